"""Tensors -> buckets -> parts -> keys: how a declared set of tensors is fused and cut, and which server holds what.

Pure. The scheduler builds a Layout from the ranks' declarations; workers and servers get it as JSON and build the same object.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Final, Literal, get_args

from psgc.codecs import BLOCK, Scheme, Setting, parse_scheme
from psgc.codecs.codec import MAX_PART
from psgc.errors import CodecError, LayoutMismatch, PsgcError, RemoteProtocolError
from psgc.wire.messages import ErrorCode, decode_json, parse_record

# Below this the header and the system call cost more than the payload.
MIN_PART_PAYLOAD_BYTES: Final = 64 << 10
LayoutKind = Literal["plan", "adhoc", "broadcast"]
ITEM_BYTES: Final = {
    "float32": 4, "bfloat16": 2, "float16": 2, "float64": 8,
    "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "bool": 1,
}  # fmt: skip
MAX_LAYOUTS: Final = 1 << 16


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
class Declaration:
    """What one rank declares under one name. order: indices of ``tensors`` in ready order; used: those that had a gradient.

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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Declaration:
        """Raises RemoteProtocolError for what no rank would declare."""
        tensors = _tensors(body)
        declaration = replace(parse_record(cls, {**body, "tensors": []}), tensors=tensors)
        known = range(len(tensors))
        if declaration.kind not in get_args(LayoutKind):
            raise _malformed(f"kind {declaration.kind!r}")
        if not set(declaration.order).union(declaration.used).issubset(known) or len(set(declaration.order)) < len(declaration.order):
            raise _malformed(f"order or used names tensors that are not among the {len(tensors)}, or twice")
        if min(declaration.part_bytes - 1, declaration.fuse_bytes, declaration.min_compress_bytes, declaration.root) < 0:
            raise _malformed("a size or the root is negative")
        return declaration


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
    """One declared set of tensors, fused and cut. Equal on every member: ``to_json`` is canonical."""

    id: int
    name: str
    kind: LayoutKind
    mean: bool
    root: int
    workers: int
    tensors: tuple[TensorSpec, ...]
    buckets: tuple[Bucket, ...]

    def scheme(self, bucket: Bucket) -> Scheme:
        """How the bucket's parts are synchronised."""
        shapes = tuple(self.tensors[i].shape for i in bucket.tensors)
        return parse_scheme(bucket.codec, Setting(bucket.dtype, self.workers, self.mean, shapes))

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
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

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


def part_numel(scheme: Scheme, dtype: str, part_bytes: int) -> int:
    """Elements in a full part: ``part_bytes`` of the tensor, but never under 64 KB of payload where there can be as much; a multiple of
    BLOCK."""
    blocks = max(1, part_bytes // ITEM_BYTES[dtype] // BLOCK)
    while 2 * blocks * BLOCK <= MAX_PART and scheme.push_bound(blocks * BLOCK) < MIN_PART_PAYLOAD_BYTES:
        blocks *= 2
    return blocks * BLOCK


def _check_step(scheme: Scheme, numel: int) -> None:
    if numel > MAX_PART:
        remedy = "it does not cut tensors: use another codec for this one" if scheme.whole else "lower PSGC_PART_BYTES"
        raise CodecError(f"codec {scheme.canonical}: a part of {numel} elements, at most {MAX_PART}; {remedy}")


def build_layout(
    declaration: Declaration, *, layout_id: int, servers: int, workers: int, used_by_all: frozenset[int] | None = None
) -> Layout:  # fmt: skip
    """Fuse small tensors in ready order, cut large ones, and spread the parts over ``servers``.

    A plan's tensors that some rank had no gradient for stand alone (``used_by_all`` has the others): a bucket skipped by all then
    leaves their p.grad as it was. A plan's bucket of fewer than ``min_compress_bytes`` travels uncompressed. The server of
    a bucket's first part rotates, so that one layer's burst does not hit one server. Raises CodecError, naming the tensor, for one that
    the codec cannot carry.
    """
    tensors = declaration.tensors
    fused = _fuse(declaration, used_by_all)
    buckets: list[Bucket] = []
    counts = [0] * servers
    turn = layout_id  # layouts of one part each, too, are spread over the servers
    for index, members in enumerate(fused):
        dtype = tensors[members[0]].dtype
        numel = sum(tensors[i].numel for i in members)
        small = declaration.kind == "plan" and numel * ITEM_BYTES[dtype] < declaration.min_compress_bytes
        setting = Setting(dtype, workers, declaration.mean, tuple(tensors[i].shape for i in members))
        codec = "none" if small or declaration.kind == "broadcast" else declaration.codec
        try:
            scheme = parse_scheme(codec, setting)
            step = max(numel, 1) if scheme.whole else part_numel(scheme, dtype, declaration.part_bytes)
            _check_step(scheme, min(step, numel))
        except CodecError as error:
            raise CodecError(f"tensor {tensors[members[0]].name!r}: {error}") from None
        parts: list[Part] = []
        for number, offset in enumerate(range(0, max(numel, 1), step)):
            server, size = (turn + number) % servers, min(step, numel - offset)
            for round_ in range(len(scheme.rounds(size))):
                parts.append(Part(make_key(layout_id, index, len(parts)), server, offset, size, counts[server], round_))
                counts[server] += 1
        turn += 1
        # Buckets that become ready first are sent first: nothing is gained by waiting when step() needs them all.
        buckets.append(Bucket(index, members, numel, dtype, scheme.canonical, -index, tuple(parts)))
    return Layout(layout_id, declaration.name, declaration.kind, declaration.mean, declaration.root, workers, tensors, tuple(buckets))


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
    for attribute in ("kind", "codec", "mean", "root", "part_bytes", "fuse_bytes", "min_compress_bytes"):
        if getattr(first, attribute) != getattr(other, attribute):
            raise differ(attribute, getattr(first, attribute), getattr(other, attribute))


def used_by_every_rank(declarations: Sequence[Declaration]) -> frozenset[int]:
    """Tensors that had a gradient on every rank when the layout was declared."""
    return frozenset.intersection(*(frozenset(d.used) for d in declarations))
