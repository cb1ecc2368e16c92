"""Reports from a member of the job to the launcher that started it: joining, joined, left, a successor's first step, that it is back at the end of a training
whose steps have all been taken, saving, that nobody is to start the job again, or to follow the scheduler, why it ended or was cut off, where it hung.

JSON datagrams to an abstract Unix socket. PSGC_LAUNCHER has its name and the member's number. They only decide what is printed, by whom, and how
soon a launcher gives up; so it is no error if the launcher is gone, or in another network namespace.
"""

from __future__ import annotations

import hashlib
import json
import socket
from dataclasses import asdict, dataclass
from typing import Final, Literal, get_args

Event = Literal[
    "joining", "joined", "left", "stepped", "back", "died", "job failed", "cut off", "saving", "saved", "hung", "final", "unfollowed"
]
EVENTS: Final = get_args(Event)
MAX_TEXT: Final = 8000  # characters: a datagram holds 200 KB, a line that somebody reads less
PATIENCE_S: Final = 0.5  # the launcher reads as fast as it can


@dataclass(frozen=True, slots=True)
class Report:
    """child: the member's number at its launcher. text: what it "died" of, by its own fault; why the "job failed"; why it has left a job that may go on,
    "cut off" as it was from the scheduler; that a job that has failed is not to be started again ("final"); or where in its script
    it "hung" until its own watchdog ended it. rank: -1: not known."""

    child: int
    event: Event
    text: str = ""
    rank: int = -1

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Report:
        """The inverse of ``encode``. Raises ValueError for other bytes."""
        fields = json.loads(data)
        if not isinstance(fields, dict) or set(fields) != set(cls.__slots__):
            raise ValueError("no report")
        report = cls(**fields)
        if not (isinstance(report.child, int) and report.event in EVENTS and isinstance(report.text, str) and isinstance(report.rank, int)):
            raise ValueError("no report")
        return report


class Launcher:
    """The launcher of this process. address: PSGC_LAUNCHER; "" if there is none."""

    def __init__(self, address: str) -> None:
        self._name, _, number = address.rpartition(":")
        self._child = int(number) if number.isdigit() else -1

    @property
    def number(self) -> int:
        """A number that no other launcher has; 0 if there is none."""
        return int.from_bytes(hashlib.sha256(self._name.encode()).digest()[:8], "big") >> 2 if self._name else 0

    def tell(self, event: Event, text: str = "", rank: int = -1) -> bool:
        """Whether the launcher has been told; it then prints what has to be printed."""
        if not self._name or self._child < 0:
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(PATIENCE_S)
            try:
                sock.sendto(Report(self._child, event, text[:MAX_TEXT], rank).encode(), f"\0{self._name}")
            except OSError:
                return False
        return True

    def tell_saving(self, under_way: bool) -> bool:
        """Whether the launcher has been told that a checkpoint is being written, or no longer is."""
        return self.tell("saving" if under_way else "saved")
