"""When children that do not end by themselves are ended: first SIGTERM, then SIGKILL, and not while a checkpoint is being written. Pure: time is passed in."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Final

from psgc.config import Config

OWN_END_S: Final = 3.0  # margin beyond a process's own time limit before it is ended from here


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long children are waited for, in seconds."""

    fault_s: float = 13.0  # after a fault: later than PSGC_ABORT_GRACE_S, by which the job's own processes end themselves
    save_s: float = 303.0  # after a fault or a signal for one that is writing a checkpoint: later than its PSGC_SAVE_TIMEOUT_S
    grace_s: float = 8.0  # after a signal to us everyone may end by itself; whoever sent it may insist after 10 s (see ``after``)
    service_s: float = 5.0  # when the workers have ended the services have nothing to wait for
    term_s: float = 2.0  # between SIGTERM and SIGKILL

    @classmethod
    def of(cls, config: Config) -> Patience:
        """Limits longer than the processes' own, so that they end by themselves first."""
        return cls(fault_s=config.abort_grace_s + OWN_END_S, save_s=max(config.abort_grace_s, config.save_timeout_s) + OWN_END_S)

    def after(self, number: int) -> float:
        """How long everyone may take after this signal to us. Ctrl-C is a person's, who may press it again: who hangs is ended by itself as after a fault, and
        says where it was."""
        return max(self.grace_s, self.fault_s) if number == signal.SIGINT else self.grace_s


@dataclass(slots=True)
class Ending:
    """The signals that are due, and until when they are held back for a checkpoint."""

    patience: Patience
    _due: list[tuple[float, int]] = field(default_factory=list)  # (when, signal) still to be sent to everyone left
    _saves_until: float = float("inf")  # then whoever writes a checkpoint is ended all the same
    _held_at: float = float(
        "inf"
    )  # when the next signal would have been sent, but for a checkpoint; -inf: it was said that one is waited for

    def within(self, grace_s: float, now: float) -> None:
        """Give everyone so long to end by themselves. Never postpones an earlier deadline."""
        term = now + grace_s
        self._saves_until = min(self._saves_until, now + self.patience.save_s)
        if not self._due or (len(self._due) == 2 and term < self._due[0][0]):
            self._due = [(term, signal.SIGTERM), (term + self.patience.term_s, signal.SIGKILL)]

    def withdraw(self) -> None:
        """There is something to wait for after all. None of the signals has been sent."""
        self._due, self._saves_until, self._held_at = [], float("inf"), float("inf")

    def hold(self, now: float) -> float | None:
        """A checkpoint is being written: postpone the signals, up to a limit. Returns for how many seconds at most, where that is to be said, once."""
        if not self._due or now >= self._saves_until:
            return None
        due, said = self._due[0][0], None
        if self._held_at == float("inf"):
            self._held_at = due
        if now >= self._held_at != float("-inf"):
            self._held_at = float("-inf")
            said = self._saves_until - now
        later = min(now + self.patience.fault_s, self._saves_until) - due
        if later > 0:
            self._due = [(when + later, number) for when, number in self._due]
        return said

    def next(self, now: float) -> int | None:
        """A signal that is due now; it is no longer due then."""
        return self._due.pop(0)[1] if self._due and now >= self._due[0][0] else None
