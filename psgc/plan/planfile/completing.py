"""Completes a planner's buckets to a plan, with the cluster, each part's server and the issue order that an executor needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from psgc.layout import balanced_servers
from psgc.plan.inputs.profile import FLOAT_BYTES
from psgc.plan.model.options import is_uncompressed
from psgc.plan.model.plan import Plan, PlannedBucket, pushes, shape_of
from psgc.plan.model.problem import Problem, Simulated
from psgc.plan.planfile.order import issue_order


def whole_plan(problem: Problem, buckets: Sequence[PlannedBucket], simulated: Simulated, prediction: Mapping[str, Any]) -> Plan:
    """The plan of these buckets for the problem's model and cluster, at the costs by which it was made. simulated: their step."""
    cluster = problem.named
    return Plan(
        problem.profile.model, cluster.name, placed(problem, buckets), prediction, cluster, shape_of(cluster),
        issue_order(simulated, buckets),
    )  # fmt: skip


def placed(problem: Problem, buckets: Sequence[PlannedBucket]) -> tuple[PlannedBucket, ...]:
    """The buckets with each part's server, if their options push. In the order of priority, each part goes to the server with the fewest bytes so
    far, as in a job's own layout. If a part is pushed in shards, this is the server of the first shard; the other shards go to the next servers in
    turn."""
    servers = problem.cluster.servers
    if not servers:
        return tuple(buckets)
    pushing = sorted((index for index, bucket in enumerate(buckets) if pushes(bucket.option)), key=lambda index: -buckets[index].priority)
    places = dict(zip(pushing, balanced_servers((_part_bytes(problem, buckets[index]) for index in pushing), servers), strict=True))
    return tuple(replace(bucket, servers=places[index]) if index in places else bucket for index, bucket in enumerate(buckets))


def _part_bytes(problem: Problem, bucket: PlannedBucket) -> list[float]:
    """The bytes of each part that one rank pushes and pulls."""
    codec = problem.codec_of(bucket)
    plain = codec.item_bytes if is_uncompressed(bucket.option) else FLOAT_BYTES
    push = codec.bytes_per_element if any(".push.c" in action for action in bucket.option) else plain
    pull = codec.back if any(".pull.c" in action for action in bucket.option) else plain
    return [numel * (push + pull) for numel in bucket.part_sizes()]
