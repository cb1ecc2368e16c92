"""Predicted beside measured, of several candidates of one job: by lane, where the difference lies, and the correction of the costs that explains it.

The correction is the most probable one, if the logarithms of measured steps scatter by STEP_SCATTER around their predictions, and those of the factors by
PRIOR around what each lane was measured to take beside its prediction, or around nothing where no lane tells. So a factor moves only as far as the steps
ask for, and four steps do not determine five factors by themselves. Pure.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from psgc.plan.inputs.correction import LEAST_FACTOR, MOST_FACTOR, NONE, Correction, Factors
from psgc.plan.model.costs import RESOURCES, SERVER
from psgc.plan.model.lanes import BACKWARD, busy_us, spans
from psgc.plan.model.plan import PlannedBucket
from psgc.plan.model.problem import Problem, Simulated, simulate

COMPUTE: Final = "compute"
STEP_SCATTER: Final = 0.03
PRIOR: Final[Mapping[str, float]] = {"compute": 0.1, "codecs": 0.3, "server": 0.3, "messages": 0.7, "links": 0.3}
# Of a factor that a lane was measured for. A server's timeline has no span of what it adds while it receives.
MEASURED_PRIOR: Final[Mapping[str, float]] = {"compute": 0.05, "codecs": 0.1, "server": 0.2}
LEAST_SHARE: Final = 0.02  # of the step that a lane must work, as predicted and as measured, to tell of a factor
SWEEPS, NARROWING = 3, 10  # of coordinate descent, and steps of the golden section on each factor
REACH: Final = 1.1  # logarithm of the farthest that a sweep looks, first


@dataclass(frozen=True)
class Candidate:
    """What a job was measured with. buckets: by which gradients travelled; step_ms: of each window, whole iterations; compute_ms: forward and backward beside
    communication, of the slowest rank; lanes_ms: how long each lane worked in a step, where a timeline tells."""

    name: str
    buckets: tuple[PlannedBucket, ...]
    step_ms: tuple[float, ...]
    compute_ms: float
    lanes_ms: Mapping[str, float] = field(default_factory=dict)

    @property
    def measured_ms(self) -> float:
        """The median of its windows, of two the lower one: what holds a window up only adds to it."""
        return statistics.median_low(self.step_ms)

    @property
    def scatter(self) -> float:
        """The interquartile range of its windows, as a share of the median."""
        if len(self.step_ms) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.step_ms, n=4, method="inclusive")
        return (high - low) / self.measured_ms if self.measured_ms else 0.0


@dataclass(frozen=True)
class Predicted:
    """A candidate's iteration: step_ms with what communication does not touch; lanes_ms: by lane, COMPUTE among them."""

    step_ms: float
    lanes_ms: Mapping[str, float]


@dataclass(frozen=True)
class Verification:
    """before, after: the predictions by the profile's own costs, and by the corrected ones."""

    candidates: tuple[Candidate, ...]
    before: tuple[Predicted, ...]
    after: tuple[Predicted, ...]
    correction: Correction


Problems = Callable[[Factors], Callable[[Candidate], Problem]]  # by factors, each candidate's problem


def verify(candidates: Sequence[Candidate], problem_of: Problems, date: str = "", cluster: str = "") -> Verification:
    """problem_of: each candidate's problem, priced with these factors."""
    before = _predictions(candidates, problem_of(NONE))
    prior = _told_by_lanes(candidates, before)
    factors = _most_probable(candidates, problem_of, prior)
    after = _predictions(candidates, problem_of(factors))
    error = max(abs(each.step_ms / one.measured_ms - 1) for one, each in zip(candidates, after, strict=True))
    steps = tuple(
        {"name": one.name, "measured_ms": one.measured_ms, "predicted_ms": was.step_ms, "corrected_ms": now.step_ms}
        for one, was, now in zip(candidates, before, after, strict=True)
    )
    return Verification(tuple(candidates), before, after, Correction(factors, error, date, cluster, steps))


def predicted(problem: Problem, buckets: Sequence[PlannedBucket]) -> Predicted:
    found = simulate(problem, buckets)
    forward_us = problem.profile.forward_us or 0.0
    lanes = {lane: us / 1e3 for lane, us in busy_us(spans(found)).items() if lane != BACKWARD}
    return Predicted((forward_us + found.step_us) / 1e3, {COMPUTE: (forward_us + _computed_us(found)) / 1e3, **lanes})


def _computed_us(found: Simulated) -> float:
    return float(found.timeline.computed_us[-1]) if len(found.timeline.computed_us) else 0.0


def _predictions(candidates: Sequence[Candidate], problem: Callable[[Candidate], Problem]) -> tuple[Predicted, ...]:
    return tuple(predicted(problem(one), one.buckets) for one in candidates)


