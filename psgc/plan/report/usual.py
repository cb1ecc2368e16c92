"""The buckets that a job makes of a codec by itself, without a plan: what a plan is held against before it is recommended."""

from __future__ import annotations

from psgc.config import Config
from psgc.errors import PsgcError
from psgc.layout import Declaration, TensorSpec, build_layout
from psgc.layout.speed import Speed
from psgc.plan.model.plan import PlannedBucket
from psgc.plan.model.problem import Problem
from psgc.plan.planfile.runtime import plan_of
from psgc.program.ranks import Ranks

BYTES_A_GBIT = 1e9 / 8


def usual(problem: Problem, codec: str) -> tuple[PlannedBucket, ...] | None:
    """By the settings that a job has if nobody changes them, on links that it has measured. None where it would make buckets that the problem does not
    allow."""
    cluster, profile, config = problem.cluster, problem.profile, Config()
    tensors = tuple(
        TensorSpec(tensor.name, (tensor.numel,), "bfloat16" if tensor.itemsize == 2 else "float32")
        for tensor in profile.tensors
        if tensor.numel
    )
    everything = tuple(range(len(tensors)))
    declaration = Declaration(
        "usual", "plan", tensors, codec, True, part_bytes=config.part_bytes, fuse_bytes=config.fuse_bytes,
        min_compress_bytes=config.min_compress_bytes, order=everything, used=everything,
    )  # fmt: skip
    links = cluster.inter, cluster.server_link
    speed = Speed(int(min(link.gbps for link in links) * BYTES_A_GBIT), int(2 * max(link.latency_us for link in links)))
    ranks = Ranks((cluster.gpus_per_node,) * cluster.nodes)
    try:
        layout = build_layout(declaration, layout_id=0, servers=cluster.servers, workers=cluster.gpus, speed=speed, ranks=ranks)
    except PsgcError:  # a codec that needs what this cluster has not
        return None
    buckets = plan_of(layout, on_gpu=profile.device == "cuda").buckets
    return buckets if all(bucket.option in problem.options for bucket in buckets) else None
