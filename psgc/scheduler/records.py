"""What a scheduler writes down of its job, so that another process can take its place. Pure: names, fields and their check.

The state machines return ``Keep`` with a record before the messages that tell members of it: whatever a member has heard is written down. What is not
written down members say again on their new connection (``worker/requests.py``): open declarations, barriers, look-ups, submissions.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any, Final

from psgc.errors import RemoteProtocolError
from psgc.scheduler.roster import Member
from psgc.wire.messages import LEFT_OUT_IF_EMPTY, Register, parse_record, plain


@dataclass(frozen=True, slots=True)
class Began:
    """Whose journal this is. seals: for each token that the job accepts, its digest, by the slow derivation that also protects the control connections, and
    the key of the job's payload connections under it (``sealing.py``); a job without a token has one, whose digest is empty. again: this process had served
    another job before, and no worker may begin one."""

    job: int
    version: str
    nodes: int
    servers: int
    seals: dict[str, str]
    again: bool = False


@dataclass(frozen=True, slots=True)
class Sealed:
    """The job has other tokens from now on: see ``Began``."""

    seals: dict[str, str]


@dataclass(frozen=True, slots=True)
class Joined:
    """A member of the complete job, in the order in which they registered; or another name of one. peer: its connection's name, in hexadecimal; register: as
    it said it."""

    peer: str
    register: dict[str, Any]

    @classmethod
    def of(cls, peer: bytes, register: Register) -> Joined:
        return cls(peer.hex(), plain(register))

    def read(self) -> tuple[bytes, Register]:
        """Raises RemoteProtocolError."""
        return _peer(self.peer), parse_record(Register, self.register)


@dataclass(frozen=True, slots=True)
class Complete:
    """Everyone who has joined is there. epoch: of the membership from now on."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Succeeded:
    """A member's place was taken by another process: a server's, which serves no layout yet, its standby's (``register`` says so), or a worker's, which has no
    state yet. index: its number or rank; generation: which of the processes that follow one another it is, of a worker; waited_before_ms: what counts as
    waited by those before it."""

    index: int
    peer: str
    register: dict[str, Any]
    generation: int = 1
    waited_before_ms: int = field(default=0, metadata=LEFT_OUT_IF_EMPTY)

    def read(self) -> tuple[bytes, Register]:
        """Raises RemoteProtocolError."""
        return _peer(self.peer), parse_record(Register, self.register)


@dataclass(frozen=True, slots=True)
class Handed:
    """There were so many handovers of the job's state between workers."""

    count: int


@dataclass(frozen=True, slots=True)
class Settled:
    """A worker's process that has taken another's place has the job's state."""

    rank: int


@dataclass(frozen=True, slots=True)
class Mourned:
    """A worker's process counts as dead, and the others wait for the one that takes its place. heard: not any more, because it was only silent."""

    rank: int
    heard: bool = field(default=False, metadata=LEFT_OUT_IF_EMPTY)


@dataclass(frozen=True, slots=True)
class Absent:
    """A worker's process has died, and the job goes on without its rank, until another process takes the place."""

    rank: int


@dataclass(frozen=True, slots=True)
class Alone:
    """A server's standby is lost: nothing takes the server's place any more if its machine is."""

    server: int


@dataclass(frozen=True, slots=True)
class Left:
    """A member has left in order. index: a worker's rank or a server's number; standby: it is that server's standby, not the server."""

    role: str
    index: int
    standby: bool = field(default=False, metadata=LEFT_OUT_IF_EMPTY)

    @classmethod
    def of(cls, member: Member) -> Left:
        return cls(member.register.role, member.rank, member.register.standby)


@dataclass(frozen=True, slots=True)
class Failed:
    """The job has failed."""

    text: str


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A name has its layout, the next one. digest: of the declaration; text: base64 of the layout's body as it travels."""

    name: str
    digest: str
    text: str

    @classmethod
    def of(cls, name: str, digest: str, text: bytes) -> LaidOut:
        return cls(name, digest, base64.b64encode(text).decode())

    @property
    def body(self) -> bytes:
        return base64.b64decode(self.text)


@dataclass(frozen=True, slots=True)
class Served:
    """Every server is ready for a layout."""

    layout: int


@dataclass(frozen=True, slots=True)
class Passed:
    """Everyone has come to a barrier of a layout (0: of none)."""

    layout: int
    number: int


@dataclass(frozen=True, slots=True)
class Turned:
    """A step of a named tensor has its turn."""

    number: int
    key: int
    step: int


@dataclass(frozen=True, slots=True)
class TurnsSoFar:
    """In a journal that was written anew: how many turns there were, and a key's last step among them."""

    number: int
    key: int
    step: int


@dataclass(frozen=True, slots=True)
class Value:
    """A value that a rank has published. value: base64."""

    rank: int
    name: str
    value: str


Record = (
    Began
    | Sealed
    | Joined
    | Complete
    | Succeeded
    | Handed
    | Settled
    | Mourned
    | Absent
    | Alone
    | Left
    | Failed
    | LaidOut
    | Served
    | Passed
    | Turned
    | TurnsSoFar
    | Value
)
KINDS: Final[dict[str, type]] = {
    cls.__name__: cls
    for cls in (
        Began,
        Sealed,
        Joined,
        Complete,
        Succeeded,
        Handed,
        Settled,
        Mourned,
        Absent,
        Alone,
        Left,
        Failed,
        LaidOut,
        Served,
        Passed,
        Turned,
        TurnsSoFar,
        Value,
    )
}
# Steps happen too often for a write that waits for the disk: these outlive the scheduler's process, as all do, not its machine.
LIGHT: Final = (Served, Passed, Turned)


def to_json(record: Record) -> dict[str, Any]:
    return {"what": type(record).__name__, **plain(record)}


def from_json(body: Any) -> Record:
    """Raises RemoteProtocolError for what is no record."""
    if not isinstance(body, dict) or body.get("what") not in KINDS:
        raise RemoteProtocolError(f"no record of a scheduler: {body!r:.80}")
    found: Record = parse_record(KINDS[body["what"]], {name: value for name, value in body.items() if name != "what"})
    return found


def _peer(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise RemoteProtocolError(f"{text!r:.80} names no connection") from None


def succeeded(index: int, peer: bytes, register: Register, generation: int = 1, waited_before_ms: int = 0) -> Succeeded:
    joined = Joined.of(peer, register)
    return Succeeded(index, joined.peer, joined.register, generation, waited_before_ms)
