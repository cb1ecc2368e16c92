"""Profiles and clusters: what is read, what is computed, and every way a file can be wrong, named with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from psgc.errors import UsageError
from psgc.plan.inputs.cluster import cluster_names, load_cluster, read_cluster
from psgc.plan.inputs.profile import CostCurve, Profile, TensorProfile, computed_profile, load_profile, read_profile
from tests.plan.published import TRACES

CLUSTER: dict[str, Any] = {
    "nodes": 2, "gpus_per_node": 4, "intra": {"gbps": 100, "latency_us": 5}, "inter": {"gbps": 10, "latency_us": 50},
}  # fmt: skip
PROFILE: dict[str, Any] = {
    "version": 1, "model": "m", "tensors": [{"name": "a", "numel": 10, "ready_us": 0}, {"name": "b", "numel": 7, "ready_us": 4.5}],
    "codecs": {"int8": {"cpu": {"numel": [100, 1000], "encode_us": [2, 11], "decode_us": [1, 5]}}},
}  # fmt: skip


@pytest.mark.parametrize("name", cluster_names())
def test_named_clusters_say_where_their_figures_are_from(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.source
    assert cluster.gpus == cluster.nodes * cluster.gpus_per_node
    assert cluster.server_link == cluster.inter


def test_a_cluster_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    path.write_text(
        "nodes = 2\ngpus_per_node = 4\nservers = 3\n[intra]\ngbps = 100\nlatency_us = 5\n[inter]\ngbps = 10\nlatency_us = 50\n"
        "[server]\ngbps = 40\nlatency_us = 60\n"
    )
    cluster = load_cluster(str(path))
    assert (cluster.name, cluster.gpus, cluster.servers, cluster.server_link.gbps) == ("lab", 8, 3, 40)
    assert cluster.inter.us_per_byte * 10e9 / 8 == pytest.approx(1e6)


def test_a_cluster_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    for cluster in (load_cluster("espresso-pcie"), read_cluster(CLUSTER | {"server": {"gbps": 0.125, "latency_us": 1e-7}}, 'a "lab"', "x")):
        path.write_text(cluster.to_toml())
        assert load_cluster(str(path)) == cluster


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nodes": 0}, "field nodes is 0, expected a whole number of at least 1"),
        ({"gpus_per_node": 1.5}, "field gpus_per_node is 1.5"),
        ({"inter": None}, "field inter is missing; expected a table with gbps and latency_us"),
        ({"inter": {"gbps": -1, "latency_us": 1}}, "field inter.gbps is -1, expected a number above 0"),
        ({"intra": {"gbps": 1}}, "field intra.latency_us is None"),
        ({"intra": {"gbps": 1, "latency_us": 1, "mbps": 1}}, "unknown field intra.mbps"),
        ({"bandwidth": 3}, "unknown field 'bandwidth'"),
        ({"servers": -1}, "field servers is -1"),
        ({"nodes": 10**400}, "expected a whole number of at least 1, and 1,000,000 at most"),
        ({"inter": {"gbps": 1e-300, "latency_us": 1}}, "field inter.gbps is 1e-300"),
        ({"inter": {"gbps": 1, "latency_us": 10**400}}, "field inter.latency_us is 1000"),
    ],
)
def test_a_wrong_cluster_is_refused_by_its_field(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_cluster(CLUSTER | change, "lab", "lab.toml")
    assert words in str(caught.value)
    assert "lab.toml" in str(caught.value)


def test_what_is_no_cluster_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="neither a file nor one of espresso-nvlink"):
        load_cluster("moon")
    (tmp_path / "bad.toml").write_text("nodes = ")
    with pytest.raises(UsageError, match="not valid TOML"):
        load_cluster(str(tmp_path / "bad.toml"))


def test_a_profile_survives_its_json() -> None:
    profile = read_profile(PROFILE, "p.json")
    assert read_profile(json.loads(json.dumps(profile.to_json())), "again") == profile
    assert (profile.numel, profile.backward_us) == (17, 4.5)


def test_gradients_of_four_bytes_an_element_are_as_they_always_were_and_others_say_so() -> None:
    tensors = [{"name": "a", "numel": 10, "ready_us": 0.0}, {"name": "b", "numel": 30, "ready_us": 1.0, "itemsize": 2}]
    profile = read_profile(PROFILE | {"tensors": tensors}, "p.json")
    assert profile.to_json()["tensors"] == tensors and read_profile(profile.to_json(), "again") == profile
    assert (profile.itemsizes, profile.bytes_per_element, profile.itemsize_of) == ((2, 4), 2.5, {"a": 4, "b": 2})
    assert (
        profile.slower(2.0).itemsize_of == profile.itemsize_of and profile.narrowed(2).itemsizes == (2,) and profile.narrowed(4) is profile
    )


def test_what_was_measured_beside_tensors_survives_the_json() -> None:
    measured = {
        "spread": {"backward_us": {"median": 4.5, "iqr": 0.5}}, "overheads": {"part_us": 300.0},
        "links": {"loopback": {"gbps": 20.0, "latency_us": 30.0}}, "forward_us": 7.0, "device": "cpu",
    }  # fmt: skip
    profile = read_profile(PROFILE | measured, "p.json")
    assert profile.spread["backward_us"].iqr == 0.5
    assert profile.overheads == {"part_us": 300.0}
    assert profile.device == "cpu"
    assert read_profile(json.loads(json.dumps(profile.to_json())), "again") == profile
    assert profile.links["loopback"].us_per_byte == 8e-3 / 20
    assert read_profile(json.loads(json.dumps(profile.to_json())), "again") == profile


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "field version is 2, expected 1"),
        ({"unit": "ms"}, "field unit is 'ms'"),
        ({"tensors": []}, "no tensors"),
        ({"forward_us": -1}, "forward_us is -1, expected a number of at least 0"),
        ({"codecs": [1]}, "codecs: expected an object, got [1]"),
        ({"codecs": {"int8": 3}}, "codecs.int8: expected an object, got 3"),
        ({"spread": {"backward_us": {"median": 1}}}, "spread.backward_us.iqr is None"),
        ({"overheads": {"part_us": "few"}}, "overheads.part_us is 'few'"),
        ({"links": {"loopback": {"gbps": 0, "latency_us": 1}}}, "field links.loopback.gbps is 0, expected a number above 0"),
        ({"tensors": [{"name": "a", "numel": -3, "ready_us": 0}]}, "tensors[0]: numel of 'a' is -3"),
        ({"tensors": [{"name": "a", "numel": 3, "ready_us": "now"}]}, "tensors[0]: ready_us of 'a' is 'now'"),
        ({"tensors": [{"name": "a", "numel": 3, "ready_us": 0, "itemsize": 3}]}, "itemsize of 'a' is 3, expected one of 1, 2, 4, 8, 16"),
        ({"tensors": [{"numel": 3}]}, "tensors[0]: expected a tensor with name, numel and ready_us"),
        ({"tensors": [{"name": "a", "numel": 1, "ready_us": 5}, {"name": "b", "numel": 1, "ready_us": 4}]}, "'b' is ready before 'a'"),
        ({"tensors": [{"name": "a", "numel": 1, "ready_us": 5}, {"name": "a", "numel": 1, "ready_us": 5}]}, "two tensors are named 'a'"),
        ({"codecs": {"int8": {"cpu": {"numel": [1], "encode_us": [1, 2], "decode_us": [1]}}}}, "codecs.int8.cpu: numel, encode_us and"),
        ({"forward_us": 10**400}, "forward_us is 1000"),
        ({"tensors": [{"name": "a", "numel": 3, "ready_us": 1e300}]}, "ready_us of 'a' is 1e+300"),
        ({"codecs": {"int8": {"cpu": {"numel": [1], "encode_us": [True], "decode_us": [1]}}}}, "field encode_us is [True]"),
        ({"codecs": {"int8": {"cpu": {"numel": [1], "encode_us": [-1], "decode_us": [1]}}}}, "field encode_us is [-1]"),
    ],
)
def test_a_wrong_profile_is_refused_by_its_field(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_profile(PROFILE | change, "p.json")
    assert words in str(caught.value)
    assert str(caught.value).startswith("p.json: ")


def test_a_table_of_tensors_is_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "net.csv"
    path.write_text("i,name,numel,ready_us\n0,head,12,0\n1,body,30,17\n")
    assert load_profile(str(path)) == Profile("net", (TensorProfile("head", 12, 0), TensorProfile("body", 30, 17)), source=str(path))
    path.write_text("name,numel,ready_us\nhead,many,0\n")
    with pytest.raises(UsageError, match="line 2: column numel is 'many', expected a number"):
        load_profile(str(path))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("net.csv", b"name,numel,ready_ms\na,1,0\n", "no column ready_us; expected name, numel and ready_us in the first line, got"),
        ("net.csv", b"", "no column name"),
        ("net.csv", b"\xff\xfe\x00", "not valid CSV"),
        ("net.csv", b"name,numel,ready_us\n" + b"x" * 200_000 + b",1,0\n", "not valid CSV: field larger"),
        ("net.json", b"\xff\xfe\x00", "not valid JSON"),
        ("net.json", b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_in_one_short_line(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        load_profile(str(path))
    assert str(caught.value).startswith(f"{path}: {words}")
    assert len(str(caught.value)) < 400


@pytest.mark.skipif(TRACES is None, reason="the artefact's traces are not here: PSGC_TRACES names their folder")
@pytest.mark.parametrize("name", ["vgg16", "resnet101", "ugatit", "bert_base", "gpt2", "lstm"])
def test_measured_traces_are_the_models_that_are_computed(name: str) -> None:
    measured, computed = load_profile(f"{TRACES}/{name}.csv"), computed_profile(name, "v100")
    assert len(measured.tensors) == len(computed.tensors)
    # the trace's vocabulary is padded to a multiple of eight
    assert measured.numel - computed.numel == (6 * 768 if name == "bert_base" else 0)


def test_computed_profiles_say_so_and_scale_with_what_is_computed_and_how_fast() -> None:
    slow, fast = computed_profile("gpt2", "10"), computed_profile("gpt2", "20", batch=2048)
    assert slow.source == "computed: 1024 tokens a GPU at 10 TFLOP/s achieved"
    assert fast.backward_us == pytest.approx(slow.backward_us)
    assert slow.tensors[0].ready_us == 0
    assert computed_profile("vgg16", "v100").curve("onebit", "gpu") is not None
    with pytest.raises(UsageError, match="unknown GPU 'abacus'"):
        computed_profile("gpt2", "abacus")
    with pytest.raises(UsageError, match="neither a file nor one of vgg16"):
        load_profile("alexnet")


def test_costs_are_straight_between_sizes_and_go_on_as_they_ended() -> None:
    curve = CostCurve((100, 1000), (2, 11), (1, 1))
    assert [curve.encode(n) for n in (1, 100, 550, 1000, 2000)] == pytest.approx([2, 2, 6.5, 11, 21])
    assert [curve.decode(n) for n in (1, 5000)] == [1, 1]
    assert CostCurve((100,), (2,), (1,)).encode(300) == pytest.approx(6)
