"""Converts plans to layouts and back: which plans this version can run, the buckets that a job declares for a plan, and the plan of a layout.

Pure. Does not know which process reads or writes a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from psgc.codecs import parse_scheme
from psgc.codecs.backends import backends, lacking
from psgc.codecs.scheme import PairScheme, Scheme
from psgc.errors import CodecError, UsageError
from psgc.layout import MAX_PRIORITY, Bucket, BucketSpec, Layout, Part, TensorSpec, equal_parts
from psgc.layout.contributions import keys_of
from psgc.plan.model.options import OVER_SERVERS, Option, encodes, is_program
from psgc.plan.model.plan import NOT_KNOWN, UNCOMPRESSED, JobShape, Plan, PlannedBucket
from psgc.plan.planfile.fits import check_job
from psgc.plan.planfile.order import turns_of
from psgc.plan.planfile.reading import load_plan

PLAIN, ENCODED = OVER_SERVERS
ON_GPUS: Final = ("comp@gpu", *ENCODED[1:-1], "decomp@gpu")


def load_runnable(path: str) -> Plan:
    """The plan in a file. Raises UsageError, which names the file, the bucket and the reason, if this version of psgc cannot run it."""
    plan = load_plan(path)
    check_runs(plan, path)
    return plan


def check_runs(plan: Plan, source: str) -> None:
    """Raise UsageError, which names the first bucket that this version of psgc cannot run, unless it can run all of them."""
    for number, bucket in enumerate(plan.buckets):
        _check_carried(bucket, f"{source}: buckets[{number}] (of {bucket.tensors[0]!r})")


def why_not_run(plan: Plan, source: str) -> str | None:
    """Why this version of psgc cannot run the plan; None if it can. This is not part of a plan's file, because another version may read it."""
    try:
        check_runs(plan, source)
    except UsageError as error:
        return str(error)
    return None


def _check_carried(bucket: PlannedBucket, place: str) -> None:
    """Raise UsageError unless a job can run the bucket. Jobs run options in which every rank pushes to servers, uncompressed or encoded, and all
    options over groups of ranks, with or without servers. Encoding on a GPU needs a codec with a GPU side."""
    on_gpu = next((action for action in bucket.option if action.endswith("@gpu")), None)
    if not is_program(bucket.option) and _on_the_cpu(bucket.option) not in (PLAIN, ENCODED):
        raise UsageError(
            f"{place}: option {' '.join(bucket.option)}, which jobs do not carry: where every rank pushes all to servers they carry "
            f"{' '.join(PLAIN)} and {' '.join(ENCODED)}"
        )
    if not encodes(bucket.option) and bucket.codec != UNCOMPRESSED:
        raise UsageError(
            f"{place}: codec {bucket.codec}, but {' '.join(bucket.option)} encodes nothing; take codec none, or an option that encodes"
        )
    if abs(bucket.priority) >= MAX_PRIORITY:
        raise UsageError(f"{place}: priority {bucket.priority}, expected a number between -{MAX_PRIORITY} and {MAX_PRIORITY}")
    try:
        scheme = parse_scheme(bucket.codec)
    except CodecError as error:
        raise UsageError(f"{place}: {error}") from None
    without = _without_gpu_side(scheme, bucket.option) if on_gpu is not None else None
    if without is not None:
        raise UsageError(f"{place}: action {on_gpu!r}, but codec {without} has no GPU side; plan with devices = ['cpu'], or another codec")
    if is_program(bucket.option) and type(scheme) is not PairScheme:
        raise UsageError(
            f"{place}: codec {bucket.codec} runs where every rank pushes all to servers, not by {' '.join(bucket.option)}; choose another codec"
        )
    if on_gpu is not None and type(scheme) is not PairScheme and "/" in device_of(bucket.option):
        raise UsageError(
            f"{place}: codec {bucket.codec} keeps a state where it encodes, so it decodes there, too, not by {' '.join(bucket.option)}; "
            "take comp@gpu and decomp@gpu, or comp@cpu and decomp@cpu"
        )


def _without_gpu_side(scheme: Scheme, option: Option) -> str | None:
    """The codec that the option needs on GPUs but that has no GPU side; None if there is none. Programs encode with both codecs of a pair."""
    if scheme.residual_dtype != "float32":
        return scheme.canonical
    if type(scheme) is not PairScheme:
        return lacking(scheme)
    codecs = {"comp@gpu": scheme.pair.push, "decomp@gpu": scheme.pair.pull}
    used = codecs.values() if is_program(option) else (codec for action, codec in codecs.items() if action in option)
    return next((codec.canonical for codec in used if "cuda" not in backends(codec)), None)


