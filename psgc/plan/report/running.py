"""Whether a job of this version runs a plan, and in what time; and the best plan that one runs.

``psgc.plan.planfile.runtime`` says which options jobs run: what is called runnable here is what a job accepts. Where the cluster does not name what runs
collectives between GPUs, jobs move them through hosts' memory, and plans that were made for the cluster's links take another time than predicted. A codec that
jobs carry over servers alone has a server on each node, which shares the node's link, if the cluster has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from psgc.codecs.codec import BLOCK
from psgc.errors import UsageError
from psgc.plan.inputs.cluster import Cluster
from psgc.plan.inputs.profile import PUBLISHED_BYTES
from psgc.plan.methods.once import search_once
from psgc.plan.methods.result import Found
from psgc.plan.methods.uniform import fused
from psgc.plan.model.costs import CodecCosts
from psgc.plan.model.options import OVER_SERVERS, devices_of, encodes, is_program
from psgc.plan.model.plan import UNCOMPRESSED, PlannedBucket
from psgc.plan.model.problem import Problem, simulate
from psgc.plan.planfile.runtime import ON_GPUS, not_carried

UNCUT_BUCKETS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Running:
    """Whether a plan is runnable. refused: the indices of the buckets that a job cannot run; moved_us: the step of the plan as jobs move its collectives, where
    that is not as predicted; instead: the best runnable plan found in either case, None if there is none; problem: the problem that ``instead`` solves;
    without: why ``instead`` encodes nothing, "" if it may."""

    refused: tuple[int, ...]
    instead: Found | None
    problem: Problem
    without: str = ""
    moved_us: float | None = None

    @property
    def runs(self) -> bool:
        return not self.refused

    @property
    def as_predicted(self) -> bool:
        """Whether the plan runs, and in the predicted time, as far as predictions hold."""
        return self.runs and self.moved_us is None


def running(problem: Problem, buckets: Sequence[PlannedBucket]) -> Running:
    """Whether a job runs these buckets, and in the predicted time; if not, the best plan that one does."""
    refused = tuple(sorted({*not_carried(buckets), *_without_their_gpu(problem, buckets), *_cut_too_finely(buckets)}))
    moved = None if refused else moved_us(problem, buckets)
    if not refused and moved is None:
        return Running((), None, problem)
    limited = as_jobs_run(problem)
    try:
        encoded = any(encodes(option) for option in limited.options)
        found = search_once(limited)
    except UsageError:  # the constraints leave no option that jobs run
        return Running(refused, None, limited, moved_us=moved)
    why = next((why for codec in problem.used if (why := why_not_encoded(codec, limited.devices(codec)))), "")
    return Running(refused, found, limited, "" if encoded else why, moved)


def moved_us(problem: Problem, buckets: Sequence[PlannedBucket]) -> float | None:
    """The step of these buckets as jobs move their collectives; None if that is as the problem prices them, or if they have none."""
    in_job = replace(problem, constraints=replace(problem.constraints, runtime=True))
    if in_job.collectives is problem.collectives or not any(is_program(bucket.option) for bucket in buckets):
        return None
    return simulate(in_job, buckets).step_us


def _without_their_gpu(problem: Problem, buckets: Sequence[PlannedBucket]) -> list[int]:
    """The indices of the buckets that a GPU encodes or decodes, if gradients lie in hosts' memory."""
    on_hosts = problem.profile.device == "cpu"
    return [number for number, bucket in enumerate(buckets) if on_hosts and "gpu" in devices_of(bucket.option)]


def _cut_too_finely(buckets: Sequence[PlannedBucket]) -> list[int]:
    """The indices of the buckets with more parts than a job can cut them into."""
    return [number for number, bucket in enumerate(buckets) if bucket.parts > max(1, -(-bucket.numel // BLOCK))]


def as_jobs_run(problem: Problem) -> Problem:
    """The problem with only the options that jobs run."""
    constraints = replace(problem.constraints, runtime=True, servers=True)
    others = tuple((pattern, _runnable(codec, problem)) for pattern, codec in problem.others)
    codec = _runnable(problem.codec, problem)
    limited = replace(problem, codec=codec, others=others, constraints=constraints)
    return replace(limited, cluster=with_servers(problem.cluster)) if limited.needs_servers else limited


def with_servers(cluster: Cluster) -> Cluster:
    """The cluster with a server on each node, unless it has servers."""
    return cluster if cluster.servers else replace(cluster, servers=cluster.nodes, servers_on_nodes=True, server=None)


def _runnable(codec: CodecCosts, problem: Problem) -> CodecCosts:
    runtime = replace(problem, constraints=replace(problem.constraints, runtime=True))
    return codec if codec.name == UNCOMPRESSED or not why_not_encoded(codec, runtime.devices(codec)) else problem.without


def why_not_encoded(codec: CodecCosts, devices: Sequence[str] = ()) -> str:
    """Why a job cannot encode with this codec under a plan; "" if it can. devices: the devices besides the CPU on which jobs encode with it."""
    if codec.name in PUBLISHED_BYTES:
        return f"{codec.name} is not one of psgc's codecs"
    if not codec.knows("cpu") and not devices:
        return f"there are no times of {codec.name} on the CPU, where jobs encode; psgc profile measures them"
    if is_whole(codec.name):
        return f"{codec.name} does not cut tensors, which plans do; psgc run --codec {codec.name} runs it without a plan"
    return ""


def is_whole(codec: str) -> bool:
    """Whether the codec is one of psgc's that take whole tensors. Jobs run it with their own buckets, not under a plan."""
    if codec in PUBLISHED_BYTES:
        return False
    from psgc.codecs.registry import parse_scheme

    return parse_scheme(codec).whole


def uncut(problem: Problem) -> Found:
    """The best of some plans with whole tensors, as a job makes them for such a codec: tensors are fused to one size and not cut, and each bucket is
    encoded, on GPUs where gradients lie there and the codec has a GPU side and times. Otherwise the problem's profile must have its times on CPUs."""
    option = ON_GPUS if problem.profile.device == "cuda" and problem.codec.knows("gpu") and _has_side(problem.codec) else OVER_SERVERS[1]
    constraints = replace(problem.constraints, runtime=True, servers=True)
    limited = replace(problem, cluster=with_servers(problem.cluster), constraints=constraints)
    found = []
    for buckets in UNCUT_BUCKETS:
        made = tuple(replace(bucket, parts=1) for bucket in fused(limited, limited.profile.numel / buckets, option))
        found.append(Found(made, simulate(limited, made).step_us, 0.0, 1))
    return min(found, key=lambda each: each.step_us)


def _has_side(codec: CodecCosts) -> bool:
    """Whether jobs keep the codec's state, and encode with it, on a GPU."""
    from psgc.codecs.backends import lacking
    from psgc.codecs.registry import parse_scheme

    return lacking(parse_scheme(codec.name)) is None
