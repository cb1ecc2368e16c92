"""The meta frame of a ps-lite message, as ps-lite's ZeroMQ van sends it: a table of fields, and pure code that packs and reads it.

ps-lite sends its C structures as they lie in memory on x86-64: RawMeta (88 bytes), then the body, one int for each data frame (its type), and a
RawNode (168 bytes) for each node. There is no alignment between them, no version and no checksum. This is the layout of the ps-lite in byteps
0.2.5.post15 on PyPI. A later ps-lite has a larger RawMeta and RawNode; its messages are recognised by their length and refused.

Knows no sockets. docs/pslite.md shows the same tables.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from psgc.errors import LocalProtocolError, RemoteProtocolError

EMPTY: Final = (1 << 31) - 1  # ps-lite's "no value": the largest int
MAX_NODES: Final = 1024  # workers and servers of a job that psgc takes part in
MAX_BODY_BYTES: Final = 64 << 10
MAX_DATA_FRAMES: Final = 3  # keys, values, lengths


class Field(NamedTuple):
    """One member of a structure. kind: a letter of the module struct, ``B`` for C++'s bool; the rest is padding."""

    name: str
    kind: str
    offset: int
    meaning: str


META_FIELDS: Final = (
    Field("head", "i", 0, "the application's command; no value in control messages"),
    Field("body_size", "i", 4, "bytes of the body"),
    Field("command", "i", 8, "0 none (data), 1 TERMINATE, 2 ADD_NODE, 3 BARRIER, 4 ACK, 5 HEARTBEAT"),
    Field("node_size", "i", 12, "number of nodes"),
    Field("barrier_group", "i", 16, "of a BARRIER request: the sum of 1 (scheduler), 2 (servers), 4 (workers)"),
    Field("signature", "Q", 24, "of an ACK: which message it acknowledges"),
    Field("request", "B", 32, "1 request, 0 reply"),
    Field("app_id", "i", 36, "the application's number; 0 in BytePS"),
    Field("timestamp", "i", 40, "the request's number, which its reply repeats"),
    Field("data_type_size", "i", 44, "number of data frames"),
    Field("customer_id", "i", 48, "which of the application's customers in the process; 0 in BytePS; replies repeat it"),
    Field("push", "B", 52, "1 push, 0 pull"),
    Field("simple_app", "B", 53, "1: no keys and values; not carried"),
    Field("data_size", "i", 56, "bytes of all data frames"),
    Field("key", "Q", 64, "for RDMA; over ZeroMQ whatever the memory held; replies repeat it"),
    Field("addr", "Q", 72, "the sender's buffer, for RDMA; replies repeat it"),
    Field("val_len", "i", 80, "bytes of the values asked for or sent; replies repeat it"),
    Field("option", "i", 84, "for RDMA; replies repeat it"),
)
NODE_FIELDS: Final = (
    Field("role", "i", 0, "0 server, 1 worker, 2 scheduler"),
    Field("id", "i", 4, "the node's id; no value before the scheduler gives one"),
    Field("hostname", "64s", 8, "address that the node listens on, padded with zeros"),
    Field("port", "i", 72, "its port"),
    Field("is_recovery", "B", 76, "1: takes the place of a node that died"),
    Field("customer_id", "i", 80, "of the customer that joined"),
    Field("endpoint_name", "64s", 84, "for other vans, unused over ZeroMQ; psgc's workers and servers: `psgc`"),
    Field("endpoint_name_len", "Q", 152, "bytes of endpoint_name; over ZeroMQ 0 in ps-lite"),
    Field("aux_id", "i", 160, "for other vans; -1"),
)
META_BYTES: Final = 88
NODE_BYTES: Final = 168
NEWER_META_BYTES: Final = 112  # of ps-lite with several vans and groups of instances (2021)
NEWER_NODE_BYTES: Final = 552


def _structure(fields: tuple[Field, ...], size: int) -> struct.Struct:
    text, end = "<", 0
    for field in fields:
        text += f"{field.offset - end}x{field.kind}"
        end = field.offset + struct.calcsize(f"<{field.kind}")
    return struct.Struct(f"{text}{size - end}x")


_META: Final = _structure(META_FIELDS, META_BYTES)
_NODE: Final = _structure(NODE_FIELDS, NODE_BYTES)
_META_NAMES: Final = tuple(field.name for field in META_FIELDS)

