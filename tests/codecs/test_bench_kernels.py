"""The kernel bench gives the promised document, and never the speed of a wrong kernel or baseline."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from psgc.codecs import onebit, shared
from psgc.codecs.codec import Codec
from psgc.codecs.common.one_part import gaussian
from psgc.codecs.registry import parse_codec
from psgc.codecs.scheme import Scheme
from psgc.errors import CodecError, ConfigError, UsageError
from psgc.launch.bench import kernels as bench
from psgc.launch.bench.baselines import MULTIPLE, WITH_BASELINES, numpy_baselines, torch_baselines
from psgc.launch.bench.kernels import bench_kernels, check_codec, check_scheme, read_sizes, timed_subject
from psgc.launch.bench.tables import bytes_text, ratio_table, time_table
from tests.plan.commands import psgc

ROW = {"codec", "implementation", "op", "numel", "threads", "gbps", "ns_per_element", "ratio_to_memcpy"}
OPS = ("encode", "decode", "server")
WITHOUT_COMPILING = ("numpy", "torch")


def test_the_document_has_a_row_for_each_codec_size_and_operation() -> None:
    told: list[str] = []
    result = json.loads(json.dumps(bench_kernels([70_000, 9_000], ["onebit:ef=1", "topk:k=0.1", "shared"], progress=told.append)))
    assert set(result) == {"memcpy_gbps", "codecs", "left_out", "machine"}
    assert [(row["codec"], row["numel"], row["op"]) for row in result["codecs"]] == [
        (codec, numel, op) for codec in ("onebit", "topk:k=0.1", "shared") for numel in (9_000, 70_000) for op in OPS
    ]
    for row in result["codecs"]:
        assert set(row) == ROW
        assert (row["implementation"], row["threads"]) == ("psgc", 1)
        assert row["gbps"] > 0
        assert row["gbps"] * row["ns_per_element"] == pytest.approx(4, rel=0.05)
    assert result["memcpy_gbps"] > 0
    assert list(dict.fromkeys(text.split(":")[0] for text in told)) == ["onebit", "topk", "shared"]
    assert all("a multiple of 4096" in why for why in result["left_out"].values())


def test_baselines_stand_behind_the_kernels_rows() -> None:
    rows = bench_kernels([MULTIPLE, 3 * MULTIPLE], ["int8", "int4"], beside=WITHOUT_COMPILING)["codecs"]
    mine = [("int8", "psgc", numel, op) for numel in (MULTIPLE, 3 * MULTIPLE) for op in OPS]
    theirs = [("int8", who, n, op) for who in WITHOUT_COMPILING for n in (MULTIPLE, 3 * MULTIPLE) for op in OPS[:2]]
    got = [(row["codec"], row["implementation"], row["numel"], row["op"]) for row in rows]
    assert got == [*mine, *theirs, *(("int4", *rest) for _, *rest in mine)]


@pytest.mark.parametrize("text", ["none", "bf16", "fp16", "int8", "int8:ef=0", "onebit", "onebit:ef=0", "topk", "topk:ef=0"])
def test_every_codec_passes_the_check(text: str) -> None:
    check_codec(parse_codec(text))


@pytest.mark.parametrize("text", ["shared", "shared:ef=0", "powersgd", "powersgd:ef=0,rank=2"])
def test_schemes_of_several_rounds_pass_the_check(text: str) -> None:
    subject = timed_subject(text)
    assert isinstance(subject, Scheme)
    check_scheme(subject, 9_000 if "shared" in text else 70_001)


@pytest.fixture
def inputs_drawn_anew() -> Iterator[None]:
    """What a damaged kernel has written to, others must not time."""
    yield
    gaussian.cache_clear()


def damaged(kernel: Any) -> Any:
    """The kernel, with one bit wrong in everything that it writes."""

    def wrong(*arguments: object) -> object:
        result = kernel(*arguments)
        for argument in arguments:
            if isinstance(argument, np.ndarray) and argument.flags.writeable and argument.size:
                argument.view(np.uint8)[argument.nbytes // 2] ^= 1
        return result

    return wrong


@pytest.mark.usefixtures("inputs_drawn_anew")
@pytest.mark.parametrize(("kernel", "says"), [("_encode", "encode"), ("_decode", "decode"), ("_commit", "commit"), ("_serve", "server")])
def test_a_kernel_that_is_wrong_is_not_timed(kernel: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onebit, kernel, damaged(getattr(onebit, kernel)))
    with pytest.raises(CodecError, match=rf"onebit: {says}( residual)? differs"):
        bench_kernels([5000], ["onebit"])


@pytest.mark.usefixtures("inputs_drawn_anew")
@pytest.mark.parametrize("kernel", ["_write_codes", "_apply", "_fold_codes", "_write_sums"])
def test_a_scheme_whose_kernel_is_wrong_is_not_timed(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, kernel, damaged(getattr(shared, kernel)))
    with pytest.raises(CodecError, match=r"shared: \w+ differs"):
        bench_kernels([5000], ["shared"])


@pytest.mark.parametrize("codec", WITH_BASELINES)
@pytest.mark.parametrize("implementation", WITHOUT_COMPILING)
def test_there_are_baselines_that_answer_what_the_codec_does(implementation: str, codec: str) -> None:
    subject = parse_codec(codec)
    baseline = (numpy_baselines() if implementation == "numpy" else torch_baselines())[codec]
    assert (baseline.keep is not None) == subject.feedback
    assert isinstance(subject, Codec)
    assert {row["implementation"] for row in bench_kernels([MULTIPLE], [codec], beside=[implementation])["codecs"]} == {
        "psgc",
        implementation,
    }


@pytest.mark.parametrize("implementation", WITHOUT_COMPILING)
def test_a_baseline_that_is_wrong_is_not_timed(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench.runner

    def wrong(which: str, codec: str) -> Any:
        found = right(which, codec)
        return replace(found, decode=lambda *arguments: (found.decode(*arguments)[0] * 1.01, found.decode(*arguments)[1]))

    monkeypatch.setattr(bench, "runner", wrong)
    with pytest.raises(CodecError, match=f"int8: its baseline in {implementation} gives other results"):
        bench_kernels([MULTIPLE], ["int8"], beside=[implementation])


def test_where_torch_cannot_compile_the_document_says_why_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(function: Any, **settings: Any) -> Any:
        def fail(*arguments: Any) -> Any:
            raise RuntimeError("no C++\ncompiler found")

        return fail

    monkeypatch.setattr(torch, "compile", no_compiler)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    result = bench_kernels([MULTIPLE], ["int8", "bf16"], beside=["torch.compile"])
    assert result["left_out"] == {"torch.compile": "RuntimeError: no C++ compiler found"}
    assert {row["implementation"] for row in result["codecs"]} == {"psgc"}


def test_torch_is_left_with_the_threads_it_had() -> None:
    before = torch.get_num_threads()
    bench_kernels([MULTIPLE], ["bf16"], beside=["torch"])
    assert torch.get_num_threads() == before
    assert torch.is_grad_enabled()


def test_the_tables_have_a_row_for_each_codec_and_the_baselines_beside_it() -> None:
    result = bench_kernels([MULTIPLE, 2 * MULTIPLE], ["bf16", "none"], beside=WITHOUT_COMPILING)
    header, rows = ratio_table(result)
    assert header == ["codec", "encode", "numpy", "torch", "decode", "numpy", "torch", "server"]
    assert [row[0] for row in rows] == ["bf16", "none"]
    assert all(rows[0]) and rows[1][2] == "", "none has no baseline"
    header, rows = time_table(result)
    assert header == ["codec", *(f"{op} {size}" for op in OPS for size in ("16 KB", "32 KB"))]
    assert all(cell for row in rows for cell in row)


def test_sizes_are_read_with_their_units() -> None:
    assert read_sizes("64K,1M, 16M,9") == [65536, 1 << 20, 1 << 24, 9]
    assert [bytes_text(4 * size) for size in read_sizes("64K,1M,100")] == ["256 KB", "4 MB", "400 B"]
    for text in ("", "64k", "1.5M", "1M,,2M", "-3"):
        with pytest.raises(UsageError, match="--sizes"):
            read_sizes(text)


def test_a_device_without_kernels_is_refused() -> None:
    with pytest.raises(ConfigError, match="cuda"):
        bench_kernels([5000], ["onebit"], device="cuda")


def test_a_size_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="numel"):
        bench_kernels([0], ["onebit"])


@pytest.mark.parametrize(
    ("text", "words"), [("onebot", "onebot"), ("onebit/int8", "one codec at a time"), ("onebit/relay", "one codec at a time")]
)
def test_an_unknown_codec_or_a_pair_is_refused(text: str, words: str) -> None:
    with pytest.raises(CodecError, match=words):
        bench_kernels([5000], [text])


def test_the_verb_prints_tables_and_what_was_left_out_or_one_document() -> None:
    done = psgc("bench", "kernels", "--numel", "5000", "--codec", "bf16")
    assert done.returncode == 0, done.stderr
    assert all(text in done.stdout for text in ("times memcpy's speed", "nanoseconds an element", "bf16")), done.stdout
    done = psgc("bench", "kernels", "--numel", "5000", "--codec", "bf16", "--json")
    assert [row["codec"] for row in json.loads(done.stdout)["codecs"]][:1] == ["bf16"]


@pytest.mark.parametrize("text", ["demo", "sparseloco:k=32"])
def test_what_servers_relay_is_not_timed(text: str) -> None:
    with pytest.raises(
        CodecError, match=f"codec {text}: servers relay its payloads, and each rank adds up as many as there are; only codecs"
    ):
        timed_subject(text)
