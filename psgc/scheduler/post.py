"""The scheduler's messages: of one job, in the epoch that it is in. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from psgc.scheduler.actions import Send
from psgc.wire.frames import SCHEDULER_SENDER, Header, Kind

FIRST_EPOCH: Final = 1


@dataclass(slots=True)
class Post:
    """job: its id. epoch: of the membership, which the scheduler alone changes; every message says it."""

    job: int
    epoch: int = FIRST_EPOCH

    def send(self, peer: bytes, kind: Kind, body: bytes = b"", *, plan: int = 0, key: int = 0, step: int = 0) -> Send:
        header = Header(
            kind, job=self.job, epoch=self.epoch, plan=plan, key=key, step=step, sender=SCHEDULER_SENDER, payload_bytes=len(body)
        )
        return Send(peer, header, body)
