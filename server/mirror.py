"""What a standby does while its server lives: it writes what the server commits into memory of its own, which a process that takes the server's place reads as
a restarted one reads its own. Knows blocks (``blocks.py``), not what is in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from psgc.errors import PsgcError, RemoteProtocolError
from psgc.server.blocks import BlockId, Blocks, Bytes, Of, read_label, write_record
from psgc.server.replica import GO_ON, What
from psgc.server.store import RECORDS_BYTES, REMOVED
from psgc.transport.link import Link
from psgc.transport.memory.segment import Place, Segment
from psgc.wire.frames import HEADER_BYTES, Header, Kind


class Mirror:
    """See the module's text. former, keep: as of ``Blocks``."""

    def __init__(self, former: Iterable[Segment] = (), keep: Callable[[int, Segment], None] | None = None) -> None:
        self._blocks = Blocks("psgc-store", former, keep)
        self._places: dict[BlockId, Place] = {}
        self._link: Link | None = None  # to the server
        self.has_all = False  # that the server kept when its connection was made; since then, what it commits

    @property
    def segments(self) -> list[Segment]:
        """All memory, for the process that takes the server's place."""
        return list(self._blocks.segments.values())

    def let_in(self, link: Link | None) -> Link | None:
        """The server has another connection, or none is heard any more. Returns the one before, which has failed."""
        former, self._link = self._link, link
        if former is not None:
            former.fail("the server has another connection, or its place was taken")
        return former

    def receive(self, link: Link) -> int:
        """Handle what has come, and answer. Returns its bytes. Raises as ``take``."""
        nbytes = 0
        for header, payload in link.receive():
            nbytes += HEADER_BYTES + header.payload_bytes
            if (answer := self.take(header, payload)) is not None:
                link.send(answer)
                self.has_all = self.has_all or answer.step != GO_ON
        return nbytes

    def room(self, header: Header) -> Bytes | None:
        """Where bytes that have begun to come are received: nothing names them before the record that follows has come. None: elsewhere."""
        if header.kind != Kind.REPLICA or header.contributors != What.BYTES:
            return None
        place = self._places.get(BlockId(header.codec, header.key, header.round))
        if place is None or header.step + header.payload_bytes > place.bytes.nbytes:
            return None  # ``take`` refuses it
        return place.bytes[header.step : header.step + header.payload_bytes]

    def take(self, header: Header, payload: Bytes | None) -> Header | None:
        """Handle a message of the server's. Returns the answer, if there is one. Raises RemoteProtocolError for one that does not fit, OSError where there is
        no memory."""
        if header.kind != Kind.REPLICA:
            raise RemoteProtocolError(f"a server does not send {Kind(header.kind).name} to its standby")
        if header.contributors == What.MARK:
            return Header(Kind.ACK, job=header.job, epoch=header.epoch, step=header.step)
        data = np.empty(0, np.uint8) if payload is None else np.frombuffer(payload, np.uint8)
        of = BlockId(header.codec, header.key, header.round)
        if header.contributors == What.LABEL:
            self._label(of, data)
            return None
        place = self._places.get(of)
        if place is None or header.step + len(data) > place.bytes.nbytes or header.contributors not in (What.BYTES, What.RECORD):
            raise RemoteProtocolError(f"{len(data)} bytes at {header.step} of {of}, which has {0 if place is None else place.bytes.nbytes}")
        target = place.bytes[header.step : header.step + len(data)]
        if header.contributors == What.RECORD:
            if len(data) < 16 or len(data) % 8:
                raise RemoteProtocolError(f"a record of {len(data)} bytes of {of}")
            if not np.array_equal(target, data):  # one that counts already must not stop counting for a moment
                write_record(target, data)
            if of.kind == Of.KEY and int.from_bytes(data[:8].tobytes(), "little") == REMOVED:
                place.part(RECORDS_BYTES, place.bytes.nbytes - RECORDS_BYTES).release()
        elif data.ctypes.data != target.ctypes.data:
            target[:] = data
        return None

    def _label(self, of: BlockId, label: Bytes) -> None:
        named, shape, nbytes = read_label(label)
        if named != of:
            raise RemoteProtocolError(f"a label of {named} in a message of {of}")
        if of in self._places:
            return
        try:
            self._places[of] = self._blocks.block(of, shape, nbytes)
        except PsgcError as error:
            raise RemoteProtocolError(str(error)) from None
