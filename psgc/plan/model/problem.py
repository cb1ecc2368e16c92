"""A planning problem, and the simulated step time of any plan for it. Every method's plan is judged here.

Owns how a plan's buckets become chains of tasks on a timeline. Does not know how plans are found.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from psgc.errors import UsageError
from psgc.plan.inputs.cluster import Cluster
from psgc.plan.inputs.correction import corrected_links
from psgc.plan.inputs.estimates import through_hosts
from psgc.plan.inputs.profile import F64, FLOAT_BYTES, PUBLISHED_BYTES, V100_CODECS, CostCurve, Profile, on_curve
from psgc.plan.model import costs, options
from psgc.plan.model.bucketing import Tensors
from psgc.plan.model.collectives import BETWEEN_GPUS, IN_HOSTS_MEMORY, LIBRARY, RINGS, Collectives
from psgc.plan.model.cores import Sharing, sharing_of
from psgc.plan.model.costs import Atom, CodecCosts, Task
from psgc.plan.model.options import Constraints, Option
from psgc.plan.model.plan import UNCOMPRESSED, Plan, PlannedBucket, check_fits
from psgc.plan.model.timeline import Chains, Ints, Timeline, chains_of, run

if TYPE_CHECKING:
    from psgc.codecs.scheme import Round, Scheme

_SAMPLE: Final = 1 << 20


def codec_costs(name: str, profile: Profile, workers: int = 1) -> CodecCosts:
    """A codec's payload bytes per element, and its encode and decode times from the profile; of gradients of the type that most of the profile's elements
    have.

    A ``push/pull`` pair has the bytes and times of both halves; where the profile has no times of the pull codec, those of the push codec. ``none``
    has no encode or decode times, so no device can encode with it.
    Raises CodecError for an unknown codec, and UsageError for a codec without times in the profile."""
    raw = profile.codecs.get(UNCOMPRESSED, {})
    carriers = profile.all_carriers
    item_bytes = float(profile.itemsizes[0])
    if name == UNCOMPRESSED:
        return CodecCosts(UNCOMPRESSED, item_bytes, {}, None, raw, carriers, item_bytes=item_bytes)
    if name in PUBLISHED_BYTES:
        return CodecCosts(name, PUBLISHED_BYTES[name], profile.codecs.get(name, {}), None, raw, carriers, item_bytes=item_bytes)
    from psgc.codecs.registry import parse_scheme
    from psgc.codecs.scheme import BucketContext

    sample = _SAMPLE
    scheme = parse_scheme(name, BucketContext("float32", workers, True, ((_SAMPLE,),)))
    if scheme.whole:  # payloads depend on shapes: the whole model is the sample
        _check_shapes(name, profile)
        sample, known = profile.numel, tuple(tensor.shape for tensor in profile.tensors if tensor.shape is not None)
        scheme = parse_scheme(name, BucketContext("float32", workers, True, known))
    curves = _curves(name, scheme, profile)
    rounds = scheme.rounds(sample)
    push = sum(round_.pair.push.payload_bound(round_.numel) for round_ in rounds) / sample
    pull = sum(round_.pair.pull.payload_bound(round_.numel) for round_ in rounds) / sample
    answers = _of_pull(rounds, profile)
    if answers is None:
        return CodecCosts(scheme.canonical, push, curves, pull, raw, carriers, item_bytes=item_bytes)
    again = {device: answers.get(device, curve) for device, curve in curves.items()}
    adds, finishes = (of.get("server") or of.get("cpu") for of in (curves, answers))
    if adds is not None and finishes is not None:
        curves = {**curves, "server": _answered(adds, finishes)}
    return CodecCosts(scheme.canonical, push, curves, pull, raw, carriers, again, item_bytes)


def _check_shapes(name: str, profile: Profile) -> None:
    """Raise UsageError, which names the first tensor without a shape."""
    lacking = next((tensor.name for tensor in profile.tensors if tensor.shape is None), None)
    if lacking is not None:
        raise UsageError(
            f"codec {name}: its payload depends on the tensors' shapes, and the profile has none of {lacking!r}; psgc profile "
            f"makes profiles with shapes"
        )


def _of_pull(rounds: Sequence[Round], profile: Profile) -> Mapping[str, CostCurve] | None:
    """The curves of the pull codec of one round; None if it is the push codec, or the profile has no times of it."""
    pair = rounds[0].pair
    if len(rounds) > 1 or pair.push.canonical == pair.pull.canonical:
        return None
    text = pair.pull.canonical
    return profile.codecs.get(text) or profile.codecs.get(text.partition(":")[0])


def _answered(adds: CostCurve, finishes: CostCurve) -> CostCurve:
    """A server's curve where payloads are of one codec and the sum is encoded by another."""
    sizes = np.array(sorted({*adds.numel, *finishes.numel}))
    finish = finishes.encode_all(sizes)
    own = adds.encode_all(sizes)
    passes = tuple((count, tuple((np.maximum(on_curve(adds.numel, us, sizes) - own, 0.0) + finish).tolist())) for count, us in adds.passes)
    return CostCurve(tuple(sizes.tolist()), tuple(finish.tolist()), tuple(adds.decode_all(sizes).tolist()), passes)


