"""Makes a layout from a declaration: fuses small tensors into buckets, cuts buckets into parts, and spreads the parts over the servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from psgc.codecs import BLOCK, BucketContext, Scheme, parse_scheme
from psgc.codecs.codec import MAX_PART
from psgc.codecs.relay import RelayCodec
from psgc.codecs.scheme import PairScheme
from psgc.errors import CodecError, UsageError
from psgc.layout.byteps_hash import HashPlacement
from psgc.layout.collective import default_option, needs_servers, refusal
from psgc.layout.contributions import Piece, in_order, keys_of_pieces, pieces_of
from psgc.layout.machines import Machines
from psgc.layout.placement import Excess, Load, Placement, servers_in_turn, total_of, work_of
from psgc.layout.records import ITEM_BYTES, MAX_LAYOUTS, NO_SERVER, OF_MODELS, Bucket, BucketSpec, Declaration, Layout, Part, make_key
from psgc.layout.speed import UNKNOWN, Speed
from psgc.layout.update_rule import UpdateRule
from psgc.program.ranks import Ranks
from psgc.wire.frames import MAX_PAYLOAD_BYTES

# Below this the header and the system call cost more than the payload.
MIN_PART_PAYLOAD_BYTES: Final = 64 << 10
# A part should take no longer than this on the slowest connection, because a part of higher priority waits for it, and for two more in the queue.
MOST_PART_S: Final = 0.5
# One server's share of a model's gradients is cut into at least this many parts. So no server has more than a quarter above the mean, and pulls begin
# while most pushes are still to come. Below the least size, messages would cost more than that gains. With many servers, each holds less of the model, and
# the last parts take a longer share of the exchange, so parts are smaller (benchmarks/placement.py).
PARTS_ON_A_SERVER: Final = 4
LEAST_SHARE_BYTES: Final = 256 << 10
MANY_SERVERS: Final = 9
PARTS_ON_ONE_OF_MANY: Final = 8
LEAST_SHARE_OF_MANY_BYTES: Final = 128 << 10
# If the busiest machine's load exceeds the least possible load by more than this share, the last buckets are cut into smaller parts to even it out;
# unless the excess takes a 10 Gbit/s link less than a millisecond, which is not worth the messages.
LEVEL: Final = 0.01
LEAST_EXCESS_BYTES: Final = 2 << 20
LEAST_LEVELLING_BYTES: Final = 64 << 10
# Without servers, the parts of a named tensor or a broadcast run one after the other, and each collective overlaps its own work. So uncompressed
# tensors are cut only if the sums of one part would need more memory than this.
WHOLE_BYTES: Final = 64 << 20
UNCOMPRESSED: Final = "none"
# Servers return a part's sum while later parts are pushed, so an exchange takes as long as all pushes and the last part's pull. On a slow connection parts take
# this long, or a sixty-fourth of what a server has. Only with codecs whose results do not depend on how a tensor is cut; the others' would differ from run to
# run, as the measured rate does.
PIPELINED_PART_S: Final = 0.01
MOST_PIPELINED: Final = 64
# With CrossBarrier, the trainer waits for each bucket by itself. A part of such a bucket takes this long on the slowest connection, so that a more urgent
# part waits no longer, and servers return a part's sum while the next part is being sent. The bucket lies on all servers in equal shares, so that all links
# carry it at the same time. Parts are not so short, nor so many, that messages cost more than that gains.
AWAITED_PART_S: Final = 0.005
LEAST_AWAITED_PART_BYTES: Final = 32 << 10
MOST_AWAITED_PARTS: Final = 64


def part_numel(scheme: Scheme, dtype: str, part_bytes: int, rate: int = 0) -> int:
    """Elements in a full part, a multiple of BLOCK: ``part_bytes`` of the tensor, but at least MIN_PART_PAYLOAD_BYTES of payload if a part can have that much;
    where the answer carries every rank's payload, of the answer. rate: bytes a second of the slowest connection, 0 for unlimited; the part is halved until none
    of its messages takes longer than MOST_PART_S on it. Halving makes slightly different measured rates give the same parts."""
    blocks = max(1, part_bytes // ITEM_BYTES[dtype] // BLOCK)
    bound = _message_bound if _relayed(scheme) else Scheme.push_bound
    while 2 * blocks * BLOCK <= MAX_PART and bound(scheme, blocks * BLOCK) < MIN_PART_PAYLOAD_BYTES:
        blocks *= 2
    while rate and blocks > 1 and _message_bound(scheme, blocks * BLOCK) > MOST_PART_S * rate:
        blocks = -(-blocks // 2)
    return blocks * BLOCK


def _relayed(scheme: Scheme) -> bool:
    """Whether servers forward every rank's payload: a server sends so many times what it receives, so that its share must not be larger than the others'."""
    return any(isinstance(round_.pair.pull, RelayCodec) for round_ in scheme.rounds(BLOCK))


def _message_bound(scheme: Scheme, numel: int) -> int:
    """Upper bound on the bytes of one payload of a part of ``numel`` elements, over all rounds and both directions."""
    pairs = ((round_.pair, round_.numel) for round_ in scheme.rounds(numel))
    return max(max(pair.push.payload_bound(count), pair.pull.payload_bound(count)) for pair, count in pairs)


def _pipelined_bytes(scheme: Scheme, dtype: str, part_bytes: int, rate: int, share: float) -> int:
    """``part_bytes``, halved until a payload would take less than PIPELINED_PART_S. share: the bytes of gradients that a server has."""
    numel = part_bytes // ITEM_BYTES[dtype]
    least = max(PIPELINED_PART_S * rate, share / part_bytes * scheme.push_bound(numel) / MOST_PIPELINED, MIN_PART_PAYLOAD_BYTES)
    while numel > BLOCK and scheme.push_bound(numel // 2) >= least:
        numel //= 2
    return numel * ITEM_BYTES[dtype]


def _parts_awaited(scheme: Scheme, numel: int, dtype: str, part_bytes: int, servers: int, rate: int) -> int:
    """The number of parts of a bucket that the trainer waits for by itself; 0: cut it like any other bucket. rate: bytes per second of the slowest
    connection; 0 for unlimited."""
    if not rate or scheme.whole:
        return 0
    nbytes, usual = _message_bound(scheme, numel), -(-numel * ITEM_BYTES[dtype] // part_bytes)
    # A power of two, so that slightly different measured rates give the same parts.
    size = max(1 << int(AWAITED_PART_S * rate).bit_length() - 1, LEAST_AWAITED_PART_BYTES)
    parts = min(-(-nbytes // size), MOST_AWAITED_PARTS)
    more = -(-parts // servers) * servers
    even = more if nbytes // more >= max(size // 4, LEAST_AWAITED_PART_BYTES) else parts // servers * servers
    return min(max(even or parts, usual), -(-numel // BLOCK))


def build_layout(
    declaration: Declaration, *, layout_id: int, servers: int, workers: int, used_by_all: frozenset[int] | None = None, speed: Speed = UNKNOWN,
    ranks: Ranks | None = None, machines: Machines | None = None,
) -> Layout:  # fmt: skip
    """Fuse tensors into buckets, cut large buckets into parts, and spread the parts over ``servers``.

    If the declaration has buckets (from a plan), they are used as they are. Otherwise small tensors are fused in ready order. A tensor that is not
    in ``used_by_all`` (some rank had no gradient for it) gets a bucket of its own, so that its p.grad stays as it was if all ranks skip it. A bucket
    of fewer than ``min_compress_bytes`` travels uncompressed. A part is small enough to take at most MOST_PART_S at the
    ``speed`` of the slowest connection (AWAITED_PART_S if buckets are ``awaited_singly``; PIPELINED_PART_S with codecs that can be cut anywhere), and of a
    plan's tensors it has at most a quarter of what a server has of them on average (an eighth of many servers'), unless it would have fewer than
    LEAST_SHARE_BYTES.

    Parts are spread over the servers by their cost on ``machines`` (``placement``; None: unknown machines), unless a declared bucket names
    its parts' servers. If a machine would then have clearly more than its share, the last buckets are cut into smaller parts. ranks: the ranks of
    each node, which determine the contributors to keys behind sums within nodes; by default every rank is a node. Without servers, every
    bucket runs over groups of ranks, with the option that it names or with ``collective.default_option``. Raises CodecError,
    which names the tensor, if the codec cannot carry it; UsageError if the declared buckets are impossible.
    """
    tensors = declaration.tensors
    if declaration.kind == "weights":
        _check_weights(declaration, servers)
    if declaration.buckets:
        check_buckets(declaration)
        specs = sorted(declaration.buckets, key=lambda spec: -spec.priority)
    else:
        specs = [_fused(declaration, members, number) for number, members in enumerate(_fuse(declaration, used_by_all))]
    if declaration.members:
        specs = [spec if spec.members else replace(spec, members=declaration.members) for spec in specs]
    turn = layout_id if declaration.turn < 0 else declaration.turn  # names of one part each, too, are spread over the servers
    hashed = HashPlacement.parse(declaration.hashed) if declaration.hashed and machines is not None else None
    machines = machines or Machines.alone(servers, workers)
    part_bytes, rate = _most_part_bytes(declaration, servers), speed.rate
    ranks = ranks or Ranks((1,) * workers)
    cut = [_sliced(declaration, index, spec, ranks, servers, part_bytes, rate) for index, spec in enumerate(specs)]
    places, beyond = _spread(cut, machines, turn, rate, hashed)
    if declaration.kind in OF_MODELS and hashed is None and beyond.bytes > max(LEVEL * beyond.least, LEAST_EXCESS_BYTES):
        finer = _with_finer_tail(declaration, cut, machines, ranks, part_bytes, rate, beyond)
        levelled, then = _spread(finer, machines, turn, rate, hashed)
        if then.bytes < beyond.bytes:
            cut, places = finer, levelled
    counts = [0] * servers
    buckets = tuple(
        _bucket(each, index, of_each, layout_id, workers, counts) for index, (each, of_each) in enumerate(zip(cut, places, strict=True))
    )
    return in_order(Layout(
        layout_id, declaration.name, declaration.kind, declaration.mean, declaration.root, workers, tensors, buckets,
        max(declaration.seed, 0), declaration.stream or declaration.name, declaration.past_steps, turn, declaration.rule,
        _ahead(cut, speed, servers) if declaration.kind == "plan" and servers else 0, declaration.members,
        declaration.backup,
    ))  # fmt: skip


def _ahead(cut: Sequence[_Slices], speed: Speed, servers: int) -> int:
    """How far ahead of the sums each rank may push."""
    pushed = (
        (each.scheme, size) for each in cut for size in ([piece.hi - piece.lo for piece in each.pieces] if each.option else each.sizes)
    )
    payloads = [round_.pair.push.payload_bound(round_.numel) for scheme, size in pushed for round_ in scheme.rounds(size)]
    return speed.ahead(max(payloads, default=0), sum(payloads) / servers)


class _Slices(NamedTuple):
    """One bucket, cut into slices. sizes: elements of each slice; option: the actions that it runs over groups of ranks, () if every rank pushes all of
    it; pieces: what ranks push to servers behind sums within nodes."""

    spec: BucketSpec
    dtype: str
    scheme: Scheme
    sizes: list[int]
    name: str  # of its first tensor
    option: tuple[str, ...] = ()
    pieces: tuple[Piece, ...] = ()

    def loads(self, rate: int, workers: int) -> list[Load]:
        """The cost of each slice, or, for a bucket over groups, of each piece that servers sum. A piece costs less if it has fewer contributors."""
        if not self.option:
            share = len(self.spec.members) / workers if self.spec.members else 1.0
            return [_load(self.scheme, size, rate, share) for size in self.sizes]
        return [_load(self.scheme, piece.hi - piece.lo, rate, len(piece.contributors) / workers) for piece in self.pieces]

    def named_servers(self, servers: int) -> tuple[int, ...]:
        """The servers that the bucket names, one for each load. Raises UsageError, naming its first tensor, for servers that the job lacks."""
        named, parts = self.spec.servers, len(self.sizes)
        if named and len(named) != parts:
            raise UsageError(
                f"tensor {self.name!r}: its bucket names the servers of {len(named)} parts, but has {parts}; name one for each part"
            )
        for number, server in enumerate(named):
            if not 0 <= server < servers:
                raise UsageError(
                    f"tensor {self.name!r}: part {number} of its bucket is to lie on server {server}, but the job has {servers}, numbered from 0; "
                    f"make a plan for as many"
                )
        return tuple(named[piece.part] for piece in self.pieces) if named and self.option else named


def _sliced(
    declaration: Declaration, index: int, spec: BucketSpec, ranks: Ranks, servers: int, part_bytes: int, rate: int
) -> _Slices:  # fmt: skip
    """A bucket, cut as planned or into parts of ``part_bytes``. Raises CodecError, which names the tensor, if its codec cannot carry these parts."""
    tensors = [declaration.tensors[i] for i in spec.tensors]
    dtype, name = tensors[0].dtype, tensors[0].name
    ranks = members_of(spec, ranks, name)
    if not servers and declaration.kind != "plan" and spec.codec == UNCOMPRESSED:
        part_bytes = max(part_bytes, WHOLE_BYTES)
    try:
        scheme = parse_scheme(spec.codec, BucketContext(dtype, ranks.size, declaration.mean, tuple(tensor.shape for tensor in tensors)))
        if declaration.kind == "weights":
            _check_one_way(scheme)
        if declaration.awaited_singly and servers and not spec.parts and not spec.option:
            parts = _parts_awaited(scheme, sum(tensor.numel for tensor in tensors), dtype, part_bytes, servers, rate)
            spec = replace(spec, parts=parts if parts > 1 else 0)
        elif rate and servers and declaration.kind in OF_MODELS and not spec.option and scheme.cut_anywhere:
            share = sum(tensor.numel * ITEM_BYTES[tensor.dtype] for tensor in declaration.tensors) / servers
            part_bytes = _pipelined_bytes(scheme, dtype, part_bytes, rate, share)
        sizes = _cut(spec, sum(tensor.numel for tensor in tensors), scheme, dtype, part_bytes, rate)
    except CodecError as error:
        raise CodecError(f"tensor {name!r}: {error}") from None
    if not spec.option and servers:
        return _Slices(spec, dtype, scheme, sizes, name)
    option = spec.option
    if not option:
        _check_serverless(scheme, name)
        option = default_option(scheme, dtype, declaration.kind == "broadcast", ranks.node_sizes)
    _check_over_groups(option, scheme, name)
    return _Slices(
        spec, dtype, scheme, sizes, name, option, pieces_of(option, sizes, ranks, index, servers, spec.members) if spec.option else ()
    )


def members_of(spec: BucketSpec | Bucket, ranks: Ranks, name: str) -> Ranks:
    """The ranks whose bucket it is, numbered from 0 on: some of the job's are a node each. name: of its first tensor. Raises UsageError for ranks that the job
    lacks."""
    if not spec.members:
        return ranks
    if spec.members[-1] >= ranks.size:
        raise UsageError(f"tensor {name!r}: its bucket is rank {spec.members[-1]}'s, but the job has {ranks.size}, numbered from 0")
    return Ranks((1,) * len(spec.members))


def _spread(
    cut: Sequence[_Slices], machines: Machines, turn: int, rate: int, hashed: HashPlacement | None
) -> tuple[list[tuple[int, ...]], Excess]:  # fmt: skip
    """The server of each load of each bucket, and by how much the busiest machine's load exceeds the least possible."""
    loads = [each.loads(rate, sum(machines.workers)) for each in cut]
    placement = Placement(machines, total_of(load for each in loads for load in each), turn)
    few = not machines.alike and sum(map(len, loads)) < len(machines.servers)
    places: list[tuple[int, ...]] = []
    for index, (each, its_loads) in enumerate(zip(cut, loads, strict=True)):
        servers = each.named_servers(len(machines.servers))
        if not servers and hashed is not None:
            servers = tuple(hashed.server((turn - 1 + index) % MAX_LAYOUTS, part, machines) for part in range(len(its_loads)))
        elif not servers and few:
            cycle = servers_in_turn(machines)
            servers = tuple(cycle[(turn + index + part) % len(cycle)] for part in range(len(its_loads)))
        for server, load in zip(servers, its_loads, strict=False):
            placement.put(server, load)
        places.append(servers or tuple(placement.place(load) for load in its_loads))
    return places, placement.excess


