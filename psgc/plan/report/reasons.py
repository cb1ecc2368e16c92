"""Why a bucket is encoded, or is not: the step time if this bucket alone were the opposite, and the lane whose work changes most.

The alternative is the option that takes the least time for one part by itself: among the uncompressed options for an encoded bucket, among
those that encode once for an uncompressed one. Owns the comparison and its sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from psgc.plan.model.costs import RESOURCES, CodecCosts, Task, resources_of
from psgc.plan.model.options import Option, encodes
from psgc.plan.model.plan import UNCOMPRESSED, PlannedBucket
from psgc.plan.model.problem import Problem, simulate
from psgc.plan.model.timeline import F64
from psgc.plan.report.wording import ms

# Each reason costs a simulation of the whole step; the smallest buckets get none.
MOST_LOOKED_INTO: Final = 64
# A smaller change of the step, as a share, counts as none: the model is not more exact.
NO_CHANGE: Final = 1e-3


class Reason(NamedTuple):
    """Why a bucket has its option. other: the alternative, None if there is none; longer_us: by how much it would make the step longer; lane: the lane
    whose work would change most; here_us, there_us: the bucket's work on that lane as planned, and with the alternative."""

    other: Option | None
    longer_us: float
    lane: str
    here_us: float
    there_us: float


NO_OTHER: Final = Reason(None, 0.0, "", 0.0, 0.0)


def reasons(problem: Problem, buckets: Sequence[PlannedBucket]) -> dict[int, Reason]:
    """The reasons of the ``MOST_LOOKED_INTO`` largest buckets, by the bucket's index in the plan."""
    step_us = simulate(problem, buckets).step_us
    largest = sorted(range(len(buckets)), key=lambda number: -buckets[number].numel)[:MOST_LOOKED_INTO]
    others = dict.fromkeys(largest, NO_OTHER)
    for encoded in (True, False):
        numbers = [number for number in largest if bool(encodes(buckets[number].option)) == encoded]
        options = [option for option in problem.options if encodes(option) == (0 if encoded else 1)]
        found = quickest(problem, options, [buckets[number] for number in numbers])
        for number, other in zip(numbers, found, strict=True):
            if other is not None:
                others[number] = _reason(problem, buckets, number, other, step_us)
    return others


def _part_numel(bucket: PlannedBucket) -> float:
    return bucket.numel / bucket.parts


def _reason(problem: Problem, buckets: Sequence[PlannedBucket], number: int, other: Option, step_us: float) -> Reason:
    bucket = buckets[number]
    own, others = (_work_us(problem, option, bucket) for option in (bucket.option, other))
    lane = max(RESOURCES, key=lambda name: abs(others[name] - own[name]))
    changed = [*buckets[:number], encoded_as(problem, bucket, other), *buckets[number + 1 :]]
    return Reason(other, simulate(problem, changed).step_us - step_us, lane, own[lane], others[lane])


def encoded_as(problem: Problem, bucket: PlannedBucket, option: Option) -> PlannedBucket:
    """The bucket with another option, and the codec that goes with it."""
    return replace(bucket, option=option, codec=problem.codec_of(bucket).name if encodes(option) else UNCOMPRESSED)


def all_encoded(problem: Problem, buckets: Sequence[PlannedBucket]) -> tuple[PlannedBucket, ...] | None:
    """The buckets, each with the quickest option that encodes once, or unchanged if it has none; None if no bucket has one."""
    found = quickest(problem, [option for option in problem.options if encodes(option) == 1], buckets)
    if not any(found):
        return None
    return tuple(bucket if option is None else encoded_as(problem, bucket, option) for bucket, option in zip(buckets, found, strict=True))


def quickest(problem: Problem, options: Sequence[Option], buckets: Sequence[PlannedBucket]) -> list[Option | None]:
    """For each bucket the option that takes the least time for one part by itself, the first of equal ones; None if none is allowed."""
    found: list[Option | None] = [None] * len(buckets)
    for codec in problem.codecs:
        places = [place for place, bucket in enumerate(buckets) if problem.codec_of(bucket) is codec]
        allowed = [option for option in options if problem.takes(option, codec)]
        if places and allowed:
            least = _least(problem, codec, allowed, np.array([_part_numel(buckets[place]) for place in places]))
            for place, number in zip(places, least, strict=True):
                found[place] = allowed[number]
    return found


def _least(problem: Problem, codec: CodecCosts, options: Sequence[Option], numels: F64) -> list[int]:
    """For each number of elements, the index of the option that takes the least time."""
    priced: dict[Task, F64] = {}
    total = np.zeros((len(options), len(numels)))
    for number, option in enumerate(options):
        for task in problem.tasks(option, codec):
            if task not in priced:
                priced[task] = codec.all_us(task, numels)
            total[number] += priced[task]
    return [int(number) for number in total.argmin(axis=0)]


def _work_us(problem: Problem, option: Option, bucket: PlannedBucket) -> dict[str, float]:
    """The time that the bucket takes on each resource with this option."""
    total = dict.fromkeys(RESOURCES, 0.0)
    for _, resource, us in problem.part_tasks(option, _part_numel(bucket), problem.codec_of(bucket)):
        for one in resources_of(resource):
            total[RESOURCES[one]] += us * bucket.parts / float(problem.threads[one])
    return total


def sentence(bucket: PlannedBucket, reason: Reason, step_us: float) -> str:
    """The reason in words."""
    opposite = "uncompressed" if encodes(bucket.option) else "encoded"
    if reason.other is None:
        return f"no option leaves it {opposite}"
    change = f"{reason.lane} works {ms(reason.here_us)} ms for it, {ms(reason.there_us)} if it were {opposite}"
    if abs(reason.longer_us) < NO_CHANGE * step_us:
        return f"{change}; the step would be the same: other work hides it"
    return f"{change}; the step would take {ms(abs(reason.longer_us))} ms {'longer' if reason.longer_us > 0 else 'less'}"
