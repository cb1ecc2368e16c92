"""The state of each part that this worker exchanges with servers, from step to step. Pure.

A part's step goes IDLE -> QUEUED -> SENT -> ACKED -> DECODING -> IDLE (a skip goes straight to SENT). Invariant: what a step says of itself
(``Said``) does not change until the next one begins, so it can be sent again at any time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from psgc.layout import ITEM_BYTES, OF_MODELS, Bucket, Layout, Part
from psgc.wire.frames import Flag, Header, Kind


class Phase(Enum):
    IDLE = "idle"
    QUEUED = "waiting to be sent"
    SENT = "sent, not yet accepted"
    ACKED = "accepted, result awaited"
    DECODING = "being decoded"


@dataclass(frozen=True, slots=True)
class PartPlace:
    """What a layout says of a part. position: within a turn of the layout's window on its server; turn: the layout's parts on that server; codec: the push
    codec's id; kind: the layout's; name: of the bucket's first tensor; by: the bucket's codec; plain_bytes: what a step of its slice
    would carry in both directions uncompressed, 0 in later rounds, and behind groups."""

    key: int
    server: int
    layout: int
    round: int
    position: int
    turn: int
    codec: int
    name: str
    kind: str = "adhoc"
    plain_bytes: int = 0
    by: str = ""

    @classmethod
    def of(cls, layout: Layout, bucket: Bucket, part: Part, codec: int) -> PartPlace:
        return cls(
            part.key, part.server, layout.id, part.round, part.position, layout.parts_on_server[part.server], codec,
            layout.tensors[bucket.tensors[0]].name, layout.kind,
            0 if part.round or bucket.over_groups else 2 * part.numel * ITEM_BYTES[bucket.dtype], bucket.codec,
        )  # fmt: skip

    @property
    def of_gradients(self) -> bool:
        """Whether it is of an optimizer's layout."""
        return self.kind in OF_MODELS


class Said(NamedTuple):
    """What a step says of itself. began: when it was submitted."""

    skip: bool = False
    flags: int = Flag.NONE
    rescale: float = 1.0
    payload_bytes: int = 0
    began: float = 0.0


@dataclass(slots=True)
class PartState:
    """See the module's text. credit: bytes of the server's credit that the part holds; asked: after a connection was re-made, and not answered yet;
    overwritten: the step's result has begun to come, so that its payload may be gone; results: that this process has taken."""

    place: PartPlace
    priority: int
    step: int = 0
    phase: Phase = Phase.IDLE
    said: Said = field(default_factory=Said)
    credit: int = 0
    asked: bool = False
    overwritten: bool = False
    results: int = 0

    @property
    def ticket(self) -> int:
        """The place of its step in its layout's window."""
        return (self.step - 1) * self.place.turn + self.place.position

    @property
    def is_initial(self) -> bool:
        """Whether the step's payload is of weights' initial values, which travel uncompressed."""
        return self.place.kind == "weights" and self.step == 1

    def header(self, kind: Kind, *, job: int, epoch: int, sender: int) -> Header:
        """Of a message about the step. A push's has the codec and the payload's length."""
        codec = self.place.codec if kind == Kind.PUSH and not self.is_initial else 0
        payload_bytes = self.said.payload_bytes if kind == Kind.PUSH else 0
        return Header(
            kind, int(self.said.flags), job, epoch, self.place.layout, self.place.key, self.step, self.place.round, codec, sender, 0, self.said.rescale,
            payload_bytes,
        )  # fmt: skip
