"""Messages from any thread to one that sleeps in ``poll``: a queue and an eventfd that makes the poll return."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

Call = tuple[Callable[..., None], tuple[Any, ...]]


class Mailbox:
    """Calls to be made by the owning thread. ``fileno`` is readable while there may be some."""

    def __init__(self) -> None:
        self._calls: deque[Call] = deque()
        self._woken = False  # the poll returns, or has returned, for calls that have not been drained yet
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def put(self, call: Callable[..., None], *args: Any) -> None:
        """Have the owner call ``call(*args)``. From any thread; in order."""
        self._calls.append((call, args))
        if not self._woken:  # else the owner empties the queue after this
            self.wake()

    def wake(self) -> None:
        """Make the owner's poll return."""
        self._woken = True
        os.eventfd_write(self._fd, 1)

    def drain(self, turn_s: float) -> Iterator[Call]:
        """The calls that have come, oldest first, for at most ``turn_s`` seconds. If some are left then, or come meanwhile, the next poll returns
        immediately. So the owner also serves its other sources, however many calls are put here."""
        until = time.monotonic() + turn_s
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        self._woken = False  # after that, lest it take away what the next call writes; and before the queue is looked at
        while self._calls:
            yield self._calls.popleft()
            if self._calls and time.monotonic() >= until:
                self.wake()
                return

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # there was no descriptor left for it
            os.close(
                self._fd
            )  # not before: any thread that has this object may still write to it, and by then the number may be another file's