def _told_by_lanes(candidates: Sequence[Candidate], before: Sequence[Predicted]) -> dict[str, float]:
    """The logarithm of each factor that lanes tell: the median over the candidates of what they were measured to take beside their predictions."""
    told: dict[str, list[float]] = {}
    for one, each in zip(candidates, before, strict=True):
        least_ms = LEAST_SHARE * one.measured_ms
        pairs = {
            "compute": (one.compute_ms, each.lanes_ms[COMPUTE]),
            "codecs": (one.lanes_ms.get("cpu", 0.0), each.lanes_ms["cpu"]),
            "server": (one.lanes_ms.get("server", 0.0), each.lanes_ms[RESOURCES[SERVER]]),
        }
        for name, (measured_ms, predicted_ms) in pairs.items():
            if min(measured_ms, predicted_ms) > least_ms:
                told.setdefault(name, []).append(math.log(measured_ms / predicted_ms))
    return {name: statistics.median(logs) for name, logs in told.items()}


def _most_probable(candidates: Sequence[Candidate], problem_of: Problems, told: Mapping[str, float]) -> Factors:
    names = list(PRIOR)
    at = {name: told.get(name, 0.0) for name in names}
    least, most = math.log(LEAST_FACTOR), math.log(MOST_FACTOR)

    def improbability(logs: Mapping[str, float]) -> float:
        factors = Factors(**{name: math.exp(logs[name]) for name in names})
        found = _predictions(candidates, problem_of(factors))
        steps = sum((math.log(each.step_ms / one.measured_ms) / STEP_SCATTER) ** 2 for one, each in zip(candidates, found, strict=True))
        return steps + sum(
            ((logs[name] - told.get(name, 0.0)) / (MEASURED_PRIOR[name] if name in told else PRIOR[name])) ** 2 for name in names
        )

    for sweep in range(SWEEPS):
        for name in names:
            reach = REACH / 3**sweep
            low, high = max(least, at[name] - reach), min(most, at[name] + reach)
            at[name] = _least(functools.partial(_with, improbability, at, name), low, high, at[name])
    return Factors(**{name: round(math.exp(at[name]), 4) for name in names})


def _with(improbability: Callable[[Mapping[str, float]], float], at: Mapping[str, float], name: str, value: float) -> float:
    return improbability({**at, name: value})


def _least(cost: Callable[[float], float], low: float, high: float, present: float) -> float:
    """Where the cost is least between the two, by golden section; ``present`` if nothing is better."""
    ratio = (math.sqrt(5) - 1) / 2
    one, other = high - ratio * (high - low), low + ratio * (high - low)
    of_one, of_other = cost(one), cost(other)
    for _ in range(NARROWING):
        if of_one <= of_other:
            high, other, of_other = other, one, of_one
            one = high - ratio * (high - low)
            of_one = cost(one)
        else:
            low, one, of_one = one, other, of_other
            other = low + ratio * (high - low)
            of_other = cost(other)
    best, value = min(((of_one, one), (of_other, other)))
    return value if best < cost(present) else present


def where(candidate: Candidate, each: Predicted) -> tuple[str, float]:
    """The lane whose measured time is farthest from its prediction, and by how many milliseconds it is longer; ("", 0) where no lane was measured."""
    measured = {COMPUTE: candidate.compute_ms, **candidate.lanes_ms}
    apart = {lane: ms - each.lanes_ms.get(lane, 0.0) for lane, ms in measured.items() if lane in each.lanes_ms}
    lane = max(apart, key=lambda name: abs(apart[name]), default="")
    return lane, apart.get(lane, 0.0)


def document(found: Verification) -> dict[str, Any]:
    """For JSON."""
    rows = []
    for one, was, now in zip(found.candidates, found.before, found.after, strict=True):
        measured = {COMPUTE: one.compute_ms, **one.lanes_ms}
        lanes = [
            {"lane": lane, "predicted_ms": was.lanes_ms.get(lane), "measured_ms": measured.get(lane)}
            for lane in dict.fromkeys([*was.lanes_ms, *measured])
        ]
        lane, ms = where(one, was)
        rows.append({
            "name": one.name, "measured_ms": one.measured_ms, "windows_ms": list(one.step_ms), "predicted_ms": was.step_ms,
            "error": was.step_ms / one.measured_ms - 1, "corrected_ms": now.step_ms, "corrected_error": now.step_ms / one.measured_ms - 1,
            "lanes": lanes, "farthest_lane": lane, "farthest_ms": ms,
        })  # fmt: skip
    return {"candidates": rows, "factors": asdict(found.correction.factors), "error": found.correction.error}
