"""What every method of finding a plan answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from psgc.errors import UsageError
from psgc.plan.model.plan import PlannedBucket


@dataclass(frozen=True, slots=True)
class Found:
    """What a method chose. step_us: by the timeline; select_us: how long it took to choose, cost tables included; options_considered: how
    many options it had to choose from."""

    buckets: tuple[PlannedBucket, ...]
    step_us: float
    select_us: float
    options_considered: int


UNDER_CONSTRAINTS: Final = " under these constraints"
WITHOUT_ENCODING: Final = ", since encoding is ruled out"


class RuledOut(UsageError):
    """The user has ruled out what a method cannot do without. by: one of the two above, which go on from what is not possible."""

    def __init__(self, text: str, by: str) -> None:
        super().__init__(text)
        self.by = by
