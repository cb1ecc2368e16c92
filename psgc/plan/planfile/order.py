"""The issue order of a plan: for each lane of links, the order in which it begins its transfers.

All ranks must begin the collectives of a lane in the same order, or they deadlock. The order is that of the simulated timeline. All lanes follow one
order over all transfers. So a rank that begins each transfer when it is first on all its lanes never deadlocks. Owns the order, and the
checks of an order from a file. Pure.
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
from psgc.plan.model.costs import LINKS, RESOURCES, CodecCosts, copies_of, price, resources_of, walk
from psgc.plan.model.options import Option, is_program
from psgc.plan.model.plan import Issue, PlannedBucket
from psgc.program.order import is_issued

if TYPE_CHECKING:  # importing it would compile kernels that a training script with a plan does not need
    from psgc.plan.model.problem import Simulated

Order = Mapping[str, tuple[Issue, ...]]
Used = Mapping[Option, Sequence[frozenset[str]]]  # the lanes that each of an option's actions uses
_ANY_CODEC = CodecCosts("any", 1.0, {})  # which links a transfer uses does not depend on the codec


def issue_order(simulated: Simulated, buckets: Sequence[PlannedBucket]) -> dict[str, tuple[Issue, ...]]:
    """The transfers of the simulated step by lane, in the order in which they begin. The lanes' orders are parts of one order over all
    transfers."""
    chains, rows = simulated.chains, simulated.rows
    start, us, resource = simulated.timeline.start_us.tolist(), chains.us.tolist(), chains.resource.tolist()
    lanes: dict[str, dict[Issue, None]] = {}  # a transfer may be several tasks
    steps = _steps(simulated, buckets)
    # If two tasks begin at the same moment on one lane, the first one took no time.
    for task in sorted(range(len(rows)), key=lambda task: (start[task], start[task] + us[task], task)):
        for lane in _lanes(resource[task]):
            lanes.setdefault(lane, {}).setdefault(Issue(rows[task].bucket, rows[task].part, steps[task]))
    return {lane: tuple(issues) for lane, issues in sorted(lanes.items())}


def _lanes(resource: int) -> tuple[str, ...]:
    return tuple(RESOURCES[one] for one in resources_of(resource) if RESOURCES[one] in LINKS)


def _steps(simulated: Simulated, buckets: Sequence[PlannedBucket]) -> list[int]:
    """For each task, the index of its action in the bucket's option. An action may have several tasks; in a group of one rank it has none."""
    steps: list[int] = []
    for first, after in zip(simulated.chains.first[:-1].tolist(), simulated.chains.first[1:].tolist(), strict=True):
        step = 0
        for row in simulated.rows[first:after]:
            option = buckets[row.bucket].option
            step = option.index(row.action, step) if row.action in option[step:] else step
            steps.append(step)
    return steps


def lanes_of(option: Option, cluster: Cluster) -> tuple[frozenset[str], ...]:
    """The lanes that each of the option's actions uses on the cluster."""
    priced = (price(atom, cluster, _ANY_CODEC) for atom in walk(option, copies_of(cluster))[0])
    return tuple(frozenset(lane for task in tasks for lane in _lanes(task.resource)) for tasks in priced)


def check_order(order: Order, buckets: Sequence[PlannedBucket], cluster: Cluster, source: str) -> None:
    """Raise UsageError, which names the first wrong transfer, unless every transfer is issued once on each lane that it uses, and the lanes' orders
    contradict neither each other nor the order of any part's steps."""
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
    """Why this is not a transfer of the lane; "" if it is."""
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
    """All transfers in one order that agrees with every lane's order and with the steps of every part. Raises UsageError, which names a transfer, if
    there is no such order.

    Kahn's algorithm: repeatedly take a transfer that is next on all its lanes and whose part's earlier steps are taken.
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
    ordered: list[Issue] = []
    while ready:
        ordered.append(heapq.heappop(ready)[1])
        del before[ordered[-1]]
        for later in after.get(ordered[-1], ()):
            before[later] -= 1
            if not before[later]:
                heapq.heappush(ready, (place[later], later))
    if before:
        raise UsageError(
            f"{source}: issue_order: {list(min(before))} waits for itself: the lanes, or a part's steps, contradict each other; make the plan "
            f"anew with psgc plan"
        )
    return ordered


def turns_of(order: Order, buckets: Sequence[PlannedBucket]) -> list[tuple[int, ...]]:
    """For each bucket that runs over groups of ranks, the turns of its transfers, with pushes and pulls, in the form of ``psgc.layout.BucketSpec``; () for
    other buckets. A transfer that takes no time on the plan's cluster is on no lane; its turn is just before that of the part's next transfer."""
    left = {
        (number, part): [*(step for step, action in enumerate(bucket.option) if is_issued(action)), len(bucket.option)]
        for number, bucket in enumerate(buckets)
        if is_program(bucket.option)
        for part in range(bucket.parts)
    }
    turns: dict[tuple[int, int], list[int]] = {chain: [] for chain in left}
    numbers = itertools.count()
    last = {issue[:2]: issue for issue in one_order(order)}
    for issue in (*one_order(order), *(Issue(*chain, len(buckets[chain[0]].option)) for chain in left)):
        chain = issue[:2]
        until = len(buckets[issue.bucket].option) if last.get(chain) == issue else issue.step
        while left.get(chain) and left[chain][0] <= until:
            turns[chain].append(next(numbers))
            del left[chain][0]
    parts = {number: range(bucket.parts) for number, bucket in enumerate(buckets) if is_program(bucket.option)}
    return [tuple(turn for part in parts.get(number, ()) for turn in turns[number, part]) for number in range(len(buckets))]