def _bucket(cut: _Slices, index: int, servers: Sequence[int], layout_id: int, workers: int, counts: list[int]) -> Bucket:
    """The bucket with its parts and keys. servers: of each load; counts: parts of each server so far."""
    spec, keys = cut.spec, tuple[Part, ...]()
    if cut.option:
        keys = keys_of_pieces(cut.pieces, servers, cut.sizes, workers, layout_id, index, counts)
        servers = (NO_SERVER,) * len(cut.sizes)
    contributors = spec.members if len(spec.members) < workers and not cut.option else ()
    parts = _parts(cut.scheme, cut.sizes, layout_id, index, servers, counts, contributors)
    return Bucket(
        index, spec.tensors, sum(cut.sizes), cut.dtype, cut.scheme.canonical, spec.priority, parts, cut.option, spec.turns, keys, spec.device,
        spec.members,
    )  # fmt: skip


def _with_finer_tail(
    declaration: Declaration, cut: Sequence[_Slices], machines: Machines, ranks: Ranks, part_bytes: int, rate: int, beyond: Excess
) -> list[_Slices]:  # fmt: skip
    """The same buckets, with the last ones cut into smaller parts, which even out the loads that the larger parts leave uneven. The last ones are as
    many buckets as together have one large part for each server."""
    finer = part_bytes
    # One more part costs a machine with servers each worker's push and pull of it.
    while finer > LEAST_LEVELLING_BYTES and 2 * finer * ranks.size > LEVEL * beyond.least:
        finer //= 2
    again, left = list(cut), len(machines.servers) * part_bytes
    for index in reversed(range(len(cut))):
        each = cut[index]
        if left <= 0:
            break
        left -= sum(each.sizes) * ITEM_BYTES[each.dtype]
        if not each.spec.parts and not each.option:
            again[index] = _sliced(declaration, index, each.spec, ranks, len(machines.servers), finer, rate)
    return again


