"""The sum of the leaves' sums: `psgc.codecs.common.sums`, level by level."""

from __future__ import annotations

from typing import Final

import torch

from psgc.codecs.common.sums import LEAF
from psgc.cuda.common.launching import launch
from psgc.cuda.common.scratch import Plan
from psgc.cuda.common.sum_kernels import sums_kernel

STEPS: Final = LEAF.bit_length() - 1


def sums_plan(numel: int) -> Plan:
    """The arrays that ``total`` takes: the leaves' sums of a part of ``numel`` elements, and room for the next level."""
    leaves = -(-numel // LEAF)
    return {"sums": (torch.float64, leaves), "more_sums": (torch.float64, -(-leaves // LEAF))}


def total(sums: torch.Tensor, spare: torch.Tensor) -> torch.Tensor:
    """The sum of the leaves' sums, at the beginning of one of the two arrays; both are overwritten."""
    count = sums.numel()
    while count > 1:
        launch(sums_kernel, -(-count // LEAF), sums, spare, count, LEAF=LEAF, STEPS=STEPS, num_warps=8)
        count, sums, spare = -(-count // LEAF), spare, sums
    return sums
