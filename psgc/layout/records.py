"""Tensors -> buckets -> parts -> keys: how a declared set of tensors is fused and cut, and which server holds what.

Pure. The scheduler builds a Layout from the ranks' declarations; workers and servers get it as JSON and build the same object.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, Literal, get_args

from psgc.codecs import BLOCK, BucketContext, Scheme, parse_scheme
from psgc.codecs.codec import MAX_PART
from psgc.errors import CodecError, LayoutMismatch, PsgcError, RemoteProtocolError, UsageError
from psgc.wire.messages import ErrorCode, decode_json, parse_record

# A part's priority stays well below what a worker puts decoding at.
MAX_PRIORITY: Final = 1 << 31
# Below this the header and the system call cost more than the payload.
MIN_PART_PAYLOAD_BYTES: Final = 64 << 10
# A part is to take no longer than this on the slowest connection: what has a higher priority waits for it, and two more in the queue.
MOST_PART_S: Final = 0.5
LayoutKind = Literal["plan", "adhoc", "broadcast"]
ITEM_BYTES: Final = {
    "float32": 4, "bfloat16": 2, "float16": 2, "float64": 8,
    "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "bool": 1,
}  # fmt: skip
MAX_LAYOUTS: Final = 1 << 16
OF_EACH_RANK: Final = ("order", "used")  # fields of a Declaration that ranks need not agree on


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor as declared. group: the optimizer's parameter group; tensors of two groups or dtypes are never fused."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise PsgcError(f"tensor {self.name!r}: dtype {self.dtype} is not supported; supported: {', '.join(ITEM_BYTES)}")

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """One bucket as it is wanted. ``tensors`` are indices into the declaration's, in this order; of two parts that could travel that of
    higher priority does. parts: how many, or 0 for as many as ``part_bytes`` says; part_numel: elements of each but the last, or 0 for
    parts as equal as whole blocks allow."""

    tensors: tuple[int, ...]
    codec: str
    priority: int
    parts: int = 0
    part_numel: int = 0


@dataclass(frozen=True, slots=True)
class Declaration:
    """What one rank declares under one name. order: indices of ``tensors`` in ready order; used: those that had a gradient; buckets: what
    a plan makes of the tensors; without any they are fused in ready order, up to ``fuse_bytes``, and cut at ``part_bytes``.

    seed: of random streams; -1: the session's own. stream, past_steps, turn: what makes the random streams, warm-ups and servers of an
    earlier job's layout go on: the name that its streams are of, or nothing for this name; steps that its tensors have taken before; and
    the server that the first bucket begins on, -1: by the layout's id.
    Everything must agree between ranks but order and used (rank 0's order counts).
    """

    name: str
    kind: LayoutKind
    tensors: tuple[TensorSpec, ...]
    codec: str
    mean: bool
    root: int = 0
    order: tuple[int, ...] = ()
    used: tuple[int, ...] = ()
    part_bytes: int = 4 << 20
    fuse_bytes: int = 4 << 20
    min_compress_bytes: int = 64 << 10
    buckets: tuple[BucketSpec, ...] = ()
    seed: int = -1
    stream: str = ""
    past_steps: int = 0
    turn: int = -1

    def to_json(self) -> dict[str, Any]:
        tensors = [_fields_of(tensor) for tensor in self.tensors]
        return {**_fields_of(self), "tensors": tensors, "buckets": [_fields_of(bucket) for bucket in self.buckets]}

    def digest(self) -> str:
        """Equal for ranks that declare the same, as far as they must."""
        body = self.to_json()
        agreed = {name: value for name, value in body.items() if name not in OF_EACH_RANK}
        return hashlib.sha256(json.dumps(agreed, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    @property
    def unused(self) -> tuple[int, ...]:
        """Of a plan, indices of the tensors that had no gradient on this rank."""
        return tuple(sorted(set(range(len(self.tensors))).difference(self.used))) if self.kind == "plan" else ()

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Declaration:
        """Raises RemoteProtocolError for what no rank would declare."""
        tensors, buckets = _tensors(body), _bucket_specs(body)
        declaration = replace(parse_record(cls, {**body, "tensors": [], "buckets": []}), tensors=tensors, buckets=buckets)
        known = range(len(tensors))
        if declaration.kind not in get_args(LayoutKind):
            raise _malformed(f"kind {declaration.kind!r}")
        if not set(declaration.order).union(declaration.used).issubset(known) or len(set(declaration.order)) < len(declaration.order):
            raise _malformed(f"order or used names tensors that are not among the {len(tensors)}, or twice")
        sizes = (declaration.part_bytes - 1, declaration.fuse_bytes, declaration.min_compress_bytes, declaration.past_steps)
        if min(*sizes, declaration.root) < 0:
            raise _malformed("a size, a number of steps or the root is negative")
        planned = [i for bucket in buckets for i in bucket.tensors]
        if not set(planned).issubset(known) or len(set(planned)) < len(planned):
            raise _malformed(f"buckets name tensors that are not among the {len(tensors)}, or twice")
        return declaration


def _fields_of(record: Any) -> dict[str, Any]:
    """The fields by name, as they are. dataclasses.asdict would copy each one: 20 times slower, for the thousands of tensors of a model."""
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def _tensors(body: dict[str, Any]) -> tuple[TensorSpec, ...]:
    tensors = body.get("tensors")
    if not isinstance(tensors, list):
        raise _malformed(f"tensors is {tensors!r:.80}")
    try:
        specs = tuple(parse_record(TensorSpec, tensor) for tensor in tensors)
    except RemoteProtocolError:
        raise
    except PsgcError as error:
        raise _malformed(str(error)) from None
    if any(extent < 0 for spec in specs for extent in spec.shape):
        raise _malformed("a shape is negative")
    return specs


def _bucket_specs(body: dict[str, Any]) -> tuple[BucketSpec, ...]:
    buckets = body.get("buckets")
    if not isinstance(buckets, list):
        raise _malformed(f"buckets is {buckets!r:.80}")
    specs = tuple(parse_record(BucketSpec, bucket) for bucket in buckets)
    for spec in specs:
        if not spec.tensors or min(spec.parts, spec.part_numel) < 0 or abs(spec.priority) >= MAX_PRIORITY:
            raise _malformed(f"bucket {spec!r:.120}")
    return specs


def _malformed(what: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"declaration or layout: {what}; expected what psgc of this version sends", ErrorCode.MALFORMED)


@dataclass(frozen=True, slots=True)
class Part:
    """One round of a slice of a bucket: what travels. offset, numel: the slice. position: its place in the plan's order among the parts
    of its server and layout; rounds of a slice follow one another."""

    key: int
    server: int
    offset: int
    numel: int
    position: int
    round: int = 0


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors fused, or one large tensor. ``tensors`` are indices into the layout's, laid out one after the other."""

    index: int
    tensors: tuple[int, ...]
    numel: int
    dtype: str
    codec: str
    priority: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Layout:
    """One declared set of tensors, fused and cut. Equal on every member: ``to_json`` is canonical. seed, stream, past_steps: of random
    streams and warm-ups: their step n is the layout's n-th step after ``past_steps``. turn: the server of the first part, modulo
    their number."""

    id: int
    name: str
    kind: LayoutKind
    mean: bool
    root: int
    workers: int
    tensors: tuple[TensorSpec, ...]
    buckets: tuple[Bucket, ...]
    seed: int = 0
    stream: str = ""
    past_steps: int = 0
    turn: int = 0

    @cached_property
    def number(self) -> int:
        """The layout's place in random streams: 32 bits that follow from its name, or from that of the layout that it goes on with, and
        so are the same whenever a job declares it."""
        return zlib.crc32(self.stream.encode())

    def scheme(self, bucket: Bucket) -> Scheme:
        """How the bucket's parts are synchronised."""
        shapes = tuple(self.tensors[i].shape for i in bucket.tensors)
        return parse_scheme(bucket.codec, BucketContext(bucket.dtype, self.workers, self.mean, shapes))

    def places(self, bucket: Bucket) -> Iterator[tuple[str, slice]]:
        """Where the elements of each of the bucket's tensors, by name, lie in it."""
        offset = 0
        for index in bucket.tensors:
            tensor = self.tensors[index]
            yield tensor.name, slice(offset, offset + tensor.numel)
            offset += tensor.numel

    def parts(self) -> Iterator[tuple[Bucket, Part]]:
        return ((bucket, part) for bucket in self.buckets for part in bucket.parts)

    @cached_property
    def parts_on_server(self) -> dict[int, int]:
        """How many parts each server holds: the length of one turn of its window."""
        counts: dict[int, int] = {}
        for _, part in self.parts():
            counts[part.server] = counts.get(part.server, 0) + 1
        return counts

    def to_json(self) -> str:
        buckets = [{**_fields_of(bucket), "parts": [_fields_of(part) for part in bucket.parts]} for bucket in self.buckets]
        body = {**_fields_of(self), "tensors": [_fields_of(tensor) for tensor in self.tensors], "buckets": buckets}
        return json.dumps(body, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Layout:
        """Raises RemoteProtocolError for what is no layout."""
        body = decode_json(text if isinstance(text, bytes) else text.encode(), "layout")
        buckets = body.get("buckets")
        if not isinstance(buckets, list):
            raise _malformed(f"buckets is {buckets!r:.80}")
        bare = parse_record(cls, {**body, "tensors": [], "buckets": []})
        return replace(bare, tensors=_tensors(body), buckets=tuple(map(_bucket, buckets)))


def _bucket(body: Any) -> Bucket:
    parts = body.get("parts") if isinstance(body, dict) else None
    if not isinstance(parts, list):
        raise _malformed(f"parts of a bucket is {parts!r:.80}")
    return replace(parse_record(Bucket, {**body, "parts": []}), parts=tuple(parse_record(Part, part) for part in parts))


def make_key(layout: int, bucket: int, part: int) -> int:
    """A part's id: layout (16 bits), bucket (24), part (24)."""
    if bucket >= 1 << 24 or part >= 1 << 24:
        raise PsgcError(f"bucket {bucket}, part {part}: at most {1 << 24} of each; raise PSGC_PART_BYTES")
    assert layout < MAX_LAYOUTS
    return layout << 48 | bucket << 24 | part


def key_text(key: int) -> str:
    """A key as people read it."""
    return f"{key >> 48}.{key >> 24 & 0xFFFFFF}.{key & 0xFFFFFF}"


def part_numel(scheme: Scheme, dtype: str, part_bytes: int, rate: int = 0) -> int:
    """Elements in a full part: ``part_bytes`` of the tensor, but never under 64 KB of payload where there can be as much; a multiple of
    BLOCK. rate: bytes a second of the slowest connection, or 0; the part is halved until no message of it takes longer than MOST_PART_S
    there, so that rates measured a little differently give the same parts."""
    blocks = max(1, part_bytes // ITEM_BYTES[dtype] // BLOCK)
    while 2 * blocks * BLOCK <= MAX_PART and scheme.push_bound(blocks * BLOCK) < MIN_PART_PAYLOAD_BYTES:
        blocks *= 2
    while rate and blocks > 1 and _message_bound(scheme, blocks * BLOCK) > MOST_PART_S * rate:
        blocks = -(-blocks // 2)
    return blocks * BLOCK


def _message_bound(scheme: Scheme, numel: int) -> int:
    """Most bytes of one payload of such a part, in any round and either direction."""
    pairs = ((round_.pair, round_.numel) for round_ in scheme.rounds(numel))
    return max(max(pair.push.payload_bound(count), pair.pull.payload_bound(count)) for pair, count in pairs)


def build_layout(
    declaration: Declaration, *, layout_id: int, servers: int, workers: int, used_by_all: frozenset[int] | None = None, rate: int = 0
) -> Layout:  # fmt: skip
    """Make the declaration's buckets, or fuse small tensors in ready order; cut what is large, and spread the parts over ``servers``.

    Without buckets of the declaration's own: tensors of a plan that some rank had no gradient for stand alone (``used_by_all`` has the
    others), so that a bucket skipped by all leaves their p.grad as it was; and a plan's bucket of fewer than ``min_compress_bytes``
    travels uncompressed; parts are no larger than ``rate``, bytes a second of the slowest connection, can carry in MOST_PART_S (0: of any
    speed). The server of a bucket's first part rotates, so that one layer's burst does not hit one server. Raises
    CodecError, naming the tensor, for one that the codec cannot carry; UsageError for buckets that cannot be made.
    """
    tensors = declaration.tensors
    if declaration.buckets:
        check_buckets(declaration)
        specs = sorted(declaration.buckets, key=lambda spec: -spec.priority)
    else:
        specs = [_fused(declaration, members, number) for number, members in enumerate(_fuse(declaration, used_by_all))]
    buckets: list[Bucket] = []
    counts = [0] * servers
    turn = layout_id if declaration.turn < 0 else declaration.turn  # layouts of one part each, too, are spread over the servers
    for index, spec in enumerate(specs):
        dtype = tensors[spec.tensors[0]].dtype
        numel = sum(tensors[i].numel for i in spec.tensors)
        context = BucketContext(dtype, workers, declaration.mean, tuple(tensors[i].shape for i in spec.tensors))
        try:
            scheme = parse_scheme(spec.codec, context)
            sizes = _cut(spec, numel, scheme, dtype, declaration.part_bytes, rate)
        except CodecError as error:
            raise CodecError(f"tensor {tensors[spec.tensors[0]].name!r}: {error}") from None
        parts = _place(scheme, sizes, layout_id, index, turn + index, counts)
        buckets.append(Bucket(index, spec.tensors, numel, dtype, scheme.canonical, spec.priority, parts))
    return Layout(
        layout_id, declaration.name, declaration.kind, declaration.mean, declaration.root, workers, tensors, tuple(buckets),
        max(declaration.seed, 0), declaration.stream or declaration.name, declaration.past_steps, turn,
    )  # fmt: skip


def _fused(declaration: Declaration, members: tuple[int, ...], number: int) -> BucketSpec:
    """Buckets that become ready first are sent first: nothing is gained by waiting when step() needs them all."""
    nbytes = sum(declaration.tensors[i].numel * ITEM_BYTES[declaration.tensors[i].dtype] for i in members)
    small = declaration.kind == "plan" and nbytes < declaration.min_compress_bytes
    return BucketSpec(members, "none" if small or declaration.kind == "broadcast" else declaration.codec, -number)


def _place(scheme: Scheme, sizes: Sequence[int], layout_id: int, bucket: int, turn: int, counts: list[int]) -> tuple[Part, ...]:
    """Slices of these sizes, every round of each a part, from server ``turn`` on. counts: parts that each server has so far."""
    parts: list[Part] = []
    offset = 0
    for number, size in enumerate(sizes):
        server = (turn + number) % len(counts)
        for round_ in range(len(scheme.rounds(size))):
            parts.append(Part(make_key(layout_id, bucket, len(parts)), server, offset, size, counts[server], round_))
            counts[server] += 1
        offset += size
    return tuple(parts)


def _cut(spec: BucketSpec, numel: int, scheme: Scheme, dtype: str, part_bytes: int, rate: int) -> list[int]:
    """Elements of each slice; a plan's are as planned. Raises CodecError where the codec cannot carry them."""
    if scheme.whole and spec.parts > 1:
        raise CodecError(f"codec {scheme.canonical} does not cut tensors, but {spec.parts} parts are planned; plan 1")
    if spec.parts and not spec.part_numel:
        sizes = equal_parts(numel, spec.parts)
    else:
        whole = max(numel, 1) if scheme.whole else part_numel(scheme, dtype, part_bytes, rate)
        sizes = full_parts(numel, spec.part_numel or whole)
    if sizes[0] > MAX_PART:
        remedy = "plan more parts" if spec.parts else "lower PSGC_PART_BYTES"
        remedy = "it does not cut tensors: use another codec for this one" if scheme.whole else remedy
        raise CodecError(f"codec {scheme.canonical}: a part of {sizes[0]} elements, at most {MAX_PART}; {remedy}")
    return sizes


def full_parts(numel: int, size: int) -> list[int]:
    """Parts of ``size`` elements, the last of what is left; one for no elements."""
    return [min(size, numel - offset) for offset in range(0, max(numel, 1), size)]


def equal_parts(numel: int, parts: int) -> list[int]:
    """Elements of each of so many parts, cut at blocks and as equal as that allows, larger ones first. Not for more parts than blocks."""
    least, more = divmod(-(-numel // BLOCK), parts)
    ends = [min((number * least + min(number, more)) * BLOCK, numel) for number in range(parts + 1)]
    return [end - start for start, end in pairwise(ends)]


def check_buckets(declaration: Declaration) -> None:
    """Raise UsageError, naming the tensor, unless the declared buckets can be made: every tensor with elements is in one, those of a bucket
    are of one group and dtype, and there are blocks enough for its parts."""
    tensors, placed = declaration.tensors, {i for bucket in declaration.buckets for i in bucket.tensors}
    for i, tensor in enumerate(tensors):
        if tensor.numel and i not in placed:
            raise UsageError(f"tensor {tensor.name!r} is in no bucket of the plan; make a plan for this model")
    for bucket in declaration.buckets:
        first = tensors[bucket.tensors[0]]
        for attribute, what in (("dtype", "dtype"), ("group", "parameter group")):
            wanted = getattr(first, attribute)
            for tensor in (tensors[i] for i in bucket.tensors):
                if getattr(tensor, attribute) != wanted:
                    raise UsageError(
                        f"tensor {tensor.name!r} is of {what} {getattr(tensor, attribute)}, but shares a bucket of the plan with "
                        f"{first.name!r} of {wanted}; plan a bucket for each {what}"
                    )
        _check_parts(bucket, first.name, sum(tensors[i].numel for i in bucket.tensors))


def _check_parts(bucket: BucketSpec, name: str, numel: int) -> None:
    blocks = -(-numel // BLOCK)
    if bucket.parts > max(blocks, 1):
        raise UsageError(f"tensor {name!r}: its bucket of {numel} elements is cut into {bucket.parts} parts; "
                         f"parts are cut at multiples of {BLOCK}, so plan at most {max(blocks, 1)}")  # fmt: skip
    if bucket.part_numel and (bucket.part_numel % BLOCK or -(-numel // bucket.part_numel) != bucket.parts):
        raise UsageError(f"tensor {name!r}: its bucket of {numel} elements is cut into {bucket.parts} parts of {bucket.part_numel}; "
                         f"plan parts of a multiple of {BLOCK} that add up to it")  # fmt: skip


def _fuse(declaration: Declaration, used_by_all: frozenset[int] | None) -> list[tuple[int, ...]]:
    """Tensor indices of each bucket, in ready order; empty tensors are left out, for they have nothing to say."""
    tensors, fuse_bytes = declaration.tensors, declaration.fuse_bytes
    listed = set(declaration.order)
    order = [*declaration.order, *(i for i in range(len(tensors)) if i not in listed)]
    done: list[tuple[int, ...]] = []
    open_buckets: dict[tuple[int, str], list[int]] = {}
    sizes: dict[tuple[int, str], int] = {}
    for i in order:
        size = tensors[i].numel * ITEM_BYTES[tensors[i].dtype]
        if size == 0:
            continue
        alone = size >= fuse_bytes or (used_by_all is not None and i not in used_by_all)
        if alone:
            done.append((i,))
            continue
        kind = (tensors[i].group, tensors[i].dtype)
        if sizes.get(kind, 0) + size > fuse_bytes and kind in open_buckets:
            done.append(tuple(open_buckets.pop(kind)))
            sizes[kind] = 0
        open_buckets.setdefault(kind, []).append(i)
        sizes[kind] = sizes.get(kind, 0) + size
    done.extend(tuple(members) for members in open_buckets.values())
    return done


def compare(first: Declaration, rank_first: int, other: Declaration, rank_other: int) -> None:
    """Raise LayoutMismatch, naming the first tensor and the ranks that differ, unless the two declarations agree."""

    def differ(what: str, a: object, b: object) -> LayoutMismatch:
        return LayoutMismatch(
            f"{first.name!r}: {what} on rank {rank_first} is {a}, on rank {rank_other} it is {b}; every rank must declare the same"
        )

    for a, b in zip(first.tensors, other.tensors, strict=False):
        if a.name != b.name:
            raise differ("the next tensor", repr(a.name), repr(b.name))
        for attribute in ("shape", "dtype", "group"):
            if getattr(a, attribute) != getattr(b, attribute):
                raise differ(f"{attribute} of tensor {a.name!r}", getattr(a, attribute), getattr(b, attribute))
    if len(first.tensors) != len(other.tensors):
        longer, rank = (first, rank_first) if len(first.tensors) > len(other.tensors) else (other, rank_other)
        extra = longer.tensors[min(len(first.tensors), len(other.tensors))].name
        lacking = rank_other if rank == rank_first else rank_first
        raise LayoutMismatch(
            f"{first.name!r}: tensor {extra!r} is on rank {rank} but not on rank {lacking}; build the same model everywhere"
        )
    for attribute in (
        "kind",
        "codec",
        "mean",
        "root",
        "part_bytes",
        "fuse_bytes",
        "min_compress_bytes",
        "seed",
        "stream",
        "past_steps",
        "turn",
    ):
        if getattr(first, attribute) != getattr(other, attribute):
            raise differ(attribute, getattr(first, attribute), getattr(other, attribute))
    if first.buckets != other.buckets:
        raise differ(*_planned_apart(first, other))


def _planned_apart(first: Declaration, other: Declaration) -> tuple[str, str, str]:
    """What of the plans differs first, and how it stands in each."""
    for number, (a, b) in enumerate(zip(first.buckets, other.buckets, strict=False)):
        bucket = f"of the plan's bucket {number} (of {first.tensors[a.tensors[0]].name!r})"
        if a.tensors != b.tensors:
            mine, others = ([first.tensors[i].name for i in spec.tensors] for spec in (a, b))
            return f"tensors {bucket}", f"{mine!s:.80}", f"{others!s:.80}"
        for attribute in ("codec", "priority", "parts", "part_numel"):
            if getattr(a, attribute) != getattr(b, attribute):
                return f"{attribute} {bucket}", getattr(a, attribute), getattr(b, attribute)
    return "the number of the plan's buckets", str(len(first.buckets)), str(len(other.buckets))
