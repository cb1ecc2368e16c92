"""The proved connections of one I/O thread. One system call finds those that are ready, for any number of connections.

Owns their epoll, which itself is one descriptor for ``Watch``. Idle connections take no time here. If the host's link is simulated,
connections that it holds up are not polled until an alarm tells that the link is free again.
"""

from __future__ import annotations

import select
from collections.abc import Iterator, Sequence

from psgc.transport.link import Link, Posted, nothing_posted
from psgc.transport.pacing import Alarm, PacedLink
from psgc.transport.receive_buffers import ReceiveBuffers


class LinkSet:
    """See the module's text. pace: the simulated link that all connections share, if any; posted: theirs. Not thread-safe."""

    def __init__(self, pace: PacedLink | None = None, posted: Posted = nothing_posted) -> None:
        self._pace = pace
        self._alarm = Alarm() if pace is not None else None
        self._held: dict[int, Link] = {}
        self._epoll = select.epoll()
        self._buffers, self._posted = ReceiveBuffers(), posted
        self._links: dict[int, Link] = {}
        self._polled_for: dict[int, int] = {}
        self._touched: dict[int, Link] = {}
        self._more: dict[int, Link] = {}
        if self._alarm is not None:
            self._epoll.register(self._alarm.fileno(), select.EPOLLIN)

    def __iter__(self) -> Iterator[Link]:
        return iter(list(self._links.values()))

    def fileno(self) -> int:
        """A descriptor that polls readable when a connection is ready."""
        return self._epoll.fileno()

    @property
    def pending(self) -> bool:
        """Whether a connection had more to receive than there was time for: then the loop must not sleep."""
        return bool(self._more)

    def add(self, link: Link) -> None:
        fd = link.fileno()
        link.buffers, link.posted = self._buffers, self._posted
        self._links[fd] = link
        self._polled_for[fd] = select.EPOLLIN
        self._epoll.register(fd, select.EPOLLIN)
        if self._pace is not None:
            link.slow_down(self._pace)

    def discard(self, link: Link) -> None:
        """Forget the connection before it is closed: a copy of its descriptor in another process would keep the epoll awake."""
        fd = link.fileno()
        if self._links.get(fd) is link:
            self._epoll.unregister(fd)
            for known in (self._links, self._polled_for, self._touched, self._more, self._held):
                known.pop(fd, None)

    def touch(self, link: Link) -> None:
        """A message was queued on the connection, or it was closed."""
        self._touched[link.fileno()] = link

    def flush(self) -> list[Link]:
        """Send queued messages, as far as the kernel takes them. Call it before sleeping. Returns the connections that were touched."""
        touched, self._touched = self._touched, {}
        for fd, link in touched.items():
            if not link.closed:
                link.flush()
                self._settle(fd, link)
        return list(touched.values())

    def ready(self) -> list[Link]:
        """The connections that have something to receive, or are closed. Their queues have been sent, as far as there is room."""
        if self._alarm is not None and self._alarm.rang():
            self._resume()
        ready, self._more = self._more, {}
        for fd, events in self._epoll.poll(0):
            if self._alarm is not None and fd == self._alarm.fileno():
                continue  # it rang just now, so another turn follows at once
            link = self._links[fd]
            if events & select.EPOLLOUT:
                self._touched[fd] = link
            if events & ~select.EPOLLOUT:
                ready[fd] = link
        return list(ready.values())

    def received(self, link: Link) -> None:
        """``link.receive`` has been called: whether it stopped early."""
        if link.closed:
            return
        if link.more:
            self._more[link.fileno()] = link
        if link.held_in:
            self._settle(link.fileno(), link)

    def _settle(self, fd: int, link: Link) -> None:
        """Set the events that are polled for; connections that the simulated link holds up wait for the alarm."""
        self._poll_for(fd, (0 if link.held_in else select.EPOLLIN) | (select.EPOLLOUT if link.queued and not link.held_out else 0))
        if self._alarm is not None and link.pace is not None and (link.held_in or link.held_out):
            self._held[fd] = link
            for held, pace in ((link.held_out, link.pace.out), (link.held_in, link.pace.into)):
                if held:
                    self._alarm.set(pace.free_at)

    def _resume(self) -> None:
        """The simulated link is free again for a connection that it held up. They take turns: the first of the last time is the last now."""
        held, self._held = list(self._held.items()), {}
        for fd, link in (*held[1:], *held[:1]):
            link.held_in = link.held_out = False
            self._touched[fd] = link
            self._settle(fd, link)

    def defer(self, links: Sequence[Link]) -> None:
        """There was no time for these connections of ``ready``: they come first in the next turn."""
        self._more = {**{link.fileno(): link for link in links if self._links.get(link.fileno()) is link}, **self._more}

    def _poll_for(self, fd: int, events: int) -> None:
        if self._polled_for[fd] != events:
            self._polled_for[fd] = events
            self._epoll.modify(fd, events)

    def close(self) -> None:
        self._epoll.close()
        if self._alarm is not None:
            self._alarm.close()
