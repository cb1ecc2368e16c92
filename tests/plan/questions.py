"""Random planning questions: a profile, a cluster, a codec with times from the one source of them, and what runs collectives."""

from __future__ import annotations

from hypothesis import strategies as st

from psgc.plan.inputs.cluster import Cluster, Link
from psgc.plan.inputs.estimates import with_codec_times
from psgc.plan.inputs.profile import CostCurve, Profile, TensorProfile
from psgc.plan.model.options import Constraints
from psgc.plan.model.problem import Problem, codec_costs, is_of_a_node

CURVE = CostCurve((1.0, 1e6), (10.0, 500.0), (10.0, 500.0))
CODECS = ("none", "bf16", "int8", "int4", "onebit", "topk", "onebit/int8", "shared", "dithering")


@st.composite
def questions(draw: st.DrawFn, devices: tuple[str, ...] = ("cpu", "cuda", "")) -> Problem:
    """Gradients lie on CPUs, on GPUs or nowhere in particular."""
    device = draw(st.sampled_from(devices))
    sizes = draw(st.lists(st.sampled_from([1, 4096, 70001, 1 << 20]), min_size=1, max_size=4))
    tensors = tuple(TensorProfile(f"t{number}", numel, 300.0 * number) for number, numel in enumerate(sizes))
    codec = draw(st.sampled_from(CODECS))
    own = {name: {"cpu": CURVE, "server": CURVE} for name in ("shared", "dithering")} if codec in ("shared", "dithering") else {}
    profile = Profile("m", tensors, hardware=draw(st.sampled_from(["", "NVIDIA A100"])), device=device, codecs=own)
    timed = with_codec_times(profile, codec.split("/"), memory_gbps=draw(st.sampled_from([None, 900.0]))).profile
    known = codec if codec == "none" or all(half in timed.codecs for half in codec.split("/")) else "none"
    host = draw(st.sampled_from([None, Link(100, 10)])) if device == "cuda" else None
    collectives = draw(st.sampled_from(["", "host", "nccl"])) if device == "cuda" else ""
    costs = codec_costs(known, timed)
    cluster = Cluster(
        "made", draw(st.integers(1, 3)), draw(st.integers(1, 2)), Link(50, 5), Link(draw(st.sampled_from([0.1, 10.0])), 50),
        draw(st.integers(0, 2)), cores=0 if is_of_a_node(costs) else 4, host=host, collectives=collectives,
    )  # fmt: skip
    runtime = draw(st.booleans()) and cluster.servers > 0
    return Problem(timed, cluster, codec_costs(known, timed, cluster.gpus), Constraints(servers=True, runtime=runtime))
