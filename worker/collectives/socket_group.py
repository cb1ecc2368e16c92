"""A group of ranks on any hosts: collectives over a TCP connection between every two members, in which everything goes straight to where it is wanted.

Both ends of a connection know what a collective sends over it, so a stream is a header, by which a member that is in another collective is found out, and then
bytes, which one loop without the GIL receives where they are wanted (``pump``). Sums are in member order. A slice is summed in strips: while one is added the
next ones travel, and sums leave as they are made. Under PSGC_ENCRYPT=1 each piece is a message with a tag of its own.
"""

from __future__ import annotations

import itertools
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psgc.errors import RemoteProtocolError
from psgc.program.checks import check_array, check_cuts, check_payloads, check_root
from psgc.program.groups import Bytes
from psgc.transport.security.encryption import TAG_BYTES
from psgc.worker.collectives.connections import Connections
from psgc.worker.collectives.pump import NEVER, Limits, Moved, Outcome, Streams, address_of, pump
from psgc.worker.collectives.sums import Adder
from psgc.worker.collectives.turns import LEFT, Closed, PeerGroup
from psgc.worker.session import Session

Array = NDArray[Any]
STRIP_BYTES: Final = 1 << 20  # of a slice that is summed
WHOLE_BYTES: Final = 16 << 10  # an array up to this size goes to everybody whole: one message in place of two
SEALED_BYTES: Final = 1 << 20  # of an encrypted message, at most
LOOK_MS: Final = 1_000  # how often a member that waits looks whether what it waits for can come
_HEADER_WORDS: Final = 4  # of eight bytes: the constant below, the collective's number, a digest of its name, and the stream's bytes
_MAGIC: Final = int.from_bytes(b"PSGCgrp1", "little")


class _Stage(NamedTuple):
    """A point of a collective: once so many pieces of each stream have come, ``then`` is called, and pieces after ``out`` may leave."""

    into: tuple[int, ...]
    out: tuple[int, ...]
    then: Callable[[], None] | None


class _Collective:
    """What this member sends and receives, by connection, in order; and what it does in between. piece_bytes: to cut pieces by."""

    def __init__(self, others: Sequence[int], piece_bytes: int) -> None:
        self._places = {index: place for place, index in enumerate(others)}
        self._piece_bytes = piece_bytes
        self.out: list[list[Array]] = [[] for _ in others]
        self.into: list[list[Array]] = [[] for _ in others]
        self.stages: list[_Stage] = []

    def send(self, index: int, array: Array) -> None:
        self.out[self._places[index]].extend(self._pieces(array))

    def receive(self, index: int, array: Array) -> None:
        self.into[self._places[index]].extend(self._pieces(array))

    def then(self, call: Callable[[], None] | None) -> None:
        """Call it once all that is to be received so far is there. What is to be sent after this waits for it."""
        self.stages.append(_Stage(tuple(map(len, self.into)), tuple(map(len, self.out)), call))

    def _pieces(self, array: Array) -> list[Array]:
        whole = array.view(np.uint8)
        return [whole[lo : lo + self._piece_bytes] for lo in range(0, whole.size, self._piece_bytes)]


