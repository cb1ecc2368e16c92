"""The codecs that ``auto`` may try, by the job's level of quality and by how far the job has come. Pure.

Under ``fast`` a job is not compressed coarsely from its first step: while a model learns fastest, what a codec leaves out is late by many steps. As in Deep
Gradient Compression (ICLR'18, section 3.3) the share of elements that are sent falls in stages, and as in 1-bit Adam (ICML'21) one bit an element comes after
a warm-up.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from psgc.plan.model.level import EXACT, FAST
from psgc.plan.model.plan import UNCOMPRESSED, PlannedBucket
from psgc.plan.model.quality import CAST_OF, allowed, known_loss

FINE: Final = (UNCOMPRESSED, "bf16", "int8", "int4")
STAGE_STEPS: Final = 100
# Coarse codecs by stage of a ``fast`` job; the last stage stays.
RAMP: Final = ((), ("topk:k=0.0625",), ("onebit", "topk:k=0.02"), ("onebit", "topk"))
COARSEST: Final = 1.0  # loss of a codec whose error is not known


def stage_of(level: str, steps: int) -> int:
    """The stage of a job that has taken so many steps. Only those of ``fast`` differ."""
    return min(steps // STAGE_STEPS, len(RAMP) - 1) if level == FAST else 0


def candidates(level: str, stage: int, dtypes: Collection[str] = ()) -> list[str]:
    """The codecs that may be tried, those with the smallest error first. dtypes: of the gradients."""
    found = FINE if level != EXACT else (UNCOMPRESSED, *sorted({CAST_OF[dtype] for dtype in dtypes if dtype in CAST_OF}))
    return [codec for codec in (*found, *(RAMP[stage] if level == FAST else ())) if allowed(codec, level, dtypes=dtypes)]


def all_candidates(level: str, dtypes: Collection[str] = ()) -> list[str]:
    """Those of all stages."""
    return list(dict.fromkeys(codec for stage in range(len(RAMP)) for codec in candidates(level, stage, dtypes)))


def loss_of(buckets: Sequence[PlannedBucket]) -> float:
    """A number that grows with the loss of gradients that travel in these buckets: that of their coarsest codec. 0: no loss."""
    return max((loss_of_codec(bucket.codec) for bucket in buckets), default=0.0)


def loss_of_codec(codec: str) -> float:
    return known_loss(codec, COARSEST)
