"""Ports for tests to listen on. Each is handed out once, and not from the range out of which the system gives ports to those who ask for none: another
process's connection cannot take one between its choice and its use.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Iterator

FIRST, END = 10_000, 32_000  # Linux gives away 32768 and above


def _own() -> Iterator[int]:
    """This process's share of the ports, from a place on that differs between runs of the tests."""
    number, of = (os.environ.get(f"PYTEST_XDIST_WORKER{name}", default) for name, default in (("", "gw0"), ("_COUNT", "1")))
    share = (END - FIRST) // int(of)
    first, offset = FIRST + share * int(number.removeprefix("gw")), 7919 * os.getpid() % share
    return itertools.cycle([*range(first + offset, first + share), *range(first, first + offset)])


_ports = _own()


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
    """A port from which others count: nobody listens at it plus any of these. Of a range of its own, below ``free_port``'s."""
    for base in range(2_000 + 110 * (os.getpid() % 60), FIRST - max(offsets), 110):
        with contextlib.ExitStack() as probes:
            try:
                for offset in offsets:
                    probes.enter_context(socket.socket()).bind(("", base + offset))
            except OSError:
                continue
            return base
    raise AssertionError("there are no more ports")
