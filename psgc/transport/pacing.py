"""A link of a simulated host: how many bytes of psgc's own TCP traffic may pass now, for ``psgc run --link-mbit``.

Each direction is a token bucket that is filled at the link's rate. Bytes are paid for after they have passed: a quantum passes at once, and
the next one when the first would have arrived. The bucket's level is kept as the time at which the link is free again, in a file in memory that the
processes of one simulated host inherit, so that they share the link. A connection asks ``allowance`` and reports by ``spend``; nothing
sleeps here. Knows bytes, not messages.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import struct
import threading
import time
from dataclasses import dataclass
from typing import Any, Final

FRAME_SHARE: Final = 1514 / 1448  # the link's bytes for each byte that TCP carries: a full Ethernet frame has 66 bytes of headers
QUANTUM_S: Final = 2e-3  # shorter, and a busy machine's wake-ups cost more than they carry
LEAST_QUANTUM_BYTES: Final = 1448
# If a process is woken late and the link was busy before, the link counts as busy in between; otherwise a busy machine's link would be slower
# than its rate. After a longer pause the link counts as idle.
LATE_S: Final = 50e-3
QUEUE_S: Final = 10e-3  # what a switch buffers for a busy link
LEAST_QUEUE_BYTES: Final = 128 << 10
_spending: Final = threading.Lock()  # among this process's threads, which a lock on a file does not keep apart
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_SPEC: Final = struct.Struct("@qqqq")  # struct itimerspec: interval, then moment, each in seconds and nanoseconds
_ABSOLUTE: Final = 1  # TFD_TIMER_ABSTIME
_STATE: Final = struct.Struct("<q?")  # when the link is free again, in monotonic ns; whether a process had more to send then
DIRECTIONS: Final = ("out", "in")
FILE_BYTES: Final = 2 * _STATE.size


def after(free_ns: int, waited: bool, now_ns: int, cost_ns: int) -> int:
    """When the link is free again, after bytes have passed that take it ``cost_ns``. waited: a process had more to send when the link was last
    busy."""
    late = now_ns - free_ns
    began = free_ns if late <= 0 or (waited and late < LATE_S * 1e9) else now_ns
    return began + cost_ns


class Pace:
    """One direction of a link. fd: a file of FILE_BYTES that processes of the simulated host share. bytes_per_s: the rate, headers included."""

    def __init__(self, fd: int, direction: str, bytes_per_s: float) -> None:
        self._fd, self._offset = fd, DIRECTIONS.index(direction) * _STATE.size
        self._ns_per_byte = 1e9 * FRAME_SHARE / bytes_per_s
        self.quantum = max(LEAST_QUANTUM_BYTES, int(QUANTUM_S * bytes_per_s))

    def allowance(self) -> int:
        """How many bytes may pass now: a quantum, or none while the link is busy."""
        return self.quantum if time.monotonic_ns() >= self._state()[0] else 0

    @property
    def free_at(self) -> float:
        """When more bytes may pass, in seconds of the monotonic clock."""
        return self._state()[0] / 1e9

    def spend(self, nbytes: int, more: bool) -> None:
        """``nbytes`` have passed. more: there were more to send."""
        with _spending:
            self._spend(nbytes, more)

    def _spend(self, nbytes: int, more: bool) -> None:
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
    """The first ``nbytes`` of the pieces."""
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
        """Ring at this time, in seconds of the monotonic clock, or now if it is past. An earlier time that was set stays."""
        if at < self.at:
            self.at = at
            seconds, fraction = divmod(max(at, 1e-9), 1.0)
            moment = _SPEC.pack(0, 0, int(seconds), max(1, int(fraction * 1e9)))
            if _LIBC.timerfd_settime(self._fd, _ABSOLUTE, moment, None) < 0:
                raise OSError(ctypes.get_errno(), "the timer of a simulated link cannot be set")

    def rang(self) -> bool:
        """Whether the time has come; if so, the alarm is off again."""
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
    queue_bytes: int  # size of a receiving socket's buffer, which stands for a switch's

    @classmethod
    def of(cls, mbit: float, fd: int = -1) -> PacedLink:
        """mbit: 1e6 bit/s, in each direction. fd: as ``make_file`` made it, for the processes that share the link; -1: none do. Raises OSError."""
        if fd < 0:
            fd = make_file()
        os.set_inheritable(fd, False)
        rate = mbit * 1e6 / 8
        return cls(Pace(fd, "out", rate), Pace(fd, "in", rate), max(LEAST_QUEUE_BYTES, int(rate * QUEUE_S)))


def make_file() -> int:
    """A file for an idle link, to be inherited by the processes of one simulated host."""
    fd = os.memfd_create("psgc-link", os.MFD_CLOEXEC)
    os.ftruncate(fd, FILE_BYTES)
    return fd
