"""Ports for tests to listen on. Each is handed out once, and not from the ranges out of which the system, and psgc's launchers (`launch/job/ranks.py`), give
ports to those who ask for none: another process cannot take one between its choice and its use.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Iterator

FIRST, END = 10_000, 20_000  # psgc's launchers give away 20000 to 31999, Linux 32768 and above
FIRST_BASE, BASES, APART = 2_000, 72, 110  # ports from which others are counted


def _own(count: int) -> Iterator[int]:
    """This process's share of so many numbers, from a place on that differs between runs of the tests."""
    number, of = (os.environ.get(f"PYTEST_XDIST_WORKER{name}", default) for name, default in (("", "gw0"), ("_COUNT", "1")))
    share = max(1, count // int(of))
    first, offset = share * int(number.removeprefix("gw")), 7919 * os.getpid() % share
    return itertools.cycle([*range(first + offset, first + share), *range(first, first + offset)])


_ports, _bases = (FIRST + number for number in _own(END - FIRST)), _own(BASES)


def free_port() -> int:
    """A port of this machine on which nobody listens, and which no other call has given."""
    for port in _ports:
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError("there are no more ports")


def free_base(*offsets: int) -> int:
    """A port from which others count, up to 100 more: nobody listens at it plus any of these. Of a range of its own, below ``free_port``'s."""
    for _ in range(BASES):
        base = FIRST_BASE + APART * next(_bases)
        with contextlib.ExitStack() as probes:
            try:
                for offset in offsets:
                    probes.enter_context(socket.socket()).bind(("", base + offset))
            except OSError:
                continue
            return base
    raise AssertionError("there are no more ports")
