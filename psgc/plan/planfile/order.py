"""The issue order of a plan: for each lane of links, in which order it begins its transfers.

All ranks must begin the collectives of a lane in the same order, or they wait for each other for ever. The order is the simulated timeline's.
Transfers on two lanes follow one order, too, so that a rank which begins each when it is its turn on all its lanes can go on. Owns the order, and the
checks of one that was read. Pure.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from psgc.errors import UsageError
from psgc.plan.inputs.cluster import Cluster
from psgc.plan.inputs.documents import shown
from psgc.plan.model.costs import FLOAT_BYTES, LINKS, RESOURCES, CodecCosts, copies_of, price, resources_of, walk
from psgc.plan.model.options import Option, is_program
from psgc.plan.model.plan import Issue, PlannedBucket
from psgc.program.order import is_issued

if TYPE_CHECKING:  # it has kernels, which a training script that reads a plan does not need
    from psgc.plan.model.problem import Simulated

Order = Mapping[str, tuple[Issue, ...]]
Used = Mapping[Option, Sequence[frozenset[str]]]  # of each option's actions, the lanes that it uses
_ANY_CODEC = CodecCosts("any", FLOAT_BYTES, {})  # which links a transfer uses does not depend on the codec


def issue_order(simulated: Simulated, buckets: Sequence[PlannedBucket]) -> dict[str, tuple[Issue, ...]]:
    """By lane, the transfers of the simulated step in the order in which they begin: each lane's part of one order over all of them."""
    chains, rows = simulated.chains, simulated.rows
    start, us, resource = simulated.timeline.start_us.tolist(), chains.us.tolist(), chains.resource.tolist()
    lanes: dict[str, dict[Issue, None]] = {}  # a transfer may be several tasks
    steps = _steps(simulated, buckets)
    # Of two that begin at the same moment on a lane the one that takes no time was first.
    for task in sorted(range(len(rows)), key=lambda task: (start[task], start[task] + us[task], task)):
        for lane in _lanes(resource[task]):
            lanes.setdefault(lane, {}).setdefault(Issue(rows[task].bucket, rows[task].part, steps[task]))
    return {lane: tuple(issues) for lane, issues in sorted(lanes.items())}


def _lanes(resource: int) -> tuple[str, ...]:
    return tuple(RESOURCES[one] for one in resources_of(resource) if RESOURCES[one] in LINKS)


def _steps(simulated: Simulated, buckets: Sequence[PlannedBucket]) -> list[int]:
    """Of each task, which action of its bucket's option it is of. A step has several tasks, or, in a group of one rank, none."""
    steps: list[int] = []
    for first, after in zip(simulated.chains.first[:-1].tolist(), simulated.chains.first[1:].tolist(), strict=True):
        step = 0
        for row in simulated.rows[first:after]:
            option = buckets[row.bucket].option
            step = option.index(row.action, step) if row.action in option[step:] else step
            steps.append(step)
    return steps


def lanes_of(option: Option, cluster: Cluster) -> tuple[frozenset[str], ...]:
    """Of each of the option's actions, the lanes that it uses on the cluster."""
    priced = (price(atom, cluster, _ANY_CODEC) for atom in walk(option, copies_of(cluster))[0])
    return tuple(frozenset(lane for task in tasks for lane in _lanes(task.resource)) for tasks in priced)


def check_order(order: Order, buckets: Sequence[PlannedBucket], cluster: Cluster, source: str) -> None:
    """Raise UsageError, naming the first transfer that is wrong, unless every transfer is issued once on each lane that it uses, and no two
    lanes, or a lane and the steps of a part, contradict each other."""
    used = {option: lanes_of(option, cluster) for option in {bucket.option for bucket in buckets}}
    for lane, issues in order.items():
        if lane not in LINKS:
            raise UsageError(f"{source}: issue_order: unknown lane {shown(lane)}; expected some of {', '.join(sorted(LINKS))}")
        seen: set[Issue] = set()
        for number, issue in enumerate(issues):
            wrong = _fault(issue, lane, buckets, used) or ("which the lane has twice" if issue in seen else "")
            if wrong:
                raise UsageError(f"{source}: issue_order[{lane!r}][{number}] is {shown(list(issue))}, {wrong}")
            seen.add(issue)
    _check_whole(order, buckets, used, source)
    one_order(order, source)


