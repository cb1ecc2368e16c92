"""The same problem with faster or slower links, computers or codecs.

Owns which times scale with which factor. Used for error margins, for the bandwidth at which an answer changes, and for hypothetical codecs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from psgc.plan.inputs.cluster import Cluster, Link
from psgc.plan.inputs.profile import FLOAT_BYTES, CostCurve, Profile
from psgc.plan.model.costs import CodecCosts
from psgc.plan.model.problem import Problem


@dataclass(frozen=True, slots=True)
class Change:
    """Factors by which a problem changes.

    link:     bandwidth between nodes and to servers.
    compute:  speed of forward, backward and codecs on the GPU.
    backward: time of backward, which communication beside it may slow down.
    codec:    time to encode and decode.
    payload:  bytes of payloads.
    host:     bandwidth between GPUs and their hosts.
    """

    link: float = 1.0
    compute: float = 1.0
    backward: float = 1.0
    codec: float = 1.0
    payload: float = 1.0
    host: float = 1.0


SAME = Change()


def varied(problem: Problem, change: Change) -> Problem:
    """The problem with these changes."""
    if change == SAME:
        return problem
    return replace(
        problem,
        profile=_profile(problem.profile, change),
        cluster=with_faster_host(with_faster_link(problem.cluster, change.link), change.host),
        codec=_codec(problem.codec, change),
        others=tuple((pattern, _codec(codec, change)) for pattern, codec in problem.others),
    )


def with_faster_link(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with ``factor`` times the bandwidth between nodes and to servers; latencies stay."""
    if factor == 1:
        return cluster
    return replace(cluster, inter=faster(cluster.inter, factor), server=None if cluster.server is None else faster(cluster.server, factor))


def with_faster_host(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with ``factor`` times the bandwidth between GPUs and their hosts, if it has such links."""
    return cluster if factor == 1 or cluster.host is None else replace(cluster, host=faster(cluster.host, factor))


def in_halves(problem: Problem) -> Problem:
    """The same without compression, with gradients as 16-bit floats, if they are wider: where all are float32, on links that are twice as fast."""
    if problem.profile.itemsizes == (FLOAT_BYTES,):
        return replace(problem, cluster=with_halved_bytes(problem.cluster))
    profile = problem.profile.narrowed(FLOAT_BYTES // 2)
    most = float(profile.itemsizes[0])
    others = tuple((pattern, codec.of_items(most)) for pattern, codec in problem.others)
    return replace(problem, profile=profile, codec=problem.codec.of_items(most), others=others)


def with_halved_bytes(cluster: Cluster) -> Cluster:
    """The cluster with every link twice as fast. On it, float32 takes as long as 16-bit floats on this one."""
    return replace(with_faster_host(with_faster_link(cluster, 2), 2), intra=faster(cluster.intra, 2))


def faster(link: Link, factor: float) -> Link:
    """The link with ``factor`` times the bandwidth; the latency stays."""
    return Link(link.gbps * factor, link.latency_us)


def _profile(profile: Profile, change: Change) -> Profile:
    factor = change.backward / change.compute
    if factor == 1 and change.compute == 1:
        return profile
    slower = profile.slower(factor)
    if profile.forward_us is None or change.compute == 1:
        return slower
    return replace(slower, forward_us=profile.forward_us / change.compute)


def _codec(codec: CodecCosts, change: Change) -> CodecCosts:
    if change.codec == change.compute == change.payload == 1:
        return codec

    def scaled(curves: Mapping[str, CostCurve]) -> Mapping[str, CostCurve]:
        return {device: curve.scaled(change.codec / (change.compute if device == "gpu" else 1)) for device, curve in curves.items()}

    back = codec.pull_bytes_per_element
    return replace(
        codec, curves=scaled(codec.curves), pull_curves=None if codec.pull_curves is None else scaled(codec.pull_curves),
        bytes_per_element=codec.bytes_per_element * change.payload, pull_bytes_per_element=None if back is None else back * change.payload,
    )  # fmt: skip
