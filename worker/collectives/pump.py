"""Moves bytes between this process and its peers, over many sockets at once, without the GIL: one call where Python would make five for each peer.

A stream is what goes to one peer, or comes from it, within one collective: a list of pieces of memory, in the kernel's own form of such lists (iovec). Owns
the loop and the streams' counts. Knows no collectives: what the bytes mean is the caller's.
"""

from __future__ import annotations

import itertools
import socket
from enum import IntEnum
from typing import Any, Final, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from psgc.codecs.jit.kernel import helper, kernel

I64 = NDArray[np.int64]
NEVER: Final = np.iinfo(np.int64).max  # no limit on the bytes of a call
AT_ONCE: Final = 64  # pieces in one system call
_PIECES = types.Array(types.int64, 2, "C")
_COUNTS = types.Array(types.int64, 1, "C")
_POLL = types.Array(types.int32, 1, "C")
# The C library's, found by name when a kernel is linked. Their errors need no number: what cannot go on is polled for, and a poll tells what is broken.
_sendmsg: Any = types.ExternalFunction("sendmsg", types.intp(types.int32, types.intp, types.int32))
_recvmsg: Any = types.ExternalFunction("recvmsg", types.intp(types.int32, types.intp, types.int32))
_poll: Any = types.ExternalFunction("poll", types.int32(types.intp, types.uintp, types.int32))
_FLAGS: Final = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_POLLIN, _POLLOUT, _BROKEN = 1, 4, 8 | 32  # POLLERR, POLLNVAL
# POLLHUP: closed in both directions. What came before that can still be received; a send that has failed has taken the error, so no POLLERR tells of it.
_HUNG_UP: Final = 16
_COUNTED: Any = types.UniTuple(types.int64, 5)  # type: ignore[no-untyped-call]
_WORDS: Final = 7  # of a msghdr, of eight bytes each


class Outcome(IntEnum):
    """Why ``pump`` has returned."""

    DONE = 0  # all that was asked for has moved
    QUIET = 1  # nothing has moved within the time, or no more may
    BROKEN = 2  # a connection is closed or broken


class Moved(NamedTuple):
    """What a call has done. sent, received: bytes over sockets that are limited; any: whether anything has moved over any; which: the broken socket, or -1."""

    outcome: Outcome
    sent: int
    received: int
    any: bool
    which: int


class Limits(NamedTuple):
    """How many bytes may move in a call over those sockets whose number here is 1; no sockets: over all, without a limit."""

    sockets: I64
    out: int
    into: int


UNLIMITED: Final = Limits(np.zeros(0, np.int64), NEVER, NEVER)


def address_of(array: NDArray[Any]) -> int:
    """What array.ctypes.data is, in a third of its time."""
    address: int = array.__array_interface__["data"][0]
    return address


class Streams(NamedTuple):
    """One direction. pieces: [pieces, 2] address and bytes of each, those of a stream one after the other; what has moved is taken off. at: the first piece of
    each stream that is not done; until: where to stop for now."""

    pieces: I64
    at: I64
    until: I64

    @classmethod
    def of(cls, streams: list[list[NDArray[Any]]]) -> Streams:
        """Of arrays, which are contiguous and must stay. ``until`` is each stream's end."""
        pieces = [(address_of(array), array.nbytes) for stream in streams for array in stream]
        ends = list(itertools.accumulate(map(len, streams), initial=0))
        return cls(np.array(pieces, np.int64).reshape(-1, 2), np.array(ends[:-1], np.int64), np.array(ends[1:], np.int64))

    @property
    def done(self) -> bool:
        at: list[int] = self.at.tolist()
        until: list[int] = self.until.tolist()
        return at == until


def pump(sockets: I64, out: Streams, into: Streams, timeout_ms: int, all_out: bool = True, limits: Limits = UNLIMITED) -> Moved:
    """Send and receive until all that is wanted has come and, with ``all_out``, all has left that may; or the limits are reached; or nothing has moved for
    ``timeout_ms``.

    sockets: descriptors; the i-th one's streams are the i-th. An interrupted wait counts as quiet."""
    arrays = out.pieces, out.at, out.until, into.pieces, into.at, into.until
    outcome, *moved, which = _pump(
        sockets, *arrays, timeout_ms, all_out, limits.sockets if limits.sockets.size else sockets * 0, *limits[1:]
    )
    return Moved(Outcome(outcome), moved[0], moved[1], bool(moved[2]), which)


