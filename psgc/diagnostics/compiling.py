"""Tells the user that kernels are being compiled, which takes many seconds at the first use on a machine.

Owns the hook into the compiler and the messages. Does not know kernels or their cache. If several processes share a terminal, only the first one that
compiles says so, because all of them compile the same kernels.
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
GPU_TEXT: Final = "compiling GPU kernels, once on this machine: the first steps with a codec take some seconds longer"
PAUSE_S: Final = 0.7  # several kernels are compiled in a row; if none begins within this time, compilation is over


class Observer(Protocol):
    """Called when a kernel's compilation begins and ends, in the thread that compiles."""

    def begins(self) -> None: ...
    def ends(self) -> None: ...


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """A context in which ``observer`` replaces the usual messages about compilation."""
    global _observer  # noqa: PLW0603 - the process has one
    before, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = before


@contextmanager
def compilation() -> Iterator[None]:
    """A context that reports the compilation of kernels, and nothing if they come from the cache."""
    from numba.core import event

    with event.install_listener("numba:compile", _listener(_observer)):
        yield


def _listener(observer: Observer) -> Any:
    from numba.core.event import Event, Listener

    class Compilations(Listener):
        def __init__(self) -> None:
            self.under_way = 0  # a kernel's helpers are compiled while it is

        def on_start(self, event: Event) -> None:
            self.under_way += 1
            if self.under_way == 1:
                observer.begins()

        def on_end(self, event: Event) -> None:
            self.under_way -= 1
            if not self.under_way:
                observer.ends()

    return Compilations()


class TextObserver:
    """Calls ``tell`` with a text while a kernel is compiled, and then with ""."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    def begins(self) -> None:
        self._tell(TEXT)

    def ends(self) -> None:
        self._tell("")


class StandardError:
    """Tells on stderr: with a moving bar on a terminal, with one line elsewhere."""

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
    """A bar without a total, because the number of kernels is not known. It disappears when no kernel is compiling."""

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


_gpu_voice: Final[list[Voice]] = []  # none until the first kernel
_gpu_counts: Final[list[Callable[[], None]]] = []


@contextmanager
def gpu_kernels_counted_by(count: Callable[[], None]) -> Iterator[None]:
    """A context in which ``count`` is called for each kernel for GPUs that is compiled, in place of the usual message."""
    _gpu_counts.append(count)
    try:
        yield
    finally:
        _gpu_counts.remove(count)


def gpu_kernel_compiled() -> None:
    """A kernel for GPUs has been compiled. After the first one, a line says that there may be more."""
    for count in _gpu_counts:
        count()
    if not _gpu_voice and not _gpu_counts:
        _gpu_voice.append(Voice("kernels", outlet()))
        if _gpu_voice[0].speaks("gpu kernels"):
            logger.warning("%s", GPU_TEXT)


def moving_bar(count: str) -> Any:
    """A progress bar on stderr, a terminal; it is erased at the end. count: rich's template for the amount done."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn(count), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False, redirect_stderr=False)


_observer: Observer = StandardError()
