"""Records a server's spans: arriving payloads, sums, and leaving results. ``clocks`` estimates offsets from the arriving and leaving ones."""

from __future__ import annotations

from time import monotonic_ns

from psgc.config import Config
from psgc.observe.lanes import PULL, PUSH, Line
from psgc.observe.member import MemberTrace, recorder_of
from psgc.wire.frames import Header, Kind


class ServerTrace(MemberTrace):
    """See the module's text."""

    role = "server"

    def __init__(self, config: Config) -> None:
        super().__init__(config.trace_folder, recorder_of(config))
        self._came: dict[int, int] = {}  # when each rank's last payload had arrived
        self._receiving: dict[int, int] = {}  # when each rank's next payload began to arrive

    def received(self, rank: int, header: Header) -> None:
        """Note that a worker's message has arrived completely."""
        if header.kind != Kind.PUSH:
            return
        self.begun(header.step)
        if not self.recorder.wants(header.step):
            return
        now, began = monotonic_ns(), self._receiving.pop(rank, 0)
        began = began if began > self._came.get(rank, 0) else now
        self.recorder.add(Line.RECEIVE, rank, PUSH, header.key, header.step, began, now, header.payload_bytes)
        self._came[rank] = now

    def receiving(self, rank: int) -> None:
        """Note that the beginning of a worker's message has arrived, but not all of it."""
        self._receiving.setdefault(rank, monotonic_ns())

    def sending(self, rank: int, header: Header) -> None:
        """Note that a message is given to the connection to a worker."""
        if header.kind == Kind.RESULT:
            now = monotonic_ns()
            self.recorder.add(Line.SEND, rank, PULL, header.key, header.step, now, now, header.payload_bytes)

    def folded(self, key: int, step: int, began_ns: int) -> None:
        """Note that a pool thread has summed a block of payloads."""
        self.recorder.add(Line.SERVER, self.recorder.thread(), PUSH, key, step, began_ns, monotonic_ns())


def server_trace(config: Config) -> ServerTrace | None:
    """The server's trace; None if the process does not trace. Raises ConfigError if its folder cannot be made."""
    return ServerTrace(config) if config.trace_folder and not config.trace_as_byteps else None
