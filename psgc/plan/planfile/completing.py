"""A planner's answer as a whole plan: with the cluster, the server of each part and the issue order that an executor needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from psgc.layout import server_in_turn
from psgc.plan.model.plan import Plan, PlannedBucket, pushes, shape_of
from psgc.plan.model.problem import Problem, Simulated
from psgc.plan.planfile.order import issue_order


def whole_plan(problem: Problem, buckets: Sequence[PlannedBucket], simulated: Simulated, prediction: Mapping[str, Any]) -> Plan:
    """The plan of these buckets for the problem's model and cluster. simulated: their step."""
    cluster = problem.cluster
    return Plan(
        problem.profile.model, cluster.name, placed(buckets, cluster.servers), prediction, cluster, shape_of(cluster),
        issue_order(simulated, buckets),
    )  # fmt: skip


def placed(buckets: Sequence[PlannedBucket], servers: int) -> tuple[PlannedBucket, ...]:
    """The buckets with the server of each part, where the option pushes to some: servers in turn, as a job's own layout has them, from server 0
    on. Where a part is pushed in shards, this is the server of the first one, and the others follow it in turn."""
    if not servers:
        return tuple(buckets)
    pushing = sorted((index for index, bucket in enumerate(buckets) if pushes(bucket.option)), key=lambda index: -buckets[index].priority)
    turns = {index: turn for turn, index in enumerate(pushing)}
    return tuple(
        replace(bucket, servers=tuple(server_in_turn(turns[index], number, servers) for number in range(bucket.parts)))
        if index in turns
        else bucket
        for index, bucket in enumerate(buckets)
    )
