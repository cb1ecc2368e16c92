"""Results that the script went on without a step: whether codecs go on from what they have kept of them.

What a codec has not sent of a gradient stays in its residual, also where the script then uses the averaged gradient in an update of its own, or throws it
away as a GAN's other half does in each iteration. But a script that seldom does so guards against bad steps: there the rest of a gradient that is
thousands of times too large would come back in the next steps, which the guard would throw away, too. So with a result that is left as an exception the
residuals are forgotten. The first few results count as exceptions: to forget what three steps have left costs next to nothing, and a bad batch that comes
back ruins a training. Before the first step nothing is forgotten, because a script that never steps uses its results by hand.
Pure; the same on all ranks whose scripts do the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

# Steps for each result without one, with which such a result is an exception; critics of GANs are stepped five times.
EXCEPTIONAL: Final = 6
# So many results without a step are exceptions from the beginning on, as if EXCEPTIONAL steps for each had gone before.
FORGIVEN: Final = 3
# So many in a row are exceptions after any number of steps: of what a script did long ago nothing follows for what it does now.
IN_A_ROW: Final = 10


@dataclass(slots=True)
class Skips:
    """applied: steps so far; left: results that the script went on without a step. credit: steps of late that no result without a step has used up."""

    applied: int = 0
    left: int = 0
    credit: int = EXCEPTIONAL * FORGIVEN

    @property
    def by_hand(self) -> bool:
        """Whether the script has results and never steps: it uses them in updates of its own."""
        return self.left > 0 and self.applied == 0

    def state(self) -> dict[str, int]:
        """The counts, to be saved with the residuals."""
        return asdict(self)

    @classmethod
    def of(cls, state: Mapping[str, int]) -> Skips:
        """Those of ``state``; of a state without counts those of a new job."""
        return cls(**state)

    def step(self) -> None:
        self.applied += 1
        self.credit = min(self.credit + 1, EXCEPTIONAL * IN_A_ROW)

    def leave(self) -> bool:
        """A result is left to the script. Returns whether that is an exception, so that residuals are to be forgotten."""
        self.left += 1
        self.credit = max(self.credit - EXCEPTIONAL, -EXCEPTIONAL * FORGIVEN)
        return self.applied > 0 and self.credit >= 0
