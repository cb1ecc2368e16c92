"""Espresso's selection (Wang et al., EuroSys 2023, section 4.4), as in the paper: Algorithm 1 for GPUs, then Algorithm 2 for the CPU.

Owns the two algorithms and the choices that the paper leaves open; the timeline F is ours. The paper's tensors are buckets here: one for each
tensor, unless buckets are given.

- Every bucket starts with reduce-scatter, all-reduce and all-gather, or with the first uncompressed option that the constraints allow.
- A bubble is a time before a send in which no link carries anything, neither within nodes nor between them, and no bucket is sent in part. (If
  a bubble could contain the decode of a bucket between two sends, Algorithm 1 would stop at the first large tensor that it compresses.)
- The CPU counterpart of an option has every encode and decode on the CPU.
- Algorithm 2 enumerates a product of offload counts, which may be too large; the paper does not say what to do then. Beyond ``MAX_ENUMERATED``, each
  group's count is enumerated with the others fixed, group after group, until none changes.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psgc.errors import UsageError
from psgc.plan.local_search.space import Space, graph
from psgc.plan.methods.baselines import HIERARCHICAL, tensor_by_tensor, with_option
from psgc.plan.methods.espresso_trials import Trials
from psgc.plan.methods.result import UNDER_CONSTRAINTS, Found, RuledOut
from psgc.plan.model.costs import copies_of
from psgc.plan.model.options import Constraints, Option, constrained, is_uncompressed
from psgc.plan.model.plan import PlannedBucket
from psgc.plan.model.problem import Problem, ranks

MAX_ENUMERATED: Final = 10_000
Ints = NDArray[np.int64]


def espresso(
    problem: Problem, buckets: Sequence[PlannedBucket] | None = None, *, space: Space | None = None, patience_s: float = np.inf
) -> Found:  # fmt: skip
    """Espresso's plan. Its tree has no options over servers. buckets: choose only the options of these; space: the problem's, if it already
    exists. Raises UsageError if the constraints leave no option, or after ``patience_s`` seconds."""
    begun = time.perf_counter()
    given = tensor_by_tensor(problem) if buckets is None else tuple(buckets)
    job = _job(problem, given, space, begun + patience_s)
    choose_on_gpu(job)
    offload(job)
    options = job.options
    chosen = tuple(with_option(given[unit.index], options[job.option(unit)], problem) for unit in job.units)
    step = job.trials.step()
    select = (time.perf_counter() - begun) * 1e6
    return Found(tuple(sorted(chosen, key=lambda bucket: -bucket.priority)), step, select, len(options))


@dataclass(frozen=True, slots=True)
class Unit:
    """A bucket among the chains. index: in the given buckets; turn: in order of readiness; kind: of its parts; low, high: the range of its
    chains."""

    index: int
    turn: int
    numel: int
    kind: tuple[float, int]  # size, and the codec's number
    low: int
    high: int


class Candidates(NamedTuple):
    """The options to choose from. numbers: their numbers in the space; on_gpu: indices of the options of Algorithm 1; on_cpu: index of each option's
    CPU counterpart, or its own; encode: whether each option encodes."""

    numbers: Ints
    on_gpu: Ints
    on_cpu: Ints
    encode: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Job:
    """options: by their numbers in ``trials``; units: in order of readiness; low: index of each unit's first chain; candidates: by codec; until_s: the
    deadline."""

    options: tuple[Option, ...]
    trials: Trials
    units: tuple[Unit, ...]
    candidates: tuple[Candidates, ...]
    low: Ints
    until_s: float = np.inf

    def go_on(self) -> None:
        """Raise UsageError after the deadline."""
        if time.perf_counter() > self.until_s:
            raise UsageError(f"method espresso: not waited for with {len(self.units)} tensors; psgc plan --method espresso does")

    def option(self, unit: Unit) -> int:
        return int(self.trials.option[unit.low])

    def on_cpu(self, unit: Unit, option: int) -> int:
        """The CPU counterpart of a unit's option."""
        return int(self.candidates[unit.kind[1]].on_cpu[option])

    def take(self, unit: Unit, option: int) -> None:
        self.trials.option[unit.low : unit.high] = option

    def is_compressed(self, unit: Unit) -> bool:
        return bool(self.candidates[0].encode[self.option(unit)])


def _job(problem: Problem, buckets: Sequence[PlannedBucket], space: Space | None = None, until_s: float = np.inf) -> Job:
    options, every = _options(problem.allowed, copies_of(problem.priced))
    space = space or Space(problem)
    numbers = every.numbers
    ready = [max(problem.ready_us[name] for name in bucket.tensors) for bucket in buckets]
    units: list[Unit] = []
    low = 0
    for index in sorted(range(len(buckets)), key=lambda index: (ready[index], -buckets[index].priority, index)):
        bucket = buckets[index]
        kind = (bucket.numel / bucket.parts, problem.codec_numbers[bucket.tensors[0]])
        units.append(Unit(index, len(units), bucket.numel, kind, low, low + bucket.parts))
        low += bucket.parts
    kinds = sorted({unit.kind for unit in units})
    parts = [unit.high - unit.low for unit in units]
    start = (
        options.index(HIERARCHICAL) if HIERARCHICAL in options else next(i for i, option in enumerate(options) if is_uncompressed(option))
    )
    trials = Trials(
        space.table(numbers, np.array([size for size, _ in kinds]), np.array([codec for _, codec in kinds])),
        np.repeat([ready[unit.index] for unit in units], parts),
        np.repeat([kinds.index(unit.kind) for unit in units], parts),
        np.full(low, start, np.int64),
        space.threads,
        space.moments_us,
        ranks(buckets, [unit.index for unit in units]),
    )
    left = tuple(_left(every, takes) for takes in space.fits(numbers))
    return Job(options, trials, tuple(units), left, np.array([unit.low for unit in units]), until_s)


