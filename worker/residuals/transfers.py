"""Transfers of residuals between a worker and the servers that keep them: read when a state is saved, set when one is loaded.

Pure: no sockets, clocks, threads or numbers; ``now`` is passed in. A message carries a fixed number of elements, and a few messages travel
to each server at once. Messages without an answer are repeated on a new connection; servers answer repeats alike and set nothing twice.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

from psgc.layout import key_text
from psgc.processes.reminder import Reminder
from psgc.wire.frames import Header, Kind

IN_FLIGHT: Final = 64  # messages to one server; 4 MiB of elements keep a 10 Gbit/s link of 3 ms busy


@dataclass(slots=True, eq=False)
class Transfer:
    """Some elements of one key's residual. payload: the elements to set; None asks for them. step: the worker's last step. owner: opaque here,
    for the caller that carries out the actions. rescale: the factor to set, or the factor that came with ``answer``."""

    key: int
    first: int
    step: int
    flags: int = 0
    payload: Any = None
    rescale: float = 1.0
    owner: Any = None
    answer: Any = None
    began: float = 0.0

    @property
    def kind(self) -> Kind:
        return Kind.RESIDUAL if self.payload is None else Kind.RESTORE

    def answered_by(self, header: Header) -> bool:
        return (header.kind, header.key, header.contributors, header.step) == (self.kind, self.key, self.first, self.step)


@dataclass(slots=True)
class Transfers:
    """The transfers of one server. Methods return those whose messages are to be sent now."""

    waiting: deque[Transfer] = field(default_factory=deque)
    said: list[Transfer] = field(default_factory=list)
    named: Reminder | None = None

    def add(self, transfers: list[Transfer], now: float) -> None:
        for transfer in transfers:
            transfer.began = now
        self.waiting += transfers

    def pump(self) -> list[Transfer]:
        """Transfers that may be sent now for the first time."""
        fresh = []
        while self.waiting and len(self.said) < IN_FLIGHT:
            transfer = self.waiting.popleft()
            fresh.append(transfer)
            self.said.append(transfer)
        return fresh

    def answered(self, header: Header, payload: Any) -> Transfer | None:
        """The transfer that this message answers; None for a repeated answer."""
        for transfer in self.said:
            if transfer.answered_by(header):
                self.said.remove(transfer)
                if transfer.kind is Kind.RESIDUAL:
                    transfer.answer, transfer.rescale = payload, header.rescale
                return transfer
        return None

    def awaited(self, server: int, now: float, silence_s: float) -> str | None:
        """A line about what has been awaited for long, once in a while."""
        late = [*self.said, *self.waiting]
        if not late:
            self.named = None
            return None
        first = late[0]
        self.named = self.named or Reminder(first.began)
        if not self.named.due(now, silence_s):
            return None
        what = "has not been sent" if first.kind is Kind.RESIDUAL else "has not been taken"
        more = f" and {len(late) - 1} more" if len(late) > 1 else ""
        return (
            f"waiting for server {server} for {now - first.began:.0f} s: its residual of key {key_text(first.key)}, elements from "
            f"{first.first} on{more}, {what}"
        )
