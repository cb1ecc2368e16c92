"""ps-lite's KVWorker and KVServer: push and pull values by key, and answer such requests.

    office = Postoffice(Settings(role="worker", workers=1, servers=1, root_host="127.0.0.1", root_port=9000))
    office.start()
    worker = KVWorker(office)
    worker.wait(worker.push((3,), value))
    pairs = worker.wait(worker.pull((3,)))
    office.finalize()

A key goes to the server whose range holds it (``Postoffice.server_key_ranges``).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from psgc.errors import RemoteProtocolError, UsageError
from psgc.pslite.meta import Meta
from psgc.pslite.nodes import rank_of, server_id
from psgc.pslite.pairs import Bytes, KVMeta, KVPairs, slice_by_server
from psgc.pslite.postoffice import FOREVER, Postoffice

Done = Callable[[KVPairs], None]
RequestHandler = Callable[[KVMeta, KVPairs, "KVServer"], None]


@dataclass(slots=True)
class _Request:
    """push: whether it is one. asked: by the server's rank, the keys that its reply is about."""

    push: bool
    asked: dict[int, tuple[int, ...]]
    done: Done | None
    vals: object  # kept as they are until the reply comes
    replies: dict[int, KVPairs] = field(default_factory=dict)


class KVWorker:
    """Pushes to, and pulls from, the job's servers. All methods may be called from any thread."""

    def __init__(self, office: Postoffice, app_id: int = 0, customer_id: int = 0) -> None:
        self._office, self._app_id, self._customer_id = office, app_id, customer_id
        self._timestamps = itertools.count()
        self._lock = threading.Lock()
        self._under_way: dict[int, _Request] = {}
        self._results: dict[int, KVPairs] = {}
        self.dropped = 0  # replies that nobody asked for
        office.add_customer(app_id, self._process)

    def push(self, keys: Sequence[int], vals: Bytes, lens: Sequence[int] = (), cmd: int = 0, done: Done | None = None) -> int:
        """Send values; returns the request's number at once. vals: not copied, so they must stay as they are until the request is done.
        lens: bytes of each key's value; nothing where all are of one length. done: called with no pairs when all servers have answered, in the thread
        that receives; then ``wait`` has nothing to give. Raises UsageError for keys, values and lengths that do not fit."""
        return self._ask(KVPairs(tuple(keys), memoryview(vals).cast("B"), tuple(lens)), True, cmd, done)

    def pull(self, keys: Sequence[int], length: int = 0, cmd: int = 0, done: Done | None = None) -> int:
        """Ask for values; returns the request's number at once. length: bytes that are expected, which only travel along. done: called with the pairs."""
        return self._ask(KVPairs(tuple(keys)), False, cmd, done, length)

    def wait(self, timestamp: int, timeout_s: float = FOREVER) -> KVPairs:
        """Sleep until a request without ``done`` is answered, and return its pairs (of a push: none). Raises JobFailed; UsageError for a number that is
        unknown or was waited for."""
        with self._lock:
            if timestamp not in self._under_way and timestamp not in self._results:
                raise UsageError(f"request {timestamp} is unknown, or was waited for already")
        self._office.wait_for(lambda: timestamp in self._results, lambda: self.awaited(timestamp), timeout_s)
        with self._lock:
            return self._results.pop(timestamp)

    def awaited(self, timestamp: int) -> str:
        """The servers whose replies a request still waits for."""
        with self._lock:
            request = self._under_way.get(timestamp)
            if request is None:
                return "nothing"
            left = [server_id(rank) for rank in request.asked if rank not in request.replies]
            return f"the reply of ps-lite server {left} to a {'push' if request.push else 'pull'} of key {next(iter(request.asked.values()))[0]}"

    def _ask(self, pairs: KVPairs, push: bool, cmd: int, done: Done | None, length: int = 0) -> int:
        if not pairs.keys:
            raise UsageError("a push or pull without keys")
        sliced = slice_by_server(pairs, self._office.server_key_ranges())
        with self._lock:
            timestamp = next(self._timestamps)
            self._under_way[timestamp] = _Request(push, {rank: part.keys for rank, part in sliced}, done, pairs.vals)
        for rank, part in sliced:
            frames, types = part.frames()
            meta = Meta(
                head=cmd, request=True, push=push, app_id=self._app_id, customer_id=self._customer_id, timestamp=timestamp, data_types=types,
                data_size=sum(len(frame) for frame in frames) & 0x7FFFFFFF, val_len=(len(part.vals) if push else length) & 0x7FFFFFFF,
            )  # fmt: skip
            self._office.send(server_id(rank), meta, frames)
        return timestamp

    def _process(self, sender: int, meta: Meta, frames: list[memoryview]) -> None:
        pairs, rank = KVPairs.of_frames(frames), rank_of(sender)
        with self._lock:
            request = self._under_way.get(meta.timestamp)
            if request is None or request.push != meta.push or rank not in request.asked or rank in request.replies:
                self.dropped += 1  # a repetition of one that was answered
                return
            if not request.push and pairs.keys != request.asked[rank]:
                raise RemoteProtocolError(
                    f"its reply is about keys {list(pairs.keys)[:8]}, but {list(request.asked[rank])[:8]} were pulled"
                )
            request.replies[rank] = pairs
            if len(request.replies) < len(request.asked):
                return
            del self._under_way[meta.timestamp]
            result = _joined([request.replies[r] for r in sorted(request.replies)])
            if request.done is None:
                self._results[meta.timestamp] = result
        if request.done is not None:
            request.done(result)
        self._office.notify()


def _joined(replies: list[KVPairs]) -> KVPairs:
    """The replies of several servers as one, in the order of the servers' ranges, which is that of the keys."""
    if len(replies) == 1:
        return replies[0]
    keys = tuple(key for pairs in replies for key in pairs.keys)
    lens = tuple(length for pairs in replies for length in pairs.lens)
    return KVPairs(keys, memoryview(b"".join(pairs.vals for pairs in replies)), lens)


class KVServer:
    """Answers requests: ``set_request_handle``, before the office starts, then ``response`` to each request, now or later, from any thread."""

    def __init__(self, office: Postoffice, app_id: int = 0) -> None:
        self._office, self._app_id = office, app_id
        self._handle: RequestHandler | None = None
        office.add_customer(app_id, self._process)

    def set_request_handle(self, handle: RequestHandler) -> None:
        """handle(meta, pairs, server) is called for one request after another. RemoteProtocolError that it raises ends this server's part in the job."""
        self._handle = handle

    def response(self, meta: KVMeta, pairs: KVPairs | None = None) -> None:
        """Answer a request. pairs: of a pull. The values are not copied if they are large: they must not change."""
        frames, types = (pairs or KVPairs()).frames()
        key, addr, val_len, option = meta.echoed
        reply = Meta(
            head=meta.cmd, request=False, push=meta.push, app_id=self._app_id, customer_id=meta.customer_id, timestamp=meta.timestamp,
            data_types=types, data_size=sum(len(frame) for frame in frames) & 0x7FFFFFFF, key=key, addr=addr, val_len=val_len, option=option,
        )  # fmt: skip
        self._office.send(meta.sender, reply, frames)

    def _process(self, sender: int, meta: Meta, frames: list[memoryview]) -> None:
        if self._handle is None:
            raise UsageError("a request came, but this KVServer has no handler; call set_request_handle before the office starts")
        self._handle(KVMeta.of(sender, meta), KVPairs.of_frames(frames), self)
