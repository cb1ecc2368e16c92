"""Who times a step's computation, as the gradients' exchange sees it."""

from __future__ import annotations

from typing import Protocol


class Observer(Protocol):
    """Times a step's computation. While there is one, buckets stay until synchronize, so that nothing else runs beside backward."""

    def ready(self, name: str) -> None:
        """Backward has finished this tensor's gradient. Runs in autograd's thread."""

    def leaving(self) -> None:
        """The trainer asks for the synchronized gradients."""

    def delivered(self) -> None:
        """It has them."""
