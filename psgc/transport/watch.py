"""The poller of an I/O thread: it sleeps on descriptors and ZeroMQ sockets, and then serves only those that are ready.

The poller is kept from turn to turn: making a new one, and asking every idle socket, costs more than a message.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import zmq

Pollable = tuple[Any, int]  # a descriptor, an object with fileno(), or a ZeroMQ socket; and the events of interest


class Watch:
    """See the module's text. Not thread-safe."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._watched: list[Pollable] = []

    def wait(self, things: Iterable[Pollable], timeout_s: float) -> set[Any]:
        """Sleep until one of ``things`` is ready or the time is over. Returns those that are ready, descriptors as numbers."""
        wanted = [(thing if isinstance(thing, (int, zmq.Socket)) else thing.fileno(), events) for thing, events in things]
        if wanted != self._watched:
            self._poller = zmq.Poller()
            for thing, events in wanted:
                self._poller.register(thing, events)
            self._watched = wanted
        return {thing for thing, _ in self._poller.poll(int(timeout_s * 1000) + 1 if timeout_s > 0 else 0)}


def has_message(socket: zmq.Socket[Any]) -> bool:
    """Whether a receive would succeed. Asking costs a fifth of the time in which zmq.Again is raised and caught."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
