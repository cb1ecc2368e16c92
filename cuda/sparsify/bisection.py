"""MSTop-K's choice on the GPU: a threshold found by bisection between the mean and the largest magnitude.

As `psgc.codecs.sparsify.largest` defines it (``probed``): a probe is too low if the magnitude of rank k + 1 reaches it, so that the bisection needs no
pass of its own. The mean is a tree in float64 over leaves of 4096 elements, as `psgc.codecs.common.sums` says.
"""

from __future__ import annotations

import torch

from psgc.codecs.common.sums import LEAF
from psgc.codecs.sparsify.largest import PROBES
from psgc.codecs.topk import TopKCodec
from psgc.cuda.common.launching import launch
from psgc.cuda.common.scratch import Plan
from psgc.cuda.common.sums import STEPS, sums_plan, total
from psgc.cuda.sparsify.bisect_kernels import bisect_kernel, magnitudes_kernel
from psgc.cuda.sparsify.selection import KEY_BITS, Arrays, Guess, Source, rank_keys


def plan(codec: TopKCodec, numel: int) -> Plan:
    """What ``choose`` needs besides; nothing for other selectors."""
    if codec.select != "mstopk":
        return {}
    return {"top": (torch.int64, 1), **sums_plan(numel)}


def choose(source: Source, numel: int, k: int, guessed: Guess, arrays: Arrays) -> None:
    """Set LIMIT and LEVEL to what bisection chooses. The candidates are k + 1 or more."""
    top, sums, state = arrays["top"].zero_(), arrays["sums"], arrays["state"]
    launch(
        magnitudes_kernel, sums.numel(), *source.arguments, sums, top, numel, LEAF=LEAF, STEPS=STEPS, num_warps=8, **source.constants
    )  # fmt: skip
    sums = total(sums, arrays["more_sums"])
    rank_keys(source, numel, k + 1, guessed, KEY_BITS, False, arrays)
    launch(
        bisect_kernel, 1, arrays["histograms"], state, sums, top, k + 1, guessed.need, guessed.room, numel, KEY_BITS=KEY_BITS, PROBES=PROBES
    )  # fmt: skip
