"""What is said while kernels are compiled: at first use on a machine that takes many seconds, at later ones nothing is compiled or said.

Owns how the compiler is listened to and the words. Knows nothing of kernels, nor of where they are kept. Of the processes whose lines end up
in one place the first that compiles says so: all of them compile the same.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

from psgc.config import outlet
from psgc.transport.control.voice import Voice

logger = logging.getLogger(__name__)
TEXT: Final = "compiling kernels, once on this machine"
PAUSE_S: Final = 0.7  # kernels come one after the other: what has not begun by then is not waited for


class Teller(Protocol):
    """Hears of every kernel that is compiled. Called from whichever thread compiles."""

    def begins(self) -> None: ...
    def ends(self) -> None: ...


@contextmanager
def told_by(teller: Teller) -> Iterator[None]:
    """Within, ``teller`` hears of kernels that are compiled, and nothing is said otherwise."""
    global _teller  # noqa: PLW0603 - the process has one
    before, _teller = _teller, teller
    try:
        yield
    finally:
        _teller = before


@contextmanager
def compilation() -> Iterator[None]:
    """If a kernel is compiled within, that is told; if it is loaded from the cache, it is not."""
    from numba.core import event

    with event.install_listener("numba:compile", _listener(_teller)):
        yield


def _listener(teller: Teller) -> Any:
    from numba.core.event import Event, Listener

    class Compilations(Listener):
        def __init__(self) -> None:
            self.under_way = 0  # a kernel's helpers are compiled while it is

        def on_start(self, event: Event) -> None:
            self.under_way += 1
            if self.under_way == 1:
                teller.begins()

        def on_end(self, event: Event) -> None:
            self.under_way -= 1
            if not self.under_way:
                teller.ends()

    return Compilations()


class Heard:
    """Tells ``tell``: the text while a kernel is compiled, then ""."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    def begins(self) -> None:
        self._tell(TEXT)

    def ends(self) -> None:
        self._tell("")


class StandardError:
    """Says it on stderr, once: a bar that moves on a terminal, a line elsewhere."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._voice: Voice | None = None
        self._said = False
        self._bar: _Bar | None = None

    def begins(self) -> None:
        with self._lock:
            if self._voice is None:
                self._voice = Voice("kernels", outlet())
            if not self._voice.speaks("kernels"):
                return
            if sys.stderr.isatty():
                self._bar = self._bar or _Bar()
                self._bar.begins()
            elif not self._said:
                logger.warning("%s: some 10 s for each codec; `psgc warm` does it ahead of a job", TEXT)
            self._said = True

    def ends(self) -> None:
        if self._bar is not None:
            self._bar.ends()


class _Bar:
    """A bar without an end, for nobody knows how many kernels will be asked for. It goes when none is compiled any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shown: Any = None
        self._task: Any = None
        self._under_way = 0
        self._ended = 0.0
        atexit.register(self._stop)

    def begins(self) -> None:
        with self._lock:
            self._under_way += 1
            if self._shown is None:
                self._shown = moving_bar("{task.completed} done")
                self._task = self._shown.add_task(TEXT, total=None)
                self._shown.start()

    def ends(self) -> None:
        with self._lock:
            self._under_way -= 1
            self._ended = time.monotonic()
            if self._shown is not None:
                self._shown.advance(self._task)
        look = threading.Timer(PAUSE_S, self._stop_if_idle)
        look.daemon = True
        look.start()

    def _stop_if_idle(self) -> None:
        if not self._under_way and time.monotonic() - self._ended >= PAUSE_S * 0.9:
            self._stop()

    def _stop(self) -> None:
        with self._lock:
            shown, self._shown = self._shown, None
            if shown is not None:
                shown.stop()


def moving_bar(count: str) -> Any:
    """A bar on the terminal that stderr is; nothing of it stays. count: rich's text of how much is done."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn(count), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False, redirect_stderr=False)


_teller: Teller = StandardError()
