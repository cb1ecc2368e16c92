"""The result of a planning method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from psgc.errors import UsageError
from psgc.plan.model.plan import PlannedBucket


@dataclass(frozen=True, slots=True)
class Found:
    """What a method chose. step_us: by the timeline; select_us: the time of the search, cost tables included;
    options_considered: the number of options a bucket could have."""

    buckets: tuple[PlannedBucket, ...]
    step_us: float
    select_us: float
    options_considered: int


UNDER_CONSTRAINTS: Final = " under these constraints"
WITHOUT_ENCODING: Final = ", since encoding is ruled out"


class RuledOut(UsageError):
    """The constraints rule out what a method needs. by: one of the two reasons above."""

    def __init__(self, text: str, by: str) -> None:
        super().__init__(text)
        self.by = by