def _left(found: Candidates, takes: NDArray[np.bool_]) -> Candidates:
    """The candidates of a codec. takes: whether it can have each option."""
    on_cpu = np.where(takes[found.on_cpu], found.on_cpu, np.arange(len(takes)))
    return found._replace(on_gpu=found.on_gpu[takes[found.on_gpu]], on_cpu=on_cpu)


@functools.cache
def _options(allowed_by: Constraints, copies: int) -> tuple[tuple[Option, ...], Candidates]:
    """The options that encode only on GPUs or not at all, followed by their CPU counterparts; and the indices of each kind."""
    tree = [option for option in constrained(allowed_by) if not any(".push" in action for action in option)]
    if not tree:
        raise RuledOut(
            "method espresso: its tree has no options over servers, and the constraints leave no others; choose another method",
            UNDER_CONSTRAINTS,
        )
    gpu = [option for option in tree if not any("@cpu" in action for action in option)]
    allowed, number = set(tree), {option: index for index, option in enumerate(gpu)}
    counterparts = []
    for option in gpu:
        other = tuple(action.replace("@gpu", "@cpu") for action in option)
        counterparts.append(number.setdefault(other, len(number)) if other in allowed else number[option])
    on_cpu = [*counterparts, *range(len(gpu), len(number))]
    numbers = np.array([graph(allowed_by, copies).number[option] for option in number])
    encode = np.array([not is_uncompressed(option) for option in number])
    return tuple(number), Candidates(numbers, np.arange(len(gpu)), np.array(on_cpu, np.int64), encode)


def choose_on_gpu(job: Job) -> None:
    """Algorithm 1: each bucket takes the option with the shortest step, the largest bucket first, and of equal ones the one that is ready last. A
    bucket that is sent uncompressed before a bubble is not considered any more."""
    step = job.trials.step()
    left = _remove(job, sorted(job.units, key=lambda unit: (-unit.numel, -unit.low)))
    while left:
        job.go_on()
        unit, *left = left
        best, shorter = job.trials.best(unit.low, unit.high, job.candidates[unit.kind[1]].on_gpu, step)
        if best >= 0:
            step = shorter
            job.take(unit, best)
        left = _remove(job, left)


def _remove(job: Job, units: Iterable[Unit]) -> list[Unit]:
    """The paper's Remove(): the units without those that are uncompressed and sent before a bubble."""
    bubble, sent = job.trials.last_bubble()
    after = np.maximum.reduceat(sent, job.low) > bubble
    return [unit for unit in units if after[unit.turn] or job.is_compressed(unit)]


def offload(job: Job) -> None:
    """Algorithm 2: the compressed buckets form groups of equal size, codec and option. Of each group, the buckets that are ready first move to the CPU;
    how many of each group is chosen for the shortest step."""
    groups: dict[tuple[tuple[float, int], int], list[Unit]] = {}
    for unit in job.units:
        if job.on_cpu(unit, job.option(unit)) != job.option(unit):
            groups.setdefault((unit.kind, job.option(unit)), []).append(unit)
    members = list(groups.values())
    if members:
        Offloading(job, members, [job.option(group[0]) for group in members]).run()


@dataclass(frozen=True, slots=True)
class Offloading:
    """groups: units of one kind and option, in order of readiness; option: each group's option on the GPU."""

    job: Job
    groups: Sequence[Sequence[Unit]]
    option: Sequence[int]

    def run(self) -> None:
        most = [len(group) for group in self.groups]
        counts = self._enumerated(most) if prod(size + 1 for size in most) <= MAX_ENUMERATED else self._one_by_one(most)
        self._set(counts)

    def _enumerated(self, most: Sequence[int]) -> tuple[int, ...]:
        best, step = tuple(0 for _ in most), self.job.trials.step()
        for counts in product(*(range(size + 1) for size in most)):
            self.job.go_on()
            self._set(counts)
            if (shorter := self.job.trials.step(step)) < step:
                best, step = counts, shorter
        return best

    def _one_by_one(self, most: Sequence[int]) -> tuple[int, ...]:
        best, step, unchanged, group = [0] * len(most), self.job.trials.step(), 0, 0
        while unchanged < len(most):
            before = best[group]
            for count in range(most[group] + 1):
                self.job.go_on()
                self._set([*best[:group], count, *best[group + 1 :]])
                if (shorter := self.job.trials.step(step)) < step:
                    best[group], step = count, shorter
            unchanged = 1 if best[group] != before else unchanged + 1
            group = (group + 1) % len(most)
        return tuple(best)

    def _set(self, counts: Sequence[int]) -> None:
        for group, option, count in zip(self.groups, self.option, counts, strict=True):
            for place, unit in enumerate(group):
                self.job.take(unit, self.job.on_cpu(unit, option) if place < count else option)
