"""Which threads sleep in a wait of a session, and keeping one there while another thread reads what it would change."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class Rest:
    """Used by any thread. Invariant: a thread that is kept does not leave its wait before it is let go as often.

    trains: the thread that trains; at first the one that makes this. Another one may wait in its stead: within backward, on a GPU, autograd's own."""

    def __init__(self) -> None:
        self.trains = threading.get_ident()
        self._changed = threading.Condition()
        self._resting: dict[int, float] = {}  # by thread, since when
        self._waits = Counter[int]()  # of each of these: more than one where several wait in its stead
        self._kept = Counter[int]()
        self._stands_in = set[int]()
        self._rested_s = 0.0

    @contextmanager
    def in_trainers_stead(self) -> Iterator[None]:
        """Inside, the thread that trains is behind this one, and rests where this one does."""
        me = threading.get_ident()
        stands_in = me != self.trains and me not in self._stands_in
        if stands_in:
            self._stands_in.add(me)
        try:
            yield
        finally:
            if stands_in:
                self._stands_in.discard(me)

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Inside, this thread does nothing but wait."""
        me = threading.get_ident()
        me = self.trains if me in self._stands_in else me
        with self._changed:
            self._resting.setdefault(me, time.monotonic())
            self._waits[me] += 1
        try:
            yield
        finally:
            with self._changed:
                while self._kept[me]:
                    self._changed.wait()
                self._waits[me] -= 1
                if not self._waits[me]:
                    began = self._resting.pop(me)
                    if me == self.trains:
                        self._rested_s += time.monotonic() - began

    def rested_s(self, now: float) -> float:
        """For how long the thread that trains has rested, with the wait that is under way."""
        rested_s, since = self._rested_s, self._resting.get(self.trains)
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
