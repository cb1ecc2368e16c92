"""One step of a bucket as the front end asks for it, whoever carries it out: the network thread over servers, an executor over groups."""

from __future__ import annotations

from dataclasses import dataclass

from psgc.worker.session import BucketBuffer
from psgc.worker.tickets import StepTicket


@dataclass(slots=True)
class Submission:
    """A bucket's step as the front end asked for it."""

    buffer: BucketBuffer
    ticket: StepTicket
    skip: bool = False
    previous_skipped: int = 0
    rescale: float = 1.0
    priority: int | None = None  # None: the bucket's
