"""Which fragment leaves after which step, and when its mean is taken: every rank follows it by counting its own steps. Pure.

Fragment p of P leaves after every step whose number is p' modulo ``every``, where p' = (p + 1) every / P, rounded down; with one fragment, after every
``every``-th step. Its mean is taken ``delay`` steps later. Invariant: a fragment is taken before it leaves again, and fragments leave in one order.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import Any

from psgc.errors import UsageError


@dataclass(frozen=True, slots=True)
class Schedule:
    """every: steps between two exchanges of a fragment; fragments: how many; delay: steps from its leaving until its mean is taken; by: whose schedule it
    is. Raises UsageError for numbers that do not fit each other."""

    every: int
    fragments: int = 1
    delay: int = 0
    by: str = "DiLoCo"

    def __post_init__(self) -> None:
        for name in ("every", "fragments", "delay"):
            object.__setattr__(self, name, whole(getattr(self, name), f"{self.by}: {name}"))
        if self.every < 1 or self.fragments < 1 or self.delay < 0:
            raise UsageError(
                f"{self.by}: every={self.every}, fragments={self.fragments}, delay={self.delay}: expected at least 1 step and 1 fragment, "
                f"and a delay of 0 or more"
            )
        if self.fragments > self.every:
            raise UsageError(f"{self.by}: {self.fragments} fragments, each exchanged every {self.every} steps: choose every >= fragments")
        if self.delay >= self.every:
            raise UsageError(
                f"{self.by}: a delay of {self.delay} steps, but a fragment leaves again after {self.every}; choose delay < every"
            )

    def leaving(self, step: int) -> int | None:
        """The fragment that leaves after the step with this number, from 1 on."""
        return next((each for each in range(self.fragments) if (step - self._place(each)) % self.every == 0), None)

    def next_leaving(self, step: int) -> int:
        """The fragment that leaves next after this step."""
        return next(each for later in range(step + 1, step + self.every + 1) if (each := self.leaving(later)) is not None)

    def taken(self, step: int) -> int | None:
        """The fragment whose mean is taken after this step, before another leaves."""
        return self.leaving(step - self.delay) if step > self.delay else None

    def _place(self, fragment: int) -> int:
        return (fragment + 1) * self.every // self.fragments


def whole(value: Any, what: str) -> int:
    """The value as an integer. what: in messages. Raises UsageError for any other, such as a quotient: no step has such a number."""
    try:
        return index(value)
    except TypeError:
        raise UsageError(f"{what}={value!r}: expected a whole number, such as total // 3") from None
