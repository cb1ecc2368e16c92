"""A published claim, an experiment of several, and the judgement of what is found for them.

Owns the arithmetic of a judgement and how a value is shown. A claim never holds what is found: ``measure`` finds it each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

Unit = Literal["gain", "share", "times", "ms", "count", "Gbit/s", "bytes", "lines"]
Bound = Literal["about", "at most", "at least"]
Verdict = Literal["yes", "sign only", "no", "not run"]

_SHOWN: Final[dict[str, str]] = {
    "gain": "{:+.1%}",
    "share": "{:.1%}",
    "times": "{:.3g} x",
    "ms": "{:.4g} ms",
    "count": "{:g}",
    "Gbit/s": "{:.3g} Gbit/s",
    "bytes": "{:,.0f} B",
    "lines": "{:g} lines",
}
_BEFORE: Final = {"about": "", "at most": "<= ", "at least": ">= "}


@dataclass(frozen=True, slots=True)
class Claim:
    """One number of a paper.

    expected:  what the paper says; a gain of 42 % is 0.42
    measure:   finds the number here; None where nothing here can
    bound:     whether the number is claimed as such, or as a limit
    tolerance: relative, of 1 + gain for a gain; None for the experiment's
    reason:    why the number differs here, where it does
    """

    says: str
    expected: float
    measure: Callable[[], float] | None
    unit: Unit = "gain"
    bound: Bound = "about"
    tolerance: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Experiment:
    """Claims of one source, set-up and means. reason: why numbers differ, for claims without a reason of their own."""

    title: str
    source: str
    setup: str
    means: str
    tolerance: float
    claims: Sequence[Claim]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A claim, and what was found; None if nothing was run."""

    claim: Claim
    ours: float | None
    tolerance: float
    reason: str

    @property
    def ratio(self) -> float | None:
        """Ours over the claimed number; of two gains, of what they multiply by. None without either."""
        claimed = _factor(self.claim, self.claim.expected)
        return None if self.ours is None or claimed == 0 else _factor(self.claim, self.ours) / claimed

    @property
    def verdict(self) -> Verdict:
        """yes: within the tolerance, and of the same sign; sign only: a gain (or a loss) as claimed, of another size."""
        if self.ours is None:
            return "not run"
        same_sign = self.claim.unit != "gain" or self.claim.bound != "about" or (self.ours > 0) == (self.claim.expected > 0)
        if same_sign and self._within(self.ours):
            return "yes"
        return "sign only" if same_sign and self.claim.unit == "gain" and self.claim.bound == "about" else "no"

    @property
    def unexplained(self) -> bool:
        return self.verdict != "yes" and not self.reason

    def _within(self, ours: float) -> bool:
        found, claimed = _factor(self.claim, ours), _factor(self.claim, self.claim.expected)
        slack = self.tolerance * abs(claimed)
        above, below = found <= claimed + slack, found >= claimed - slack
        return {"about": above and below, "at most": above, "at least": below}[self.claim.bound]


def run(experiment: Experiment) -> list[Outcome]:
    """What is found for each claim. An exception of a measurement is the harness's own error and is not caught."""
    return [
        Outcome(
            claim,
            None if claim.measure is None else float(claim.measure()),
            experiment.tolerance if claim.tolerance is None else claim.tolerance,
            claim.reason or experiment.reason,
        )
        for claim in experiment.claims
    ]


def shown(value: float | None, unit: Unit, bound: Bound = "about") -> str:
    """The value for people; a dash for none."""
    return "-" if value is None else _BEFORE[bound] + _SHOWN[unit].format(value)


def _factor(claim: Claim, value: float) -> float:
    return 1 + value if claim.unit == "gain" else value
