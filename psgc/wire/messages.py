"""Bodies of the control messages: JSON on the wire, checked dataclasses here. Data messages (PUSH, ACK, RESULT, PULL, SKIP,
WINDOW) have no body: the header says it all, and a payload is the codec's bytes. Large bodies (layouts) travel packed."""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import IntEnum
from functools import cache
from typing import Any, Final, Literal, TypeVar

from psgc.errors import RemoteProtocolError

MAX_CONTROL_BYTES = 64 << 20  # a layout of 100,000 tensors is about 20 MB, unpacked
PACK_FROM_BYTES = 16 << 10  # a layout packs to a tenth of its size, in less time than 1 Gbit/s needs for the rest
MEASURE_BYTES = 1 << 20  # the largest MEASURE, and the largest answer to one
MAX_VALUE_NAME = 200  # letters of the name of a published value
MAX_VALUE_BYTES = 64 << 10  # of a published value
RESIDUAL_NUMEL = 16384  # elements of a RESIDUAL, and at most of a RESTORE: 64 KiB fit a packet of a Unix socket


class ErrorCode(IntEnum):
    """Typed reasons in an ERROR message. The numbers are part of the protocol; 2 and 7 are reserved."""

    MALFORMED = 1
    UNKNOWN_KIND = 3
    UNKNOWN_KEY = 4
    STALE_EPOCH = 5
    WRONG_JOB = 6
    WRONG_STEP = 8
    WRONG_CODEC = 9
    BAD_PAYLOAD = 10
    PUSH_MISSING = 11
    OUTSIDE_WINDOW = 12
    NOT_ADMITTED = 13
    DISAGREE = 14
    NO_CONTRIBUTOR = 15
    BROKEN_GROUP = 16
    ABSENT = 17
    CUT_OFF = 18
    FINAL = 19


LEFT_OUT_IF_EMPTY: Final = {"left out": "if empty"}  # metadata of a field that was added later: bodies without it stay as they were
# A worker's processes that a launcher starts in the place of a lost host are numbered beyond all that the launcher before it can have started.
NUMBERS_A_HOST: Final = 1 << 20
NETWORK_SCHEME, LOCAL_SCHEME = "tcp://", "shm://"  # schemes of the addresses that have fields of their own


@dataclass(frozen=True, slots=True)
class Register:
    """A member's first message to the scheduler. ``host`` identifies the machine (boot id and network namespace)."""

    role: Literal["worker", "server"]
    version: str
    host: str
    hostname: str
    pid: int
    pid_started: int  # clock ticks since boot (/proc/PID/stat field 22), so that a reused pid is not taken for the member
    nodes: int
    servers: int
    node: int = 0
    local_rank: int = 0
    local_size: int = 1
    index: int = -1  # server: its DMLC_SERVER_ID, or -1 for any
    address: str = ""  # server: where workers connect, tcp://host:port
    local_address: str = ""  # server: abstract Unix socket for peers on the same host
    encrypt: bool = False  # its payload connections must be encrypted
    more: tuple[str, ...] = field(default=(), metadata=LEFT_OUT_IF_EMPTY)  # server: where workers connect by other transports, URLs
    planned: bool = field(default=False, metadata=LEFT_OUT_IF_EMPTY)  # worker: PSGC_PLAN is set
    roots: tuple[int, ...] = field(
        default=(), metadata=LEFT_OUT_IF_EMPTY
    )  # worker: local ranks of its node that own shards; none: all of them
    switch: int = field(default=0, metadata=LEFT_OUT_IF_EMPTY)  # worker: how many of its node are behind one PCIe switch; 0: all of them
    asynchronous: bool = field(default=False, metadata=LEFT_OUT_IF_EMPTY)  # worker: PSGC_ASYNC=1
    session: int = field(default=0, metadata=LEFT_OUT_IF_EMPTY)  # how many sessions its process had before
    # Which of the processes it is, from 1, that take one another's place; 0: its death ends the job. Those of a server have a number in common, and those of a
    # worker that one launcher starts.
    incarnation: int = field(default=0, metadata=LEFT_OUT_IF_EMPTY)
    lineage: int = field(default=0, metadata=LEFT_OUT_IF_EMPTY)
    waits: bool = field(default=False, metadata=LEFT_OUT_IF_EMPTY)  # worker: PSGC_ON_WORKER_LOSS=wait
    shrinks: bool = field(default=False, metadata=LEFT_OUT_IF_EMPTY)  # worker: PSGC_ON_WORKER_LOSS=shrink
    standby: bool = field(default=False, metadata=LEFT_OUT_IF_EMPTY)  # server: it takes another's place if that one's machine is lost
    launcher: int = field(default=0, metadata=LEFT_OUT_IF_EMPTY)  # server, under PSGC_REPLICAS=1: the process with which it would be lost
    goes_on: bool = field(default=False, metadata=LEFT_OUT_IF_EMPTY)  # server: it has what a former process of its lineage kept of layouts

    def __post_init__(self) -> None:
        if self.role not in ("worker", "server"):
            raise RemoteProtocolError(f"Register.role is {self.role!r}, expected worker or server", ErrorCode.MALFORMED)


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server is, as it registered."""

    index: int
    host: str
    address: str
    local_address: str
    more: tuple[str, ...] = field(default=(), metadata=LEFT_OUT_IF_EMPTY)

    @property
    def by_transport(self) -> dict[str, str]:
        """The server's addresses as URLs, by the names of their transports."""
        local = [f"{LOCAL_SCHEME}{self.local_address}"] if self.local_address else []
        return {url.partition("://")[0]: url for url in (self.address, *local, *self.more) if url}


