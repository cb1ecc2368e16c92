"""The header of every message, as a table and the code made from it.

Owns the bytes of a header; must not know the meaning of messages (``messages.py``) or how they travel (``transport/``).
PROTOCOL.md shows the same table; a test holds the two together.
"""

from __future__ import annotations

import math
import struct
from enum import IntEnum
from typing import Final, NamedTuple

from psgc.errors import LocalProtocolError, RemoteProtocolError

MAGIC: Final = b"PSGC"
VERSION: Final = 2

# One row a field: name, struct code, meaning. HEADER_STRUCT is built from it.
FIELDS: Final = (
    ("magic", "4s", "the four bytes PSGC"),
    ("version", "B", "protocol version, 2"),
    ("kind", "B", "message kind, see the table of kinds"),
    ("flags", "H", "bits, see the table of flags"),
    ("job", "Q", "job id; a message of another job is refused"),
    ("epoch", "I", "job-wide, changed by the scheduler alone; an old epoch is refused"),
    ("plan", "I", "id of the layout that the key belongs to; for control messages a request id"),
    ("key", "Q", "a part's id: layout (16 bits), bucket (24), part (24)"),
    ("step", "Q", "one synchronisation of the key, counted from 1"),
    ("round", "H", "round within the step, for codecs that take several; else 0"),
    ("codec", "H", "codec id of the payload; 0 = none"),
    ("sender", "I", "worker: its rank; server: 0x8000_0000 + its index; scheduler: 0xffff_ffff"),
    (
        "contributors",
        "I",
        "result: how many ranks contributed (skips not counted); RESIDUAL, RESTORE: the first element; REPLICA: what it is",
    ),
    ("rescale", "f", "factor of the residual's unit against the last step's (learning rate, loss scale); RESIDUAL, RESTORE: still to come"),
    ("payload_bytes", "Q", "length of the payload that follows the header"),
)
HEADER_STRUCT: Final = struct.Struct("<" + "".join(code for _, code, _ in FIELDS))
MAX_PAYLOAD_BYTES: Final = 512 << 20  # of one message; layouts are cut so that no payload is larger
HEADER_BYTES: Final = HEADER_STRUCT.size
assert HEADER_BYTES == 64

SERVER_SENDER: Final = 0x8000_0000
SCHEDULER_SENDER: Final = 0xFFFF_FFFF
UNASSIGNED_SENDER: Final = 0xFFFF_FFFE  # a member before the scheduler has given it a rank


class Kind(IntEnum):
    """Message kinds. The numbers are the wire's; never reuse one."""

    HELLO = 1
    REGISTER = 2
    TOPOLOGY = 3
    HEARTBEAT = 4
    BARRIER = 5
    DECLARE = 6
    KEYS = 7
    KEYS_READY = 8
    LAYOUT = 9
    PUSH = 10
    ACK = 11
    RESULT = 12
    PULL = 13
    SKIP = 14
    WINDOW = 15
    ERROR = 16
    FAULT = 17
    ABORT = 18
    BYE = 19
    SEGMENT = 20
    RESIDUAL = 21
    RESTORE = 22
    MEASURE = 23
    DECLARATION = 24
    PUBLISH = 25
    LOOKUP = 26
    TURN = 27
    REPORT = 28
    OBSERVE = 29
    RETIRE = 30
    STATE = 31
    REPLICA = 32


class Flag(IntEnum):
    """Header flag bits. Not an IntFlag: combining those takes a microsecond in every message, under the GIL. Bit 8 was used by an earlier
    version and stays reserved."""

    NONE = 0
    WANT_RESULT = 1
    NONFINITE = 2
    PREVIOUS_SKIPPED = 4
    SKIPPED = 16
    LOCATED = 32
    RAISED = 64


class Header(NamedTuple):
    """A decoded header, without magic, which is checked. version: another one than ours only in what a scheduler hears and answers."""

    kind: int
    flags: int = 0
    job: int = 0
    epoch: int = 0
    plan: int = 0
    key: int = 0
    step: int = 0
    round: int = 0
    codec: int = 0
    sender: int = UNASSIGNED_SENDER
    contributors: int = 0
    rescale: float = 1.0
    payload_bytes: int = 0
    version: int = VERSION


_KINDS = frozenset(int(k) for k in Kind)
_KNOWN_FLAGS = sum(Flag)


def pack_header(header: Header) -> bytes:
    """The 64 bytes of ``header``. Raises LocalProtocolError for a value that its field cannot hold."""
    try:
        if not math.isfinite(header.rescale):
            raise OverflowError(f"rescale is {header.rescale}, which would poison residuals")
        return HEADER_STRUCT.pack(MAGIC, header.version, *header[:-1])
    except (struct.error, OverflowError) as error:
        raise LocalProtocolError(f"header {header} does not fit its fields: {error}") from None


def unpack_header(data: bytes | memoryview, any_version: bool = False) -> Header:
    """Decode and check 64 bytes. Raises RemoteProtocolError for wrong length, magic, version, kind, flags or rescale."""
    if len(data) != HEADER_BYTES:
        raise RemoteProtocolError(f"header of {len(data)} bytes, expected {HEADER_BYTES}", code=1)
    return header_at(data, 0, any_version)


def header_at(data: bytes | memoryview, start: int, any_version: bool = False) -> Header:
    """As ``unpack_header``, of the 64 bytes of ``data`` from ``start`` on, which are there."""
    fields = HEADER_STRUCT.unpack_from(data, start)
    if fields[0] != MAGIC:
        raise RemoteProtocolError(f"magic {fields[0]!r}, expected {MAGIC!r}: is the peer psgc?", code=1)
    if fields[1] != VERSION and not any_version:
        raise RemoteProtocolError(f"protocol version {fields[1]}, expected {VERSION}: install one psgc everywhere", code=2)
    header = Header._make((*fields[2:], fields[1]))
    if header.kind not in _KINDS:
        raise RemoteProtocolError(f"unknown message kind {header.kind}", code=3)
    if header.flags & ~_KNOWN_FLAGS:
        raise RemoteProtocolError(f"unknown flag bits {header.flags & ~_KNOWN_FLAGS:#x} in a {Kind(header.kind).name}", code=1)
    if not math.isfinite(header.rescale):
        raise RemoteProtocolError(f"rescale is {header.rescale}, which would poison residuals", code=1)
    return header