@helper
def _move(fd: Any, pieces: Any, first: Any, until: Any, most: Any, message: Any, one: Any, out: Any) -> Any:
    """Send, or receive, as much of these pieces as goes at once, ``most`` bytes at most. Returns the bytes that have moved, as the system call does."""
    count, total = 0, 0
    while first + count < until and count < AT_ONCE and total + pieces[first + count, 1] <= most:
        total += pieces[first + count, 1]
        count += 1
    message[2] = pieces[first:].ctypes.data
    if not count:
        one[0, 0], one[0, 1], count = pieces[first, 0], most, 1
        message[2] = one.ctypes.data
    message[3] = count
    return _sendmsg(fd, message.ctypes.data, _FLAGS) if out else _recvmsg(fd, message.ctypes.data, _FLAGS)


@helper
def _after(pieces: Any, at: Any, count: Any) -> Any:
    """The first piece that is not done after ``count`` more bytes have moved."""
    while count > 0:
        size = pieces[at, 1]
        if count < size:
            pieces[at, 0] += count
            pieces[at, 1] -= count
            return at
        count -= size
        at += 1
    return at


@kernel(_COUNTED(
    _COUNTS, _PIECES, _COUNTS, _COUNTS, _PIECES, _COUNTS, _COUNTS, types.int64, types.boolean, _COUNTS, types.int64, types.int64
))  # fmt: skip
def _pump(
    sockets: Any, out: Any, out_at: Any, out_until: Any, into: Any, in_at: Any, in_until: Any, timeout_ms: Any, all_out: Any, limited: Any, most_out: Any,
    most_in: Any,
) -> Any:  # fmt: skip
    peers = sockets.size
    message, poll = np.zeros(_WORDS, np.int64), np.zeros(2 * peers, np.int32)
    piece = np.zeros((1, 2), np.int64)
    sent, received, ever = 0, 0, 0
    readable = np.ones(peers, np.int64)  # tried before the first poll: most often there is room, and small answers are there
    while True:
        moved, left = False, False
        for peer in range(peers):
            while out_at[peer] < out_until[peer]:
                left = left or all_out
                if limited[peer] and sent >= most_out:
                    break
                most = most_out - sent if limited[peer] else NEVER
                count = _move(sockets[peer], out, out_at[peer], out_until[peer], most, message, piece, True)
                if count <= 0:
                    break
                sent += count * limited[peer]
                moved = True
                out_at[peer] = _after(out, out_at[peer], count)
            while in_at[peer] < in_until[peer]:
                left = True
                if not readable[peer] or (limited[peer] and received >= most_in):
                    break
                most = most_in - received if limited[peer] else NEVER
                count = _move(sockets[peer], into, in_at[peer], in_until[peer], most, message, piece, False)
                if count == 0:
                    return 2, sent, received, ever, peer
                if count < 0:
                    readable[peer] = 0
                    break
                received += count * limited[peer]
                moved = True
                in_at[peer] = _after(into, in_at[peer], count)
        ever |= moved
        if not left:
            return 0, sent, received, ever, -1
        if moved:
            continue
        if sent + received > 0 and (sent >= most_out or received >= most_in):
            return 1, sent, received, ever, -1
        for peer in range(peers):
            events = 0
            if out_at[peer] < out_until[peer] and not (limited[peer] and sent >= most_out):
                events |= _POLLOUT
            if in_at[peer] < in_until[peer] and not (limited[peer] and received >= most_in):
                events |= _POLLIN
            poll[2 * peer], poll[2 * peer + 1] = sockets[peer] if events else -1, events
        if _poll(poll.ctypes.data, peers, timeout_ms) <= 0:
            return 1, sent, received, ever, -1
        for peer in range(peers):
            events = (poll[2 * peer + 1] >> 16) & 0xFFFF if poll[2 * peer] >= 0 else 0
            if events & _BROKEN or (events & _HUNG_UP and poll[2 * peer + 1] & _POLLOUT):
                return 2, sent, received, ever, peer
            readable[peer] = 1
