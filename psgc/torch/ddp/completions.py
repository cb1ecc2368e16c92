"""torch futures for tickets: one thread waits for a session's tickets and completes the futures that DDP waits for.

The thread sleeps in the kernel, without the GIL, so that backward goes on beside it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from psgc.torch.tensors.sent import SentBucket
from psgc.worker.session import Session, Ticket


class Completion:
    """A tensor that is not complete yet. torch waits for ``future``, which gives ``tensor`` or raises the error that ended the job."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._source: torch.futures.Future[Exception | None] = torch.futures.Future(devices=[tensor.device] if tensor.is_cuda else None)
        self._tensor = tensor
        self.future: torch.futures.Future[torch.Tensor] = self._source.then(self._give)

    def complete(self, error: Exception | None = None) -> None:
        self._source.set_result(error)

    def _give(self, source: torch.futures.Future[Exception | None]) -> torch.Tensor:
        # Only an exception that is raised here reaches the future's waiters in C++ with its text.
        error = source.value()
        if error is not None:
            raise error
        return self._tensor


@dataclass(slots=True, eq=False)
class Arrival:
    """One of DDP's buckets in one step. gradients: each parameter's, as DDP has laid them out in the bucket's memory."""

    parameters: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor]
    completion: Completion
    last: bool

    def pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return zip(self.parameters, self.gradients, strict=True)


class Completer(threading.Thread):
    """See the module's text. Ends with the process."""

    def __init__(self, session: Session) -> None:
        super().__init__(name="psgc-completions", daemon=True)
        self._session = session
        self._queue: queue.SimpleQueue[tuple[Sequence[Ticket], Completion, Callable[[], None]]] = queue.SimpleQueue()
        self.start()

    def complete_after(self, tickets: Sequence[Ticket], completion: Completion, then: Callable[[], None] = lambda: None) -> None:
        """Complete it once all tickets are done, and the completions before it have been; call ``then`` just before, unless the job fails."""
        self._queue.put((tickets, completion, then))

    def run(self) -> None:
        while True:
            tickets, completion, then = self._queue.get()
            error = None
            try:
                self._session.wait(tickets)
                then()
            except Exception as fault:  # whatever it is, DDP must not wait for ever
                error = fault
            completion.complete(error)
            del tickets, completion, then  # a bucket's memory is DDP's: not to be held until the next one comes


class InOrder:
    """DDP's buckets of one model, whose futures complete in the order in which DDP has handed the buckets over."""

    def __init__(self, completer: Completer) -> None:
        self._completer = completer
        self._open: list[tuple[Arrival, Sequence[SentBucket], Callable[[], None]]] = []  # those that wait for a bucket which has not left

    def add(self, arrival: Arrival, buckets: Sequence[SentBucket], then: Callable[[], None]) -> None:
        """Complete it once the results of these buckets have arrived; call ``then`` just before. Called again whenever some have left."""
        self._open.append((arrival, buckets, then))
        while self._open and all(bucket.ticket is not None for bucket in self._open[0][1]):
            arrival, buckets, then = self._open.pop(0)
            self._completer.complete_after([bucket.ticket for bucket in buckets if bucket.ticket is not None], arrival.completion, then)
