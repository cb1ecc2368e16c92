"""The interface of an observer that times a step's computation; the profiler and ``auto`` implement it."""

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


class StepObserver(Observer, Protocol):
    """An observer that is told apart when gradients have arrived and when the trainer is between two steps: DDP's hook knows these at different times."""

    def arrived(self) -> None:
        """The last gradient of a step has come. Runs in the thread that waits for it."""

    def decide(self) -> None:
        """The next step begins, and nothing of it has been sent. May switch plans."""
