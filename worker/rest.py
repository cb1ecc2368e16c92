"""Which threads sleep in a wait of a session, and keeping one there while another thread reads what it would change."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class Rest:
    """Used by any thread. Invariant: a thread that is kept does not leave its wait before it is let go as often. The thread that makes it is the one that
    trains."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._resting: dict[int, float] = {}  # by thread, since when
        self._kept = Counter[int]()
        self._trains = threading.get_ident()
        self._rested_s = 0.0

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Inside, this thread does nothing but wait."""
        me = threading.get_ident()
        with self._changed:
            self._resting[me] = began = time.monotonic()
        try:
            yield
        finally:
            with self._changed:
                while self._kept[me]:
                    self._changed.wait()
                self._resting.pop(me, None)
                if me == self._trains:
                    self._rested_s += time.monotonic() - began

    def rested_s(self, now: float) -> float:
        """For how long the thread that trains has rested, with the wait that is under way."""
        rested_s, since = self._rested_s, self._resting.get(self._trains)
        return rested_s if since is None else rested_s + max(0.0, now - since)

    def rests(self, thread: int) -> bool:
        return thread in self._resting

    def keep(self, thread: int) -> bool:
        """Keep this thread where it is, if it rests; else return False."""
        with self._changed:
            kept = thread in self._resting
            self._kept[thread] += kept
        return kept

    def let_go(self, thread: int) -> None:
        with self._changed:
            self._kept[thread] -= 1
            self._changed.notify_all()
