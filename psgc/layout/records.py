"""The records that members agree on: a declaration (what one rank wants to synchronise), a layout (its buckets and parts), and their JSON.

Pure records. ``building`` makes layouts; everyone else reads them.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, Literal, get_args

from psgc.codecs import BucketContext, Scheme, parse_scheme
from psgc.errors import PsgcError, RemoteProtocolError, UsageError
from psgc.program.order import Turn, order_of
from psgc.wire.messages import LEFT_OUT_IF_EMPTY, ErrorCode, decode_json, parse_record

# A part's priority stays well below the priority of a worker's decoding.
MAX_PRIORITY: Final = 1 << 31
LayoutKind = Literal["plan", "adhoc", "broadcast", "weights"]
OF_MODELS: Final = ("plan", "weights")  # the kinds whose layouts have a whole model's tensors
ITEM_BYTES: Final = {
    "float32": 4, "bfloat16": 2, "float16": 2, "float64": 8,
    "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "bool": 1,
}  # fmt: skip
MAX_LAYOUTS: Final = 1 << 16
NO_SERVER: Final = -1  # of a part that runs over groups of ranks
_LEFT_OUT: Final = (
    "servers", "option", "turns", "device", "keys", "contributors", "hashed", "rule", "awaited_singly", "members", "ahead",
    "backup",
)  # where they are empty  # fmt: skip
DEVICES: Final = ("", "gpu", "gpu/cpu", "cpu/gpu")  # of a bucket that every rank pushes
OF_EACH_RANK: Final = ("order", "used")  # fields of a Declaration that ranks need not agree on


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor as declared. group: the optimizer's parameter group where residuals follow each group's learning rate, else
    0; tensors of two groups or dtypes are never fused."""

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
    """One bucket of a declaration.

    tensors:    indices into the declaration's tensors, in this order.
    priority:   parts of higher priority are sent first.
    parts:      number of parts; 0: cut at ``part_bytes``.
    part_numel: elements of each part except the last; 0: parts of equal size.
    servers:    the server of each part; (): each goes to the one with the fewest bytes so far.
    option:     the actions of a bucket that runs over groups of ranks; (): every rank pushes the whole bucket to servers.
    turns:      with ``option``, the turns of the transfers, part after part, in the layout's order of transfers (``psgc.program.order``); (): psgc's
                default order.
    device:     without ``option``, the devices that encode and decode, such as ``gpu`` or ``gpu/cpu``; "": the CPU, or, for a bucket without a plan,
                wherever its gradients lie.
    members:    the ranks whose bucket it is, ascending: only they hold its tensors, exchange them, and count in the mean; (): all that declare it."""

    tensors: tuple[int, ...]
    codec: str
    priority: int
    parts: int = 0
    part_numel: int = 0
    servers: tuple[int, ...] = field(default=(), metadata=LEFT_OUT_IF_EMPTY)
    option: tuple[str, ...] = field(default=(), metadata=LEFT_OUT_IF_EMPTY)
    turns: tuple[int, ...] = field(default=(), metadata=LEFT_OUT_IF_EMPTY)
    device: str = field(default="", metadata=LEFT_OUT_IF_EMPTY)
    members: tuple[int, ...] = field(default=(), metadata=LEFT_OUT_IF_EMPTY)


