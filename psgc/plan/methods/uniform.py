"""Plans that compress every bucket with one option: buckets of one size, encoded on one device.

They show the cost of a codec that the planner would not choose. Owns the fusion and the short list of options to simulate.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from psgc.errors import UsageError
from psgc.plan.inputs.profile import Profile
from psgc.plan.methods.result import Found
from psgc.plan.model.costs import GPU, RESOURCES, Task, resources_of
from psgc.plan.model.options import Option, encodes
from psgc.plan.model.plan import UNCOMPRESSED, PlannedBucket
from psgc.plan.model.problem import Problem, simulate

MAX_CUTS: Final = 64  # with more buckets, latencies cost more than bytes
MIN_BUCKET_NUMEL: Final = 1 << 16  # smaller buckets cost little but latency on any link
MAX_SIMULATED: Final = 24  # pairs of option and bucket size; on the ready-made clusters no further one is better by more than 1.2 %


def compressed(problem: Problem) -> tuple[Option, ...]:
    """The options that send payloads between nodes and encode on one device. Raises UsageError if there are none."""
    found = tuple(option for option in problem.options if _payloads_between_nodes(option) and _one_device(option))
    if not found:
        raise UsageError(
            f"codec {problem.codec.name}: the profile has its times on no device that may encode; measure them with psgc profile"
        )
    return found


def _payloads_between_nodes(option: Option) -> bool:
    return any(action.endswith(".c") and not action.startswith("intra") for action in option)


def _one_device(option: Option) -> bool:
    return len({action.partition("@")[2] for action in option if "@" in action}) == 1


def best_uniform(problem: Problem, options: Sequence[Option]) -> Found:
    """The best uniform plan over these options, and over buckets from the whole gradient down to a 64th of it."""
    begun = time.perf_counter()
    numel = problem.profile.numel
    # with one GPU per node, many options have the same tasks
    chains = {tuple(task[1:] for task in chain): (option, chain) for option in options for chain in [problem.tasks(option, problem.codec)]}
    estimates = [
        (_estimate_us(problem, chain, numel, cuts), cuts, option)
        for option, chain in chains.values() for cuts in _cuts(numel)
    ]  # fmt: skip
    found = None
    for _, cuts, option in sorted(estimates)[:MAX_SIMULATED]:
        buckets = fused(problem, numel / cuts, option)
        step = simulate(problem, buckets).step_us
        if found is None or step < found.step_us:
            found = Found(buckets, step, 0.0, len(options))
    assert found is not None
    return replace(found, select_us=(time.perf_counter() - begun) * 1e6)


def _cuts(numel: int) -> Iterable[int]:
    cuts = 1
    while cuts == 1 or (cuts <= MAX_CUTS and numel / cuts >= MIN_BUCKET_NUMEL):
        yield cuts
        cuts *= 2


def _estimate_us(problem: Problem, chain: Sequence[Task], numel: float, cuts: int) -> float:
    """Estimate of the step: the time of the busiest resource, plus that of one bucket's tasks alone."""
    busy, alone = [0.0] * len(RESOURCES), 0.0
    busy[GPU] = problem.profile.backward_us
    for task in chain:
        us = problem.codec.task_us(task, numel / cuts)
        alone += us
        for resource in resources_of(task.resource):
            busy[resource] += us * cuts / problem.threads[resource]
    return max(busy) + alone


def fused(problem: Problem, size: float, option: Option) -> tuple[PlannedBucket, ...]:
    """Tensors fused in order of readiness until a bucket has ``size`` elements; a bucket that one tensor makes larger is cut."""
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
    """Microseconds that a rank and its server spend encoding and decoding these buckets."""
    total = 0.0
    for bucket in buckets:
        for task in problem.tasks(bucket.option, problem.codec):
            if task.curve:
                total += bucket.parts * problem.codec.task_us(task, bucket.numel / bucket.parts)
    return total
