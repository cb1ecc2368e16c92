"""What every method of finding a plan answers."""

from __future__ import annotations

from dataclasses import dataclass

from psgc.plan.plan import PlannedBucket


@dataclass(frozen=True, slots=True)
class Found:
    """What a method chose. step_us: by the timeline; select_us: how long it took to choose, cost tables included; options_considered: how
    many options it had to choose from."""

    buckets: tuple[PlannedBucket, ...]
    step_us: float
    select_us: float
    options_considered: int