@dataclass(frozen=True, slots=True)
class Declaration:
    """What one rank declares under one name. All fields must be equal on all ranks, except ``order`` (rank 0's counts) and ``used``.

    order:   indices of ``tensors`` in ready order.
    used:    indices of the tensors that had a gradient.
    buckets: a plan's buckets; (): tensors are fused in ready order, up to ``fuse_bytes``, and cut at ``part_bytes``.
    seed:    of random streams; -1: the session's own.
    hashed:  BytePS's hash function that chooses the servers of parts (``byteps_hash``); "": psgc's own placement.
    rule:    for weights, the rule by which servers update them (``update_rule``); ``root`` then brings their initial values.
    awaited_singly: the trainer waits for each bucket by itself, and not for all of them at the end of a step; so each bucket goes over all servers, in
                    short parts.

    turn:    the server of the first bucket, modulo the number of servers; -1: it follows from the order in which names were declared.

    members: the ranks that declare it, ascending, (): all ranks. A bucket that names no members of its own is theirs.

    backup:  how many ranks' contributions a step on a server need not wait for; they are added to the next step.

    Two fields continue the random streams and warm-ups of an earlier job's layout. stream: the name that the streams belong to, "" for ``name``; past_steps:
    the steps that the tensors have taken before.
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
    hashed: str = field(default="", metadata=LEFT_OUT_IF_EMPTY)
    rule: str = field(default="", metadata=LEFT_OUT_IF_EMPTY)
    awaited_singly: bool = field(default=False, metadata=LEFT_OUT_IF_EMPTY)
    members: tuple[int, ...] = field(default=(), metadata=LEFT_OUT_IF_EMPTY)
    backup: int = field(default=0, metadata=LEFT_OUT_IF_EMPTY)

    def to_json(self) -> dict[str, Any]:
        tensors = [_fields_of(tensor) for tensor in self.tensors]
        return {**_spec_fields(self), "tensors": tensors, "buckets": [_spec_fields(bucket) for bucket in self.buckets]}

    def digest(self) -> str:
        """A digest of the fields in which all ranks must agree."""
        body = self.to_json()
        agreed = {name: value for name, value in body.items() if name not in OF_EACH_RANK}
        return hashlib.sha256(json.dumps(agreed, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def check_same(self, earlier: Declaration) -> None:
        """Raise UsageError unless this is the ``earlier`` one of the same name again, in whatever order its tensors become ready now."""
        if self._fixed != earlier._fixed:
            raise UsageError(f"{self.name!r} was declared before as {earlier._described}, now as {self._described}; use another name")

    @property
    def _fixed(self) -> tuple[object, ...]:
        return self.kind, self.tensors, self.codec, self.mean, self.root, self.buckets, self.rule, self.members

    @property
    def _described(self) -> str:
        tensors = ", ".join(f"{t.dtype}{list(t.shape)}" for t in self.tensors[:3])
        return f"{self.kind} of {tensors}{' ...' if len(self.tensors) > 3 else ''} with codec {self.codec}"

    @property
    def unused(self) -> tuple[int, ...]:
        """For a plan, the indices of the tensors that had no gradient on this rank."""
        return tuple(sorted(set(range(len(self.tensors))).difference(self.used))) if self.kind == "plan" else ()

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Declaration:
        """Raises RemoteProtocolError for a body that no rank would send."""
        tensors, buckets = _tensors(body), _bucket_specs(body)
        declaration = replace(parse_record(cls, {**body, "tensors": [], "buckets": []}), tensors=tensors, buckets=buckets)
        known = range(len(tensors))
        if declaration.kind not in get_args(LayoutKind):
            raise _malformed(f"kind {declaration.kind!r}")
        if not set(declaration.order).union(declaration.used).issubset(known) or len(set(declaration.order)) < len(declaration.order):
            raise _malformed(f"order or used names tensors that are not among the {len(tensors)}, or twice")
        sizes = (declaration.part_bytes - 1, declaration.fuse_bytes, declaration.min_compress_bytes, declaration.past_steps)
        if not _ascending(declaration.members):
            raise _malformed(f"members {declaration.members!r:.80}")
        if min(*sizes, declaration.root, declaration.backup) < 0:
            raise _malformed("a size, a number of steps or ranks, or the root is negative")
        planned = [i for bucket in buckets for i in bucket.tensors]
        if not set(planned).issubset(known) or len(set(planned)) < len(planned):
            raise _malformed(f"buckets name tensors that are not among the {len(tensors)}, or twice")
        return declaration


def _fields_of(record: Any) -> dict[str, Any]:
    """The fields by name, as they are. dataclasses.asdict would copy each one: 20 times slower, for the thousands of tensors of a model."""
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def _spec_fields(spec: Declaration | BucketSpec | Layout | Bucket | Part) -> dict[str, Any]:
    return {name: value for name, value in _fields_of(spec).items() if name not in _LEFT_OUT or value}


def _bucket_fields(bucket: Bucket) -> dict[str, Any]:
    body = _spec_fields(bucket)
    return body | {name: [_spec_fields(part) for part in body[name]] for name in ("parts", "keys") if name in body}


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
        negative = min(spec.parts, spec.part_numel, *spec.servers) < 0
        if not spec.tensors or negative or not _ascending(spec.members) or abs(spec.priority) >= MAX_PRIORITY or spec.device not in DEVICES:
            raise _malformed(f"bucket {spec!r:.120}")
    return specs


def _ascending(ranks: tuple[int, ...]) -> bool:
    return min((0, *ranks)) >= 0 and all(first < second for first, second in pairwise(ranks))


def _malformed(what: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"declaration or layout: {what}; expected what psgc of this version sends", ErrorCode.MALFORMED)


@dataclass(frozen=True, slots=True)
class Part:
    """One round of a slice of a bucket. offset, numel: the slice; position: its position in the plan's order among the parts of its server and layout,
    where rounds of a slice follow one another; server: NO_SERVER if the bucket runs over groups of ranks; contributors: the ranks that push it,
    ascending; () for all."""

    key: int
    server: int
    offset: int
    numel: int
    position: int
    round: int = 0
    contributors: tuple[int, ...] = field(default=(), metadata=LEFT_OUT_IF_EMPTY)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Fused tensors, or one large tensor. tensors: indices into the layout's tensors, whose elements lie one after the other; option, turns, device, members:
    see ``BucketSpec``; keys: if the option uses servers, the slices of the parts that are pushed to them, each with its contributors."""

    index: int
    tensors: tuple[int, ...]
    numel: int
    dtype: str
    codec: str
    priority: int
    parts: tuple[Part, ...]
    option: tuple[str, ...] = field(default=(), metadata=LEFT_OUT_IF_EMPTY)
    turns: tuple[int, ...] = field(default=(), metadata=LEFT_OUT_IF_EMPTY)
    keys: tuple[Part, ...] = field(default=(), metadata=LEFT_OUT_IF_EMPTY)
    device: str = field(default="", metadata=LEFT_OUT_IF_EMPTY)
    members: tuple[int, ...] = field(default=(), metadata=LEFT_OUT_IF_EMPTY)

    def is_of(self, rank: int) -> bool:
        """Whether the rank takes part in its steps."""
        return not self.members or rank in self.members

    @property
    def over_groups(self) -> bool:
        """Whether the bucket runs over groups of ranks. It then uses servers only if it has ``keys``."""
        return bool(self.option)


