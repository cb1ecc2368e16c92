"""The keys of buckets that are pushed to servers after a sum within nodes, and their positions in the servers' windows. Pure.

Such a key is a piece of a part, to which some ranks contribute the sum over their node. The bucket's program determines the pieces. A server
admits contributions in the order of its window, and ranks run collectives in the layout's order of transfers. If the two orders differed, they could
deadlock: a rank could wait in a window for a key that other ranks push only after they have this rank's result. So the keys' positions in each
window follow the layout's order of transfers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from psgc.errors import UsageError
from psgc.layout.records import Bucket, Layout, Part, make_key
from psgc.program.compile import compile_option, op_of
from psgc.program.order import Turn
from psgc.program.ranks import Range, Ranks


class Piece(NamedTuple):
    """A range of one part of a bucket that some ranks push, each with the sum over different ranks. part: the part's number; lo, hi: the range's
    elements in the part."""

    part: int
    lo: int
    hi: int
    contributors: tuple[int, ...]


def pieces_of(
    option: tuple[str, ...], sizes: Sequence[int], ranks: Ranks, bucket: int, servers: int, members: Sequence[int] = ()
) -> tuple[Piece, ...]:
    """The pieces of a bucket that runs ``option`` in parts of these sizes; () if the option uses no servers. members: the job's ranks that ``ranks`` numbers;
    () for all. Raises UsageError if it uses servers and the job has none."""
    found: list[Piece] = []
    for number, size in enumerate(sizes):
        pieces: dict[Range, list[int]] = {}
        for rank, program in zip(members or ranks.everybody, compile_option(option, size, ranks, bucket + number), strict=True):
            for piece in program.served:
                pieces.setdefault(piece, []).append(rank)
        if pieces and not servers:
            raise UsageError(
                f"the option {' '.join(option)} has servers, and the job has none; start it with servers, or make a plan without"
            )
        found += [Piece(number, lo, hi, tuple(contributors)) for (lo, hi), contributors in sorted(pieces.items())]
    return tuple(found)


def keys_of_pieces(
    pieces: Sequence[Piece], servers: Sequence[int], sizes: Sequence[int], workers: int, layout_id: int, bucket: int, counts: list[int]
) -> tuple[Part, ...]:  # fmt: skip
    """The keys of a bucket's pieces. servers: each piece's server; sizes: elements of each part; counts: number of each server's keys so far."""
    offsets = [0, *accumulate(sizes)]
    keys: list[Part] = []
    for (number, lo, hi, contributors), server in zip(pieces, servers, strict=True):
        some = () if len(contributors) == workers else contributors
        keys.append(
            Part(make_key(layout_id, bucket, len(sizes) + len(keys)), server, offsets[number] + lo, hi - lo, counts[server], 0, some)
        )
        counts[server] += 1
    return tuple(keys)


def in_order(layout: Layout) -> Layout:
    """The layout with the keys behind groups, on each server, in the order of their pushes; those of other buckets keep their positions."""
    if not any(bucket.keys for bucket in layout.buckets):
        return layout
    place = {turn: number for number, turn in enumerate(layout.order)}
    found: dict[int, list[tuple[int, int, int]]] = {}  # for each server, its keys as (turn of the push, key, position)
    chain = -1
    for bucket in (bucket for bucket in layout.buckets if bucket.over_groups):
        for part in bucket.parts:
            chain += 1
            for key in keys_of(bucket, part):
                turns = [place[Turn(chain, action)] for action, text in enumerate(bucket.option) if op_of(text) == "push"]
                found.setdefault(key.server, []).append((turns[0], key.key, key.position))
    position = {
        key: at
        for keys in found.values()
        for (_, key, _), at in zip(sorted(keys), sorted(at for _, _, at in keys), strict=True)
    }  # fmt: skip
    return replace(
        layout,
        buckets=tuple(replace(b, keys=tuple(replace(k, position=position[k.key]) for k in b.keys)) for b in layout.buckets),
    )


def keys_of(bucket: Bucket, part: Part) -> list[Part]:
    """The bucket's keys that are slices of this part."""
    return [key for key in bucket.keys if part.offset <= key.offset < part.offset + part.numel]
