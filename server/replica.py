"""A server's end of the connection to its standby, a process on another machine that takes its place if this one's machine is lost (PSGC_REPLICAS=1).

What the server commits is sent there, as bytes of blocks (``blocks.py``), and what workers are to hear of it waits until it has come (``held.py``). A new
connection is first sent all that the server keeps. Knows bytes, not what they mean. Runs in the server's loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from enum import IntEnum
from typing import Final

from psgc.config import Config
from psgc.errors import RemoteProtocolError
from psgc.processes.addresses import is_loopback, split
from psgc.processes.reminder import Reminder
from psgc.server.blocks import BlockId, Bytes, Written, label_of, read_label
from psgc.server.held import Held
from psgc.server.state import Effect
from psgc.transport.host import host_id
from psgc.transport.link_set import LinkSet
from psgc.transport.memory.segment import Place
from psgc.transport.registry import FALLBACK
from psgc.transport.security.handshake import worker_key
from psgc.transport.server_link import ServerLink, connect_server
from psgc.wire.frames import SERVER_SENDER, Header, Kind
from psgc.wire.messages import ServerAddress, Topology

PIECE_BYTES: Final = 16 << 20  # in one message


class What(IntEnum):
    """What a REPLICA message is, in its header's ``contributors``."""

    LABEL = 0  # of the block that ``key``, ``codec`` (its kind) and ``round`` (its number) name: whose bytes follow
    BYTES = 1  # of the block, from ``step`` on
    RECORD = 2  # the same; they count from the moment at which the last eight are there
    MARK = 3  # the standby acknowledges ``step`` once it has all that came before


class Replica:
    """See the module's text. everything: all that the server keeps."""

    def __init__(self, config: Config, topology: Topology, links: LinkSet, now: float) -> None:
        self._index, self._job, self._epoch = topology.rank, config.job, topology.epoch
        own = topology.size  # among those who connect to the standby
        key = worker_key(bytes.fromhex(topology.key), own, topology.epoch)
        here = is_loopback(split(topology.standby.partition("://")[2])[0])
        address = ServerAddress(topology.rank, host_id() if here else "", topology.standby, "")
        over_tcp = replace(config, transport=FALLBACK)
        self.link: ServerLink = connect_server(address, links, over_tcp, rank=own, epoch=topology.epoch, key=key)
        self.held = Held()
        self._labelled: set[BlockId] = set()  # blocks, on this connection
        self._since: float | None = now  # when the connection went down; None while it is up
        self._named = Reminder(now)

    def look(self, everything: Iterable[Written], now: float) -> None:
        """Take note of what has become of the connection. Call it when that is closed, and now and then while there is none."""
        for event in self.link.events():
            if event == "up":
                self._since = None
                self._labelled.clear()
                mark = self.held.connected()
                self._send(everything, mark)
            else:
                self._since, self._named = now, Reminder(now)
                self.held.disconnected()

    def receive(self) -> list[Effect]:
        """What may be done, now that the standby has more. Raises RemoteProtocolError."""
        effects: list[Effect] = []
        for header, _ in self.link.receive():
            if (header.kind, header.job, header.epoch) != (Kind.ACK, self._job, self._epoch):
                raise RemoteProtocolError(f"the standby of server {self._index} sends {header}, expected ACK")
            effects += self.held.acknowledged(header.step)
        return effects

    def committed(self, key: int, written: Iterable[Written]) -> None:
        """Something of a key was committed, and wrote this."""
        mark = self.held.committed(key)
        if mark is not None:
            self._send(written, mark)

    def late(self, now: float, first_s: float, limit_s: float) -> tuple[str, bool]:
        """A line on the standby that cannot be reached, if that is due, and whether it has been for too long."""
        if self._since is None:
            return "", False
        waited = now - self._since
        text = f"its standby cannot be reached at {self.link.route.address}, for {waited:.0f} s so far: {self.link.remedy}"
        if waited > limit_s:
            return f"server {self._index}: {text}; gave up (PSGC_STEP_TIMEOUT_S)", True
        return (text, False) if self._named.due(now, first_s) else ("", False)

    def close(self) -> None:
        self.link.close(linger_s=0.0)

    def _send(self, written: Iterable[Written], mark: int) -> None:
        stamp = {"job": self._job, "epoch": self._epoch, "sender": SERVER_SENDER + self._index}
        for header, data in messages(written, self._labelled):
            stamped = header._replace(**stamp)
            if header.contributors == What.BYTES:
                self.link.send(stamped, place=Place(None, 0, data))
            else:  # copied: records are written again before the connection has taken them
                self.link.send(stamped, data.tobytes())
        self.link.send(Header(Kind.REPLICA, step=mark, contributors=What.MARK, **stamp))


def messages(written: Iterable[Written], labelled: set[BlockId]) -> Iterator[tuple[Header, Bytes]]:
    """What a standby is told of memory that was written. labelled: blocks whose labels it has, to which others are added."""
    for block, offset, data, record in written:
        label = label_of(block)
        of = read_label(label)[0]
        fields = {"key": of.key, "codec": of.kind, "round": of.number}
        if of not in labelled:
            labelled.add(of)
            yield Header(Kind.REPLICA, contributors=What.LABEL, payload_bytes=len(label), **fields), label
        if record:
            yield Header(Kind.REPLICA, step=offset, contributors=What.RECORD, payload_bytes=len(data), **fields), data
            continue
        for start in range(0, len(data), PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            yield Header(Kind.REPLICA, step=offset + start, contributors=What.BYTES, payload_bytes=len(piece), **fields), piece
