"""A stand-in for a device: streams and events over CPU memory, which record who uses which memory, and find uses that no event orders.

Work runs at once, in the order in which it is enqueued, so results are right whatever order a real device might take. The order is checked instead:
every stream and every host thread has a vector clock. Enqueueing carries the thread's clock to the stream, ``record`` takes the stream's, ``wait`` and
``synchronize`` bring it to another stream or to a thread, ``handed`` and ``received`` from one thread to the next. Two uses of the same bytes, one of
them a write, where neither is before the other by these clocks, are a race. A device codec's numbers come from the codec's own kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from psgc.codecs.blocktopk import BlockTopKCodec, places_of
from psgc.codecs.codec import Codec, Stream
from psgc.codecs.scheme import Scheme, slices
from psgc.codecs.sparsify.gaps import packed_length, unpack
from psgc.device.codec import DeviceCodec
from psgc.errors import UsageError
from psgc.torch.device.runtime import Event as RuntimeEvent
from tests.device.cpu_state import CpuState

Clock = dict[object, int]


def _join(clock: Clock, other: Clock) -> None:
    for actor, tick in other.items():
        if clock.get(actor, 0) < tick:
            clock[actor] = tick


@dataclass(slots=True)
class _Use:
    """Of bytes [lo, hi) of a storage."""

    lo: int
    hi: int
    actor: object
    tick: int
    writes: bool


class Races:
    """What has been used by whom, and what was wrong with it. ``found`` has a line for each race."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.uses = 0
        self._lock = threading.RLock()
        self._clocks: dict[object, Clock] = {}
        self._tokens: dict[int, tuple[object, Clock]] = {}
        self._memory: dict[int, tuple[Any, list[_Use]]] = {}  # by address; the storage is kept, so that no other takes its place

    def clock(self, actor: object) -> Clock:
        return self._clocks.setdefault(actor, {actor: 1})

    def carry(self, source: object, target: object) -> None:
        with self._lock:
            _join(self.clock(target), self.clock(source))

    def taken(self, actor: object) -> Clock:
        with self._lock:
            clock = self.clock(actor)
            found = dict(clock)
            clock[actor] += 1
            return found

    def bring(self, clock: Clock, actor: object) -> None:
        with self._lock:
            _join(self.clock(actor), clock)

    def handed(self, thing: object) -> None:
        with self._lock:
            self._tokens[id(thing)] = thing, self.taken(host())

    def received(self, thing: object) -> None:
        with self._lock:
            if id(thing) in self._tokens:
                self.bring(self._tokens[id(thing)][1], host())

    def use(self, actor: object, tensor: torch.Tensor, writes: bool, what: str = "") -> None:
        if not tensor.numel():
            return
        storage = tensor.untyped_storage()
        lo = tensor.storage_offset() * tensor.element_size()
        span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        with self._lock:
            self.uses += 1
            clock = self.clock(actor)
            _, uses = self._memory.setdefault(storage.data_ptr(), (storage, []))
            mine = _Use(lo, lo + span * tensor.element_size(), actor, clock[actor], writes)
            kept = []
            for use in uses:
                meets = use.lo < mine.hi and mine.lo < use.hi
                before = clock.get(use.actor, 0) >= use.tick
                if meets and not before and (use.writes or writes):
                    kind = f"{'write' if writes else 'read'} by {actor} is not ordered after the {'write' if use.writes else 'read'} by {use.actor}"
                    self.found.append(
                        f"{kind}: bytes {max(mine.lo, use.lo)} to {min(mine.hi, use.hi)} of {tensor.dtype} {tuple(tensor.shape)} {what}"
                    )
                if not (before and mine.lo <= use.lo and use.hi <= mine.hi and (writes or not use.writes)):
                    kept.append(use)
            kept.append(mine)
            uses[:] = kept


def host() -> str:
    return f"thread {threading.get_ident()} ({threading.current_thread().name})"


class Event:
    def __init__(self, races: Races, clock: Clock) -> None:
        self._races, self.clock = races, clock

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._races.bring(self.clock, host())


US_OF_WORK = 50.0  # each piece of work, by the device's clock


