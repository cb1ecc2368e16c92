"""A plan of a whole model, for a model that FSDP2 shards within nodes: each unit's shards travel between the nodes as the plan has most of its elements.

FSDP reduces a unit at once, so the plan's own buckets, and what it does within nodes, do not apply. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from psgc.errors import UsageError
from psgc.plan.model.options import is_program
from psgc.plan.model.plan import Plan, PlannedBucket, pushes
from psgc.plan.planfile.runtime import device_of
from psgc.torch.tensors.declaring import plain_name

Option = tuple[str, ...]


class Way(NamedTuple):
    """How a unit's shards travel between the nodes. option: over groups; (): every rank pushes to servers, encoding on ``device``."""

    codec: str
    option: Option = ()
    device: str = ""


def ways_of(plan: Plan, units: Mapping[str, Sequence[tuple[str, int]]], servers: int) -> dict[str, Way]:
    """By unit. units: by name, the names of their parameters in the model, and how many elements of each are on a rank. Raises UsageError for a plan of other
    parameters, for stages within nodes, which are FSDP's, and for servers that the job lacks."""
    bucket_of = {plain_name(name): bucket for bucket in plan.buckets for name in bucket.tensors}
    names = {name for parameters in units.values() for name, _ in parameters}
    for one, other, what in (
        (names, bucket_of.keys(), "the plan lacks"),
        (bucket_of.keys(), names, "the plan has, and FSDP does not shard,"),
    ):
        if lacking := sorted(name for name in one if name not in other):
            raise UsageError(f"fsdp_hook: {what} {lacking[0]!r}{_more(len(lacking))}; make a plan of this model's parameters")
    ways = {}
    for unit, parameters in units.items():
        elements: Counter[Way] = Counter()
        for name, numel in parameters:
            elements[_way(bucket_of[name], unit, servers)] += numel
        ways[unit] = elements.most_common(1)[0][0]
    return ways


def _way(bucket: PlannedBucket, unit: str, servers: int) -> Way:
    option = " ".join(bucket.option)
    if any(action.startswith("intra.") for action in bucket.option):
        raise UsageError(
            f"fsdp_hook: the plan has {option} for {unit!r}, with stages within nodes, which FSDP does itself; plan for nodes of one rank (gpus_per_node = 1)"
        )
    if pushes(bucket.option) and not servers:
        raise UsageError(
            f"fsdp_hook: the plan has {unit!r} go over servers ({option}), but this job has none; start servers, or plan without"
        )
    if is_program(bucket.option):
        return Way(bucket.codec, bucket.option)
    return Way(bucket.codec, (), "" if bucket.codec == "none" else device_of(bucket.option))


def _more(count: int) -> str:
    return f" and {count - 1} more" if count > 1 else ""