@dataclass(frozen=True, slots=True)
class Topology:
    """The scheduler's answer once everyone is there."""

    rank: int
    size: int
    nodes: int
    node_sizes: tuple[int, ...]
    epoch: int
    servers: tuple[ServerAddress, ...]
    workers: tuple[str, ...]  # "node.local_rank@hostname" by rank, for messages
    key: str = field(
        default="", repr=False
    )  # hexadecimal; a worker's own data key, or for a server the job's, from which all workers' are derived
    scheduler_host: str = ""  # the scheduler's host, as in Register: members on that host see whether its process is alive
    scheduler_pid: int = 0
    scheduler_started: int = 0
    roots: tuple[str, ...] = field(
        default=(), metadata=LEFT_OUT_IF_EMPTY
    )  # by node, as Register.roots, with commas; left out where all own shards
    switches: tuple[int, ...] = field(default=(), metadata=LEFT_OUT_IF_EMPTY)  # by node, as Register.switch; left out where there are none
    layouts: int = field(
        default=0, metadata=LEFT_OUT_IF_EMPTY
    )  # to a server that follows another process: it lets workers in when it serves so many
    incarnation: int = field(default=0, metadata=LEFT_OUT_IF_EMPTY)  # to a worker that follows other processes: which of them it is, from 2
    returns: bool = field(default=False, metadata=LEFT_OUT_IF_EMPTY)  # the scheduler may be started again though nobody listens meanwhile
    standby: str = field(
        default="", metadata=LEFT_OUT_IF_EMPTY
    )  # to a server: where its standby listens, tcp://host:port; none: it has none
    stands_by: bool = field(
        default=False, metadata=LEFT_OUT_IF_EMPTY
    )  # to a standby: it is that of server ``rank``, and serves no worker yet

    @classmethod
    def from_body(cls, body: dict[str, Any]) -> Topology:
        """Raises RemoteProtocolError."""
        servers = body.get("servers")
        if not isinstance(servers, list):
            raise RemoteProtocolError(f"Topology.servers is {servers!r}, expected a list", ErrorCode.MALFORMED)
        addresses = tuple(parse_record(ServerAddress, server) for server in servers)
        return replace(parse_record(cls, {**body, "servers": []}), servers=addresses)

    @property
    def node_roots(self) -> tuple[tuple[int, ...], ...]:
        """Raises RemoteProtocolError."""
        try:
            return tuple(tuple(int(root) for root in of_node.split(",") if root) for of_node in self.roots)
        except ValueError:
            raise RemoteProtocolError(f"Topology.roots is {self.roots!r:.80}, expected numbers with commas", ErrorCode.MALFORMED) from None


@dataclass(frozen=True, slots=True)
class Declare:
    """A rank declares a name. Equal digests mean equal declarations; the scheduler asks one rank for the whole declaration."""

    name: str
    digest: str  # of the declaration's canonical text, without the fields in which ranks may differ
    unused: tuple[int, ...] = ()  # a plan: indices of the tensors that had no gradient on this rank
    members: tuple[int, ...] = field(default=(), metadata=LEFT_OUT_IF_EMPTY)  # the ranks that declare it, ascending; none: all of them


@dataclass(frozen=True, slots=True)
class Lookup:
    """The name of a published value that a worker asks for."""

    name: str

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= MAX_VALUE_NAME:
            raise RemoteProtocolError(
                f"the name of a value has {len(self.name)} letters, expected 1 to {MAX_VALUE_NAME}", ErrorCode.MALFORMED
            )


@dataclass(frozen=True, slots=True)
class Published:
    """A value that a worker publishes under a name, and what others get who ask for it."""

    name: str
    value: str  # base64

    def __post_init__(self) -> None:
        Lookup(self.name)
        if len(self.data) > MAX_VALUE_BYTES:
            raise RemoteProtocolError(f"value {self.name!r} has {len(self.data)} bytes, at most {MAX_VALUE_BYTES}", ErrorCode.MALFORMED)

    @classmethod
    def of(cls, name: str, data: bytes) -> Published:
        return cls(name, base64.b64encode(data).decode())

    @property
    def data(self) -> bytes:
        try:
            return base64.b64decode(self.value.encode(), validate=True)
        except (ValueError, binascii.Error) as error:
            raise RemoteProtocolError(f"value {self.name!r} is not base64 ({error})", ErrorCode.MALFORMED) from None


