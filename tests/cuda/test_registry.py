"""Which codecs have a GPU side. Nothing here imports triton."""

from __future__ import annotations

import pytest
import torch

from psgc.codecs import backends
from psgc.codecs.int8 import Int8Codec
from psgc.codecs.registry import parse_codec, registered_codecs
from psgc.errors import CodecError


class Derived(Int8Codec):
    """A codec whose payload may be another one than its base's."""


def test_every_codec_of_the_library_has_a_gpu_side_that_the_cpu_does_not_get() -> None:
    for text in (*registered_codecs(), "onebit:ef=0,scale=unit", "dithering:partition=natural"):
        codec = parse_codec(text)
        assert backends.backends(codec) == ("cpu", "cuda")
        assert backends.device_codec(codec, torch.device("cpu")) is None


def test_a_class_without_a_row_runs_on_the_cpu_until_its_package_registers_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_CUDA", dict(backends._CUDA))
    codec = Derived()
    assert backends.backends(codec) == ("cpu",)
    assert backends.cuda_side(codec) is None
    backends.register_cuda(f"{Derived.__module__}:Derived", "fractions:Fraction")  # anything that is made from the codec
    assert backends.backends(codec) == ("cpu", "cuda")
    with pytest.raises(CodecError, match="has a GPU side already, fractions:Fraction; elsewhere:Another cannot be another one"):
        backends.register_cuda(f"{Derived.__module__}:Derived", "elsewhere:Another")