def _curves(name: str, scheme: Scheme, profile: Profile) -> Mapping[str, CostCurve]:
    """The curves in the profile of a codec, or of a pair's push codec, looked up by its text, then its canonical form, then its name without parameters."""
    from psgc.codecs.relay import is_relayed

    canonical = scheme.canonical
    bare = canonical.partition("/")[0].partition(":")[0]
    for text in (name, canonical, canonical.partition("/")[0], bare):
        if text in profile.codecs:
            return profile.codecs[text]
    known = ", ".join(sorted(profile.codecs)) or "none at all"
    if is_relayed(scheme) and "/" not in canonical:
        raise UsageError(
            f"codec {name}: servers relay its payloads, and each rank adds up as many as there are, which no profile times and no plan has; it is for "
            f"{'psgc.DeMo' if bare == 'demo' else 'psgc.DiLoCo'} (docs/far-apart.md), of which psgc advise lists an estimate by itself"
        )
    raise UsageError(f"codec {name}: the profile has no times for it, but for {known}; measure it with psgc profile --codecs {name}")


def is_of_a_node(codec: CodecCosts) -> bool:
    """Whether the codec's CPU times are the published ones of the V100's host. Those are for a node's whole CPU, not for one thread."""
    built_in = V100_CODECS.get(codec.name.partition("/")[0].partition(":")[0], {}).get("cpu")
    return built_in is not None and codec.curves.get("cpu") == built_in


@functools.cache
def has_gpu_side(codec: str) -> bool:
    """Whether psgc has GPU kernels that encode and decode this codec."""
    if codec in PUBLISHED_BYTES or codec == UNCOMPRESSED:
        return False
    from psgc.codecs.backends import backends
    from psgc.codecs.registry import parse_scheme
    from psgc.codecs.scheme import PairScheme

    scheme = parse_scheme(codec)
    if type(scheme) is not PairScheme or scheme.residual_dtype != "float32":
        return False
    return all("cuda" in backends(each) for each in (scheme.pair.push, scheme.pair.pull))


@functools.cache
def takes_one_round(codec: str) -> bool:
    """Whether the codec takes one round, so that workers can exchange its payloads among themselves."""
    if codec in PUBLISHED_BYTES:
        return False
    from psgc.codecs.registry import parse_scheme
    from psgc.codecs.scheme import PairScheme

    return type(parse_scheme(codec)) is PairScheme


