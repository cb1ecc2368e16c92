"""Receives the reports that a launcher's processes send (psgc/diagnostics/report.py). Reports of other users are dropped."""

from __future__ import annotations

import os
import secrets
import socket
import struct
from typing import Final

from psgc.diagnostics.report import Report

_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid of the sender, filled in by the kernel
_MAX_BYTES: Final = 1 << 16


class Reports:
    """The listening end. ``address(n)`` is PSGC_LAUNCHER of the process with number n."""

    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._name = f"psgc-launcher/{os.getpid()}/{secrets.token_hex(8)}"
        self.socket.bind(f"\0{self._name}")

    def address(self, child: int) -> str:
        return f"{self._name}:{child}"

    def receive(self) -> list[Report]:
        """The reports that came since the last call."""
        reports: list[Report] = []
        while True:
            try:
                data, ancillary, _, _ = self.socket.recvmsg(_MAX_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
            except BlockingIOError:
                return reports
            try:
                if os.getuid() == _sender(ancillary):
                    reports.append(Report.decode(data))
            except ValueError:
                continue

    def close(self) -> None:
        self.socket.close()


def _sender(ancillary: list[tuple[int, int, bytes]]) -> int:
    """The sender's uid; -1 if the kernel did not give it."""
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(data) >= _CREDENTIALS.size:
            return int(_CREDENTIALS.unpack_from(data)[1])
    return -1
