"""A group of ranks on one host: collectives through memory that all of them see, without a copy through the kernel.

A collective is a sequence of rounds. In a round each member writes to its own slot, signals the others, waits for their signals, and reads
their slots. Three slots in turn let a member write round r + 1 before it has read round r: who signals round r + 1 has read round r - 1, so
slot (r + 2) % 3, which held it, is free once all have signalled round r + 1. Slots are small, so that what was written is still in the
processor's cache when it is read.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psgc.program.checks import check_array, check_cuts, check_payloads, check_root
from psgc.program.groups import Bytes
from psgc.worker.collectives.mesh import Mesh
from psgc.worker.collectives.sums import Adder
from psgc.worker.collectives.turns import Closed, PeerGroup
from psgc.worker.session import Session

Array = NDArray[Any]
SLOT_BYTES: Final = 2 << 20
SLOTS: Final = 3
SEGMENT_BYTES: Final = SLOTS * SLOT_BYTES
WHOLE_BYTES: Final = 16 << 10  # an array up to this size is read whole by everybody: one round in place of two
_LINE_BYTES: Final = 64  # pieces begin at cache lines of their own
_SIGNAL: Final = struct.Struct("<Q?")  # the round's number, and whether the sender needs a further one; the collective's name follows


class Round(NamedTuple):
    """write: fill this member's slot. read: use the others' slots, by index. settled: ``write`` needs the result of the round before."""

    write: Callable[[Array], None]
    read: Callable[[dict[int, Array]], None]
    settled: bool = False


class SharedGroup(PeerGroup[Mesh]):
    """See psgc.program.groups.Group. Sums are in member order, also those of ``all_reduce`` and ``reduce``."""

    def __init__(self, session: Session, mesh: Mesh) -> None:
        super().__init__(session, mesh)
        self._adder = Adder()
        self._round = 0
        self._more = self._own_more = False  # whether some member, or this one, needs a further round
        self._slots = [_slots(mesh, number) for number in range(SLOTS)]

    def all_reduce(self, array: Array, dtype: str) -> None:
        check_array(array, dtype)
        self._run(f"all_reduce of {array.size} {dtype}", array.size, self._all_reduce(array, dtype, range(len(self.members))))

    def maximum(self, array: Array) -> None:
        check_array(array, "int32")
        self._run(f"maximum of {array.size} int32", array.size, self._whole(array, _maximum))

    def reduce(self, array: Array, dtype: str, root: int) -> None:
        check_array(array, dtype)
        check_root(root, len(self.members))
        what = f"reduce of {array.size} {dtype} to rank {self.members[root]}"
        self._run(what, array.size, self._all_reduce(array, dtype, [root]))

    def broadcast(self, array: Array, dtype: str, root: int) -> None:
        check_array(array, dtype)
        check_root(root, len(self.members))
        what = f"broadcast of {array.size} {dtype} from rank {self.members[root]}"
        cuts = [0] * (root + 1) + [array.size] * (len(self.members) - root)
        self._run(what, array.size, self._gather(array, cuts))

    def reduce_scatter(self, array: Array, dtype: str, cuts: Sequence[int], divisor: int = 1) -> None:
        check_array(array, dtype)
        check_cuts(cuts, len(self.members), array.size)
        self._run(f"reduce_scatter of {array.size} {dtype}", array.size, self._scatter(array, dtype, cuts, divisor))

    def all_gather(self, array: Array, dtype: str, cuts: Sequence[int]) -> None:
        check_array(array, dtype)
        check_cuts(cuts, len(self.members), array.size)
        self._run(f"all_gather of {array.size} {dtype}", array.size, self._gather(array, cuts))

    def exchange(self, outgoing: Sequence[Bytes | None], incoming: Sequence[Bytes | None]) -> None:
        check_payloads(outgoing, incoming, len(self.members))
        sent, place = outgoing[self.index], incoming[self.index]
        if sent is not None and place is not None:
            np.asarray(place)[:] = sent
        self._run("exchange", 1, self._exchange(outgoing, incoming))

    # collectives, as rounds

    def _all_reduce(self, array: Array, dtype: str, readers: Sequence[int]) -> Iterator[Round]:
        """The sum, for the members with the indices ``readers``. The pieces of chunk c + 1 are summed while those of chunk c are gathered."""
        if array.nbytes <= WHOLE_BYTES:
            yield from self._whole(array, lambda arrays: self._adder.add(arrays, self.index, dtype))
            return
        numel = _numel(array, len(self.members)) * len(self.members)
        gathering: Round | None = None
        for start in range(0, array.size, numel):
            chunk = array[start : start + numel]
            cuts = self._even(chunk)
            yield from self._scatter(chunk, dtype, cuts)  # one round
            if gathering is not None:
                yield gathering
            (gathering,) = self._gather(chunk, cuts, readers)
        if gathering is not None:
            yield gathering._replace(settled=array.size <= numel)  # after a lone chunk's own sum

    def _even(self, chunk: Array) -> list[int]:
        members = len(self.members)
        line = _LINE_BYTES // chunk.itemsize
        each = -(-chunk.size // (members * line)) * line
        return [min(chunk.size, each * index) for index in range(members + 1)]

    def _scatter(self, array: Array, dtype: str, cuts: Sequence[int], divisor: int = 1) -> Iterator[Round]:
        """Each member writes for each other one a piece of its slice; who owns the slice adds them to its own."""
        numel = _numel(array, len(self.members))
        offset = numel * array.itemsize
        longest = max(end - start for start, end in itertools.pairwise(cuts))
        for at in range(0, longest, numel):
            pieces = [array[start + at : max(start + at, min(start + at + numel, end))] for start, end in itertools.pairwise(cuts)]

            def write(slot: Array, pieces: list[Array] = pieces) -> None:
                for index in self._peers.others:
                    _put(pieces[index], slot, offset * index)

            def read(slots: dict[int, Array], own: Array = pieces[self.index]) -> None:
                if own.size:
                    place = offset * self.index
                    arrays = [own if index == self.index else _at(slots[index], place, own) for index in range(len(self.members))]
                    self._adder.add(arrays, self.index, dtype, divisor)

            yield Round(write, read)

    def _gather(self, array: Array, cuts: Sequence[int], readers: Sequence[int] | None = None) -> Iterator[Round]:
        """Each member writes a piece of its slice, which the readers (None: all) copy."""
        numel = SLOT_BYTES // array.itemsize
        longest = max(end - start for start, end in itertools.pairwise(cuts))
        reads = readers is None or self.index in readers
        for at in range(0, longest, numel):
            pieces = [array[start + at : max(start + at, min(start + at + numel, end))] for start, end in itertools.pairwise(cuts)]

            def write(slot: Array, own: Array = pieces[self.index]) -> None:
                _put(own, slot, 0)

            def read(slots: dict[int, Array], pieces: list[Array] = pieces) -> None:
                if reads:
                    for index in self._peers.others:
                        pieces[index][:] = _at(slots[index], 0, pieces[index])

            yield Round(write, read)

    def _whole(self, array: Array, combine: Callable[[list[Array]], None]) -> Iterator[Round]:
        """Everybody writes all of its array, and combines all of them, in place of its own."""
        numel = SLOT_BYTES // array.itemsize
        for at in range(0, array.size, numel):
            piece = array[at : at + numel]

            def write(slot: Array, piece: Array = piece) -> None:
                _put(piece, slot, 0)

            def read(slots: dict[int, Array], piece: Array = piece) -> None:
                arrays = [piece if index == self.index else _at(slots[index], 0, piece).copy() for index in range(len(self.members))]
                combine(arrays)

            yield Round(write, read)

    def _exchange(self, outgoing: Sequence[Bytes | None], incoming: Sequence[Bytes | None]) -> Iterator[Round]:
        """Only the two ends know a payload's length, so that members tell each other in each round whether they need a further one."""
        each = SLOT_BYTES // len(self.members) // _LINE_BYTES * _LINE_BYTES
        going = {index: _bytes(outgoing[index]) for index in self._peers.others}
        coming = {index: _bytes(incoming[index]) for index in self._peers.others}
        at, self._more = 0, True
        while self._more:
            self._own_more = any(len(payload) > at + each for payload in going.values())

            def write(slot: Array, at: int = at) -> None:
                for index, payload in going.items():
                    _put(payload[at : at + each], slot, each * index)

            def read(slots: dict[int, Array], at: int = at) -> None:
                for index, place in coming.items():
                    piece = place[at : at + each]
                    piece[:] = _at(slots[index], each * self.index, piece)

            yield Round(write, read)
            at += each
        self._own_more = False

    # rounds

    def _run(self, what: str, numel: int, rounds: Iterator[Round]) -> None:
        """Carry out one collective. Raises the error that ended the job, else GroupError."""
        if numel:
            self._in_turn(what, lambda: self._carry_out(what.encode(), rounds))

    def _carry_out(self, what: bytes, rounds: Iterator[Round]) -> None:
        previous: Round | None = None
        for one in rounds:
            if previous is not None and one.settled:
                self._read(previous, self._round)
                previous = None
            one.write(self._slots[(self._round + 1) % SLOTS][self.index])
            self._peers.signal(_SIGNAL.pack(self._round + 1, self._own_more) + what)
            if previous is not None:
                self._read(previous, self._round)
            self._round += 1
            self._wait(what)
            previous = one
        if previous is not None:
            self._read(previous, self._round)

    def _read(self, one: Round, number: int) -> None:
        one.read(self._slots[number % SLOTS])

    def _wait(self, what: bytes) -> None:
        more = self._own_more
        for index in self._peers.others:
            signal = self._peers.wait(index)
            number, others = _SIGNAL.unpack_from(signal)
            if number != self._round or signal[_SIGNAL.size :] != what:
                other = signal[_SIGNAL.size :].decode(errors="replace")
                raise Closed(f"rank {self.members[index]} is in its round {number}, {other}, and this rank in round {self._round}")
            more = more or others
        self._more = more


def _slots(mesh: Mesh, number: int) -> dict[int, Array]:
    """Everybody's slot of this number, by index."""
    return {index: mesh.bytes_of(index)[number * SLOT_BYTES : (number + 1) * SLOT_BYTES] for index in range(len(mesh.members))}


def _numel(array: Array, members: int) -> int:
    """Of the pieces of which a slot holds one for each member: whole cache lines."""
    return SLOT_BYTES // members // _LINE_BYTES * _LINE_BYTES // array.itemsize


def _put(piece: Array, slot: Array, offset: int) -> None:
    slot[offset : offset + piece.nbytes].view(piece.dtype)[:] = piece


def _at(slot: Array, offset: int, like: Array) -> Array:
    """The slot's elements from ``offset`` bytes on, as many as ``like`` has."""
    return slot[offset : offset + like.nbytes].view(like.dtype)


def _bytes(payload: Bytes | None) -> Array:
    return np.empty(0, np.uint8) if payload is None else np.asarray(payload).view(np.uint8)


def _maximum(arrays: list[Array]) -> None:
    """The own one is among them: all become the element-wise maximum."""
    highest = np.maximum.reduce(arrays)
    for array in arrays:
        array[:] = highest
