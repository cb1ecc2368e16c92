"""Which threads sleep in a wait of a session, and keeping one there while another thread reads what it would change."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class Rest:
    """Used by any thread. Invariant: a thread that is kept does not leave its wait before it is let go as often."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._resting: set[int] = set()
        self._kept = Counter[int]()

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Inside, this thread does nothing but wait."""
        me = threading.get_ident()
        with self._changed:
            self._resting.add(me)
        try:
            yield
        finally:
            with self._changed:
                while self._kept[me]:
                    self._changed.wait()
                self._resting.discard(me)

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