@dataclass(frozen=True, slots=True)
class Notice:
    """A text for people and a code for programs: the body of ERROR, FAULT, ABORT and BYE."""

    code: int
    text: str
    awaited: tuple[int, ...] = field(default=(), metadata=LEFT_OUT_IF_EMPTY)  # FAULT: the ranks that a server has awaited for too long


Record = TypeVar("Record")


def address_fields(urls: Iterable[str]) -> dict[str, Any]:
    """The fields of Register for a server's addresses, one URL for each transport."""
    by_scheme = {url.partition("://")[0] + "://": url for url in urls}
    address, local = by_scheme.pop(NETWORK_SCHEME, ""), by_scheme.pop(LOCAL_SCHEME, "")
    return {"address": address, "local_address": local.removeprefix(LOCAL_SCHEME), "more": tuple(by_scheme.values())}


def plain(record: Any) -> dict[str, Any]:
    """A dataclass, with those inside it, as a value for JSON; empty optional fields are left out."""
    body = {}
    for f in fields(record):
        value = getattr(record, f.name)
        if f.metadata != LEFT_OUT_IF_EMPTY or value:
            body[f.name] = [plain(each) if is_dataclass(each) else each for each in value] if isinstance(value, tuple) else value
    return body


def encode_body(record: Any) -> bytes:
    """A dataclass (or a JSON-able value) as compact UTF-8 JSON."""
    return json.dumps(plain(record) if is_dataclass(record) else record, separators=(",", ":")).encode()


def pack(data: bytes) -> bytes:
    """A body as it travels: packed with zlib if it is large."""
    return data if len(data) < PACK_FROM_BYTES else zlib.compress(data, 1)


def _unpacked(data: bytes, what: str) -> bytes:
    if data[:1] != b"\x78":  # zlib's first byte; no JSON text begins with it
        return data
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(data, MAX_CONTROL_BYTES)
    except zlib.error as error:
        raise RemoteProtocolError(f"{what}: body cannot be unpacked ({error})", ErrorCode.MALFORMED) from None
    if not unpacker.eof or unpacker.unused_data:
        raise RemoteProtocolError(f"{what}: packed body is cut off, or of more than {MAX_CONTROL_BYTES} bytes", ErrorCode.MALFORMED)
    return data


def decode_json(data: bytes | memoryview, what: str) -> dict[str, Any]:
    """The JSON object in ``data``, packed or not. Raises RemoteProtocolError."""
    if len(data) > MAX_CONTROL_BYTES:
        raise RemoteProtocolError(f"{what}: body of {len(data)} bytes, at most {MAX_CONTROL_BYTES}", ErrorCode.MALFORMED)
    try:
        body = json.loads(_unpacked(bytes(data), what))
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"{what}: body is not JSON ({error})", ErrorCode.MALFORMED) from None
    if not isinstance(body, dict):
        raise RemoteProtocolError(f"{what}: body is a {type(body).__name__}, expected an object", ErrorCode.MALFORMED)
    return body


_PLAIN: dict[str, type] = {"str": str, "int": int, "bool": bool}
_TUPLES: dict[str, type] = {"tuple[str, ...]": str, "tuple[int, ...]": int}


def _is(value: Any, plain: type) -> bool:
    return isinstance(value, plain) and (plain is bool or not isinstance(value, bool))  # True is an int to Python, not to us


@cache
def _field_types(cls: type) -> dict[str, str]:
    return {f.name: str(f.type) for f in fields(cls)}


@cache
def _optional(cls: type) -> frozenset[str]:
    return frozenset(f.name for f in fields(cls) if f.metadata == LEFT_OUT_IF_EMPTY)


def parse_record(cls: type[Record], body: Any) -> Record:
    """The JSON object ``body`` as ``cls``: every field there but optional ones, nothing else, plain types right. Raises RemoteProtocolError."""
    names, optional = _field_types(cls), _optional(cls)  # type: ignore[arg-type]
    if not isinstance(body, dict) or not names.keys() - optional <= body.keys() <= names.keys():
        odd = sorted((set(body) ^ set(names)) - optional | (set(body) - set(names))) if isinstance(body, dict) else type(body).__name__
        raise RemoteProtocolError(f"{cls.__name__}: missing or unknown fields {odd}", ErrorCode.MALFORMED)
    values = dict(body)
    for name, wanted in names.items():
        if name not in body:
            continue
        value = body[name]
        if wanted in _TUPLES:
            fine = isinstance(value, list) and all(_is(element, _TUPLES[wanted]) for element in value)
            values[name] = tuple(value) if fine else value
        else:
            fine = wanted not in _PLAIN or _is(value, _PLAIN[wanted])
        if not fine:
            raise RemoteProtocolError(f"{cls.__name__}.{name} is {value!r:.80}, expected {wanted}", ErrorCode.MALFORMED)
    return cls(**values)


def decode_body(cls: type[Record], data: bytes | memoryview) -> Record:
    """JSON bytes as a checked ``cls``. Raises RemoteProtocolError."""
    return parse_record(cls, decode_json(data, cls.__name__))
