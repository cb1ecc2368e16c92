"""The torch references beside the kernels have the codecs' bytes. They need no Triton."""

from __future__ import annotations

import numpy as np
import torch

from psgc.codecs.registry import parse_codec
from psgc.cuda.quantize.reference import reference_decode, reference_encode
from psgc.cuda.signs import reference as signs
from psgc.cuda.sparsify import reference as sparsify
from tests.cuda.against_cpu import STREAM, assert_same, values

SPECIAL = ("zeros", "denormal", "small", "huge", "nothing", "nan", "inf")
BLOCKS = (
    "int8", "int8:ef=0", "int4", "int4:ef=0", "fp8", "fp8:ef=0", "fp8:format=e5m2", "fp8:format=e5m2,ef=0", "dithering", "dithering:k=1",
    "dithering:k=1,normalize=l2", "dithering:k=100,ef=1", "dithering:partition=natural", "dithering:k=127,normalize=l2,partition=natural",
    "dithering:ef=1,k=20,partition=natural", "tbq", "tbq:tau=0.7", "int8:rotate=1", "int4:ef=0,rotate=1",
)  # fmt: skip
SPARSE = (
    "topk:k=0.1", "topk:k=0.6", "topk:k=0.99", "topk:k=0.05,select=sampled", "topk:k=0.05,select=mstopk", "topk:k=0.01,warmup=8", "blocktopk:block=64,k=0.2",
    "blocktopk:block=5000,k=0.5", "randomk:k=0.1", "randomk:k=0.3,ef=0",
)  # fmt: skip


def part(numel: int) -> np.ndarray:
    """A block of each kind, then ordinary values."""
    return np.concatenate([*(values(256, seed, special) for seed, special in enumerate(SPECIAL)), values(numel, 1)])


def test_codes_in_blocks() -> None:
    for number, text in enumerate(BLOCKS):
        codec = parse_codec(text)
        for p in (values(1 + number, 3), part(300 + number)):
            with np.errstate(all="ignore"):
                payload = codec.reference_payload(p, STREAM)
                elements = codec.reference_elements(payload, p.size)
            found = reference_encode(codec, torch.from_numpy(p), STREAM)
            assert_same(found.numpy(), np.frombuffer(payload, np.uint8), f"payload of {text}, {p.size}")
            decoded = reference_decode(codec, torch.from_numpy(np.frombuffer(payload, np.uint8).copy()), p.size)
            assert (decoded.numpy() == elements).all(), text


def test_signs() -> None:
    for text in ("onebit", "onebit:ef=0,scale=unit"):
        codec, unit = parse_codec(text), "unit" in text
        for p in (values(5, 3), part(7000), values(4100, 1, "huge")):
            payload = np.frombuffer(codec.reference_payload(p, STREAM), np.uint8)
            assert_same(signs.reference_encode(torch.from_numpy(p), unit).numpy(), payload, f"{text}, {p.size}")
            decoded = signs.reference_decode(torch.from_numpy(payload.copy()), p.size, unit)
            assert (decoded.numpy() == codec.reference_elements(payload.tobytes(), p.size)).all()


def test_chosen_elements() -> None:
    for number, text in enumerate(SPARSE):
        codec = parse_codec(text)
        for p in (values(1 + number, 3), values(5000, 1, "zeros"), values(9000, 2, "huge"), np.full(700, -1.5, np.float32)):
            with np.errstate(all="ignore"):
                wanted = np.frombuffer(codec.reference_payload(p, STREAM), np.uint8)
            found = sparsify.reference_encode(codec, torch.from_numpy(p), STREAM).numpy()
            assert found.tobytes() == wanted.tobytes(), f"payload of {text}, {p.size}"