@dataclass(frozen=True)
class Problem:
    """A model, a cluster, a codec, and the user's constraints.

    others: pairs of a pattern of tensor names and the codec of the tensors that match it, in place of ``codec``. The first match counts.
    A bucket holds tensors of one codec, and of as many bytes per element: ``codecs`` has each codec once for each of these.
    by_library: whether a library all-reduces gradients on GPUs, as DistributedDataParallel's does, in place of a job's own collectives."""

    profile: Profile
    cluster: Cluster
    codec: CodecCosts
    constraints: Constraints = field(default_factory=Constraints)
    others: tuple[tuple[str, CodecCosts], ...] = ()
    by_library: bool = False

    @cached_property
    def codecs(self) -> tuple[CodecCosts, ...]:
        """All codecs without duplicates, ``codec`` first; where gradients differ in their type, each of them for each type."""
        named = (self.codec, *(codec for _, codec in self.others))
        if len(self.profile.itemsizes) > 1:
            named = (*named, *(codec.of_items(float(size)) for size in self.profile.itemsizes for codec in named))
        return tuple({(codec.name, codec.item_bytes): codec for codec in named}.values())

    @cached_property
    def typed(self) -> bool:
        """Whether some gradients are no float32."""
        return any(codec.item_bytes != FLOAT_BYTES for codec in self.codecs)

    @cached_property
    def codec_numbers(self) -> dict[str, int]:
        """Index in ``codecs`` of each tensor's codec, by the tensor's name."""
        if len(self.codecs) == 1:
            return dict.fromkeys(self.numel, 0)
        numbers = {(codec.name, codec.item_bytes): number for number, codec in enumerate(self.codecs)}
        one_type = len(self.profile.itemsizes) == 1
        found = {}
        for name, itemsize in self.profile.itemsize_of.items():
            codec = self._codec_named(name)
            found[name] = numbers[codec.name, codec.item_bytes if one_type else itemsize]
        return found

    def _codec_named(self, tensor: str) -> CodecCosts:
        return next((codec for pattern, codec in self.others if fnmatchcase(tensor, pattern)), self.codec)

    @property
    def used(self) -> tuple[CodecCosts, ...]:
        """The codecs of tensors that may be encoded: all codecs that some tensor has, except ``none``."""
        numbers = sorted(set(self.codec_numbers.values()))
        return tuple(self.codecs[number] for number in numbers if self.codecs[number].name != UNCOMPRESSED)

    def codec_of(self, bucket: PlannedBucket) -> CodecCosts:
        """The codec that the bucket's tensors share; ``none`` if they have different ones."""
        numbers = {self.codec_numbers[name] for name in bucket.tensors}
        return self.codecs[numbers.pop()] if len(numbers) == 1 else self.without.of_items(self._item_bytes_of(bucket))

    def _item_bytes_of(self, bucket: PlannedBucket) -> float:
        """Bytes per uncompressed element of the bucket's tensors, the most if they differ."""
        if len(self.profile.itemsizes) == 1:
            return self.codec.item_bytes
        return float(max(map(self.profile.itemsize_of.__getitem__, bucket.tensors)))

    @cached_property
    def without(self) -> CodecCosts:
        """The costs of ``none``."""
        return codec_costs(UNCOMPRESSED, self.profile)

    def devices(self, codec: CodecCosts) -> tuple[str, ...]:
        """The devices that may encode and decode with this codec: the constraints allow them, and the codec has times there."""
        return tuple(device for device in self._encoders if codec.knows(device) and self._encodes_on(device, codec))

    @cached_property
    def _encoders(self) -> tuple[str, ...]:
        """The devices that the constraints allow, without GPUs where gradients lie in hosts' memory: a model without a GPU has none to encode on."""
        allowed = replace(self.constraints, on_gpus=self.on_gpus).encoders
        return tuple(device for device in allowed if device == "cpu" or self.profile.device != "cpu")

    def _encodes_on(self, device: str, codec: CodecCosts) -> bool:
        """Whether jobs can encode this codec on the device. Without ``runtime`` the plan need not run, and every device counts."""
        return device == "cpu" or not self.constraints.runtime or has_gpu_side(codec.name)

    @cached_property
    def on_gpus(self) -> bool:
        """Whether jobs encode on GPUs: the plan is to be run, and gradients lie on a GPU."""
        return self.constraints.runtime and self.profile.device == "cuda"

    @property
    def cuts_as_jobs(self) -> bool:
        """Whether parts are cut as jobs cut them: wherever it is known of what job the profile is."""
        return self.constraints.to_be_run or bool(self.profile.device)

    def takes(self, option: Option, codec: CodecCosts) -> bool:
        """Whether buckets of this codec can have an allowed option: the codec has times for every device that the option uses, and each action carries its
        payloads."""
        return (
            options.devices_of(option) <= set(self.devices(codec))
            and (codec.served or not any(".push.c" in action for action in option))
            and all(self.carries(action, codec) for action in option)
        )

    def carries(self, action: str, codec: CodecCosts) -> bool:
        """Whether the action carries payloads of this codec, or none. In jobs those of a codec of several rounds go to servers, from every rank."""
        return not self.constraints.runtime or not action.endswith(".c") or action in options.OVER_SERVERS[1] or takes_one_round(codec.name)

    @property
    def needs_servers(self) -> bool:
        """Whether jobs carry some codec's payloads over servers alone."""
        return self.constraints.runtime and not all(takes_one_round(codec.name) for codec in self.used)

    @cached_property
    def allowed(self) -> Constraints:
        """The user's constraints, narrowed to this job: without devices that no codec has times for, and without servers if the cluster has none."""
        devices = tuple(device for device in self._encoders if any(device in self.devices(codec) for codec in self.codecs))
        servers = self.constraints.servers and self.cluster.servers > 0
        return replace(self.constraints, devices=devices, servers=servers, on_gpus=self.on_gpus, codecs=())

    @cached_property
    def named(self) -> Cluster:
        """The cluster that a plan is for. In a plan that is to be run, collectives that nothing is named for are what jobs do unless their settings say
        otherwise."""
        unnamed = not self.in_hosts_memory and not self.cluster.collectives
        return through_hosts(self.cluster) if self.constraints.runtime and unnamed else self.cluster

    @cached_property
    def priced(self) -> Cluster:
        """The same, at the rates that its links were measured to reach: what tasks are priced for."""
        correction = self.profile.correction
        return self.named if correction is None else corrected_links(self.named, correction.factors)

    @property
    def in_hosts_memory(self) -> bool:
        """Whether gradients lie where all collectives are."""
        return self.profile.device == "cpu" and self.cluster.host is None

    @cached_property
    def collectives(self) -> Collectives:
        """How collectives run. Where gradients lie on GPUs, the cluster does not name what runs them, and the plan need not run: in rings over the cluster's
        links, as the papers count them."""
        if self.in_hosts_memory or self.priced.collectives == "host":
            return IN_HOSTS_MEMORY
        if self.by_library:
            return LIBRARY
        return BETWEEN_GPUS if self.priced.collectives == "nccl" else RINGS

    @cached_property
    def threads(self) -> Ints:
        """How many tasks each resource does at once. Raises UsageError if the codec times are for whole nodes, but the cluster gives numbers of
        threads."""
        if self.cluster.has_threads and any(is_of_a_node(codec) for codec in self.codecs):
            raise UsageError(
                f"cluster {self.cluster.name}: it has cores or codec_threads, but the built-in codec times are of a node's whole CPU; leave both out, "
                f"or measure times of one thread with psgc profile"
            )
        return np.array(costs.threads(self.cluster), np.int64)

    @cached_property
    def tensors(self) -> Tensors:
        """The tensors, in order of readiness."""
        codec = (
            [self.codec_numbers[tensor.name] for tensor in self.profile.tensors]
            if len(self.codecs) > 1
            else np.zeros(len(self.profile.tensors))
        )
        return Tensors(*self.profile.columns, np.array(codec, np.int64))

    @cached_property
    def options(self) -> tuple[Option, ...]:
        """The allowed options that some codec has times for. Raises UsageError if none is left."""
        found = options.constrained(self.allowed)
        if self.needs_servers and self.allowed.devices and not self.allowed.servers:
            several = next(codec.name for codec in self.used if not takes_one_round(codec.name))
            lacking = "the constraints rule servers out" if self.cluster.servers else f"cluster {self.cluster.name} has no servers"
            raise UsageError(
                f"codec {several}: it takes several rounds, for which jobs push to servers, but {lacking}; allow some, or choose another codec"
            )
        if self.needs_servers or (self.allowed.servers and not any(codec.served for codec in self.codecs)):
            found = tuple(option for option in found if any(self.takes(option, codec) for codec in self.codecs))
        if not found:
            asked = "flat or hierarchical ones" if self.constraints.among_workers else "flat ones over servers, which alone can be run"
            raise UsageError(f"the constraints leave no option; allow {asked}")
        return found

    @property
    def ready_us(self) -> Mapping[str, float]:
        """When each tensor is ready, by its name, in that order."""
        return self.profile.ready_us_of

    @property
    def numel(self) -> Mapping[str, int]:
        """The elements of each tensor, by its name, in order of readiness."""
        return self.profile.numel_of

    @cached_property
    def _costs(self) -> dict[tuple[str, float], CodecCosts]:
        return {(codec.name, codec.item_bytes): codec for codec in self.codecs}

    def costs_of(self, bucket: PlannedBucket) -> CodecCosts:
        """The costs of the bucket's codec. Raises UsageError if its option encodes but its codec is ``none``, or has no times in the profile."""
        item_bytes = self._item_bytes_of(bucket)
        if options.is_uncompressed(bucket.option):
            return self.codec.of_items(item_bytes)
        if bucket.codec == UNCOMPRESSED:
            raise UsageError(f"plan: the bucket of {bucket.tensors[0]!r} is encoded, but its codec is none; name the codec")
        key = bucket.codec, item_bytes
        if key not in self._costs:
            self._costs[key] = codec_costs(bucket.codec, self.profile, self.cluster.gpus).of_items(item_bytes)
        return self._costs[key]

    @cached_property
    def sharing(self) -> Sharing | None:
        """The cores that backward shares with communication; None if it computes elsewhere."""
        return sharing_of(self.cluster, self.profile.compute_threads) if self.in_hosts_memory else None

    def price(self, atom: Atom, codec: CodecCosts) -> list[Task]:
        """The tasks of an atom of an option."""
        return costs.price(atom, self.priced, codec, self.collectives, self.sharing)

    def tasks(self, option: Option, codec: CodecCosts) -> tuple[Task, ...]:
        """The tasks of an option."""
        return costs.tasks(option, self.priced, codec, self.collectives, self.sharing)

    def part_tasks(self, option: Option, numel: float, codec: CodecCosts) -> list[tuple[str, int, float]]:
        """The tasks of one part of ``numel`` elements, as (action, resource, microseconds)."""
        return [(action, resource, float(us[0])) for action, resource, us in self.tasks_of(option, np.array([numel]), codec)]

    def tasks_of(self, option: Option, numel: F64, codec: CodecCosts) -> list[tuple[str, int, F64]]:
        """The tasks of parts of these numbers of elements, as (action, resource, microseconds for each part)."""
        return [(task.action, task.resource, codec.all_us(task, numel)) for task in self.tasks(option, codec)]


