"""Whether a job of this version can run a plan, and the best plan that one can.

Jobs push to servers, or aggregate among workers in hosts' memory, and encode on CPUs (``runtime`` holds plans against that). So collectives cost what the
planner takes them to cost only where gradients lie in hosts' memory. Where they do not, the best plan that runs is one over servers, and where the
cluster has none, jobs have one on each node, which shares the node's link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from psgc.errors import UsageError
from psgc.plan.inputs.cluster import Cluster
from psgc.plan.methods.registry import find
from psgc.plan.methods.result import Found
from psgc.plan.methods.uniform import fused
from psgc.plan.model.costs import CodecCosts
from psgc.plan.model.options import OVER_SERVERS, encodes
from psgc.plan.model.plan import UNCOMPRESSED, PlannedBucket
from psgc.plan.model.problem import PUBLISHED_BYTES, Problem, simulate
from psgc.plan.planfile.runtime import not_carried

SEARCH = "psgc"  # the method that searches
UNCUT_BUCKETS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Running:
    """refused: the places of the plan's buckets that a job cannot run; of those, ``instead`` is the best plan found that a job can, None where
    there is none, on ``problem``; without: why that plan encodes nothing, "" if it may."""

    refused: tuple[int, ...]
    instead: Found | None
    problem: Problem
    without: str = ""

    @property
    def runs(self) -> bool:
        return not self.refused


def running(problem: Problem, buckets: Sequence[PlannedBucket]) -> Running:
    """Whether a job can run these buckets, and, if not, what it can."""
    refused = tuple(not_carried(buckets))
    if not refused:
        return Running((), None, problem)
    limited = as_jobs_run(problem)
    try:
        encoded = any(encodes(option) for option in limited.options)
        found = find(SEARCH, limited)
    except UsageError:  # the constraints leave nothing that a job runs
        return Running(refused, None, limited)
    why = next((why for codec in problem.used if (why := why_not_encoded(codec, limited.devices(codec)))), "")
    return Running(refused, found, limited, "" if encoded else why)


def as_jobs_run(problem: Problem) -> Problem:
    """The problem with only the options that jobs run."""
    constraints = replace(problem.constraints, runtime=True, servers=True)
    others = tuple((pattern, _runnable(codec, problem)) for pattern, codec in problem.others)
    codec = _runnable(problem.codec, problem)
    limited = replace(problem, codec=codec, others=others, constraints=constraints)
    return limited if limited.among_workers else replace(limited, cluster=with_servers(problem.cluster))


def with_servers(cluster: Cluster) -> Cluster:
    """The cluster with a server on each node, unless it has servers."""
    return cluster if cluster.servers else replace(cluster, servers=cluster.nodes, servers_on_nodes=True, server=None)


def _runnable(codec: CodecCosts, problem: Problem) -> CodecCosts:
    runtime = replace(problem, constraints=replace(problem.constraints, runtime=True))
    return codec if codec.name == UNCOMPRESSED or not why_not_encoded(codec, runtime.devices(codec)) else problem.without


def why_not_encoded(codec: CodecCosts, devices: Sequence[str] = ()) -> str:
    """Why a job cannot encode with it by a plan. devices: where jobs do so with it, beside the CPU."""
    if codec.name in PUBLISHED_BYTES:
        return f"{codec.name} is not one of psgc's codecs"
    if not codec.knows("cpu") and not devices:
        return f"there are no times of {codec.name} on the CPU, where jobs encode; psgc profile measures them"
    if is_whole(codec.name):
        return f"{codec.name} does not cut tensors, which plans do; psgc run --codec {codec.name} runs it without a plan"
    return ""


def is_whole(codec: str) -> bool:
    """Whether it is one of psgc's that do not cut tensors: jobs run it, by buckets of their own and not by a plan."""
    if codec in PUBLISHED_BYTES:
        return False
    from psgc.codecs.registry import parse_scheme

    return parse_scheme(codec).whole


def uncut(problem: Problem) -> Found:
    """The best of some plans that a job makes for such a codec by itself: tensors are fused to one size and not cut, and each bucket is encoded.
    problem: with times of the codec on CPUs."""
    constraints = replace(problem.constraints, runtime=True, servers=True)
    limited = replace(problem, cluster=with_servers(problem.cluster), constraints=constraints)
    found = []
    for buckets in UNCUT_BUCKETS:
        made = tuple(replace(bucket, parts=1) for bucket in fused(limited, limited.profile.numel / buckets, OVER_SERVERS[1]))
        found.append(Found(made, simulate(limited, made).step_us, 0.0, 1))
    return min(found, key=lambda each: each.step_us)
