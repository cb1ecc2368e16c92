"""The plans of other systems, as their papers describe them, under our costs and our timeline.

Each method plans tensor by tensor, as these systems do. If buckets are given, it keeps their fusion and their parts, and chooses only their
options. Owns the systems' fixed options and rules.

    fp32             Jiang et al., OSDI 2020 (BytePS)
    byteps-compress  BytePS with gradient compression on the CPU
    hitopkcomm       Shi et al., MLSys 2021
    hipress          Bai et al., SOSP 2021: SeCoPa
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from psgc.errors import UsageError
from psgc.plan.inputs.profile import F64
from psgc.plan.methods.result import UNDER_CONSTRAINTS, WITHOUT_ENCODING, Found, RuledOut
from psgc.plan.model.costs import CodecCosts
from psgc.plan.model.options import Option, devices_of, is_uncompressed
from psgc.plan.model.plan import UNCOMPRESSED, PlannedBucket
from psgc.plan.model.problem import Problem, simulate

Buckets = Sequence[PlannedBucket]
PARTITION_NUMEL: Final = 1 << 20  # BytePS cuts tensors at 4 MB
# A model of more partitions than this is cut into larger ones: simulating all of a model's of 70 B elements takes half a minute, and gives the same
# step but for the partitions' latencies, which makes the other system's step shorter and not longer.
MOST_PARTITIONS: Final = 2048
LEAST_COMPRESSED_NUMEL: Final = 1 << 14  # BytePS leaves tensors of less than 64 KiB alone (BYTEPS_MIN_COMPRESS_BYTES)

HIERARCHICAL: Final[Option] = ("intra.reduce_scatter", "inter.all_reduce", "intra.all_gather")
OVER_SERVERS: Final[Option] = ("intra.reduce_scatter", "inter.push", "inter.pull", "intra.all_gather")
CPU_OVER_SERVERS: Final[Option] = ("intra.reduce", "comp@cpu", "inter.push.c", "inter.pull.c", "decomp@cpu", "intra.broadcast")
# each node serves its share of every tensor: payloads go to the node that sums them, and the sum's payloads go to all nodes
CPU_OVER_NODES: Final[Option] = (
    "intra.reduce", "comp@cpu", "inter.all_to_all.c", "decomp@cpu", "comp@cpu", "inter.all_gather.c", "decomp@cpu", "intra.broadcast",
)  # fmt: skip
GPU_OVER_NODES: Final[Option] = (
    "intra.reduce_scatter", "comp@gpu", "inter.all_to_all.c", "decomp@gpu", "comp@gpu", "inter.all_gather.c", "decomp@gpu",
    "intra.all_gather",
)  # fmt: skip
GATHERED: Final[Option] = ("intra.reduce_scatter", "comp@gpu", "inter.all_gather.c", "decomp@gpu", "intra.all_gather")


class Choice(NamedTuple):
    """What a system does with one tensor. parts: the number of parts that it cuts the tensor into."""

    option: Option
    parts: int = 1


Choose = Callable[[PlannedBucket], Choice]


def tensor_by_tensor(problem: Problem) -> tuple[PlannedBucket, ...]:
    """Every tensor in a bucket of its own, uncompressed; the tensor that is ready first goes first."""
    return tuple(
        PlannedBucket((tensor.name,), tensor.numel, 1, -index, UNCOMPRESSED, HIERARCHICAL)
        for index, tensor in enumerate(problem.profile.tensors)
    )


def with_option(bucket: PlannedBucket, option: Option, problem: Problem, parts: int | None = None) -> PlannedBucket:
    """The bucket with another option, and with ``parts`` parts if given."""
    codec = UNCOMPRESSED if is_uncompressed(option) else problem.codec_of(bucket).name
    count = bucket.parts if parts is None else parts
    return PlannedBucket(bucket.tensors, bucket.numel, count, bucket.priority, codec, option, bucket.part_numel, bucket.servers)


def fp32(problem: Problem, buckets: Buckets | None = None) -> Found:
    """BytePS without compression: each tensor is cut at 4 MB and summed within nodes, then between them, by servers if the cluster has some and the
    constraints allow them. It ignores the other constraints, because all plans are compared with it."""
    return _found(_fp32, problem, buckets, 1)


def _fp32(problem: Problem) -> Choose:
    option = OVER_SERVERS if _has_servers(problem) else HIERARCHICAL
    size = partition_numel(problem)
    return lambda bucket: Choice(option, -(-bucket.numel // size))


def byteps_compress(problem: Problem, buckets: Buckets | None = None) -> Found:
    """BytePS with compression on the CPU of tensors of at least 64 KiB, its default. A node's root reduces, compresses each partition and pushes it;
    servers decode, sum and encode; the root decodes and broadcasts.

    Without separate servers, each node serves its share of every partition, like BytePS's co-located servers: an all-to-all sends payloads to the
    node that sums them, which decodes and encodes on the same CPU, and an all-gather sends the sums' payloads. Raises UsageError as ``_require``
    does."""
    return _found(_byteps_compress, problem, buckets, 2)


def _byteps_compress(problem: Problem) -> Choose:
    plain, compressed = (OVER_SERVERS, CPU_OVER_SERVERS) if _has_servers(problem) else (HIERARCHICAL, CPU_OVER_NODES)
    _require("byteps-compress", compressed, problem)
    size = partition_numel(problem)

    def choose(bucket: PlannedBucket) -> Choice:
        large = bucket.numel >= LEAST_COMPRESSED_NUMEL
        return Choice(compressed if large and _can_take(bucket, compressed, problem) else plain, -(-bucket.numel // size))

    return choose


def hitopkcomm(problem: Problem, buckets: Buckets | None = None, *, least_numel: int = 1) -> Found:
    """HiTopKComm (section 3.2 of its paper): a node's GPUs reduce-scatter, each compresses its shard, nodes all-gather the payloads, and the
    decoded shards are all-gathered within the node. It compresses everything; ``least_numel`` sets a threshold.

    Raises UsageError as ``_require`` does."""
    return _found(functools.partial(_hitopkcomm, least_numel=least_numel), problem, buckets, 2)


def _hitopkcomm(problem: Problem, *, least_numel: int = 1) -> Choose:
    _require("hitopkcomm", GATHERED, problem)

    def choose(bucket: PlannedBucket) -> Choice:
        return Choice(GATHERED if bucket.numel >= least_numel and _can_take(bucket, GATHERED, problem) else HIERARCHICAL)

    return choose


def hipress(problem: Problem, buckets: Buckets | None = None, *, fused: bool = False) -> Found:
    """HiPress (section 3.3 of its paper): the formulas of SeCoPa, its planner, decide whether a tensor is compressed and cut into K partitions; see
    ``secopa``. They ignore overlap. An uncompressed tensor takes the ordinary path, in one part.

    HiPress encodes each partition, sends it to the node that sums it, decodes, sums, encodes, sends the sum to all and decodes, through servers
    on the nodes or along a ring. Here that is an all-to-all and an all-gather, which move as many bytes as K = N partitions or the ring. fused: all
    K partitions in one chain, with one launch, which is better than SeCoPa's formulas claim. Raises UsageError as ``_require`` does."""
    return _found(functools.partial(_hipress, fused=fused), problem, buckets, 2)


