"""The memory that a server's process leaves to the next one: an arena of blocks that describe themselves.

A block begins with a label, which says whose it is, its shape and its length. A segment is a sequence of blocks that ends at the first one without a label, so
a process that takes the place of another finds everything in the segments alone, and takes it up by what it would have made itself.

    label: u32 kind, u32 number, u64 key, two u64 of its shape, u64 bytes of the block with its label, u64 LABELLED (written last)
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psgc.errors import PsgcError, RemoteProtocolError
from psgc.layout import key_text
from psgc.transport.memory.arena import Arena
from psgc.transport.memory.segment import Place, Segment, aligned

Bytes = NDArray[np.uint8]
LABEL: Final = struct.Struct("<IIQQQQQ")
LABELLED: Final = 0x79656B2063677370  # "psgc key"
LABEL_BYTES: Final = 64
assert LABEL.size <= LABEL_BYTES


class Of(IntEnum):
    """What a block is of."""

    KEY = 1  # a key of gradients; shape: bytes of a result, elements of a residual
    WEIGHTS = 2  # weights' records and what their rule keeps; shape: ranks, bytes of what the rule keeps
    VERSION = 3  # a version of weights; number: its slot; shape: its bytes, 0


class BlockId(NamedTuple):
    """See ``Of``."""

    kind: int
    key: int
    number: int = 0


class Written(NamedTuple):
    """Bytes that were written to a block, for a copy of it in another process. offset: of ``bytes`` in the block, behind its label. record: they count from
    the moment at which the last eight of them are there, so these are written last; such bytes are a copy, others lie in the block."""

    block: Place
    offset: int
    bytes: Bytes
    record: bool = False


class Found(NamedTuple):
    """A block that a process has left. where: its bytes, label included."""

    id: BlockId
    shape: tuple[int, int]
    where: slice


def label_of(block: Place) -> Bytes:
    """The label in front of a block's bytes, as ``Blocks.block`` gives them."""
    assert block.segment is not None
    return block.segment.view(block.offset - LABEL_BYTES, LABEL_BYTES)


def read_label(label: Bytes) -> tuple[BlockId, tuple[int, int], int]:
    """Whose block a label is of, its shape, and its bytes behind the label. Raises RemoteProtocolError for what is none."""
    if len(label) != LABEL_BYTES:
        raise RemoteProtocolError(f"a label of {len(label)} bytes, expected {LABEL_BYTES}")
    kind, number, key, first, second, nbytes, labelled = LABEL.unpack(label[: LABEL.size].tobytes())
    if labelled != LABELLED or kind not in set(Of) or nbytes < LABEL_BYTES or nbytes % LABEL_BYTES:
        raise RemoteProtocolError(f"no label of a block: kind {kind}, {nbytes} bytes")
    return BlockId(kind, key, number), (first, second), nbytes - LABEL_BYTES


def write_record(place: Bytes, record: Bytes) -> None:
    """Write a record over an older one: until its last word is there, it does not count."""
    place[-8:] = 0
    place[:-8] = record[:-8]
    place[-8:] = record[-8:]


def find_blocks(segment: Bytes) -> Iterator[Found]:
    """All blocks in a segment's memory, whichever process has written it."""
    start = 0
    while start + LABEL_BYTES <= len(segment):
        kind, number, key, first, second, nbytes, labelled = LABEL.unpack(segment[start : start + LABEL.size].tobytes())
        if labelled != LABELLED or not LABEL_BYTES <= nbytes <= len(segment) - start:
            return
        yield Found(BlockId(kind, key, number), (first, second), slice(start, start + nbytes))
        start += nbytes


class Blocks:
    """former: the segments that a former process has left, in their order. keep: told of each new segment, with its number, before anything is in it."""

    def __init__(self, name: str, former: Iterable[Segment] = (), keep: Callable[[int, Segment], None] | None = None) -> None:
        self._arena = Arena(name, keep)
        self._left: dict[BlockId, tuple[tuple[int, int], Place]] = {}  # what a former process has left and nobody has taken up yet
        for segment in former:
            used = 0
            for found in find_blocks(segment.bytes):
                used = found.where.stop
                self._left[found.id] = found.shape, Place(segment, found.where.start, segment.bytes[found.where])
            self._arena.adopt(segment, used)

    @property
    def segments(self) -> dict[int, Segment]:
        return self._arena.segments

    def block(self, of: BlockId, shape: tuple[int, int], nbytes: int) -> Place:
        """The block of ``nbytes`` behind its label, as a former process has left it, or a new one of zeros. For one thread. Raises PsgcError for one that a
        former process has left in another shape, OSError where there is no memory."""
        nbytes = LABEL_BYTES + aligned(nbytes)
        left, place = self._left.pop(of, (shape, None))
        if left != shape or (place is not None and place.bytes.nbytes != nbytes):
            raise PsgcError(f"what a former process of this server has left of key {key_text(of.key)} has the shape {left}, not {shape}")
        if place is None:
            place = self._arena.cut(nbytes)
            place.bytes[: LABEL.size] = np.frombuffer(LABEL.pack(of.kind, of.number, of.key, *shape, nbytes, 0), np.uint8)
            place.bytes[LABEL.size - 8 : LABEL.size] = np.frombuffer(LABELLED.to_bytes(8, "little"), np.uint8)
        return place.part(LABEL_BYTES, nbytes - LABEL_BYTES)

    def left(self, kind: int, key: int) -> list[int]:
        """Numbers of the key's blocks of a kind that a former process has left and nobody has taken up."""
        return sorted(of.number for of in self._left if (of.kind, of.key) == (kind, key))

    def close(self) -> None:
        self._arena.close()


__all__ = ["LABEL_BYTES", "BlockId", "Blocks", "Found", "Of", "Written", "find_blocks", "label_of", "read_label", "write_record"]