class Row(NamedTuple):
    """The bucket, part and action of one task of the chains."""

    bucket: int
    part: int
    action: str


class Simulated(NamedTuple):
    """A plan's simulated step. step_us: from the first gradient's readiness until every bucket is synchronized; rows: one for each task of the
    chains."""

    step_us: float
    chains: Chains
    timeline: Timeline
    rows: tuple[Row, ...]


def ranks(buckets: Sequence[PlannedBucket], order: Sequence[int]) -> Ints:
    """Each part's rank among the chains: by descending priority of its bucket, then in the order of the chains. order: the buckets' indices in the
    order of their chains."""
    parts = np.array([buckets[index].parts for index in order], np.int64)
    turns = np.repeat([-buckets[index].priority for index in order], parts)
    rank = np.empty(len(turns), np.int64)
    rank[np.argsort(turns, kind="stable")] = np.arange(len(turns))
    return rank


# The actions of an option's tasks, and by a part's size their resources and microseconds.
_Priced = tuple[list[str], dict[float, list[tuple[int, float]]]]
_Kind = tuple[Option, str, float]  # of a bucket: its option, its codec, and its bytes per uncompressed element


def _kind(option: Option, codec: CodecCosts) -> _Kind:
    return option, codec.name, codec.item_bytes


def _priced(problem: Problem, buckets: Sequence[PlannedBucket], sizes: Sequence[Sequence[float]]) -> dict[_Kind, _Priced]:
    """The tasks of the buckets' parts, by their kind, each size once. sizes: of each bucket's parts."""
    found: dict[_Kind, _Priced] = {}
    wanted: dict[_Kind, tuple[CodecCosts, dict[float, None]]] = {}
    for bucket, parts in zip(buckets, sizes, strict=True):
        codec = problem.costs_of(bucket)
        wanted.setdefault(_kind(bucket.option, codec), (codec, {}))[1].update(dict.fromkeys(parts))
    for kind, (codec, distinct) in wanted.items():
        tasks = problem.tasks_of(kind[0], np.array(list(distinct)), codec)
        by_size = zip(*([(resource, us) for us in times.tolist()] for _, resource, times in tasks), strict=True)
        made = map(list, by_size) if tasks else ([] for _ in distinct)
        found[kind] = [action for action, _, _ in tasks], dict(zip(distinct, made, strict=True))
    return found


