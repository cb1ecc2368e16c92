"""A few threads that run short jobs, the highest priority first. They block while idle; kernels release the GIL while busy."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable
from typing import Any

MAX_THREADS = 4
Job = tuple[int, int, Callable[..., None], tuple[Any, ...]]
_STOP_PRIORITY = 1 << 62


def threads_of(cores: int, processes: int = 1) -> int:
    """The default number of threads of each of ``processes`` processes on ``cores`` cores."""
    return max(1, min(MAX_THREADS, cores // processes))


class Pool:
    """``threads`` daemon threads. A job must handle its own errors; one that escapes goes to ``on_error``."""

    def __init__(self, name: str, threads: int, on_error: Callable[[BaseException], None]) -> None:
        self._jobs: queue.PriorityQueue[Job] = queue.PriorityQueue()
        self._count = itertools.count()
        self._on_error = on_error
        self._threads = [threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, priority: int, job: Callable[..., None], *args: Any) -> None:
        """Run ``job(*args)`` in a thread of the pool; higher priority first, then first come, first served."""
        self._jobs.put((-priority, next(self._count), job, args))

    def close(self, timeout_s: float = 5.0) -> None:
        """Let the threads finish what is queued, then end."""
        for _ in self._threads:
            self._jobs.put((_STOP_PRIORITY, next(self._count), _stop, ()))
        for thread in self._threads:
            thread.join(timeout_s)

    def _work(self) -> None:
        while True:
            _, _, job, args = self._jobs.get()
            if job is _stop:
                return
            try:
                job(*args)
            except BaseException as error:  # a pool thread must not die unheard
                self._on_error(error)
            del job, args  # a payload must not live on in a sleeping thread's frame


def _stop() -> None:
    """Marks the end of the queue; never run."""
