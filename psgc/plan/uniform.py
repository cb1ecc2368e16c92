"""Plans in which all buckets go the same way: gradients fused to one size, one option, one device that encodes.

What a runtime without a planner would be tuned to, and quickly found, so that questions can be asked at a hundred bandwidths. Owns the
fusing and the short list of options worth simulating; ``methods`` has what a planner finds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from psgc.errors import UsageError
from psgc.plan.costs import BOTH_WAYS, GPU, RECEIVE, SEND, Task, tasks
from psgc.plan.options import Option, encodes
from psgc.plan.plan import UNCOMPRESSED, PlannedBucket
from psgc.plan.problem import Problem, simulate
from psgc.plan.profile import Profile

MOST_CUTS: Final = 64  # more than this and latencies, not bytes, are what is simulated
LEAST_NUMEL: Final = 1 << 16  # smaller buckets are latency alone on every link there is
SHORT_LIST: Final = 4  # options a size that are simulated; the estimate that picks them is within a bucket's time of the timeline


@dataclass(frozen=True, slots=True)
class Uniform:
    """step_us: by the timeline, from the first gradient's readiness on."""

    option: Option
    buckets: tuple[PlannedBucket, ...]
    step_us: float


def uncompressed(problem: Problem) -> tuple[Option, ...]:
    return tuple(option for option in problem.options if encodes(option) == 0)


def compressed(problem: Problem) -> tuple[Option, ...]:
    """Those that encode, all on one device. Raises UsageError if there are none."""
    found = tuple(option for option in problem.options if encodes(option) and _one_device(option))
    if not found:
        raise UsageError(
            f"codec {problem.codec.name}: the profile has its times on no device that may encode; measure them with psgc profile"
        )
    return found


def _one_device(option: Option) -> bool:
    return len({action.partition("@")[2] for action in option if "@" in action}) == 1


def best_uniform(problem: Problem, options: Sequence[Option]) -> Uniform:
    """The best such plan over these options, over buckets of all the gradient down to a 64th."""
    priced = [(option, tasks(option, problem.cluster, problem.codec)) for option in options]
    found = None
    for size in _sizes(problem.profile.numel):
        ranked = sorted(priced, key=lambda pair, size=size: _estimate_us(problem, pair[1], size))  # type: ignore[misc]
        for option, _ in ranked[:SHORT_LIST]:
            buckets = fused(problem, size, option)
            step = simulate(problem, buckets).step_us
            if found is None or step < found.step_us:
                found = Uniform(option, buckets, step)
    assert found is not None
    return found


def _sizes(numel: int) -> Iterable[float]:
    cuts = 1
    while cuts == 1 or (cuts <= MOST_CUTS and numel / cuts >= LEAST_NUMEL):
        yield numel / cuts
        cuts *= 2


def _estimate_us(problem: Problem, chain: Sequence[Task], size: float) -> float:
    """The busiest resource's time, and one bucket's way through the others."""
    cuts = problem.profile.numel / size
    busy = {GPU: problem.profile.backward_us}
    alone = 0.0
    for task in chain:
        us = problem.codec.task_us(task, size)
        alone += us
        for resource in (SEND, RECEIVE) if task.resource == BOTH_WAYS else (task.resource,):
            busy[resource] = busy.get(resource, 0.0) + us * cuts
    return max(busy.values()) + alone


def fused(problem: Problem, size: float, option: Option) -> tuple[PlannedBucket, ...]:
    """Tensors in order of readiness, a bucket closed when it has ``size`` elements; cut where one tensor makes it larger."""
    codec = problem.codec.name if encodes(option) else UNCOMPRESSED
    buckets: list[PlannedBucket] = []
    for names, numel in _groups(problem.profile, size):
        buckets.append(PlannedBucket(names, numel, max(1, round(numel / size)), -len(buckets), codec, option))
    return tuple(buckets)


def _groups(profile: Profile, size: float) -> Iterable[tuple[tuple[str, ...], int]]:
    names: list[str] = []
    numel = 0
    for tensor in profile.tensors:
        names.append(tensor.name)
        numel += tensor.numel
        if numel >= size:
            yield tuple(names), numel
            names, numel = [], 0
    if names:
        yield tuple(names), numel


def codec_us(problem: Problem, buckets: Sequence[PlannedBucket]) -> float:
    """What a rank and its server spend encoding and decoding for these buckets."""
    total = 0.0
    for bucket in buckets:
        for task in tasks(bucket.option, problem.cluster, problem.codec):
            if task.curve:
                total += bucket.parts * problem.codec.task_us(task, bucket.numel / bucket.parts)
    return total