def _check_weights(declaration: Declaration, servers: int) -> None:
    """Raise UsageError unless servers can hold these tensors and update them by the declared rule."""
    rule = UpdateRule.parse(declaration.rule)
    for tensor in declaration.tensors:
        rule.check_dtype(tensor.dtype)
    if not servers:
        raise UsageError(f"{declaration.name!r}: weights are held by servers, and this job has none; start one or more")


def _check_one_way(scheme: Scheme) -> None:
    """Raise CodecError unless deltas can be pushed by this codec, and weights pulled uncompressed."""
    if type(scheme) is not PairScheme or scheme.pair.pull.name != UNCOMPRESSED:
        raise CodecError(
            f"codec {scheme.canonical}: weights are pulled uncompressed; choose a codec of one round for deltas, as in 'onebit/none'"
        )


def _check_serverless(scheme: Scheme, name: str) -> None:
    """Raise CodecError, naming the tensor, for a codec that works with servers only."""
    if needs_servers(scheme):
        raise CodecError(f"tensor {name!r}: {refusal(scheme)}")


def _check_over_groups(option: Sequence[str], scheme: Scheme, name: str) -> None:
    """Raise CodecError, naming the tensor, unless ranks can run the option among themselves with this codec."""
    encodes = any(action.startswith("comp@") for action in option)
    if type(scheme) is not PairScheme or (encodes and np.dtype(scheme.array_dtype) != np.float32):
        why = (
            f"encodes {np.dtype(scheme.array_dtype).name}, not float32"
            if type(scheme) is PairScheme
            else "is of several rounds, or of servers alone"
        )
        raise CodecError(f"tensor {name!r}: codec {scheme.canonical} {why}, so {' '.join(option)} cannot run with it; choose another codec")