def _fault(issue: Issue, lane: str, buckets: Sequence[PlannedBucket], used: Used) -> str:
    """Why it is no transfer of this lane; "" if it is one."""
    if not 0 <= issue.bucket < len(buckets):
        return f"but the plan has {len(buckets)} buckets, numbered from 0"
    bucket = buckets[issue.bucket]
    if not 0 <= issue.part < bucket.parts:
        return f"but the bucket has {bucket.parts} parts, numbered from 0"
    if not 0 <= issue.step < len(bucket.option):
        return f"but the bucket's option has {len(bucket.option)} actions, numbered from 0"
    if lane not in used[bucket.option][issue.step]:
        return f"but {bucket.option[issue.step]} does not use this lane on the plan's cluster"
    return ""


def _check_whole(order: Order, buckets: Sequence[PlannedBucket], used: Used, source: str) -> None:
    issued = {lane: set(issues) for lane, issues in order.items()}
    for number, bucket in enumerate(buckets):
        for step, lanes in enumerate(used[bucket.option]):
            for lane in sorted(lanes):
                for part in range(bucket.parts):
                    if Issue(number, part, step) not in issued.get(lane, ()):
                        raise UsageError(
                            f"{source}: issue_order: lane {lane} lacks [{number}, {part}, {step}], {bucket.option[step]} of the bucket of "
                            f"{bucket.tensors[0]!r}"
                        )


def one_order(order: Order, source: str = "plan") -> list[Issue]:
    """All transfers in an order that every lane's, and every part's steps, are part of. Raises UsageError, naming a transfer, where they
    contradict each other.

    Kahn's algorithm: take, again and again, a transfer that is next on all its lanes and after the steps before it; of several, the first on its lane.
    """
    after: dict[Issue, list[Issue]] = {}
    place: dict[Issue, int] = {}
    for issues in order.values():
        place |= {issue: min(number, place.get(issue, number)) for number, issue in enumerate(issues)}
    before = dict.fromkeys(place, 0)
    chains = [pair for pair in pairwise(sorted(place)) if pair[0][:2] == pair[1][:2]]
    for pairs in (chains, *(pairwise(issues) for issues in order.values())):
        for earlier, later in pairs:
            after.setdefault(earlier, []).append(later)
            before[later] += 1
    ready = [(place[issue], issue) for issue, count in before.items() if not count]
    heapq.heapify(ready)
    taken: list[Issue] = []
    while ready:
        taken.append(heapq.heappop(ready)[1])
        del before[taken[-1]]
        for later in after.get(taken[-1], ()):
            before[later] -= 1
            if not before[later]:
                heapq.heappush(ready, (place[later], later))
    if before:
        raise UsageError(
            f"{source}: issue_order: {list(min(before))} waits for itself: the lanes, or a part's steps, contradict each other; make the plan "
            f"anew with psgc plan"
        )
    return taken


def turns_of(order: Order, buckets: Sequence[PlannedBucket]) -> list[tuple[int, ...]]:
    """For each bucket that runs over groups of ranks, the turns of its transfers (pushes and pulls among them), as ``psgc.layout.BucketSpec`` has them;
    for others nothing. A transfer that no lane lists, since it takes no time on the plan's cluster, comes just before the part's next one."""
    left = {
        (number, part): [*(step for step, action in enumerate(bucket.option) if is_issued(action)), len(bucket.option)]
        for number, bucket in enumerate(buckets)
        if is_program(bucket.option)
        for part in range(bucket.parts)
    }
    turns: dict[tuple[int, int], list[int]] = {chain: [] for chain in left}
    taken = itertools.count()
    last = {issue[:2]: issue for issue in one_order(order)}
    for issue in (*one_order(order), *(Issue(*chain, len(buckets[chain[0]].option)) for chain in left)):
        chain = issue[:2]
        until = len(buckets[issue.bucket].option) if last.get(chain) == issue else issue.step
        while left.get(chain) and left[chain][0] <= until:
            turns[chain].append(next(taken))
            del left[chain][0]
    parts = {number: range(bucket.parts) for number, bucket in enumerate(buckets) if is_program(bucket.option)}
    return [tuple(turn for part in parts.get(number, ()) for turn in turns[number, part]) for number in range(len(buckets))]
