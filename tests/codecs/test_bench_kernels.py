"""The kernel bench gives the promised document, and never the speed of a wrong kernel."""

from __future__ import annotations

import json

import numpy as np
import pytest

from psgc.codecs import onebit
from psgc.codecs.codec import parse_codec
from psgc.errors import CodecError, ConfigError
from psgc.launch.bench_kernels import bench_kernels, check_kernels

ROW = {"codec", "op", "numel", "threads", "gbps", "ns_per_element", "ratio_to_memcpy"}


def test_the_document_has_a_row_for_each_codec_and_operation() -> None:
    told: list[str] = []
    result = json.loads(json.dumps(bench_kernels(70_000, ["onebit:ef=1", "topk:k=0.1", "none"], progress=told.append)))
    assert set(result) == {"memcpy_gbps", "codecs"}
    assert [(row["codec"], row["op"]) for row in result["codecs"]] == [
        (codec, op) for codec in ("onebit", "topk:k=0.1", "none") for op in ("encode", "decode", "server")
    ]
    for row in result["codecs"]:
        assert set(row) == ROW
        assert (row["numel"], row["threads"]) == (70_000, 1)
        assert row["gbps"] > 0
        assert row["gbps"] * row["ns_per_element"] == pytest.approx(4, rel=0.05)
    assert result["memcpy_gbps"] > 0
    assert [text.split(":")[0] for text in told] == ["onebit", "topk", "none"]


@pytest.mark.parametrize("text", ["none", "bf16", "fp16", "int8", "int8:ef=0", "onebit", "onebit:ef=0", "topk", "topk:ef=0"])
def test_every_codec_passes_the_check(text: str) -> None:
    check_kernels(parse_codec(text))


@pytest.mark.parametrize(
    ("kernel", "says"), [("_encode", "encode"), ("_decode", "decode"), ("_commit", "commit"), ("_fold", "server"), ("_finish", "server")]
)
def test_a_kernel_that_is_wrong_is_not_timed(kernel: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(onebit, kernel)

    def wrong(*arguments: object) -> object:
        result = right(*arguments)
        for argument in arguments:
            if isinstance(argument, np.ndarray) and argument.flags.writeable and argument.size:
                argument.view(np.uint8)[argument.nbytes // 2] ^= 1
        return result

    monkeypatch.setattr(onebit, kernel, wrong)
    with pytest.raises(CodecError, match=rf"onebit: {says}( residual)? differs"):
        bench_kernels(5000, ["onebit"])


def test_a_device_without_kernels_is_refused() -> None:
    with pytest.raises(ConfigError, match="cuda"):
        bench_kernels(5000, ["onebit"], device="cuda")


def test_a_size_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="numel"):
        bench_kernels(0, ["onebit"])


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(CodecError, match="onebot"):
        bench_kernels(5000, ["onebot"])
