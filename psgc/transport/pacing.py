"""A link of a simulated host: how much of psgc's own TCP may pass now, for ``psgc run --link-mbit``.

A token bucket for each direction, filled at the link's rate and empty at the start of a message: what passes is paid for afterwards, so a
quantum goes at once and the next one when it would have arrived. Its level is a moment, the one at which the link is free again; it lies
in a file in memory that the processes of one simulated host have inherited, so they share the link. Whoever moves payloads asks ``allowance``
and says ``spend``; nobody sleeps here. Knows bytes, not messages.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from dataclasses import dataclass
from typing import Final

FRAME_SHARE: Final = 1514 / 1448  # of a link's bytes to those that TCP carries: 66 of headers in a full Ethernet frame
QUANTUM_S: Final = 2e-3  # shorter, and a busy machine's wake-ups cost more than they carry
LEAST_QUANTUM_BYTES: Final = 1448
# Whoever is woken late, and found the link busy before, is taken to have sent meanwhile: else a busy machine's link would be slower than
# its rate. After a longer pause the link was idle.
LATE_S: Final = 50e-3
QUEUE_S: Final = 10e-3  # what a switch keeps for a busy link
LEAST_QUEUE_BYTES: Final = 128 << 10
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


@dataclass(frozen=True, slots=True)
class PacedLink:
    """Both directions of a simulated host's link."""

    out: Pace
    into: Pace
    queue_bytes: int  # a receiving socket's buffer, in a switch's place

    @classmethod
    def of(cls, mbit: float, fd: int = -1) -> PacedLink:
        """mbit: 1e6 bit/s, each way. fd: as ``make_file`` made it, for whoever shares the link; -1: nobody does. Raises OSError."""
        fd = make_file() if fd < 0 else fd
        rate = mbit * 1e6 / 8
        return cls(Pace(fd, "out", rate), Pace(fd, "in", rate), max(LEAST_QUEUE_BYTES, int(rate * QUEUE_S)))


def make_file() -> int:
    """A link that is idle, to be inherited by the processes of one simulated host."""
    fd = os.memfd_create("psgc-link", os.MFD_CLOEXEC)
    os.ftruncate(fd, FILE_BYTES)
    return fd