class SocketGroup(PeerGroup[Connections]):
    """See psgc.program.groups.Group. Sums are in member order, also those of ``all_reduce`` and ``reduce``."""

    def __init__(self, session: Session, peers: Connections) -> None:
        super().__init__(session, peers)
        self._adder = Adder()
        self._number = 0  # of the collective under way
        # not all members send to the same one first
        self._others = tuple(sorted(peers.others, key=lambda index: (index - self.index) % len(self.members)))

    def all_reduce(self, array: Array, dtype: str) -> None:
        check_array(array, dtype)
        self._run(f"all_reduce of {array.size} {dtype}", array.size, lambda one: self._all_reduce(one, array, dtype, self._everybody))

    def maximum(self, array: Array) -> None:
        check_array(array, "int32")
        self._run(
            f"maximum of {array.size} int32",
            array.size,
            lambda one: self._whole(one, array, self._everybody, lambda arrays: _maximum(arrays, array)),
        )

    def reduce(self, array: Array, dtype: str, root: int) -> None:
        check_array(array, dtype)
        check_root(root, len(self.members))
        what = f"reduce of {array.size} {dtype} to rank {self.members[root]}"
        self._run(what, array.size, lambda one: self._all_reduce(one, array, dtype, range(root, root + 1)))

    def broadcast(self, array: Array, dtype: str, root: int) -> None:
        check_array(array, dtype)
        check_root(root, len(self.members))
        what = f"broadcast of {array.size} {dtype} from rank {self.members[root]}"
        self._run(what, array.size, lambda one: self._broadcast(one, array, root))

    def reduce_scatter(self, array: Array, dtype: str, cuts: Sequence[int], divisor: int = 1) -> None:
        check_array(array, dtype)
        check_cuts(cuts, len(self.members), array.size)
        self._run(f"reduce_scatter of {array.size} {dtype}", array.size, lambda one: self._scatter(one, array, dtype, cuts, divisor))

    def all_gather(self, array: Array, dtype: str, cuts: Sequence[int]) -> None:
        check_array(array, dtype)
        check_cuts(cuts, len(self.members), array.size)

        def gather(one: _Collective) -> None:
            slices = _slices(array, cuts)
            for index in self._others:
                one.send(index, slices[self.index])
                one.receive(index, slices[index])

        self._run(f"all_gather of {array.size} {dtype}", array.size, gather)

    def exchange(self, outgoing: Sequence[Bytes | None], incoming: Sequence[Bytes | None]) -> None:
        check_payloads(outgoing, incoming, len(self.members))
        sent, place = outgoing[self.index], incoming[self.index]
        if sent is not None and place is not None:
            np.asarray(place)[:] = sent

        def exchange(one: _Collective) -> None:
            for index in self._others:
                going, coming = outgoing[index], incoming[index]
                if going is not None:
                    one.send(index, np.asarray(going))
                if coming is not None:
                    one.receive(index, np.asarray(coming))

        self._run("exchange", 1, exchange)

    # collectives, as streams

    @property
    def _everybody(self) -> range:
        return range(len(self.members))

    def _all_reduce(self, one: _Collective, array: Array, dtype: str, readers: range) -> None:
        """The sum, for the members with the indices ``readers``."""
        if array.nbytes <= WHOLE_BYTES:
            self._whole(one, array, readers, lambda arrays: self._adder.add(arrays, self.index, dtype))
            return
        members = len(self.members)
        cuts = [array.size * index // members for index in range(members + 1)]
        slices = _slices(array, cuts)

        def leave(strip: Array) -> None:
            for index in self._others:
                if index in readers:
                    one.send(index, strip)

        self._scatter(one, array, dtype, cuts, 1, leave)
        for index in self._others if self.index in readers else ():
            for strip in _strips(slices[index]):
                one.receive(index, strip)

    def _scatter(
        self, one: _Collective, array: Array, dtype: str, cuts: Sequence[int], divisor: int, leave: Callable[[Array], None] | None = None
    ) -> None:  # fmt: skip
        """Each slice goes to its owner, who adds it to its own. leave: sends a strip of the sum, once it is made."""
        slices = _slices(array, cuts)
        own = slices[self.index]
        received = self._adder.places(own, len(self.members) - 1)
        received.insert(self.index, own)
        for index in self._others:
            for strip in _strips(slices[index]):
                one.send(index, strip)
        for strips in zip(*map(_strips, received), strict=True):
            for index in self._others:
                one.receive(index, strips[index])

            def add(strips: Sequence[Array] = strips) -> None:
                self._adder.add(list(strips), self.index, dtype, divisor)

            one.then(add)
            if leave is not None:
                leave(strips[self.index])

    def _whole(self, one: _Collective, array: Array, readers: range, combine: Callable[[list[Array]], None]) -> None:
        """Everybody sends all of its array to the readers, who combine all of them, in place of their own."""
        own = array.copy() if self.index in readers else array  # it may still be leaving when it is combined
        for index in self._others:
            if index in readers:
                one.send(index, own)
        if self.index in readers:
            arrays = [array if index == self.index else np.empty_like(array) for index in self._everybody]
            for index in self._others:
                one.receive(index, arrays[index])
            one.then(lambda: combine(arrays))

    def _broadcast(self, one: _Collective, array: Array, root: int) -> None:
        """Small arrays go to everybody; of others each member gets a slice, which it sends to the rest."""
        members = len(self.members)
        small = array.nbytes <= WHOLE_BYTES
        cuts = (
            [0] * (root + 1) + [array.size] * (members - root) if small else [array.size * index // members for index in range(members + 1)]
        )
        slices = _slices(array, cuts)
        if self.index == root:
            for index in self._others:
                for strip in (*_strips(slices[index]), *_strips(slices[root])):
                    one.send(index, strip)
            return
        for strip in _strips(slices[self.index]):
            one.receive(root, strip)
            one.then(None)
            for index in self._others:
                if index != root:
                    one.send(index, strip)
        for index in self._others:
            for strip in _strips(slices[index]):
                one.receive(index, strip)

    # streams

    def _run(self, what: str, numel: int, describe: Callable[[_Collective], None]) -> None:
        """Carry out one collective. Raises the error that ended the job, else GroupError."""
        if numel:
            self._in_turn(what, lambda: self._carry_out(what, describe))

    def _carry_out(self, what: str, describe: Callable[[_Collective], None]) -> None:
        one = _Collective(self._peers.others, SEALED_BYTES if self._peers.ciphers else NEVER)
        describe(one)
        one.then(None)
        self._number += 1
        _Transfer(self._session, self._peers, one, self._number, what).run()


class _Transfer:
    """One collective's streams under way."""

    def __init__(self, session: Session, peers: Connections, one: _Collective, number: int, what: str) -> None:
        self._session, self._peers, self._one, self._what = session, peers, one, what
        digest = zlib.crc32(what.encode())
        self._number = number
        self._heads = [_head(number, digest, stream) for stream in one.out]
        self._wanted = [_head(number, digest, stream) for stream in one.into]
        self._came = [np.zeros_like(head) for head in self._wanted]
        self._opened = [0] * len(one.into)
        self._sealed = [0] * len(one.out)
        ciphers = bool(peers.ciphers)
        self._scratch = [[np.empty(piece.size + TAG_BYTES, np.uint8) for piece in stream] if ciphers else stream for stream in one.into]
        self._out = Streams.of([[head, *stream] if stream else [] for head, stream in zip(self._heads, one.out, strict=True)])
        self._in = Streams.of([[head, *stream] if stream else [] for head, stream in zip(self._came, self._scratch, strict=True)])
        self._first_out, self._first_in = self._out.at.copy(), self._in.at.copy()
        self._kept: list[Any] = []  # sealed pieces, until they have left

    def run(self) -> None:
        for stage in self._one.stages:
            self._release(stage.out)
            for place, count in enumerate(stage.into):
                self._in.until[place] = self._first_in[place] + (count + 1 if count else 0)
            self._move(all_out=stage is self._one.stages[-1])
            self._check()
            if self._peers.ciphers:
                self._open(stage.into)
            if stage.then is not None:
                stage.then()

    def _release(self, counts: Sequence[int]) -> None:
        """Let pieces leave that are there now, so many of each stream in all."""
        for place, count in enumerate(counts):
            self._out.until[place] = self._first_out[place] + (count + 1 if count else 0)
            for piece in range(self._sealed[place], count) if self._peers.ciphers else ():
                sealed = self._peers.ciphers[place].seal(self._heads[place].tobytes(), self._one.out[place][piece].data)
                self._kept.append(sealed)
                array = np.frombuffer(sealed, np.uint8)
                self._out.pieces[self._first_out[place] + 1 + piece] = address_of(array), array.nbytes
            self._sealed[place] = count

    def _open(self, counts: Sequence[int]) -> None:
        """Decrypt what has come. Raises Closed for what was altered."""
        for place, count in enumerate(counts):
            for piece in range(self._opened[place], count):
                sealed = self._scratch[place][piece]
                try:
                    self._peers.ciphers[place].open(self._wanted[place].tobytes(), sealed.data)
                except RemoteProtocolError as error:
                    raise Closed(f"{self._who(place)}: {error}") from None
                self._one.into[place][piece][:] = sealed[:-TAG_BYTES]
            self._opened[place] = count

    def _move(self, all_out: bool) -> None:
        """Send what may leave, and receive what is wanted now. all_out: wait until all has left, too. Raises Closed, or what the session's check does."""
        peers, quiet_since = self._peers, time.monotonic()
        while not (self._in.done and (self._out.done or not all_out)):
            moved = self._pumped(all_out)
            if peers.ended:
                raise Closed(LEFT)
            if moved.outcome == Outcome.BROKEN:
                raise Closed(f"{self._who(moved.which)} has left the group")
            if moved.outcome == Outcome.DONE:
                return
            if moved.any:
                quiet_since = time.monotonic()
            self._session.check()  # a handover that is given up has nobody who ends its connections
            self._check()
            if time.monotonic() - quiet_since > peers.timeout_s:
                raise Closed(self._late())

    def _pumped(self, all_out: bool) -> Moved:
        peers, pace = self._peers, self._peers.pace
        if pace is None:
            return pump(peers.sockets, self._out, self._in, LOOK_MS, all_out)
        allowed = pace.out.allowance(), pace.into.allowance()
        until = min((each.free_at for each, most in zip((pace.out, pace.into), allowed, strict=True) if not most), default=np.inf)
        timeout_ms = max(1, int(min(LOOK_MS, (until - time.monotonic()) * 1e3)))
        moved = pump(peers.sockets, self._out, self._in, timeout_ms, all_out, Limits(peers.paced, *allowed))
        for each, most, count in zip((pace.out, pace.into), allowed, (moved.sent, moved.received), strict=True):
            if count:
                each.spend(count, more=count >= most)
        return moved

    def _check(self) -> None:
        """Raise Closed for a member that is in another collective."""
        for place, (wanted, came) in enumerate(zip(self._wanted, self._came, strict=True)):
            if self._in.at[place] > self._first_in[place] and wanted.tobytes() != came.tobytes():
                if came[0] != _MAGIC:
                    raise Closed(f"{self._who(place)} sent what is no collective's")
                raise Closed(
                    f"{self._who(place)} is in its collective {came[1]} with {came[3]} bytes for this rank, and this rank in its collective {self._number}, "
                    f"{self._what}, for {wanted[3]} bytes"
                )

    def _late(self) -> str:
        for place in range(len(self._came)):
            if self._in.at[place] < self._in.until[place]:
                return f"{self._who(place)} has not come to it within {self._peers.timeout_s:g} s"
        place = int(np.argmax(self._out.at < self._out.until))
        return f"{self._who(place)} has taken nothing for {self._peers.timeout_s:g} s"

    def _who(self, place: int) -> str:
        return f"rank {self._peers.members[self._peers.others[place]]}"


def _head(number: int, digest: int, stream: Sequence[Array]) -> NDArray[np.int64]:
    return np.array([_MAGIC, number, digest, sum(piece.nbytes for piece in stream)], np.int64)


def _slices(array: Array, cuts: Sequence[int]) -> list[Array]:
    return [array[start:end] for start, end in itertools.pairwise(cuts)]


def _strips(array: Array) -> list[Array]:
    """Both ends of a connection cut alike."""
    size = max(1, STRIP_BYTES // array.itemsize)
    return [array[lo : lo + size] for lo in range(0, array.size, size)]


def _maximum(arrays: list[Array], into: Array) -> None:
    into[:] = np.maximum.reduce(arrays)
