"""What a server records: payloads that come, sums, and results that leave. Those that come and leave are ``clocks``' measure, too."""

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
        self._came: dict[int, int] = {}  # by rank: when its last payload had come
        self._receiving: dict[int, int] = {}  # by rank: since when the next one comes

    def heard(self, rank: int, header: Header) -> None:
        """A message of a worker has come completely."""
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
        """The beginning of a message of a worker has come, but not all of it."""
        self._receiving.setdefault(rank, monotonic_ns())

    def sending(self, rank: int, header: Header) -> None:
        """A message is given to the connection to a worker."""
        if header.kind == Kind.RESULT:
            now = monotonic_ns()
            self.recorder.add(Line.SEND, rank, PULL, header.key, header.step, now, now, header.payload_bytes)

    def folded(self, key: int, step: int, began_ns: int) -> None:
        """A pool thread has added up a block of payloads."""
        self.recorder.add(Line.SERVER, self.recorder.thread(), PUSH, key, step, began_ns, monotonic_ns())


def server_trace(config: Config) -> ServerTrace | None:
    """None unless the process is to trace. Raises ConfigError where its folder cannot be made."""
    return ServerTrace(config) if config.trace_folder else None