def simulate(problem: Problem, buckets: Sequence[PlannedBucket]) -> Simulated:
    """Simulate a step of these buckets, each with its own codec. Every part is a chain of tasks.

    If several tasks could start at the same moment, the one whose bucket has the highest priority starts. Ties go to the bucket that is ready
    first, then to the one that comes first in ``buckets``.
    Raises UsageError for buckets of another model, codecs without times in the profile, and parts that do not add up to their bucket."""
    check_fits(Plan("", problem.cluster.name, tuple(buckets)), problem.numel, f"the profile of {problem.profile.model or 'the model'}")
    ready_us = problem.ready_us
    ready = [max(map(ready_us.__getitem__, bucket.tensors)) for bucket in buckets]
    order = sorted(range(len(buckets)), key=lambda index: (ready[index], -buckets[index].priority, index))
    sizes = [bucket.part_sizes() for bucket in buckets]
    priced = _priced(problem, buckets, sizes)
    chains: list[list[tuple[int, float]]] = []
    starts, rows = [], []
    for index in order:
        tasks, of_sizes = priced[_kind(buckets[index].option, problem.costs_of(buckets[index]))]
        for part, size in enumerate(sizes[index]):
            chains.append(of_sizes[size])
            starts.append(ready[index])
            rows += [Row(index, part, action) for action in tasks]
    made = chains_of(starts, chains, problem.threads.tolist(), problem.tensors.ready_us, ranks(buckets, order))
    timeline = run(made)
    return Simulated(timeline.step_us, made, timeline, tuple(rows))
