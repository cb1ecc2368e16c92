"""Cutting one buffer of device memory into arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

import torch

from psgc.codecs.codec import Codec
from psgc.errors import CodecError

ALIGNMENT: Final = 16  # bytes
Plan: TypeAlias = Mapping[str, tuple[torch.dtype, int]]  # an array's dtype and elements, by its name


def planned_bytes(plan: Plan) -> int:
    """Bytes that the plan's arrays take, each at a multiple of ``ALIGNMENT``."""
    return sum(_room(dtype, count) for dtype, count in plan.values())


def cut(plan: Plan, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """The plan's arrays in a uint8 buffer, in order."""
    whole = buffer[: planned_bytes(plan)]
    views = {dtype: whole.view(dtype) for dtype, _ in plan.values()}
    arrays, place = {}, 0
    for name, (dtype, count) in plan.items():
        first = place // dtype.itemsize
        arrays[name] = views[dtype][first : first + count]
        place += _room(dtype, count)
    return arrays


def allocated(plan: Plan, device: torch.device) -> dict[str, torch.Tensor]:
    """The plan's arrays in memory of their own, from torch's allocator, which orders it by the current stream."""
    return cut(plan, torch.empty(planned_bytes(plan), dtype=torch.uint8, device=device))


def given_scratch(codec: Codec, needed: int, scratch: torch.Tensor | None) -> torch.Tensor:
    """The scratch that an operation was given. Raises CodecError if it has fewer bytes than needed."""
    if scratch is None or scratch.numel() < needed:
        raise CodecError(f"codec {codec.name}: scratch has {0 if scratch is None else scratch.numel()} bytes; {needed} expected")
    return scratch


def _room(dtype: torch.dtype, count: int) -> int:
    return -(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT
