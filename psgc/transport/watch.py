"""What an I/O thread sleeps on: descriptors and ZeroMQ sockets, of which it then serves only those that have something.

Owns the poller, kept from turn to turn: making one anew, and asking every silent socket, costs more than a message.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import zmq

Pollable = tuple[Any, int]  # a descriptor, an object with fileno(), or a ZeroMQ socket; and the events of interest


class Watch:
    """See the module's text. Not for two threads at once."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._watched: list[Pollable] = []

    def wait(self, things: Iterable[Pollable], timeout_s: float) -> set[Any]:
        """Sleep until one of ``things`` is ready or the time is over; the ready ones, descriptors as numbers."""
        wanted = [(thing if isinstance(thing, (int, zmq.Socket)) else thing.fileno(), events) for thing, events in things]
        if wanted != self._watched:
            self._poller = zmq.Poller()
            for thing, events in wanted:
                self._poller.register(thing, events)
            self._watched = wanted
        return {thing for thing, _ in self._poller.poll(int(timeout_s * 1000) + 1 if timeout_s > 0 else 0)}


def has_message(socket: zmq.Socket[Any]) -> bool:
    """Whether a receive would succeed; asking costs a fifth of an Again that is raised and caught."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
