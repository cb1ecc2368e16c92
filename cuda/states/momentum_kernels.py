"""Kernels of `momentum`: one pass over the gradient and the velocity, and the squares that the gradient's norm is the root of."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from psgc.cuda.common.elements import load_bits, load_f32, store_f32
from psgc.cuda.common.sum_kernels import halved


@triton.jit(do_not_specialize=["numel"])
def squares_kernel(grad, sums, numel, LEAF: tl.constexpr, STEPS: tl.constexpr):
    """sums (float64) <- each leaf's sum of squares."""
    leaf = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, LEAF)
    x = load_f32(grad + leaf * LEAF, at, at < numel - leaf * LEAF, False).to(tl.float64)
    tl.store(sums + leaf, halved(x * x, LEAF, STEPS))


@triton.jit
def clip_factor(square, limit):
    """(the factor that brings a gradient with this sum of squares to a norm of ``limit``, whether it is needed); both are float64 pointers."""
    norm = tl.sqrt(tl.load(square))
    most = tl.load(limit)
    clips = (norm > most) & (norm < float("inf"))
    return (most / tl.where(clips, norm, 1.0)).to(tl.float32), clips


@triton.jit
def _advance_tile(
    grad, velocity, decoded, advanced, moved, mu, rescale, factor, clips, rest,
    REMEMBERS: tl.constexpr, NESTEROV: tl.constexpr, CLIPS: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Pointers are moved to the tile."""
    offsets = tl.arange(0, TILE)
    mask = offsets < rest
    g = load_f32(grad, offsets, mask, WHOLE)
    if CLIPS:
        g = tl.where(clips, g * factor, g)
    p = g
    if REMEMBERS:
        u = g + mu * (rescale * load_bits(velocity, offsets, mask, WHOLE))
        p = g + mu * u if NESTEROV else u
        if decoded is not None:
            u = tl.where(load_bits(decoded, offsets, mask, WHOLE) != 0, 0.0, u)
        if advanced is not None:
            store_f32(advanced, offsets, u, mask, WHOLE)
    store_f32(moved, offsets, p, mask, WHOLE)


@triton.jit(do_not_specialize=["numel"])
def advance_kernel(
    grad, velocity, decoded, advanced, moved, square, limit, mu, rescale, numel,
    REMEMBERS: tl.constexpr, NESTEROV: tl.constexpr, CLIPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """moved (may be grad) <- what is compressed. advanced: None, or becomes the next velocity, 0 where ``decoded`` (None: nowhere) is not 0;
    may be the velocity. square, limit: of ``clip_factor``."""
    start = tl.program_id(0).to(tl.int64) * TILE
    factor, clips = 1.0, False
    if CLIPS:
        factor, clips = clip_factor(square, limit)
    masks = decoded if decoded is None else decoded + start
    target = advanced if advanced is None else advanced + start
    if start + TILE <= numel:
        _advance_tile(
            grad + start, velocity + start, masks, target, moved + start, mu, rescale, factor, clips, numel - start,
            REMEMBERS, NESTEROV, CLIPS, TILE, True,
        )  # fmt: skip
    else:
        _advance_tile(
            grad + start, velocity + start, masks, target, moved + start, mu, rescale, factor, clips, numel - start,
            REMEMBERS, NESTEROV, CLIPS, TILE, False,
        )  # fmt: skip