@dataclass(frozen=True)
class Mark:
    us: float
    behind: Callable[[], bool]

    def us_to(self, later: Mark) -> float | None:
        return None if self.behind() else later.us - self.us


@dataclass(eq=False)
class RecordingStream:
    races: Races
    name: str
    fault: Callable[[str], BaseException | None] = lambda name: None
    behind: Callable[[], bool] = lambda: False
    us: float = 0.0

    def mark(self) -> Mark:
        return Mark(self.us, self.behind)

    def __str__(self) -> str:
        return self.name

    def record(self) -> RuntimeEvent:
        self.races.carry(host(), self)
        return Event(self.races, self.races.taken(self))

    def wait(self, event: RuntimeEvent) -> None:
        assert isinstance(event, Event)
        self.races.bring(event.clock, self)

    def run(self, work: Callable[[], object], reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        error = self.fault(self.name)
        if error is not None:
            raise error
        self.races.taken(host())
        self.races.carry(host(), self)
        for tensor in reads:
            self.races.use(self, tensor, False, self.name)
        for tensor in writes:
            self.races.use(self, tensor, True, self.name)
        self.races.taken(self)
        self.us += US_OF_WORK
        with torch.no_grad():
            work()

    def hold(self, tensor: torch.Tensor) -> None:
        return


@dataclass(eq=False)
class RecordingRuntime:
    """See the module's text. behind: whether the device has come to no mark yet; capturing: whether the trainer's stream is captured in a graph, where it is
    no stream for others; lacks: codecs, and schemes with a state, without kernels here; fault: what
    running work on a stream, or making memory ("memory"), raises."""

    races: Races = field(default_factory=Races)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    lacks: Callable[[Codec | Scheme], bool] = lambda codec: False
    behind: bool = False
    fault: Callable[[str], BaseException | None] = lambda name: None
    gpus: Callable[[], str] = lambda: ""  # the device's id, of a rank that may exchange from GPU to GPU
    nccl: str = "gloo, in its place"
    capturing: bool = False

    def __post_init__(self) -> None:
        self.streams = 0
        self.training = RecordingStream(self.races, "training")

    def current(self) -> RecordingStream:
        if self.capturing:
            raise UsageError("a graph is being captured")
        return self.training

    def stream(self) -> RecordingStream:
        self.streams += 1
        names = ("compute", "down", "up", *(f"group {number}" for number in range(self.streams)))
        return RecordingStream(self.races, names[self.streams - 1], self._fault, lambda: self.behind)

    def _fault(self, name: str) -> BaseException | None:
        return self.fault(name)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        error = self.fault("memory")
        if error is not None:
            raise error
        filler = torch.full((numel * dtype.itemsize,), 0xA5, dtype=torch.uint8)  # what was there before
        return filler.view(dtype)

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), 0x5A, dtype=torch.uint8)

    def codec(self, codec: Codec) -> CpuCodec | None:
        return None if self.lacks(codec) else CpuCodec(codec)

    def state(self, scheme: Scheme, numel: int) -> CpuState | None:
        return None if self.lacks(scheme) else CpuState(scheme, numel)

    @property
    def gpu(self) -> str:
        return self.gpus()

    def process_group(self, store: Any, index: int, size: int, timeout_s: float) -> Any:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout, options._threads = timedelta(seconds=timeout_s), 1
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        return gloo(store, index, size, options)

    def host_reads(self, tensor: torch.Tensor) -> None:
        self.races.taken(host())
        self.races.use(host(), tensor, False, "host")

    def host_writes(self, tensor: torch.Tensor) -> None:
        self.races.taken(host())
        self.races.use(host(), tensor, True, "host")

    def handed(self, thing: object) -> None:
        self.races.handed(thing)

    def received(self, thing: object) -> None:
        self.races.received(thing)

    # what the trainer does, which psgc does not see

    def trainer_writes(self, tensors: Sequence[torch.Tensor]) -> None:
        self.training.run(lambda: None, [], tensors)

    def trainer_reads(self, tensors: Sequence[torch.Tensor]) -> None:
        self.training.run(lambda: None, tensors, [])