# Control commands.
DATA, TERMINATE, ADD_NODE, BARRIER, ACK, HEARTBEAT = range(6)
COMMANDS: Final = ("data", "TERMINATE", "ADD_NODE", "BARRIER", "ACK", "HEARTBEAT")
# Types of data frames that BytePS uses: receivers do not check them.
INT32, UINT64, OTHER = 3, 8, 11
SERVER, WORKER, SCHEDULER = range(3)
ROLES: Final = ("server", "worker", "scheduler")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One process of a job. id: EMPTY until the scheduler has given one. endpoint_name: at most 64 bytes; schedulers pass it on, and nobody else of ps-lite
    reads it over ZeroMQ."""

    role: int
    hostname: str
    port: int
    id: int = EMPTY
    is_recovery: bool = False
    customer_id: int = 0
    aux_id: int = -1
    endpoint_name: bytes = b""

    def __post_init__(self) -> None:
        if not 0 <= self.role < len(ROLES):
            raise RemoteProtocolError(f"a ps-lite node has role {self.role}; expected 0 (server), 1 (worker) or 2 (scheduler)")
        if not re.fullmatch(r"[\w.:%\[\]-]{1,63}", self.hostname, re.ASCII):
            raise RemoteProtocolError(
                f"a ps-lite node has the host name {self.hostname!r:.80}; expected 1 to 63 letters, digits, dots and colons"
            )
        if not 0 < self.port < 1 << 16:
            raise RemoteProtocolError(f"a ps-lite node on {self.hostname} has port {self.port}; expected 1 to 65535")

    @property
    def address(self) -> str:
        """host:port, by which a node finds itself in the scheduler's list."""
        return f"{self.hostname}:{self.port}"

    def __str__(self) -> str:
        return f"{ROLES[self.role]} {self.address}" if self.id == EMPTY else f"{ROLES[self.role]} {self.id} at {self.address}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """A message without its data frames; the fields' meanings are in META_FIELDS."""

    command: int = DATA
    head: int = EMPTY
    body: bytes = b""
    nodes: tuple[Node, ...] = ()
    barrier_group: int = 0
    signature: int = 0
    request: bool = False
    app_id: int = EMPTY
    timestamp: int = EMPTY
    data_types: tuple[int, ...] = ()
    customer_id: int = EMPTY
    push: bool = False
    simple_app: bool = False
    data_size: int = 0
    key: int = 0
    addr: int = 0
    val_len: int = 0
    option: int = 0

    def pack(self) -> bytes:
        """The meta frame. Raises LocalProtocolError for values that the structure has no room for."""
        values = {name: getattr(self, name, 0) for name in _META_NAMES}
        values |= {"body_size": len(self.body), "node_size": len(self.nodes), "data_type_size": len(self.data_types)}
        try:
            parts = [_META.pack(*values.values()), self.body, struct.pack(f"<{len(self.data_types)}i", *self.data_types)]
            return b"".join(parts + [_pack_node(node) for node in self.nodes])
        except struct.error as error:
            raise LocalProtocolError(f"a ps-lite message cannot hold {self!r:.300}: {error}") from None

    def __str__(self) -> str:
        if self.command != DATA:
            return f"{COMMANDS[self.command]} {'request' if self.request else 'reply'}"
        return f"{'push' if self.push else 'pull'} {'request' if self.request else 'reply'} {self.timestamp}"


def _pack_node(node: Node) -> bytes:
    return _NODE.pack(
        node.role, node.id, node.hostname.encode(), node.port, node.is_recovery, node.customer_id, node.endpoint_name,
        len(node.endpoint_name), node.aux_id,
    )  # fmt: skip


def read_meta(frame: bytes | memoryview) -> Meta:
    """The message of a meta frame. Raises RemoteProtocolError for any that no ps-lite of this layout sends; reads nothing beyond the frame."""
    frame = memoryview(frame)
    if len(frame) < META_BYTES:
        raise RemoteProtocolError(f"a ps-lite message of {len(frame)} bytes; expected {META_BYTES} at least")
    values: dict[str, Any] = dict(zip(_META_NAMES, _META.unpack_from(frame), strict=True))
    sizes = body_size, types, nodes = values.pop("body_size"), values.pop("data_type_size"), values.pop("node_size")
    if min(sizes) < 0 or body_size > MAX_BODY_BYTES or types > MAX_DATA_FRAMES or nodes > MAX_NODES + 1:
        raise RemoteProtocolError(
            f"a ps-lite message announces a body of {body_size} bytes, {types} data frames and {nodes} nodes; expected at most "
            f"{MAX_BODY_BYTES}, {MAX_DATA_FRAMES} and {MAX_NODES + 1}"
        )
    variable = body_size + 4 * types
    if len(frame) != META_BYTES + variable + NODE_BYTES * nodes:
        if len(frame) == NEWER_META_BYTES + variable + NEWER_NODE_BYTES * nodes:
            raise RemoteProtocolError(
                "a message in the layout of a newer ps-lite (several vans, groups of instances); psgc speaks that of byteps 0.2.5.post15: run this "
                "version in the job's other processes"
            )
        raise RemoteProtocolError(
            f"a ps-lite message of {len(frame)} bytes announces {META_BYTES + variable + NODE_BYTES * nodes} (a body of {body_size}, {types} data "
            f"frames, {nodes} nodes)"
        )
    if not 0 <= values["command"] < len(COMMANDS):
        raise RemoteProtocolError(f"a ps-lite message has control command {values['command']}; expected 0 to {len(COMMANDS) - 1}")
    for name in ("request", "push", "simple_app"):
        values[name] = bool(values[name])
    if values["simple_app"]:
        raise RemoteProtocolError("a message of ps-lite's SimpleApp; psgc carries keys and values (KVWorker) only")
    after_body = META_BYTES + body_size
    values["body"] = bytes(frame[META_BYTES:after_body])
    values["data_types"] = struct.unpack_from(f"<{types}i", frame, after_body)
    start = after_body + 4 * types
    values["nodes"] = tuple(_read_node(frame, start + NODE_BYTES * i) for i in range(nodes))
    return Meta(**values)


def _read_node(frame: memoryview, offset: int) -> Node:
    role, node_id, host, port, is_recovery, customer_id, endpoint, endpoint_bytes, aux_id = _NODE.unpack_from(frame, offset)
    try:
        hostname = host.partition(b"\0")[0].decode("ascii")
    except UnicodeDecodeError:
        raise RemoteProtocolError(f"a ps-lite node has the host name {host!r:.80}; expected ASCII") from None
    return Node(
        role=role, hostname=hostname, port=port, id=node_id, is_recovery=bool(is_recovery), customer_id=customer_id, aux_id=aux_id,
        endpoint_name=endpoint[: min(endpoint_bytes, len(endpoint))],  # ps-lite does not clear the rest
    )  # fmt: skip
