"""``psgc profile``, as a user types it, and the parts that measure."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psgc.codecs import registered_codecs
from psgc.errors import PsgcError
from psgc.launch.cli import main
from psgc.launch.profiling.curves import DEFAULT_CODECS, curve_codecs, measure_curves
from psgc.launch.profiling.links import MOST_GBPS, PARTS_IN_FLIGHT, SIZES, Trips, fit, fit_group
from psgc.launch.profiling.measure import Request, cluster_of
from psgc.launch.topology import Topology
from psgc.plan.inputs.carriers import CarrierCosts, read_carriers
from psgc.plan.inputs.cluster import Link, load_cluster
from psgc.plan.inputs.observed import LEAST_ITERATIONS
from psgc.plan.inputs.profile import CostCurve, Profile, Spread, computed_profile, load_profile
from tests.plan.commands import psgc
from tests.preloaded import run_preloaded

JOB = Path(__file__).parents[1] / "jobs" / "tiny.py"
HANG_S = 240.0  # a busy machine may take long to start processes
FREE = CostCurve((1.0, 2.0), (0.0, 0.0), (0.0, 0.0))


def profile(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, which measures nothing else's threads and memory."""
    return run_preloaded("-m", "psgc.launch", "profile", *arguments, env={**os.environ, **env}, timeout=HANG_S)