class CpuCodec(DeviceCodec):
    """A codec's own kernels as a device's; see cuda/common. Only as far as CPU kernels go: elements are widened to what the codec wants."""

    def __init__(self, codec: Codec) -> None:
        super().__init__(codec)
        self.launched: list[int] = []  # parts of each launch over several that encodes
        self.used: list[int] = []  # and of each that uses payloads

    def scratch_bytes(self, numel: int) -> int:
        return 64

    def encode(
        self, grad: torch.Tensor, residual: torch.Tensor | None, rescale: float, stream: Stream, out: torch.Tensor, status: torch.Tensor,
        scratch: torch.Tensor,
    ) -> None:  # fmt: skip
        scratch.fill_(0x77)
        kept = None if residual is None else residual.numpy()
        found = self.codec.encode(self._wide(grad), kept, rescale, stream, out.numpy())
        status[0], status[1] = int(found.nonfinite), found.payload_bytes

    def encode_many(self, items: Sequence[Any]) -> None:
        self.launched.append(len(items))
        super().encode_many(items)

    def decode(self, payload: torch.Tensor, numel: int, out: torch.Tensor) -> None:
        wide = np.empty(numel, self.codec.array_dtype)
        for lo, hi in slices(self.codec, numel):
            self.codec.decode(payload.numpy(), numel, lo, hi, wide[lo:hi])
        _narrow(wide, out)

    def decode_many(self, items: Sequence[Any]) -> None:
        self.used.append(len(items))
        super().decode_many(items)

    def commit(self, payload: torch.Tensor, numel: int, grad: torch.Tensor, residual: torch.Tensor, rescale: float) -> None:
        wide, kept = self._wide(grad), residual.numpy()
        for lo, hi in slices(self.codec, numel):
            self.codec.commit(payload.numpy(), numel, lo, hi, wide[lo:hi], kept[lo:hi], rescale)

    def fold(self, payloads: Sequence[torch.Tensor], numel: int, acc: torch.Tensor, fresh: bool) -> None:
        found = [_ended(self.codec, payload.numpy(), numel) for payload in payloads]
        for lo, hi in slices(self.codec, numel):
            self.codec.fold(found, numel, lo, hi, acc.numpy()[lo:hi], fresh)

    def finish(
        self, acc: torch.Tensor, numel: int, divisor: int, residual: torch.Tensor | None, residual_out: torch.Tensor | None, rescale: float,
        stream: Stream, out: torch.Tensor, status: torch.Tensor, scratch: torch.Tensor,
    ) -> None:  # fmt: skip
        scratch.fill_(0x66)
        count, nonfinite = 0, False
        for lo, hi in slices(self.codec, numel):
            old = None if residual is None else residual.numpy()[lo:hi]
            new = None if residual_out is None else residual_out.numpy()[lo:hi]
            found = self.codec.finish(acc.numpy()[lo:hi], numel, lo, hi, divisor, old, new, rescale, stream, out.numpy())
            count, nonfinite = found.payload_bytes, nonfinite or found.nonfinite
        status[0], status[1] = int(nonfinite), count

    def _wide(self, grad: torch.Tensor) -> Any:
        if np.dtype(self.codec.array_dtype) == np.float32:
            return grad.float().numpy()
        return (grad.view(torch.uint16) if grad.dtype == torch.bfloat16 else grad).numpy()


def _ended(codec: Codec, payload: Any, numel: int) -> Any:
    """The payload without what lies behind it in memory of its bound: kernels see from its content where it ends, as those of ``topk`` on the CPU do."""
    if not isinstance(codec, BlockTopKCodec):
        return payload
    count, _ = codec.blocks(numel)
    end, chosen = packed_length(payload, count), np.empty(count, np.uint32)
    unpack(payload, chosen)
    return payload[: end + 4 * places_of(chosen, codec.block, numel).size]


def _narrow(wide: Any, out: torch.Tensor) -> None:
    found = torch.from_numpy(wide.view(np.int16)).view(torch.bfloat16) if wide.dtype == np.uint16 else torch.from_numpy(wide)
    out.copy_(found)
