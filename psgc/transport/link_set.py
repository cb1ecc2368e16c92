"""The proved connections of one I/O thread: which are ready, in one system call however many there are.

Owns their epoll, which itself is one descriptor for ``Watch``. Nothing here takes time for a connection on which nothing happens.
"""

from __future__ import annotations

import select
from collections.abc import Iterator

from psgc.transport.link import Link


class LinkSet:
    """See the module's text. Not for two threads at once."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._links: dict[int, Link] = {}
        self._polled_for: dict[int, int] = {}
        self._touched: dict[int, Link] = {}
        self._more: dict[int, Link] = {}

    def __iter__(self) -> Iterator[Link]:
        return iter(list(self._links.values()))

    def fileno(self) -> int:
        """Readable when one of them is ready."""
        return self._epoll.fileno()

    @property
    def pending(self) -> bool:
        """Whether one has more to be received than it was given time for: then there is nothing to sleep for."""
        return bool(self._more)

    def add(self, link: Link) -> None:
        fd = link.fileno()
        self._links[fd] = link
        self._polled_for[fd] = select.EPOLLIN
        self._epoll.register(fd, select.EPOLLIN)

    def discard(self, link: Link) -> None:
        """Before it is closed: a copy of the descriptor in another process would keep the epoll awake."""
        fd = link.fileno()
        if self._links.get(fd) is link:
            self._epoll.unregister(fd)
            for known in (self._links, self._polled_for, self._touched, self._more):
                known.pop(fd, None)

    def touch(self, link: Link) -> None:
        """Something was sent on it, or it was closed."""
        self._touched[link.fileno()] = link

    def flush(self) -> list[Link]:
        """Send what has been queued, as far as the kernel takes it; to be called before sleeping. Returns those that were touched."""
        touched, self._touched = self._touched, {}
        for fd, link in touched.items():
            if not link.closed:
                link.flush()
                self._poll_for(fd, select.EPOLLIN | (select.EPOLLOUT if link.queued else 0))
        return list(touched.values())

    def ready(self) -> list[Link]:
        """Those to be received from, or that are closed. What waited to be sent on them has been sent, as far as there is room."""
        ready, self._more = self._more, {}
        for fd, events in self._epoll.poll(0):
            link = self._links[fd]
            if events & select.EPOLLOUT:
                self._touched[fd] = link
            if events & ~select.EPOLLOUT:
                ready[fd] = link
        return list(ready.values())

    def received(self, link: Link) -> None:
        """``link.receive`` has been called: whether it stopped early."""
        if link.more and not link.closed:
            self._more[link.fileno()] = link

    def _poll_for(self, fd: int, events: int) -> None:
        if self._polled_for[fd] != events:
            self._polled_for[fd] = events
            self._epoll.modify(fd, events)

    def close(self) -> None:
        self._epoll.close()
