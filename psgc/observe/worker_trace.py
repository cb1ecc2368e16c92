"""Records a worker's spans: gradients' readiness, encoding and decoding, pushes and pulls, collectives, and waiting.

Times of links are those of the network thread. A push begins when it is given to its connection, or when the connection's previous push ends, and ends when
the server has acknowledged it. A pull lasts from its first byte, as far as the thread saw that, to its last.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from time import monotonic_ns, time_ns

from psgc.config import Config
from psgc.layout import Layout, make_key
from psgc.observe.byteps_timeline import comm_events, write_comm
from psgc.observe.lanes import PULL, PUSH, READY, WAIT, Line
from psgc.observe.member import MemberTrace, recorder_of
from psgc.observe.recorder import Recorded
from psgc.observe.timeline import About
from psgc.wire.frames import Header, Kind


class _Backward:
    """One layout's steps in the training thread. mark: when the last bucket, or the step's first gradient, became ready."""

    __slots__ = ("layout", "mark", "step", "track")

    def __init__(self, track: int) -> None:
        self.track, self.layout, self.step, self.mark = track, 0, 0, 0


class _Connection:
    """The connection to one server, in the network thread. sent: key -> (step, when the push was given to the connection, bytes)."""

    __slots__ = ("acked", "came", "receiving", "sent")

    def __init__(self) -> None:
        self.sent: dict[int, tuple[int, int, int]] = {}
        self.acked = self.came = self.receiving = 0  # when the last push and the last pull ended; when the pull under way began


class WorkerTrace(MemberTrace):
    """See the module's text."""

    role = "rank"

    def __init__(self, config: Config) -> None:
        super().__init__(config.trace_folder, recorder_of(config))
        self._connections: dict[int, _Connection] = {}
        self._backwards: dict[str, _Backward] = {}  # by what the optimizer's layouts are named after
        self._submitted: dict[int, int] = {}  # by layout and bucket: steps, by the job's count
        self._marks = threading.Lock()
        self._layouts: dict[int, Layout] = {}
        self._as_byteps, self._local_rank = config.trace_as_byteps, config.local_rank

    def laid_out(self, layout: Layout, taken: int = 0) -> None:
        super().laid_out(layout, taken)
        self._layouts[layout.id] = layout
        self._submitted |= {make_key(layout.id, bucket.index, 0): taken for bucket in layout.buckets}

    def _write_file(self, about: About, spans: Sequence[Recorded]) -> Path:
        if not self._as_byteps:
            return super()._write_file(about, spans)
        described = {place: name.described for place, name in self._names.items()}
        return write_comm(self._folder, self._local_rank, comm_events(spans, dict(self._layouts), described, time_ns() - monotonic_ns()))

    # the training thread, and autograd's

    def gradient(self, name: str) -> None:
        """Note that a gradient of the optimizer is ready. A step's first gradient is the beginning of backward's lane."""
        backward = self._backward(name)
        if not backward.mark:
            backward.mark = monotonic_ns()

    def submitted(self, layout: Layout, bucket: int) -> None:
        """Note that a bucket is ready."""
        now, key = monotonic_ns(), make_key(layout.id, bucket, 0)
        with self._marks:
            self._submitted[key] += 1
            step = self._submitted[key]
        self.begun(step)
        if layout.kind != "plan":
            return
        backward = self._backward(layout.name)
        backward.layout, backward.step = layout.id, step
        self.recorder.add(Line.BACKWARD, backward.track, READY, key, step, backward.mark or now, now)
        backward.mark = now

    def waited(self, name: str, waited_s: float) -> None:
        """Note that the training thread has waited for the optimizer's means until now."""
        backward, now = self._backward(name), monotonic_ns()
        self.recorder.add(Line.WAITING, backward.track, WAIT, backward.layout << 48, backward.step, now - int(waited_s * 1e9), now)
        backward.mark = 0

    def _backward(self, name: str) -> _Backward:
        name = name.partition(".")[0]
        found = self._backwards.get(name)
        if found is None:
            with self._marks:
                found = self._backwards.setdefault(name, _Backward(len(self._backwards)))
        return found

    # threads that compute

    def ran(self, lane: str | None, action: int, key: int, step: int, began_ns: int, nbytes: int = 0) -> None:
        """Note that a step of a program is over. lane: the transfer's lane; None for a computation. action: its number, or a name of ``lanes``."""
        line, track = (Line.CPU, self.recorder.thread()) if lane is None else (_LINES[lane], 0)
        self.recorder.add(line, track, action, key, step, began_ns, monotonic_ns(), nbytes)

    # the network thread

    def sending(self, server: int, header: Header) -> None:
        """Note that a message is given to the connection to a server."""
        if header.kind == Kind.PUSH and self.recorder.wants(header.step):
            self._of(server).sent[header.key] = header.step, monotonic_ns(), header.payload_bytes

    def received(self, server: int, header: Header) -> None:
        """Note that a message of a server has arrived completely."""
        if header.kind not in (Kind.ACK, Kind.RESULT) or not self.recorder.wants(header.step):
            return
        now, of = monotonic_ns(), self._of(server)
        pushed = of.sent.pop(header.key, None)
        if pushed is not None:
            step, given, nbytes = pushed
            self.recorder.add(Line.SEND, server, PUSH, header.key, step, max(given, of.acked), now, nbytes)
            of.acked = now
        if header.kind == Kind.RESULT:
            began = of.receiving if of.receiving > of.came else now
            self.recorder.add(Line.RECEIVE, server, PULL, header.key, header.step, began, now, header.payload_bytes)
            of.came, of.receiving = now, 0

    def receiving(self, server: int) -> None:
        """Note that the beginning of a server's message has arrived, but not all of it."""
        of = self._of(server)
        of.receiving = of.receiving or monotonic_ns()

    def _of(self, server: int) -> _Connection:
        found = self._connections.get(server)
        if found is None:
            found = self._connections[server] = _Connection()
        return found


_LINES = {"flat": Line.FLAT, "intra": Line.INTRA, "inter": Line.INTER, "control": Line.CONTROL}


def worker_trace(config: Config) -> WorkerTrace | None:
    """The worker's trace; None if the process does not trace. Raises ConfigError if its folder cannot be made."""
    return WorkerTrace(config) if config.trace_folder else None
