"""Calls that a session makes once at its end: before this process leaves the job, or when the job has failed."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Endings:
    """failed: whether the job has. Any thread."""

    def __init__(self, failed: Callable[[], bool]) -> None:
        self._failed = failed
        self._lock = threading.Lock()
        self._calls: list[Callable[[], None]] = []

    def add(self, call: Callable[[], None]) -> None:
        """Have ``call`` called by the next ``run``; at once if the job has failed."""
        with self._lock:
            self._calls.append(call)
        if self._failed():
            self.run()

    def run(self) -> None:
        with self._lock:
            calls, self._calls = self._calls, []
        for call in calls:
            call()
