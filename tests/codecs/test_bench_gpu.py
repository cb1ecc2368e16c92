"""``psgc bench kernels --device cuda`` without a GPU: what is timed, what is refused; times themselves come from a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from psgc.errors import CodecError
from psgc.launch.bench.gpu_kernels import HostStopwatch, bench_gpu_kernels, gpu_table
from psgc.launch.profiling.curves import measure_gpu_curves
from tests.device.recording import CpuCodec
from tests.plan.commands import psgc


class Sided(CpuCodec):
    """A side with the number of bytes that operations move."""

    def moved_bytes(self, operation: str, numel: int, item_bytes: int = 4, payloads: int = 1) -> int:
        return 4 * numel * payloads


def test_every_operation_of_codecs_with_a_gpu_side_is_timed_beside_torch_and_a_copy() -> None:
    watch = HostStopwatch(lambda codec: None if codec.name == "none" else Sided(codec))
    result = bench_gpu_kernels([8192, 4096], ["none", "int8", "topk", "bf16"], watch, beside=["torch"])
    assert result["without"] == ["none"] and result["left_out"] == {} and set(result["copy_gbps"]) == {4096, 8192}
    found = {(row["codec"], row["implementation"], row["op"]) for row in result["rows"] if row["numel"] == 8192}
    for codec, ops in (("int8", ("encode", "decode", "fold 4", "finish")), ("topk", ("encode", "decode", "commit", "finish"))):
        assert {(codec, "psgc", op) for op in ops if op != "fold 4"} <= found, found
        assert (codec, "torch", "encode") in found
    assert all(row["seconds"] > 0 and row["of_copy"] >= 0 for row in result["rows"])
    header, rows = gpu_table(result)
    assert len(header) == 6 and len(rows) == len(found)


def test_a_profile_has_curves_of_codecs_with_a_gpu_side() -> None:
    watch = HostStopwatch(lambda codec: None if codec.name == "none" else Sided(codec))
    curves = measure_gpu_curves(["none", "topk", "powersgd"], [4096, 1024], watch, lambda text: None)
    assert list(curves) == ["topk"] and curves["topk"]["gpu"].numel == (1024.0, 4096.0)
    assert min(*curves["topk"]["gpu"].encode_us, *curves["topk"]["gpu"].decode_us) > 0


def test_a_gpu_side_whose_payload_is_not_the_cpus_is_not_timed() -> None:
    class Wrong(Sided):
        def encode(self, *arguments: Any) -> None:
            super().encode(*arguments)
            arguments[4][100] ^= 1

    with pytest.raises(CodecError, match="codec int8: the payload of its GPU side is not the CPU's"):
        bench_gpu_kernels([4096], ["int8"], HostStopwatch(Wrong))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_without_cuda_one_line_says_so() -> None:
    done = psgc("bench", "kernels", "--device", "cuda")
    assert done.returncode != 0
    assert done.stderr.strip().splitlines()[-1].endswith("--device cuda, but torch sees no CUDA device on this machine; use --device cpu")


def test_a_profile_goes_on_without_a_gpu_whose_kernels_cannot_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from psgc.cuda.common import usable
    from psgc.launch.profiling import measure

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(usable, "why_not", lambda: "no C compiler: install gcc")
    assert measure._gpu_curves(["int8"], [1024], True) == {}
    assert "kernels cannot run on this machine's GPU: no C compiler: install gcc" in capsys.readouterr().err