def _fused(declaration: Declaration, members: tuple[int, ...], number: int) -> BucketSpec:
    """The spec of a fused bucket. Buckets that become ready first have the highest priority: step() needs all of them."""
    nbytes = sum(declaration.tensors[i].numel * ITEM_BYTES[declaration.tensors[i].dtype] for i in members)
    small = declaration.kind in OF_MODELS and nbytes < declaration.min_compress_bytes
    return BucketSpec(members, "none" if small or declaration.kind == "broadcast" else declaration.codec, -number)


def _most_part_bytes(declaration: Declaration, servers: int) -> int:
    """Most bytes of a tensor in one part, if no plan cuts it: ``part_bytes``, halved until a server has PARTS_ON_A_SERVER parts of a model's gradients, or
    PARTS_ON_ONE_OF_MANY if there are many servers. By a codec whose payloads servers forward, so are any tensors'."""
    most = declaration.part_bytes
    if servers and (declaration.kind in OF_MODELS or _forwards(declaration)):
        many = servers >= MANY_SERVERS
        parts, least = (PARTS_ON_ONE_OF_MANY, LEAST_SHARE_OF_MANY_BYTES) if many else (PARTS_ON_A_SERVER, LEAST_SHARE_BYTES)
        share = sum(tensor.numel * ITEM_BYTES[tensor.dtype] for tensor in declaration.tensors) // (parts * servers)
        while most > share and most // 2 >= least:
            most //= 2
    return most


