"""Finishes the steps of several optimizers at the end of one backward, without deadlock between ranks.

Ranks may have different optimizers in one backward, or in a different order (a rank that used only one of two models). So all buckets are submitted
before any result is awaited, and declarations, which wait for all ranks, are made in parallel threads.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Protocol

import torch


class Finisher(Protocol):
    """What one optimizer's exchange does when a backward is over."""

    @property
    def declared(self) -> bool:
        """Whether all its gradients are in a layout."""

    def backward_over(self) -> bool:
        """Count the backward. True if it completes a step, which is then to be sent and received."""

    def send(self) -> None:
        """Submit what has not left yet."""

    def receive(self) -> None:
        """Wait for it, and leave the means in p.grad."""


def finish(exchanges: Sequence[Finisher]) -> None:
    """Raises what ended the job, or UsageError."""
    due = [exchange for exchange in exchanges if exchange.backward_over()]
    fresh = [exchange for exchange in due if not exchange.declared]
    for exchange in due:
        if exchange not in fresh:
            exchange.send()
    if len(fresh) > 1:
        _send_side_by_side(fresh)
    else:
        for exchange in fresh:
            exchange.send()
    for exchange in due:
        exchange.receive()


def _send_side_by_side(exchanges: Sequence[Finisher]) -> None:
    """Send each in a thread of its own: needed once, when layouts are declared."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()  # a new thread has another current stream than the one that gradients were made on
    outcomes: SimpleQueue[BaseException | None] = SimpleQueue()

    def send(exchange: Finisher) -> None:
        try:
            exchange.send()
        except BaseException as error:
            outcomes.put(error)
        else:
            outcomes.put(None)

    for exchange in exchanges:
        threading.Thread(target=send, args=(exchange,), daemon=True).start()
    for _ in exchanges:
        error = outcomes.get()
        if error is not None:  # the others may wait for ranks that never come
            raise error
