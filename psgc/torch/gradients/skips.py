"""Results that the script went on without a step: whether codecs go on from what they have kept of them.

What a codec has not sent of a gradient stays in its residual, also where the script uses the averaged gradient in an update of its own, or throws it
away as a GAN's other half does in each iteration. But a script that seldom throws one away guards against bad steps: there the rest of a gradient that is
thousands of times too large would come back in the next steps, which the guard would throw away, too. So with a result that is thrown away as an exception
the residuals are forgotten. The first few count as exceptions: to forget what some steps have left costs next to nothing, and a bad batch that comes
back ruins a training. A result after which parameters were written counts as used, by hand; but a script whose optimizer steps, and that seldom does so, has
loaded an older checkpoint to get rid of a bad step.
Pure; the same on all ranks whose scripts do the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

# Steps for each result without one, with which such a result is an exception; critics of GANs are stepped five times.
EXCEPTIONAL: Final = 6
# So many results that are thrown away are exceptions from the first step on, as if EXCEPTIONAL steps for each had gone before.
FORGIVEN: Final = 3
# So many in a row are exceptions before anything was applied, and after any number of steps: what a script did long ago says nothing of what it does now.
IN_A_ROW: Final = 10


@dataclass(slots=True)
class Skips:
    """applied: steps of optimizers so far; used: results that the script applied by hand; thrown: results that it did not apply.
    credit: steps of late, and updates by hand, that no result thrown away has used up; used_credit: steps that no update by hand has used up."""

    applied: int = 0
    used: int = 0
    thrown: int = 0
    credit: int = EXCEPTIONAL * IN_A_ROW
    used_credit: int = 0

    @property
    def by_hand(self) -> bool:
        """Whether the script has results and never steps: it uses them in updates of its own."""
        return self.used > 0 and self.applied == 0

    def state(self) -> dict[str, int]:
        """The counts, to be saved with the residuals."""
        return asdict(self)

    @classmethod
    def of(cls, state: Mapping[str, int]) -> Skips:
        """Those of ``state``; of a state without counts those of a new job. Versions before had ``left``, results with which nothing was known to be done:
        those of a script that steps count as thrown away, those of one that never does as used by hand, as they did there. Other names are of a
        later version, and are left out."""
        known = {name: count for name, count in state.items() if name in cls.__dataclass_fields__}
        if "left" not in state:
            return cls(**known)
        applied, left = state.get("applied", 0), state["left"]
        if applied:
            return cls(applied, thrown=left, credit=state.get("credit", 0), used_credit=min(applied, EXCEPTIONAL * IN_A_ROW))
        made = cls()
        for _ in range(min(left, EXCEPTIONAL * IN_A_ROW)):
            made.use()
        made.used = left
        return made

    def step(self) -> None:
        self._applied()
        self.applied += 1
        self.used_credit = min(self.used_credit + 1, EXCEPTIONAL * IN_A_ROW)

    def use(self) -> bool:
        """A result is used by hand. Returns whether that is an exception, so that residuals are to be forgotten."""
        self._applied()
        self.used += 1
        self.used_credit = _spent(self.used_credit)
        return self.applied > 0 and self.used_credit >= 0

    def throw(self) -> bool:
        """A result is thrown away. Returns whether that is an exception, so that residuals are to be forgotten."""
        self.thrown += 1
        self.credit = _spent(self.credit)
        return self.credit >= 0

    def _applied(self) -> None:
        first = self.applied + self.used == 0
        self.credit = min(self.credit, EXCEPTIONAL * FORGIVEN) if first else min(self.credit + 1, EXCEPTIONAL * IN_A_ROW)


def _spent(credit: int) -> int:
    return max(credit - EXCEPTIONAL, -EXCEPTIONAL * FORGIVEN)
