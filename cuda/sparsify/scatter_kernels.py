"""Payloads of single elements put back: kernels that add a payload's values at its places to a part, or take them from it.

``places`` and ``bases`` are what `gaps.unpack` gives; ``state`` says how many there are, or that the payload holds every element (DENSE). Values
begin 4 bytes into the payload.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from psgc.cuda.common.elements import load_f32, store_f32
from psgc.cuda.sparsify.loads import p_at, p_of_tile
from psgc.cuda.sparsify.select_kernels import CHOSEN, DENSE

TILE = 1024
# What happens to an element of the part that a payload has a value for.
PUT = 0  # it becomes the value
ADD = 1
TAKE = 2


@triton.jit
def combined(out, at, value, live, MODE: tl.constexpr):
    """The element after the value has come; the value loses the sign of a zero, as in every sum that begins with 0."""
    value = value + 0.0
    if MODE == 1:
        value = load_f32(out, at, live, False) + value
    if MODE == 2:
        value = load_f32(out, at, live, False) - value
    return value


@triton.jit
def scatter_kernel(payload, places, bases, state, out, MODE: tl.constexpr, TILE: tl.constexpr):
    """Change the elements at the payload's places."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    live = at < tl.load(state + CHOSEN)
    place = tl.load(places + at, mask=live, other=0).to(tl.int64) + tl.load(bases + at // 128, mask=live, other=0)
    value = tl.load(payload + 1 + at, mask=live, other=0.0)
    store_f32(out, place, combined(out, place, value, live, MODE), live, False)


@triton.jit(do_not_specialize=["numel"])
def everything_kernel(payload, state, out, numel, MODE: tl.constexpr, TILE: tl.constexpr):
    """Change all elements, if the payload holds every one."""
    if tl.load(state + DENSE) != 0:
        at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
        live = at < numel
        store_f32(out, at, combined(out, at, tl.load(payload + 1 + at, mask=live, other=0.0), live, MODE), live, False)


@triton.jit(do_not_specialize=["numel", "divisor"])
def write_everything_kernel(
    values, residual, divisor, factor, rescale, payload, state, kept, numel, DIVIDES: tl.constexpr, TILE: tl.constexpr
):
    """Write every element of p to the payload, if that is its form. kept: None, or becomes what the payload leaves out."""
    if tl.load(state + DENSE) != 0:
        at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
        live = at < numel
        p = p_at(values, residual, at, live, divisor, factor, rescale, DIVIDES)
        tl.store(payload + 1 + at, p, mask=live)
        if kept is not None:
            tl.store(kept + at, p - (p + 0.0), mask=live)


@triton.jit(do_not_specialize=["numel", "divisor"])
def correct_kernel(values, residual, divisor, factor, rescale, out, numel, DIVIDES: tl.constexpr, TILE: tl.constexpr):
    """out <- values / divisor + rescale * residual; may be the residual."""
    start = tl.program_id(0).to(tl.int64) * TILE
    at = start + tl.arange(0, TILE)
    tl.store(out + at, p_of_tile(values, residual, start, numel, divisor, factor, rescale, DIVIDES, TILE), mask=at < numel)