def test_a_job_of_two_workers_is_profiled_and_ended(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    endless = "1000000000"
    done = profile(
        "--script", "--iterations", "4", "--codecs", "none", "-o", str(path), "--json", "--", sys.executable, str(JOB), endless
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = load_profile(str(path))
    assert json.loads(done.stdout) == found.to_json()
    assert found.model == "tiny"
    assert {tensor.name: tensor.numel for tensor in found.tensors} == runpy.run_path(str(JOB))["NUMEL"]
    assert found.tensors[0].name == "2.weight"
    assert found.forward_us is not None and found.forward_us > 0
    assert found.compute_threads >= 1
    assert set(found.spread) >= {"backward_us", "forward_us"}
    assert found.curve("none", "server") is not None
    assert not [line for line in done.stderr.splitlines() if line.startswith("psgc run:") or " E " in line], "everybody left in order"


def test_what_a_job_has_measured_is_kept_before_codecs_are_timed_and_plans_take_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured, path = computed_profile("vgg16", "v100"), tmp_path / "profile.json"
    monkeypatch.setattr("psgc.launch.profiling.job.profile_job", lambda *asked: replace(measured, codecs={}))
    found: list[Profile] = []

    def ended(*asked: Any) -> Any:
        found.append(load_profile(str(path)))
        raise PsgcError("ended here")

    monkeypatch.setattr("psgc.launch.profiling.curves.measure_curves", ended)
    done = psgc("profile", "--script", "-o", str(path), "--", sys.executable, str(JOB))
    assert done.returncode != 0 and "ended here" in done.stderr
    assert [one.tensors for one in found] == [measured.tensors], "before the first codec is timed"
    assert f"{path} has what the job has measured; what is measured now is added at the end" in done.stderr
    planned = psgc("plan", "--profile", str(path), "--cluster", "espresso-nvlink", "--codec", "int8", "-o", str(tmp_path / "plan.json"))
    assert planned.returncode == 0, planned.stderr


def test_a_job_that_ends_too_soon_is_a_failure_that_says_so() -> None:
    done = profile("--script", "--no-codecs", "--workers", "1", "--", sys.executable, str(JOB), "8")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("psgc profile: the job ended before its profile was written: that takes about 26 steps")


def test_links_are_measured_and_become_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    done = profile("--links", "--cluster-out", str(path), "--workers", "3", "--json", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    cluster = load_cluster(str(path))
    assert (cluster.nodes, cluster.gpus_per_node, cluster.servers) == (3, 1, 1)
    assert {"gbps": cluster.inter.gbps, "latency_us": cluster.inter.latency_us} == found["links"]["loopback"]
    assert 0 < cluster.inter.gbps <= MOST_GBPS
    assert cluster.inter.latency_us > 0
    assert (cluster.one_machine, cluster.over_tcp, cluster.cores) == (True, False, len(os.sched_getaffinity(0)))
    carriers = read_carriers(found["carriers"], "found")
    assert set(carriers) == {"tcp", "shm", "sockets", "memory"}
    assert all(costs.lone_us >= costs.each_us and 0 < costs.gbps <= MOST_GBPS for costs in carriers.values())
    assert found["spread"]["barrier_us"]["median"] == pytest.approx(2 * cluster.inter.latency_us, abs=0.02)


def test_a_link_to_a_server_elsewhere_is_measured_from_within_its_job(make_job: Callable[..., Any]) -> None:
    job = make_job(nodes=1, hang_s=HANG_S)
    job.scheduler()
    job.server()
    command = [sys.executable, "-m", "psgc.launch", "profile", "--links", "--join", "--transport", "tcp", "--json"]
    worker = job.start("worker 0", command, DMLC_ROLE="worker", DMLC_WORKER_ID="0", PSGC_LOG_LEVEL="error")
    assert set(job.end().values()) == {0}, job.text()
    assert json.loads(worker.last_line)["links"]["inter"]["gbps"] > 0


def test_a_computed_profile_has_given_links_in_its_cluster(tmp_path: Path) -> None:
    path, cluster = tmp_path / "vgg.json", tmp_path / "cluster.toml"
    done = psgc(
        "profile", "--model", "vgg16", "--no-codecs", "-o", str(path), "--inter-gbps", "1", "--inter-latency-us", "50", "--cluster-out", str(cluster)
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "computed" in done.stdout
    assert len(load_profile(str(path)).tensors) == 32
    assert (load_cluster(str(cluster)).inter.gbps, load_cluster(str(cluster)).inter.latency_us) == (0.9564, 50), "what TCP carries of it"


def test_the_link_of_a_cluster_is_the_one_that_was_measured_here_not_that_of_a_traces_collectives(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    trace.touch()
    links = {"collectives": Link(80.0, 7.0), "loopback": Link(12.0, 30.0)}
    asked = Request(None, "v100", (), 2, 1, LEAST_ITERATIONS, (), "tcp", False, None, trace)
    cluster, comments = cluster_of(asked, Profile("m", (), links=links), Topology())
    assert cluster.inter == cluster.intra == links["loopback"] and cluster.one_machine
    assert comments["intra"] == "measured between processes of this machine"
    joined, _ = cluster_of(replace(asked, join=True), Profile("m", (), links={**links, "inter": Link(1.0, 90.0)}), Topology())
    assert joined.inter == Link(1.0, 90.0)
    given, said = cluster_of(
        replace(asked, transport=None, inter=Link(10.0, 50.0)), Profile("m", (), links={"collectives": links["collectives"]}), Topology()
    )
    assert given.intra == given.inter == Link(9.564, 50.0) and said["intra"].startswith("assumed: as between nodes")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "nothing to measure"),
        (("--model", "alexnet"), "alexnet"),
        (("--model", "vgg16", "--codecs", "gzip"), "gzip"),
        (("--model", "vgg16", "--gpu", "abacus"), "unknown GPU 'abacus'"),
        (("--model", "vgg16", "--", "python"), "unexpected 'python'"),
        (("--script",), "--script without a command"),
        (("--script", "--", "no-such-program"), "'no-such-program' is not found"),
        (("--script", "--model", "vgg16", "--", "python"), "give one of them"),
        (("--script", "--iterations", "2", "--", sys.executable), "expected at least 1, 1 and 3"),
        (("--links", "--transport", "pigeon"), "--transport pigeon: expected one of auto, "),
        (("--links", "--gpu", "v100"), "--gpu: only with --model"),
        (("--model", "vgg16", "--iterations", "30"), "--iterations: only with --script"),
        (("--model", "vgg16", "--workers", "2"), "--workers: only with --script or --cluster-out"),
        (("--model", "vgg16", "--transport", "tcp"), "--transport: only with --links"),
        (("--model", "vgg16", "--join"), "--join says where --links measures"),
        (("--links", "--join"), "a worker needs DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT"),
        (("--links", "-o", "x.json"), "-o writes a model's profile"),
        (("--model", "vgg16", "--cluster-out", "x.toml"), "--cluster-out without links"),
        (("--model", "vgg16", "--inter-gbps", "1"), "give both"),
        (("--model", "vgg16", "--inter-gbps", "0", "--inter-latency-us", "1"), "inter.gbps is 0.0, expected a number above 0"),
        (("--model", "vgg16", "--inter-gbps", "1", "--inter-latency-us", "inf"), "inter.latency_us is inf"),
        (("--model", "vgg16", "--codecs", "int8", "--no-codecs"), "leave one of them out"),
        (("--model", "vgg16", "-o", "/"), "cannot write /: it is a folder"),
        (("--model", "vgg16", "-o", "/no/such/folder/x.json"), "no folder /no/such/folder"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["psgc", "profile", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert words in said.err
    assert said.err.count("\n") == 1
    assert not said.out


def test_curves_have_every_codec_at_every_size_on_worker_and_server() -> None:
    told: list[str] = []
    curves = measure_curves(["none", "onebit"], [4096, 1000], told.append)
    assert list(curves) == ["none", "onebit"]
    assert len(told) == 4
    for devices in curves.values():
        assert set(devices) == {"cpu", "server"}
        for curve in devices.values():
            assert curve.numel == (1000.0, 4096.0)
            assert min(*curve.encode_us, *curve.decode_us) >= 0
        assert min(devices["cpu"].encode_us) > 0
        assert min(f + e for f, e in zip(devices["server"].decode_us, devices["server"].encode_us, strict=True)) > 0


def test_a_pair_is_timed_as_its_two_codecs_and_each_codec_once() -> None:
    assert curve_codecs(["onebit/int8", "int8", "topk:k=0.05"]) == ["onebit", "int8", "topk:k=0.05"]
    assert set(DEFAULT_CODECS) <= set(registered_codecs())


def test_a_link_is_what_round_trips_leave_when_computing_is_taken_off() -> None:
    per_element_us, copy = 2 * 4 * 8e-3 / 10, CostCurve((1.0, 1e6), (1.0, 101.0), (1.0, 101.0))  # 10 Gbit/s there and back
    computed = np.array([copy.encode(n) + copy.decode(n) for n in SIZES])
    parts = 100 + per_element_us * np.array(SIZES) + 2 * computed
    trips = Trips(Spread(60, 6), tuple(Spread(us, 0) for us in parts), Spread(parts[0] + (PARTS_IN_FLIGHT - 1) * 24.0, 0))
    link, carrier = fit(trips, {"cpu": copy, "server": copy})
    assert link.gbps == carrier.gbps == pytest.approx(10, rel=1e-3)
    assert link.latency_us == 30
    assert (carrier.lone_us, carrier.each_us) == (pytest.approx(20, abs=0.1), pytest.approx(12, abs=0.1)), (
        "a push, and as much for the pull"
    )


def test_a_groups_costs_are_those_of_each_of_a_parts_two_collectives() -> None:
    """Of two workers at 8 Gbit/s, 1 ns a byte: 4 bytes of each float pass a rank's link, 300 us besides, of which 60 are two latencies: 120 us each. 32 parts
    add 200 us a part, 100 an operation. With three workers each further part takes 250: the third one adds 25 us an operation."""
    parts = tuple(Spread(300.0 + 4e-3 * numel, 0) for numel in SIZES)
    two = Trips(Spread(60, 0), parts, Spread(parts[0].median + (PARTS_IN_FLIGHT - 1) * 200.0, 0))
    three = Trips(Spread(60, 0), parts[:1], Spread(parts[0].median + (PARTS_IN_FLIGHT - 1) * 250.0, 0))
    assert fit_group({2: two}) == CarrierCosts(pytest.approx(120), pytest.approx(100), 0.0, pytest.approx(8))
    assert fit_group({2: two, 3: three}).peer_us == pytest.approx(25)


def test_a_link_that_costs_nothing_beside_copying_has_the_most_that_is_reported() -> None:
    link, carrier = fit(Trips(Spread(60, 0), (Spread(50, 0),) * len(SIZES), Spread(40, 0)), {"cpu": FREE, "server": FREE})
    assert link.gbps == MOST_GBPS
    assert carrier == CarrierCosts(0.0, 0.0, gbps=MOST_GBPS)
