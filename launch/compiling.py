"""Telling that kernels are being compiled: at first use on a machine that takes many seconds, at later ones nothing.

Owns how the compiler is listened to. Knows nothing of kernels, nor of where they are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def compilation_told(tell: Callable[[str], None]) -> Iterator[None]:
    """While kernels are compiled within, ``tell`` has heard so; it hears "" once they are. Those loaded from the cache are not told of."""
    from numba.core import event

    with event.install_listener("numba:compile", _listener(tell)):
        yield


def _listener(tell: Callable[[str], None]) -> Any:
    from numba.core.event import Event, Listener

    class Compilations(Listener):
        def __init__(self) -> None:
            self.under_way = 0  # a kernel's helpers are compiled while it is

        def on_start(self, event: Event) -> None:
            self.under_way += 1
            if self.under_way == 1:
                tell("compiling kernels, once on this machine")

        def on_end(self, event: Event) -> None:
            self.under_way -= 1
            if not self.under_way:
                tell("")

    return Compilations()