def _on_the_cpu(option: Option) -> Option:
    """The option with every encode and decode on the CPU."""
    return tuple(action.replace("@gpu", "@cpu") for action in option)


def device_of(option: Option) -> str:
    """The ``device`` in the layout of a bucket that every rank pushes with this option."""
    found = list(dict.fromkeys(action.partition("@")[2] for action in option if "@" in action))
    return "" if found == ["cpu"] else "/".join(found)


def _pushed(codec: str, device: str) -> Option:
    """The option of a bucket that every rank pushes; the inverse of ``device_of``."""
    if codec == UNCOMPRESSED:
        return PLAIN
    encoding, _, decoding = (device or "cpu").partition("/")
    return (f"comp@{encoding}", *ENCODED[1:-1], f"decomp@{decoding or encoding}")


def not_carried(buckets: Sequence[PlannedBucket]) -> list[int]:
    """The indices of the buckets that a job of this version cannot run."""
    refused = []
    for number, bucket in enumerate(buckets):
        try:
            _check_carried(bucket, "")
        except UsageError:
            refused.append(number)
    return refused


def planned_buckets(plan: Plan, tensors: Sequence[TensorSpec], shape: JobShape = NOT_KNOWN) -> tuple[BucketSpec, ...]:
    """The buckets that a job of this shape declares for the plan and these tensors. Raises UsageError, which names the first difference, if the plan
    is for another job; tensors without elements need not be in it. If the job's servers are not known, parts get no server."""
    indices = {tensor.name: index for index, tensor in enumerate(tensors)}
    planned = {name for bucket in plan.buckets for name in bucket.tensors}
    check_job(plan, shape, {tensor.name: tensor.numel for tensor in tensors if tensor.numel or tensor.name in planned}, "this model")
    order = plan.issue_order
    turns = [()] * len(plan.buckets) if order is None else turns_of(order, plan.buckets)
    return tuple(
        BucketSpec(
            tuple(indices[name] for name in bucket.tensors), parse_scheme(bucket.codec).canonical, bucket.priority, bucket.parts,
            bucket.part_numel, bucket.servers if shape.servers is not None else (), bucket.option if is_program(bucket.option) else (),
            own, "" if is_program(bucket.option) or bucket.codec == UNCOMPRESSED else device_of(bucket.option),
        )
        for bucket, own in zip(plan.buckets, turns, strict=True)
    )  # fmt: skip


def plan_of(layout: Layout, servers: int | None = None, on_gpu: bool = False) -> Plan:
    """The plan that gives the same tensors this layout again. servers: number of the job's servers; None or 0: it has none, and parts get no server.
    on_gpu: the job encodes on GPUs wherever it can and the layout names no device."""
    buckets = tuple(_planned(layout, bucket, servers is not None, on_gpu) for bucket in layout.buckets)
    return Plan(layout.name, f"{layout.workers} workers", buckets, shape=JobShape(layout.workers, servers or None))


def _planned(layout: Layout, bucket: Bucket, placed: bool, on_gpu: bool) -> PlannedBucket:
    option = bucket.option or _pushed(bucket.codec, bucket.device)
    if on_gpu and not (bucket.option or bucket.device) and _without_gpu_side(layout.scheme(bucket), ON_GPUS) is None:
        option = _pushed(bucket.codec, "gpu")
    slices = [part for part in bucket.parts if part.round == 0]
    sizes = [part.numel for part in slices]
    return PlannedBucket(
        tuple(layout.tensors[i].name for i in bucket.tensors), bucket.numel, len(sizes), bucket.priority, bucket.codec,
        option, 0 if sizes == equal_parts(bucket.numel, len(sizes)) else sizes[0],
        _servers_of(bucket, slices) if placed else (),
    )  # fmt: skip


def _servers_of(bucket: Bucket, slices: Sequence[Part]) -> tuple[int, ...]:
    """Each slice's server; () if slices have none, or if the keys of a slice lie on several."""
    if not bucket.over_groups:
        return tuple(part.server for part in slices)
    found = [{key.server for key in keys_of(bucket, part)} for part in slices]
    return tuple(server for servers in found for server in servers) if all(len(servers) == 1 for servers in found) else ()
