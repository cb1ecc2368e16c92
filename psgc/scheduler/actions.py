"""The actions that the scheduler's state machines return for the loop to carry out."""

from __future__ import annotations

from dataclasses import dataclass

from psgc.scheduler.records import Record
from psgc.wire.frames import Header


@dataclass(frozen=True, slots=True)
class Send:
    """Send a control message to one peer (its connection's identity)."""

    peer: bytes
    header: Header
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Log:
    """Log one line. level: as in the logging module."""

    level: int
    text: str


@dataclass(frozen=True, slots=True)
class End:
    """End the scheduler's process with this status, for this reason."""

    status: int
    reason: str


@dataclass(frozen=True, slots=True)
class Keep:
    """Write this down before anything that follows is done."""

    record: Record


Action = Send | Log | End | Keep
