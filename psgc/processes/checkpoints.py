"""Checkpoints that this process is writing: a failed job does not end the process in the middle of one.

Owns the set of saves in progress. The watchdog of a failed job and the end of the interpreter wait for them; the launcher is told, because it ends
processes, too.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from psgc.processes.absence import Absence

POLL_S: Final = 0.05


class Saves:
    """The saves of one process. ``saving`` may be entered by several threads at once, and nested."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # re-entrant: a signal's handler may save while its thread is in here
        self._under_way: dict[object, threading.Thread] = {}
        self._tell: Callable[[bool], object] = lambda _: None
        self._announced = False
        self._timeout_s = 0.0

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A context for writing a checkpoint: if the job fails meanwhile, the process waits for its end. Errors pass through."""
        save = object()
        with self._lock:
            self._under_way[save] = threading.current_thread()
            self._tell_if_changed()
        try:
            yield
        finally:
            with self._lock:
                self._under_way.pop(save, None)  # a process that was forked meanwhile has forgotten it
                self._tell_if_changed()

    @property
    def under_way(self) -> bool:
        return bool(self._under_way)

    def report_to(self, tell: Callable[[bool], object], timeout_s: float) -> None:
        """Call ``tell(True)`` when the first save begins, and ``tell(False)`` when the last one has ended. timeout_s: how long
        the end of the interpreter waits."""
        with self._lock:
            self._tell, self._announced, self._timeout_s = tell, False, timeout_s
            self._tell_if_changed()

    def await_others(self, name_after_s: float = 5.0) -> None:
        """Wait for the saves of other threads, which the end of the interpreter would interrupt. Announces a long wait."""
        timeout_s, began, said = self._timeout_s, time.monotonic(), False
        while writers := self._others():
            waited = time.monotonic() - began
            if waited >= timeout_s:
                _say(f"the checkpoint that {writers[0]!r} writes is not whole: {_overdue(timeout_s)} the script had ended")
                return
            if waited >= name_after_s and not said:
                said = True
                _say(f"the script has ended; waiting for thread {writers[0]!r}, inside psgc.saving(), {timeout_s - waited:.0f} s at most")
            time.sleep(POLL_S)

    def _others(self) -> list[str]:
        """Names of other threads that are saving and still run."""
        with self._lock:
            threads = list(self._under_way.values())
        return [thread.name for thread in threads if thread.is_alive() and thread is not threading.current_thread()]

    def _tell_if_changed(self) -> None:
        # Announced first and noted afterwards: a signal's handler that saves in between then says it again rather than not at all.
        if self._under_way and not self._announced:
            self._tell(True)
            self._announced = True
        elif not self._under_way and self._announced:
            self._announced = False
            self._tell(False)


class Watchdog(threading.Thread):
    """Ends the process of a failed job that does not end by itself: ``grace_s`` after the failure, or after the end of a save that was under
    way, but no later than ``save_timeout_s`` after the failure.

    stopped: set once the process has left the job in order, and nothing has to be done. last_words: said when it is ended. ending: called
    just before.
    """

    def __init__(
        self, saves: Saves, stopped: threading.Event, grace_s: float, save_timeout_s: float, last_words: str,
        ending: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        super().__init__(name="psgc-watchdog", daemon=True)
        self._saves, self._stopped, self._last_words, self._call_at_end = saves, stopped, last_words, ending
        self._grace_s, self._save_timeout_s = grace_s, save_timeout_s

    def run(self) -> None:
        failed_at, absence = time.monotonic(), Absence(POLL_S)
        last = failed_at + max(self._grace_s, self._save_timeout_s)
        end = failed_at + self._grace_s
        while (now := time.monotonic()) < min(end, last):
            if self._stopped.wait(POLL_S):
                return
            away = absence.ended(time.monotonic())  # a process that was stopped could not save
            end, last = end + away, last + away
            if self._saves.under_way:
                end = max(end, time.monotonic() + self._grace_s)
        if self._saves.under_way:
            _say(f"the checkpoint being written (inside psgc.saving()) is not whole: {_overdue(now - failed_at)} the job had failed")
        if self._last_words:
            _say(self._last_words)
        try:
            self._call_at_end()
        finally:
            os._exit(1)


def _overdue(seconds: float) -> str:
    return f"it was not done {seconds:.0f} s (PSGC_SAVE_TIMEOUT_S) after"


def _say(text: str) -> None:
    sys.stderr.write(f"psgc: {text}\n")
    sys.stderr.flush()


SAVES: Final = Saves()
os.register_at_fork(after_in_child=SAVES.__init__)  # type: ignore[misc]  # the saves are the parent's, and it tells of them


@contextmanager
def saving() -> Iterator[None]:
    """``with psgc.saving():`` around what writes a checkpoint: a job that fails meanwhile does not end this process before it is written,
    though at most PSGC_SAVE_TIMEOUT_S after the failure.

    In any thread, several at once, nested, in a job of one or before ``init``. Errors raised inside pass through.
    """
    with SAVES.saving():
        yield