def _forwards(declaration: Declaration) -> bool:
    context = BucketContext(declaration.tensors[0].dtype, 1, declaration.mean, ()) if declaration.tensors else None
    try:
        return context is not None and _relayed(parse_scheme(declaration.codec, context))
    except CodecError:
        return False  # ``_sliced`` names the tensor


def _load(scheme: Scheme, numel: int, rate: int, contributing: float) -> Load:
    """The cost of a slice of ``numel`` elements: an upper bound on its payload bytes, over all rounds and both directions, and its sums.
    contributing: the share of the ranks that push it."""
    rounds = scheme.rounds(numel)
    nbytes = sum(r.pair.push.payload_bound(r.numel) + r.pair.pull.payload_bound(r.numel) for r in rounds)
    work = work_of(nbytes / 8 if scheme.additive else sum(r.numel for r in rounds), rate)
    return Load(nbytes * contributing, work * contributing)


def _parts(
    scheme: Scheme, sizes: Sequence[int], layout_id: int, bucket: int, places: Sequence[int], counts: list[int],
    contributors: tuple[int, ...],
) -> tuple[Part, ...]:  # fmt: skip
    """The parts of slices of these sizes, one part a round. places: the server of each slice; counts: parts of each server so far;
    contributors: as a part's."""
    parts: list[Part] = []
    offset = 0
    for size, server in zip(sizes, places, strict=True):
        for round_ in range(len(scheme.rounds(size))):
            position = 0 if server == NO_SERVER else counts[server]
            parts.append(Part(make_key(layout_id, bucket, len(parts)), server, offset, size, position, round_, contributors))
            if server != NO_SERVER:
                counts[server] += 1
        offset += size
    return tuple(parts)


