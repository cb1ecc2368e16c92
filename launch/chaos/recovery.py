"""How long a job took to go on after each event: as a histogram. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

LEAST_S: Final = 0.125
MOST_BAR: Final = 40


def bucket_of(seconds: float) -> int:
    """Buckets double: 0 is up to ``LEAST_S``, 1 up to twice that."""
    return 0 if seconds <= LEAST_S else math.ceil(math.log2(seconds / LEAST_S) - 1e-9)


def histogram(times: Sequence[float]) -> list[tuple[float, int]]:
    """Upper bounds in seconds and counts, from the first bucket to the last that has any."""
    counts: dict[int, int] = {}
    for seconds in times:
        counts[bucket_of(seconds)] = counts.get(bucket_of(seconds), 0) + 1
    return [(LEAST_S * 2**bucket, counts.get(bucket, 0)) for bucket in range(max(counts, default=-1) + 1)]


def bars(times: Sequence[float]) -> list[str]:
    """The histogram as lines."""
    found = histogram(times)
    most = max((count for _, count in found), default=0)
    return [f"  up to {bound:7.3g} s  {count:5d}  {'#' * math.ceil(MOST_BAR * count / most)}" for bound, count in found]


def summary(times: Sequence[float]) -> dict[str, Any]:
    """Count, median and longest, in seconds, and the histogram."""
    ordered = sorted(times)
    middle = ordered[len(ordered) // 2] if ordered else None
    return {"count": len(ordered), "median_s": middle, "longest_s": ordered[-1] if ordered else None, "histogram": histogram(times)}