def _hipress(problem: Problem, *, fused: bool = False) -> Choose:
    _require("hipress", GPU_OVER_NODES, problem)

    @functools.cache
    def predicted(numel: int, codec: int) -> Predicted:
        return secopa(problem, numel, problem.codecs[codec])

    def choose(bucket: PlannedBucket) -> Choice:
        if not _can_take(bucket, GPU_OVER_NODES, problem):
            return Choice(HIERARCHICAL)
        compressed, partitions, _ = predicted(bucket.numel, problem.codec_numbers[bucket.tensors[0]])
        return Choice(GPU_OVER_NODES, 1 if fused else min(partitions, bucket.numel)) if compressed else Choice(HIERARCHICAL)

    return choose


def tensors_choices(problem: Problem) -> Iterator[list[Choice]]:
    """For each of these systems that the constraints allow, what it does with each tensor."""
    buckets = tensor_by_tensor(problem)
    for system in (_fp32, _byteps_compress, _hitopkcomm, _hipress):
        try:
            choose = system(problem)
        except UsageError:
            continue
        yield [choose(bucket) for bucket in buckets]


class Predicted(NamedTuple):
    """What SeCoPa decides for one tensor, and the time it predicts for it alone."""

    compressed: bool
    partitions: int
    us: float


def secopa(problem: Problem, numel: int, codec: CodecCosts) -> Predicted:
    """The minimum of HiPress's formulas, from its public artefact, for a tensor and its codec over K = 1..N partitions. x is a partition, r the ratio:

                uncompressed        compressed
        PS      G(x) + B(x)         G(rx) + B(rx) + min(K + 1, N) Enc(x) + min(N - 1 + K, 2 (N - 1)) Dec(x)
        ring    2 (N - 1) S(x)      2 (N - 1) S(rx) + N Enc(x) + N Dec(x)

    N is the number of nodes. They sum a GPU's shard, 1/k of the tensor, and the k GPUs share the node's link. S(x) is the time of a message, G and
    B are those of one node's gather from and broadcast to all others. Merging is free. Unlike in the artefact, the time to decode depends on the
    elements, not on the payload's bytes."""
    nodes, gpus, link = problem.cluster.nodes, problem.cluster.gpus_per_node, problem.cluster.inter
    gpu, payload = codec.device("gpu"), codec.bytes_per_element

    def send(nbytes: F64) -> F64:
        return link.latency_us + nbytes * gpus * link.us_per_byte

    def travel(nbytes: F64) -> tuple[F64, F64]:
        return 2 * send((nodes - 1) * nbytes), 2 * (nodes - 1) * send(nbytes)

    partitions = np.arange(1, nodes + 1)
    elements = numel / gpus / partitions
    by_servers, by_ring = travel(payload * elements)
    encode, decode = gpu.encode_all(elements), gpu.decode_all(elements)
    by_servers += np.minimum(partitions + 1, nodes) * encode + np.minimum(nodes - 1 + partitions, 2 * (nodes - 1)) * decode
    by_ring += nodes * (encode + decode)
    times = np.array([np.minimum(*travel(codec.item_bytes * elements)), np.minimum(by_servers, by_ring)]).T
    best = int(times.argmin())  # ties go to fewer partitions, then to uncompressed
    return Predicted(best % 2 == 1, best // 2 + 1, float(times.flat[best]))


def partition_numel(problem: Problem) -> int:
    """The elements at which BytePS cuts this model's tensors."""
    return max(PARTITION_NUMEL, -(-problem.profile.numel // MOST_PARTITIONS))


def _has_servers(problem: Problem) -> bool:
    return problem.cluster.servers > 0 and problem.constraints.servers


def _can_take(bucket: PlannedBucket, option: Option, problem: Problem) -> bool:
    return problem.takes(option, problem.codec_of(bucket))


def _require(method: str, option: Option, problem: Problem) -> None:
    """Raise UsageError unless the constraints allow the method's only option for some tensor."""
    only = f"method {method}: it compresses by {' '.join(option)} alone"
    if not problem.used:
        raise RuledOut(f"{only}, and encoding is ruled out; choose another method", WITHOUT_ENCODING)
    for device in devices_of(option):
        if not any(codec.knows(device) for codec in problem.codecs):
            problem.codec.device(device)
    if not replace(problem.constraints, on_gpus=problem.on_gpus).allows(option):
        raise RuledOut(f"{only}, which the constraints rule out; choose another method", UNDER_CONSTRAINTS)


def _found(system: Callable[[Problem], Choose], problem: Problem, buckets: Buckets | None, options: int) -> Found:
    """Every tensor with the system's choice for it, or the given buckets with the system's options only."""
    begun = time.perf_counter()
    choose = system(problem)
    if buckets is None:
        choices = ((bucket, choose(bucket)) for bucket in tensor_by_tensor(problem))
        made = tuple(with_option(bucket, option, problem, parts) for bucket, (option, parts) in choices)
    else:
        made = tuple(with_option(bucket, choose(bucket).option, problem) for bucket in buckets)
    return Found(made, simulate(problem, made).step_us, (time.perf_counter() - begun) * 1e6, options)
