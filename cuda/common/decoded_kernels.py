"""What becomes of decoded elements: a part of its own, added to a sum, or taken from what was encoded."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from psgc.cuda.common.elements import corrected, load_f32, store_f32

DECODES = tl.constexpr(0)  # target <- elements
ADDS = tl.constexpr(1)  # target <- target + elements
COMMITS = tl.constexpr(2)  # target <- grad + rescale * target - elements


@triton.jit
def use_decoded(values, target, grad, rescale, offsets, mask, USE: tl.constexpr, WHOLE: tl.constexpr):
    """Store decoded elements; pointers are moved to the tile."""
    if USE == ADDS:
        values = load_f32(target, offsets, mask, WHOLE) + values
    if USE == COMMITS:
        values = corrected(load_f32(grad, offsets, mask, WHOLE), target, rescale, offsets, mask, WHOLE) - values
    store_f32(target, offsets, values, mask, WHOLE)
