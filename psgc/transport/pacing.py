"""A link of a simulated host: how much of psgc's own TCP may pass now, for ``psgc run --link-mbit``.

A token bucket for each direction, filled at the link's rate and empty at the start of a message: what passes is paid for afterwards, so a
quantum goes at once and the next one when it would have arrived. Its level is a moment, the one at which the link is free again; it lies
in a file in memory that the processes of one simulated host have inherited, so they share the link. A link that moves payloads asks ``allowance``
and reports by ``spend``; nothing sleeps here. Knows bytes, not messages.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import struct
import time
from dataclasses import dataclass
from typing import Any, Final

FRAME_SHARE: Final = 1514 / 1448  # of a link's bytes to those that TCP carries: 66 of headers in a full Ethernet frame
QUANTUM_S: Final = 2e-3  # shorter, and a busy machine's wake-ups cost more than they carry
LEAST_QUANTUM_BYTES: Final = 1448
# A process that is woken late, and found the link busy before, is taken to have sent meanwhile: else a busy machine's link would be slower than
# its rate. After a longer pause the link was idle.
LATE_S: Final = 50e-3
QUEUE_S: Final = 10e-3  # what a switch keeps for a busy link
LEAST_QUEUE_BYTES: Final = 128 << 10
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_SPEC: Final = struct.Struct("@qqqq")  # struct itimerspec: interval, then moment, each in seconds and nanoseconds
_ABSOLUTE: Final = 1  # TFD_TIMER_ABSTIME
_STATE: Final = struct.Struct("<q?")  # when the link is free again, monotonic ns; whether somebody had more to send then
DIRECTIONS: Final = ("out", "in")
FILE_BYTES: Final = 2 * _STATE.size


def after(free_ns: int, waited: bool, now_ns: int, cost_ns: int) -> int:
    """When the link is free again, after what takes it ``cost_ns`` has passed. waited: somebody had more when it last was busy."""
    late = now_ns - free_ns
    began = free_ns if late <= 0 or (waited and late < LATE_S * 1e9) else now_ns
    return began + cost_ns


class Pace:
    """One direction of a link. fd: of a file of FILE_BYTES, which others of the host share. bytes_per_s: of frames."""

    def __init__(self, fd: int, direction: str, bytes_per_s: float) -> None:
        self._fd, self._offset = fd, DIRECTIONS.index(direction) * _STATE.size
        self._ns_per_byte = 1e9 * FRAME_SHARE / bytes_per_s
        self.quantum = max(LEAST_QUANTUM_BYTES, int(QUANTUM_S * bytes_per_s))

    def allowance(self) -> int:
        """Bytes that may pass at once: a quantum, or none while the link is busy."""
        return self.quantum if time.monotonic_ns() >= self._state()[0] else 0

    @property
    def free_at(self) -> float:
        """When there will be an allowance, in seconds of the monotonic clock."""
        return self._state()[0] / 1e9

    def spend(self, nbytes: int, more: bool) -> None:
        """So many bytes have passed. more: and there would have been more, had they been allowed."""
        fcntl.lockf(self._fd, fcntl.LOCK_EX)  # released by the kernel, should its holder be killed
        try:
            free_ns, waited = self._state()
            free_ns = after(free_ns, waited, time.monotonic_ns(), int(nbytes * self._ns_per_byte))
            os.pwrite(self._fd, _STATE.pack(free_ns, more), self._offset)
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def _state(self) -> tuple[int, bool]:
        free_ns, waited = _STATE.unpack(os.pread(self._fd, _STATE.size, self._offset))
        return free_ns, waited


def cut(pieces: list[Any], nbytes: int) -> list[Any]:
    """The first ``nbytes`` of pieces that are to be sent."""
    cut_off = []
    for piece in pieces:
        if nbytes <= 0:
            break
        cut_off.append(piece[:nbytes])
        nbytes -= len(piece)
    return cut_off


class Alarm:
    """A descriptor that becomes readable at a moment, more exactly than the milliseconds of a poll's time-out. Raises OSError where there is
    no timerfd."""

    def __init__(self) -> None:
        self._fd = _LIBC.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "no timerfd")
        self.at = float("inf")

    def fileno(self) -> int:
        return int(self._fd)

    def set(self, at: float) -> None:
        """In seconds of the monotonic clock; in the past: now. An earlier moment that was set stays."""
        if at < self.at:
            self.at = at
            seconds, fraction = divmod(max(at, 1e-9), 1.0)
            moment = _SPEC.pack(0, 0, int(seconds), max(1, int(fraction * 1e9)))
            if _LIBC.timerfd_settime(self._fd, _ABSOLUTE, moment, None) < 0:
                raise OSError(ctypes.get_errno(), "the timer of a simulated link cannot be set")

    def rang(self) -> bool:
        """Whether the moment has come; then there is none any more."""
        if time.monotonic() < self.at:
            return False
        self.at = float("inf")
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 8)
        return True

    def close(self) -> None:
        os.close(self._fd)


@dataclass(frozen=True, slots=True)
class PacedLink:
    """Both directions of a simulated host's link."""

    out: Pace
    into: Pace
    queue_bytes: int  # a receiving socket's buffer, in a switch's place

    @classmethod
    def of(cls, mbit: float, fd: int = -1) -> PacedLink:
        """mbit: 1e6 bit/s, in each direction. fd: as ``make_file`` made it, for the processes that share the link; -1: none do. Raises OSError."""
        if fd < 0:
            fd = make_file()
        os.set_inheritable(fd, False)
        rate = mbit * 1e6 / 8
        return cls(Pace(fd, "out", rate), Pace(fd, "in", rate), max(LEAST_QUEUE_BYTES, int(rate * QUEUE_S)))


def make_file() -> int:
    """A link that is idle, to be inherited by the processes of one simulated host."""
    fd = os.memfd_create("psgc-link", os.MFD_CLOEXEC)
    os.ftruncate(fd, FILE_BYTES)
    return fd
