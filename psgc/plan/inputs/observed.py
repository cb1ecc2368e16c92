"""Computes a profile from observed iterations: medians without outliers, and their spread.

Pure: times are plain numbers. ``psgc.torch.gradients.profiler`` measures them, with hooks and clocks.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from psgc.errors import UsageError
from psgc.plan.inputs.profile import FLOAT_BYTES, Profile, Spread, TensorProfile

LEAST_ITERATIONS: Final = 3  # a median and quartiles of fewer say nothing
FENCE: Final = 1.5  # iterations further than this many interquartile ranges beyond the quartiles are outliers (Tukey 1977)
UNSTEADY: Final = 0.1  # an interquartile range of more than this share of the median is worth a warning


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration of training, measured without concurrent communication.

    ready_us:   by tensor, counted from the first gradient's readiness; tensors that backward did not reach are missing.
    tail_us:    from the last gradient until the trainer asked for the synchronized ones.
    forward_us: everything else: from the end of synchronization to the next iteration's first gradient, with the optimizer's step.
    """

    ready_us: Mapping[str, float]
    tail_us: float
    forward_us: float

    @property
    def backward_us(self) -> float:
        return max(self.ready_us.values())

    @property
    def compute_us(self) -> float:
        return self.backward_us + self.tail_us + self.forward_us

    def stretched(self, compute_us: float) -> Iteration:
        """The iteration with all times scaled so that its computation takes ``compute_us``."""
        factor = compute_us / self.compute_us if self.compute_us else 1.0
        ready_us = {name: ready * factor for name, ready in self.ready_us.items()}
        return Iteration(ready_us, self.tail_us * factor, self.forward_us * factor)


_TOTALS: Final[Mapping[str, Callable[[Iteration], float]]] = {
    "backward_us": lambda iteration: iteration.backward_us,
    "tail_us": lambda iteration: iteration.tail_us,
    "forward_us": lambda iteration: iteration.forward_us,
    "compute_us": lambda iteration: iteration.compute_us,
}


def profile_of(
    iterations: Sequence[Iteration], numel: Mapping[str, int], *, model: str = "", hardware: str = "", date: str = "",
    shapes: Mapping[str, tuple[int, ...]] | None = None, itemsizes: Mapping[str, int] | None = None, of_ranks: int = 1,
) -> Profile:  # fmt: skip
    """The profile of these iterations. numel: elements of every tensor; shapes: the known shapes; itemsizes: bytes per element, where they are not 4;
    of_ranks: each iteration is that of the slowest of this many ranks.

    An iteration whose computation time lies more than FENCE interquartile ranges beyond the quartiles is an outlier and is left out. A tensor's
    ready time is the median over the other iterations; for a tensor that backward never reached, the end of backward.
    Raises UsageError for fewer than LEAST_ITERATIONS, or tensors that are not in ``numel``.
    """
    if len(iterations) < LEAST_ITERATIONS:
        raise UsageError(f"profile: {len(iterations)} iterations observed, expected at least {LEAST_ITERATIONS}")
    kept = _without_outliers(iterations)
    ready = {name: _ready_us(name, kept) for name in numel}
    first = min(ready.values())
    ordered = sorted(ready, key=lambda name: ready[name])  # stable: tensors of equal readiness stay in the order of declaration
    return Profile(
        model=model, hardware=hardware, date=date,
        source=f"measured: medians of {_counted(len(kept), len(iterations))}" + f", each of the slowest of {of_ranks} ranks" * (of_ranks > 1),
        tensors=tuple(
            TensorProfile(name, numel[name], round(ready[name] - first, 3), (shapes or {}).get(name), (itemsizes or {}).get(name, FLOAT_BYTES))
            for name in ordered
        ),
        forward_us=round(statistics.median(iteration.forward_us for iteration in kept), 3),
        spread={total: spread_of([read(iteration) for iteration in kept]) for total, read in _TOTALS.items()},
    )  # fmt: skip


def _counted(kept: int, observed: int) -> str:
    return f"{kept} iterations" if kept == observed else f"{kept} of {observed} iterations, the others were outliers"


def _without_outliers(iterations: Sequence[Iteration]) -> list[Iteration]:
    low, _, high = statistics.quantiles((i.compute_us for i in iterations), n=4, method="inclusive")
    reach = FENCE * (high - low)
    return [iteration for iteration in iterations if low - reach <= iteration.compute_us <= high + reach]


def _ready_us(name: str, iterations: Sequence[Iteration]) -> float:
    return statistics.median(iteration.ready_us.get(name, iteration.backward_us) for iteration in iterations)


def spread_of(values: Sequence[float]) -> Spread:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
    return Spread(round(median, 3), round(high - low, 3))


def unsteady(profile: Profile) -> str:
    """A warning that names the totals that vary too much to plan by, or "": the interquartile range is more than UNSTEADY of the median."""
    varying = [
        f"{total} ({spread.median:,.0f} us, interquartile range {spread.iqr:,.0f})"
        for total, spread in profile.spread.items()
        if total != "tail_us" and spread.iqr > UNSTEADY * spread.median
    ]
    if not varying:
        return ""
    named, verb = (varying[0], "varies") if len(varying) == 1 else (f"{', '.join(varying[:-1])} and {varying[-1]}", "vary")
    return f"{named} {verb} too much to plan by; end what else runs on this machine, or take more iterations"
