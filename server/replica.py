"""A server's end of the connection to its standby, a process on another machine that takes its place if this one's machine is lost (PSGC_REPLICAS=1).

What the server commits is sent there, as bytes of blocks (``blocks.py``), and what workers are to hear of it waits until it has come (``held.py``). A new
connection is first sent all that the server keeps, no more at once than it may hold in its queue. Knows bytes, not what they mean. Runs in the server's loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from enum import IntEnum
from typing import Final, Protocol

from psgc.config import Config
from psgc.errors import RemoteProtocolError
from psgc.processes.absence import Absence, younger
from psgc.processes.addresses import is_loopback, split
from psgc.processes.breaks import Breaks
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
from psgc.transport.socket_link import MESSAGE_BYTES
from psgc.wire.frames import SERVER_SENDER, Header, Kind
from psgc.wire.messages import ServerAddress, Topology

PIECE_BYTES: Final = 16 << 20  # in one message
FED_BYTES: Final = 16 << 20  # that wait in the connection's memory, of what it is sent first
GO_ON: Final = 0  # the mark whose acknowledgement says that more of that may be sent; no commit has it


class What(IntEnum):
    """What a REPLICA message is, in its header's ``contributors``."""

    LABEL = 0  # of the block that ``key``, ``codec`` (its kind) and ``round`` (its number) name: whose bytes follow
    BYTES = 1  # of the block, from ``step`` on
    RECORD = 2  # the same; they count from the moment at which the last eight are there
    MARK = 3  # the standby acknowledges ``step`` once it has all that came before


class Kept(Protocol):
    """The server's memory."""

    @property
    def known(self) -> list[int]:
        """Keys of which the standby has to know something."""

    def written(self, key: int) -> Iterable[Written]:
        """All that it has to know of the key."""


class Replica:
    """See the module's text. kept: all that the server keeps."""

    def __init__(self, config: Config, topology: Topology, links: LinkSet, kept: Kept, now: float) -> None:
        self._index, self._job, self._epoch = topology.rank, config.job, topology.epoch
        own = topology.size  # among those who connect to the standby
        key = worker_key(bytes.fromhex(topology.key), own, topology.epoch)
        here = is_loopback(split(topology.standby.partition("://")[2])[0])
        address = ServerAddress(topology.rank, host_id() if here else "", topology.standby, "")
        over_tcp = replace(config, transport=FALLBACK)
        self.link: ServerLink = connect_server(address, links, over_tcp, rank=own, epoch=topology.epoch, key=key)
        self.held = Held()
        self._kept = kept
        self._stamp: dict[str, int] = {"job": self._job, "epoch": self._epoch, "sender": SERVER_SENDER + self._index}
        self._labelled: set[BlockId] = set()  # blocks, on this connection
        self._waits = False  # for GO_ON, with more that the connection is to be sent first
        self._down: float | None = now  # when the connection went down; None while it is up
        self._breaks = Breaks()
        self._named = Reminder(now)
        self._absence = Absence(config.heartbeat_s, now)

    def look(self, now: float) -> None:
        """Take note of what has become of the connection. Call it when that is closed, and now and then while there is none."""
        for event in self.link.events():
            if event == "up":
                self._down, self._waits = None, False
                self._labelled.clear()
                self.held.connected(self._kept.known)
                self._feed()
            else:
                if not self._breaks.count:
                    self._named = Reminder(now)
                self._down = now
                self._breaks.broke(now)
                self.held.disconnected()

    def receive(self, now: float) -> list[Effect]:
        """What may be done, now that the standby has more. Raises RemoteProtocolError."""
        effects: list[Effect] = []
        for header, _ in self.link.receive():
            if (header.kind, header.job, header.epoch) != (Kind.ACK, self._job, self._epoch):
                raise RemoteProtocolError(f"the standby of server {self._index} sends {header}, expected ACK")
            if header.step != GO_ON:
                self._breaks.came_through(now)
            elif self._waits:
                self._feed()
            effects += self.held.acknowledged(header.step)
        return effects

    def committed(self, key: int, written: Iterable[Written]) -> None:
        """Something of a key was committed, and wrote this."""
        mark = self.held.committed(key)
        if mark is not None:
            self._send(written)
            self._mark(mark)

    def taken_up(self, keys: Iterable[int]) -> None:
        """This process has found what a former one has kept of these keys."""
        self.held.taken_up(keys)
        if self.held.connection and not self._waits:
            self._feed()

    def late(self, now: float, first_s: float, limit_s: float) -> tuple[str, bool]:
        """A line on the standby, where it cannot be reached, or the connection breaks before the standby has acknowledged anything, if that is due; and whether
        it has been so for too long. Call it once a heartbeat."""
        if away := self._absence.ended(now):
            self._down = None if self._down is None else younger(self._down, away, now)
            self._breaks.was_away(away, now)
            self._named.was_away(away, now)
        if self._down is None and not self._breaks.count:
            return "", False
        at, over = self.link.route.address, self._breaks.last(now, limit_s)
        if over or self._down is None:
            text = f"the connection to its standby at {at} {self._breaks.text(now)}: {self.link.remedy}"
        else:
            text = f"its standby cannot be reached at {at}, for {now - self._down:.0f} s so far: {self.link.remedy}"
        if over or (self._down is not None and now - self._down > limit_s):
            return f"server {self._index}: {text}; gave up (PSGC_STEP_TIMEOUT_S)", True
        return (text, False) if self._named.due(now, first_s) else ("", False)

    def close(self) -> None:
        self.link.close(linger_s=0.0)

    def _feed(self) -> None:
        """Send of what the connection is to have first as much as may wait in it, and the mark behind the last of it."""
        nbytes = 0
        while (key := self.held.next_key()) is not None:
            nbytes += self._send(self._kept.written(key))
            if nbytes >= FED_BYTES:
                break
        self._waits = key is not None
        self._mark(GO_ON if self._waits else self.held.all_sent())

    def _send(self, written: Iterable[Written]) -> int:
        """Returns how many bytes of the connection's own memory it takes."""
        nbytes = 0
        for header, data in messages(written, self._labelled):
            stamped = header._replace(**self._stamp)
            nbytes += MESSAGE_BYTES
            if header.contributors == What.BYTES:
                self.link.send(stamped, place=Place(None, 0, data))
            else:  # copied: records are written again before the connection has taken them
                nbytes += len(data)
                self.link.send(stamped, data.tobytes())
        return nbytes

    def _mark(self, mark: int) -> None:
        self.link.send(Header(Kind.REPLICA, step=mark, contributors=What.MARK, **self._stamp))


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
