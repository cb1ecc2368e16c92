"""Baseline codecs in a few lines of NumPy or torch, which ``psgc bench kernels`` times beside the kernels.

Owns these codecs: the same arithmetic and the same packing as psgc's (except top-k's indices, which stay 32-bit integers); a payload is a tuple of
arrays. Lengths are multiples of ``MULTIPLE``. The torch codecs are also run under ``torch.compile``, whole operations at a time and for a fixed
length, which makes them up to twice as fast as for dynamic lengths.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from psgc.codecs.codec import BLOCK, F32
from psgc.codecs.int8 import Int8Codec

MULTIPLE: Final = BLOCK  # elements: no baseline cares for a last block that is shorter
IMPLEMENTATIONS: Final = ("numpy", "torch", "torch.compile")
WITH_BASELINES: Final = ("bf16", "fp16", "int8", "onebit", "topk")  # codecs, at their default parameters
ONE_PERCENT: Final = 100  # top-k's default: one element in so many, rounded up
_TINY: Final = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class Baseline:
    """A baseline codec on arrays or tensors. read: decodes a payload into an array of the result's length; keep: gives the residual of p after a payload;
    None: no feedback."""

    write: Callable[[Any], tuple[Any, ...]]
    read: Callable[[tuple[Any, ...], Any], Any]
    keep: Callable[[tuple[Any, ...], Any], Any] | None = None

    def encode(self, grad: Any, residual: Any, rescale: float) -> tuple[Any, ...]:
        """The payload of grad + rescale * residual."""
        return self.write(grad if self.keep is None else grad + rescale * residual)

    def decode(self, pulled: tuple[Any, ...], sent: tuple[Any, ...], grad: Any, residual: Any, rescale: float) -> tuple[Any, Any]:
        """The elements of what was pulled, and the residual after what was sent (None without feedback)."""
        return self.read(pulled, grad), None if self.keep is None else self.keep(sent, grad + rescale * residual)


def numpy_baselines() -> dict[str, Baseline]:
    """By codec."""

    def write_bf16(p: F32) -> tuple[Any, ...]:
        bits = p.view(np.uint32)
        return (((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16),)

    def read_bf16(payload: tuple[Any, ...], like: Any) -> Any:
        return (payload[0].astype(np.uint32) << 16).view(np.float32)

    def write_fp16(p: F32) -> tuple[Any, ...]:
        return (p.astype(np.float16),)

    def read_fp16(payload: tuple[Any, ...], like: Any) -> Any:
        return payload[0].astype(np.float32)

    def write_int8(p: F32) -> tuple[Any, ...]:
        groups = p.reshape(-1, Int8Codec.block)
        tops = np.maximum(np.abs(groups).max(1, keepdims=True), np.float32(_TINY))
        return tops / np.float32(127), np.rint(groups * (np.float32(127) / tops)).astype(np.int8)

    def read_int8(payload: tuple[Any, ...], like: Any) -> Any:
        scales, codes = payload
        return (codes * scales).reshape(-1)

    def write_onebit(p: F32) -> tuple[Any, ...]:
        return np.abs(p).reshape(-1, BLOCK).mean(1, keepdims=True), np.packbits(p < 0, bitorder="little")

    def read_onebit(payload: tuple[Any, ...], like: Any) -> Any:
        scales, packed = payload
        negative = np.unpackbits(packed, bitorder="little").view(np.bool_).reshape(-1, BLOCK)
        return np.where(negative, -scales, scales).reshape(-1)

    def write_topk(p: F32) -> tuple[Any, ...]:
        k = -(-p.size // ONE_PERCENT)
        indices = np.argpartition(np.abs(p), p.size - k)[p.size - k :].astype(np.uint32)
        return indices, p[indices]

    def read_topk(payload: tuple[Any, ...], like: Any) -> Any:
        elements = np.zeros_like(like)
        elements[payload[0]] = payload[1]
        return elements

    def keep_topk(payload: tuple[Any, ...], p: Any) -> Any:
        p[payload[0]] = 0
        return p

    return {
        "bf16": Baseline(write_bf16, read_bf16),
        "fp16": Baseline(write_fp16, read_fp16),
        "int8": Baseline(write_int8, read_int8, lambda payload, p: p - read_int8(payload, p)),
        "onebit": Baseline(write_onebit, read_onebit, lambda payload, p: p - read_onebit(payload, p)),
        "topk": Baseline(write_topk, read_topk, keep_topk),
    }


def torch_baselines() -> dict[str, Baseline]:
    """By codec."""
    import torch

    bits = torch.arange(8, dtype=torch.uint8)

    def cast(dtype: torch.dtype) -> Baseline:
        return Baseline(lambda p: (p.to(dtype),), lambda payload, like: payload[0].to(torch.float32))

    def write_int8(p: Any) -> tuple[Any, ...]:
        groups = p.view(-1, Int8Codec.block)
        tops = groups.abs().amax(1, keepdim=True).clamp(min=_TINY)
        return tops / 127, torch.round(groups * (127 / tops)).to(torch.int8)

    def read_int8(payload: tuple[Any, ...], like: Any) -> Any:
        scales, codes = payload
        return (codes * scales).view(-1)

    def write_onebit(p: Any) -> tuple[Any, ...]:
        return p.view(-1, BLOCK).abs().mean(1, keepdim=True), ((p < 0).to(torch.uint8).view(-1, 8) << bits).sum(1, dtype=torch.uint8)

    def read_onebit(payload: tuple[Any, ...], like: Any) -> Any:
        scales, packed = payload
        negative = ((packed[:, None] >> bits) & 1).view(-1, BLOCK)
        return torch.where(negative != 0, -scales, scales).view(-1)

    def write_topk(p: Any) -> tuple[Any, ...]:
        indices = torch.topk(p.abs(), -(-p.numel() // ONE_PERCENT), sorted=False).indices
        return indices.to(torch.int32), p[indices]

    def read_topk(payload: tuple[Any, ...], like: Any) -> Any:
        return torch.zeros_like(like).scatter_(0, payload[0].long(), payload[1])

    def keep_topk(payload: tuple[Any, ...], p: Any) -> Any:
        return p.scatter_(0, payload[0].long(), 0)

    return {
        "bf16": cast(torch.bfloat16),
        "fp16": cast(torch.float16),
        "int8": Baseline(write_int8, read_int8, lambda payload, p: p - read_int8(payload, p)),
        "onebit": Baseline(write_onebit, read_onebit, lambda payload, p: p - read_onebit(payload, p)),
        "topk": Baseline(write_topk, read_topk, keep_topk),
    }


@dataclass(frozen=True, slots=True)
class Runner:
    """A baseline's two operations under one implementation, on NumPy arrays or on tensors of the same memory."""

    encode: Callable[..., tuple[Any, ...]]
    decode: Callable[..., tuple[Any, Any]]
    wrap: Callable[[F32], Any]


def runner(implementation: str, codec: str) -> Runner:
    """How one of ``WITH_BASELINES`` runs under one of ``IMPLEMENTATIONS``."""
    if implementation == "numpy":
        plain = numpy_baselines()[codec]
        return Runner(plain.encode, plain.decode, lambda array: array)
    import torch

    baseline = torch_baselines()[codec]
    if implementation == "torch":
        return Runner(baseline.encode, baseline.decode, torch.from_numpy)
    torch.compiler.reset()  # each codec's operations count as recompilations of the same functions, which torch gives up after eight of
    compiled = functools.partial(torch.compile, dynamic=False)
    return Runner(compiled(baseline.encode), compiled(baseline.decode), torch.from_numpy)


@contextmanager
def one_thread() -> Iterator[None]:
    """A context in which torch uses only the calling thread, and records no gradients."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(before)
