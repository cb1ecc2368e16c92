"""The interface of an observer that times a step's computation; the profiler implements it."""

from __future__ import annotations

from typing import Protocol


class Observer(Protocol):
    """Times a step's computation. holds: buckets leave only at synchronize while it observes, so that only backward runs."""

    @property
    def holds(self) -> bool: ...

    def ready(self, name: str) -> None:
        """Backward has finished this tensor's gradient. Runs in autograd's thread."""

    def leaving(self) -> None:
        """The trainer asks for the synchronized gradients."""

    def delivered(self) -> None:
        """The trainer has them."""