@dataclass(frozen=True)
class Layout:
    """One declared set of tensors, fused and cut. Equal on every member: ``to_json`` is canonical. seed, stream, past_steps: of random
    streams and warm-ups: their step n is the layout's n-th step after ``past_steps``. turn: the server of the first part, modulo
    their number. rule, members, backup: as declared. ahead: bytes that each rank may push to a server ahead of its sums; 0: what the server has room for."""

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
    rule: str = field(default="", metadata=LEFT_OUT_IF_EMPTY)
    ahead: int = field(default=0, metadata=LEFT_OUT_IF_EMPTY)
    members: tuple[int, ...] = field(default=(), metadata=LEFT_OUT_IF_EMPTY)
    backup: int = field(default=0, metadata=LEFT_OUT_IF_EMPTY)

    @cached_property
    def number(self) -> int:
        """The layout's place in random streams: 32 bits that follow from its name, or from that of the layout that it goes on with, and
        so are the same whenever a job declares it."""
        return zlib.crc32(self.stream.encode())

    def scheme(self, bucket: Bucket) -> Scheme:
        """The scheme by which the bucket's parts are synchronised."""
        shapes = tuple(self.tensors[i].shape for i in bucket.tensors)
        return parse_scheme(bucket.codec, BucketContext(bucket.dtype, self.counted(bucket), self.mean, shapes))

    def counted(self, bucket: Bucket) -> int:
        """How many ranks' gradients a sum of the bucket is of."""
        return len(bucket.members) or self.workers

    def places(self, bucket: Bucket) -> Iterator[tuple[str, slice]]:
        """Where the elements of each of the bucket's tensors, by name, lie in it."""
        offset = 0
        for index in bucket.tensors:
            tensor = self.tensors[index]
            yield tensor.name, slice(offset, offset + tensor.numel)
            offset += tensor.numel

    def tensor_at(self, bucket: Bucket, element: int) -> str:
        """The name of the tensor that an element of the bucket belongs to."""
        return next(name for name, place in self.places(bucket) if element < place.stop)

    @property
    def served(self) -> Layout:
        """The layout for servers. Buckets that run over groups of ranks have their ``keys`` as parts, or are left out if they have none."""
        buckets = (replace(bucket, parts=bucket.keys) if bucket.over_groups else bucket for bucket in self.buckets)
        return replace(self, buckets=tuple(bucket for bucket in buckets if bucket.parts))

    @cached_property
    def order(self) -> tuple[Turn, ...]:
        """The order of all transfers of the buckets that run over groups of ranks. A turn's chain numbers the parts of these buckets."""
        return order_of([(bucket.option, len(bucket.parts), bucket.turns) for bucket in self.buckets if bucket.over_groups])

    def order_for(self, rank: int) -> tuple[Turn, ...]:
        """The ``order`` of the rank's own transfers, whose chains number the parts of its own buckets."""
        own, chains = dict[int, int](), 0
        for bucket in (bucket for bucket in self.buckets if bucket.over_groups):
            for chain in range(chains, chains + len(bucket.parts)) if bucket.is_of(rank) else ():
                own[chain] = len(own)
            chains += len(bucket.parts)
        return tuple(Turn(own[turn.chain], turn.action) for turn in self.order if turn.chain in own)

    def parts(self) -> Iterator[tuple[Bucket, Part]]:
        return ((bucket, part) for bucket in self.buckets for part in bucket.parts)

    @cached_property
    def parts_on_server(self) -> dict[int, int]:
        """The number of parts that each server holds, which is the length of one step in its window."""
        counts: dict[int, int] = {}
        for _, part in self.parts():
            counts[part.server] = counts.get(part.server, 0) + 1
        return counts

    def to_json(self) -> str:
        buckets = [_bucket_fields(bucket) for bucket in self.buckets]
        body = {**_spec_fields(self), "tensors": [_fields_of(tensor) for tensor in self.tensors], "buckets": buckets}
        return json.dumps(body, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Layout:
        """Raises RemoteProtocolError for a body that is no layout."""
        body = decode_json(text if isinstance(text, bytes) else text.encode(), "layout")
        buckets = body.get("buckets")
        if not isinstance(buckets, list):
            raise _malformed(f"buckets is {buckets!r:.80}")
        bare = parse_record(cls, {**body, "tensors": [], "buckets": []})
        return replace(bare, tensors=_tensors(body), buckets=tuple(map(_bucket, buckets)))


def _bucket(body: Any) -> Bucket:
    if not isinstance(body, dict) or "parts" not in body:
        raise _malformed(f"a bucket is {body!r:.80}")
    parts, keys = (_parts(body.get(name, []), name) for name in ("parts", "keys"))
    return replace(parse_record(Bucket, {**body, "parts": [], "keys": []}), parts=parts, keys=keys)


def _parts(found: Any, name: str) -> tuple[Part, ...]:
    if not isinstance(found, list):
        raise _malformed(f"{name} of a bucket is {found!r:.80}")
    return tuple(parse_record(Part, part) for part in found)


def make_key(layout: int, bucket: int, part: int) -> int:
    """A part's id: layout (16 bits), bucket (24), part (24)."""
    if bucket >= 1 << 24 or part >= 1 << 24:
        raise PsgcError(f"bucket {bucket}, part {part}: at most {1 << 24} of each; raise PSGC_PART_BYTES")
    assert layout < MAX_LAYOUTS
    return layout << 48 | bucket << 24 | part


def key_text(key: int) -> str:
    """A key as text for people: layout.bucket.part."""
    return f"{key >> 48}.{key >> 24 & 0xFFFFFF}.{key & 0xFFFFFF}"
