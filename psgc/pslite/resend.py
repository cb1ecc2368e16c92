"""ps-lite's resending (PS_RESEND): each message is acknowledged, and sent again until it is. Pure; all of a job's nodes must have it on.

A message's signature tells messages of a job apart: the application, sender, receiver, number, and whether it is a request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from psgc.errors import JobFailed
from psgc.pslite.meta import ACK, EMPTY, TERMINATE, Meta

RETRIES: Final = 10  # ps-lite aborts at the tenth
MAX_REMEMBERED: Final = 1 << 16  # signatures of messages that came, of each sender; ps-lite remembers all of them for ever


def signature_of(meta: Meta, sender: int, receiver: int) -> int:
    """As in ps-lite, which joins its 16-bit and 8-bit fields with a 32-bit int that is sign-extended."""
    low = (meta.timestamp << 1 | meta.request) & 0xFFFFFFFF
    low |= 0xFFFFFFFF_00000000 if low >> 31 else 0
    return (meta.app_id & 0xFFFF) << 48 | (sender & 0xFF) << 40 | (receiver & 0xFF) << 32 | low


@dataclass(slots=True)
class _Outgoing:
    receiver: int
    meta: Meta
    frames: Sequence[Any]
    sent: float
    retries: int = 0


@dataclass(slots=True)
class Resender:
    """The messages that are not acknowledged yet, and those that have come. timeout_s: how long an acknowledgement may take."""

    own_id: int
    timeout_s: float
    _outgoing: dict[int, _Outgoing] = field(default_factory=dict)
    _came: dict[int, OrderedDict[int, None]] = field(default_factory=dict)

    def sending(self, receiver: int, meta: Meta, frames: Sequence[Any], now: float) -> None:
        """A message leaves for the first time."""
        if meta.command not in (ACK, TERMINATE) and meta.timestamp != EMPTY:
            self._outgoing.setdefault(signature_of(meta, self.own_id, receiver), _Outgoing(receiver, meta, frames, now))

    def receive(self, sender: int, meta: Meta) -> tuple[bool, Meta | None]:
        """A message came: whether to pass it on, and the acknowledgement to answer with."""
        if meta.command == TERMINATE:
            return True, None
        if meta.command == ACK:
            self._outgoing.pop(meta.signature, None)
            return False, None
        signature = signature_of(meta, sender, self.own_id)
        came = self._came.setdefault(sender, OrderedDict())
        fresh = signature not in came
        came[signature] = None
        if len(came) > MAX_REMEMBERED:
            came.popitem(last=False)
        return fresh, Meta(command=ACK, signature=signature)

    def due(self, now: float) -> list[tuple[int, Meta, Sequence[Any]]]:
        """Messages to send again. Raises JobFailed when one has been sent too often."""
        again = []
        for entry in self._outgoing.values():
            if entry.sent + self.timeout_s * (1 + entry.retries) < now:
                entry.retries += 1
                if entry.retries >= RETRIES:
                    raise JobFailed(
                        f"ps-lite node {entry.receiver} has not acknowledged {entry.meta} after {RETRIES} tries; is it alive, and is PS_RESEND set in "
                        f"all of the job's processes?"
                    )
                again.append((entry.receiver, entry.meta, entry.frames))
        return again