def _cut(spec: BucketSpec, numel: int, scheme: Scheme, dtype: str, part_bytes: int, rate: int) -> list[int]:
    """Elements of each slice of a bucket, as planned if a plan says so. Raises CodecError if the codec cannot carry a slice."""
    if scheme.whole and spec.parts > 1:
        raise CodecError(f"codec {scheme.canonical} does not cut tensors, but {spec.parts} parts are planned; plan 1")
    if spec.parts and not spec.part_numel:
        sizes = equal_parts(numel, spec.parts)
    else:
        whole = max(numel, 1) if scheme.whole else part_numel(scheme, dtype, part_bytes, rate)
        sizes = full_parts(numel, spec.part_numel or whole)
    remedy = "plan more parts" if spec.parts else "lower PSGC_PART_BYTES"
    remedy = "it does not cut tensors: use another codec for this one" if scheme.whole else remedy
    if sizes[0] > MAX_PART:
        raise CodecError(f"codec {scheme.canonical}: a part of {sizes[0]} elements, at most {MAX_PART}; {remedy}")
    largest = max(max(r.pair.push.payload_bound(r.numel), r.pair.pull.payload_bound(r.numel)) for r in scheme.rounds(sizes[0]))
    if largest > MAX_PAYLOAD_BYTES:
        raise CodecError(f"codec {scheme.canonical}: a payload of {largest} bytes, at most {MAX_PAYLOAD_BYTES} travel as one; {remedy}")
    return sizes


def full_parts(numel: int, size: int) -> list[int]:
    """Parts of ``size`` elements, the last of them smaller if need be; one empty part for an empty bucket."""
    return [min(size, numel - offset) for offset in range(0, max(numel, 1), size)]


def equal_parts(numel: int, parts: int) -> list[int]:
    """Elements of each of ``parts`` parts, cut at multiples of BLOCK and as equal as possible, larger parts first. Needs a block for each part."""
    least, more = divmod(-(-numel // BLOCK), parts)
    ends = [min((number * least + min(number, more)) * BLOCK, numel) for number in range(parts + 1)]
    return [end - start for start, end in pairwise(ends)]


def check_buckets(declaration: Declaration) -> None:
    """Raise UsageError, naming the tensor, unless the declared buckets can be made: every tensor with elements is in one, those of a bucket
    are of one group and dtype, its ranks are among those that declare it, and there are blocks enough for its parts."""
    tensors, placed = declaration.tensors, {i for bucket in declaration.buckets for i in bucket.tensors}
    for i, tensor in enumerate(tensors):
        if tensor.numel and i not in placed:
            raise UsageError(f"tensor {tensor.name!r} is in no bucket of the plan; make a plan for this model")
    for bucket in declaration.buckets:
        first = tensors[bucket.tensors[0]]
        if declaration.members and not set(bucket.members) <= set(declaration.members):
            raise UsageError(
                f"tensor {first.name!r}: its bucket is of ranks {list(bucket.members)}, but those that declare it are {list(declaration.members)}"
            )
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
    """Tensor indices of each bucket, in ready order; tensors without elements are left out."""
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
