"""An observer of an exchange's steps, which times their computation: the profiler and ``auto`` are such. One that observes nothing is ``UNOBSERVED``.

Its methods run in several threads. Those of one step come one after the other and need no lock: under DDP ``delivered`` returns before DDP's last future is
complete, for which backward waits; so ``stepped`` and the next step's ``begins`` see all that it wrote.
"""

from __future__ import annotations

from typing import Final

import torch


class Observer:
    """Times a step's computation. holds: buckets leave only at synchronize while it observes, so that only backward runs."""

    holds = False

    def begins(self) -> None:
        """The next step begins, and nothing of it has been sent. Plans may be switched."""

    def ready(self, name: str, gradient: torch.Tensor) -> None:
        """Backward has finished this tensor's gradient, which is not sent yet. Runs in autograd's thread."""

    def leaving(self) -> None:
        """The trainer asks for the synchronized gradients."""

    def delivered(self) -> None:
        """The trainer has them. Under DDP it runs in the thread that waits for them."""

    def stepped(self) -> None:
        """An optimizer has applied the last gradients that were delivered, if any were since it was told so before. The trainer is between two steps: plans may
        be switched. Under DDP optimizers are the user's own and may be none that tell of their steps."""


UNOBSERVED: Final = Observer()
