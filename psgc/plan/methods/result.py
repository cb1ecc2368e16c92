"""The result of a planning method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from psgc.errors import UsageError
from psgc.plan.model.plan import PlannedBucket


@dataclass(frozen=True, slots=True)
class Found:
    """A method's plan. step_us: the simulated step; select_us: the time that planning took, with the cost tables; options_considered: the number
    of options that a bucket could have."""

    buckets: tuple[PlannedBucket, ...]
    step_us: float
    select_us: float
    options_considered: int


UNDER_CONSTRAINTS: Final = " under these constraints"
WITHOUT_ENCODING: Final = ", since encoding is ruled out"


class RuledOut(UsageError):
    """The constraints rule out the options of a method. by: one of the two reasons above."""

    def __init__(self, text: str, by: str) -> None:
        super().__init__(text)
        self.by = by
