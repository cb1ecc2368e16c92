"""A bucket at work: its codec, its residual, the slots that its payloads are encoded into, and the jobs that encode and decode parts.

Numbers only: no protocol, no sockets. A step is ``begin``, ``encode`` and ``decode`` of each part, and ``store``. Several parts of a bucket may be worked on
at once; the steps of a bucket never overlap.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psgc.codecs import BucketContext, Encoded, SchemeState, Stream, parse_scheme
from psgc.errors import CodecError, DeviceError, UsageError
from psgc.layout import Bucket, Layout, Part
from psgc.layout.building import UNCOMPRESSED
from psgc.wire.frames import Flag
from psgc.worker.contributions import Slot
from psgc.worker.device import DeviceBucket
from psgc.worker.nonfinite import first_nonfinite
from psgc.worker.residuals.owed import Owed
from psgc.worker.residuals.residual import ExactResidual, Residual, TensorMemory, make_residual
from psgc.worker.session import BucketBuffer, DeviceBuffer

Bytes = NDArray[np.uint8]


@dataclass(slots=True)
class _SliceWork:
    """A slice of the bucket and its state in the rounds of a step. Slots, and the lengths of the payloads in them, are listed by round."""

    offset: int
    numel: int
    state: SchemeState
    residual: Residual | None
    slots: list[Slot]
    lengths: list[int]
    poisoned: bool = False  # a round of this step has met a NaN or infinity on some rank
    rescale: float = 1.0  # of the residual's unit, since the residual was last committed
    committed: bool = False  # the last step's payload is part of an aggregate and of the residual
    add_back: bool = False  # the trainer skipped the last step: the elements that the slots' payloads encode return to the residual

    @property
    def sent(self) -> list[Bytes]:
        return [slot.bytes[:length] for slot, length in zip(self.slots, self.lengths, strict=True)]


class BucketWork:
    """See the module's text. keeps_residual: whether the push codec keeps an error for the next step, in gradient units."""

    def __init__(self, layout: Layout, bucket: Bucket, slots: Mapping[int, Slot], rank: int) -> None:
        self.layout, self.bucket = layout, bucket
        self.scheme = layout.scheme(bucket)
        self._rank = rank
        self.keeps_residual = self.scheme.feedback and layout.kind != "broadcast"
        self._slices: list[_SliceWork] = []
        self._by_key: dict[int, tuple[_SliceWork, int]] = {}
        for part in bucket.parts:
            if part.round == 0:
                residual = make_residual(self.scheme.residual_dtype, part.numel) if self.keeps_residual else None
                self._slices.append(_SliceWork(part.offset, part.numel, self._new_state(part), residual, [], []))
            self._slices[-1].slots.append(slots[part.key])
            self._slices[-1].lengths.append(0)
            self._by_key[part.key] = (self._slices[-1], part.round)
        # Where the servers keep a residual they add a skipped step's result back; else each worker adds its own payload.
        rounds = self._slices[0].state.rounds if self._slices else ()
        self._servers_add_back = any(round_.pair.pull.feedback for round_ in rounds)
        self._adds_back = self.keeps_residual and not self._servers_add_back
        # The first step's elements are the weights' initial values, which travel as they come back: uncompressed.
        self._initial = parse_scheme(UNCOMPRESSED, BucketContext(bucket.dtype)) if layout.kind == "weights" else None
        self._lock = threading.Lock()
        self._buffer: BucketBuffer | None = None
        self._array: NDArray[Any] | None = None
        self._device: DeviceBucket | None = None  # where the elements lie and residuals are kept; None: on the host
        self._placed = 0  # the step for which ``_device`` has been asked for
        self._keeps_state = False  # whether slices' states may be other than new ones
        self._skipped = False
        self._owed: Owed | None = None
        self.step = 0

    def _new_state(self, part: Part) -> SchemeState:
        try:
            return self.scheme.new_state(part.numel)
        except CodecError as error:
            raise CodecError(f"tensor {self._tensor_at(part.offset)!r}: {error}") from None

    @property
    def name(self) -> str:
        return f"{self.layout.name}/{self.bucket.index}"

    @property
    def unapplied(self) -> bool:
        """Whether servers are still to be told that the last result was not applied, whatever the trainer says. Never: a step that all ranks
        skip has none."""
        return False

    def slot(self, key: int) -> Slot:
        work, index = self._by_key[key]
        return work.slots[index]

    def begin(self, buffer: BucketBuffer, previous_skipped: int, rescale: float) -> None:
        """A step starts; the last one has been stored."""
        self._buffer, self._array = buffer, None
        self._keeps_state = self._keeps_state or self.step > 0
        self.step += 1
        if self._owed is not None and not self._owed.begin(previous_skipped and not self._servers_add_back, rescale):
            self._owed = None
        for work in self._slices:
            work.add_back = work.add_back or (self._adds_back and bool(previous_skipped) and work.committed)
            work.committed = work.poisoned = False
            work.rescale *= rescale

    def encode(self, key: int, then: Callable[[Encoded | DeviceError], None]) -> None:
        """Encode one round of a part into its slot, and call ``then`` once it is there: at once, or in another thread where the elements lie on a
        device."""
        work, index = self._by_key[key]
        if work.poisoned:  # every rank knows this, so none sends a payload in the remaining rounds
            then(Encoded(0, True))
            return
        if self.step == 1:
            work.slots[index].populate()
        lo, hi = work.offset, work.offset + work.numel
        device = self._place(work)
        if work.add_back:
            self._give_back(work)
        stream = Stream(self.layout.seed, self.layout.past_steps + self.step, self._rank, self.bucket.index, lo, self.layout.number)
        out = work.slots[index].bytes

        def encoded(found: Encoded | DeviceError) -> None:
            if isinstance(found, Encoded):
                work.lengths[index] = found.payload_bytes
            else:
                found = self._named(found, work)
            then(found)

        if device is not None:
            try:
                if self._owed is not None and index == 0:
                    device.add(lo, self._owed.pay(lo, hi))
                device.encode(index, lo, hi, work.residual, work.rescale, stream, out, encoded)
            except DeviceError as error:
                raise self._named(error, work) from error
            return
        array = self._loaded()
        if self._owed is not None and index == 0:
            self._owed.add_to(array[lo:hi], lo)
        if self._initial is not None and self.step == 1:
            encoded(self._initial.new_state(work.numel).encode(0, array[lo:hi], None, 1.0, stream, out))
            return
        residual = None if work.residual is None else work.residual.load()
        encoded(work.state.encode(index, array[lo:hi], residual, work.rescale, stream, out))

    def _named(self, error: DeviceError, work: _SliceWork) -> DeviceError:
        return DeviceError(f"gradient of {self._tensor_at(work.offset)!r}: {error}")

    def _place(self, work: _SliceWork) -> DeviceBucket | None:
        """Where this step's elements lie; what is kept between steps moves there, if it lies elsewhere."""
        with self._lock:
            if self._placed != self.step:
                there = self._buffer if self.layout.kind == "plan" and isinstance(self._buffer, DeviceBuffer) else None
                try:
                    slices = [(each.offset, each.offset + each.numel) for each in self._slices]
                    device = None if there is None else there.on_device(self.scheme, slices=slices)
                except UsageError as error:
                    raise UsageError(f"gradient of {self._tensor_at(0)!r}: {error}") from None
                except DeviceError as error:
                    raise self._named(error, self._slices[0]) from error
                if device is not self._device:
                    for each in self._slices:
                        try:
                            self._move(each, device)
                        except DeviceError as error:
                            raise self._named(error, each) from error
                    self._device = device
                self._placed = self.step
        return self._device

    def _move(self, work: _SliceWork, device: DeviceBucket | None) -> None:
        """From where this is kept to the device, None: to the host."""
        if work.add_back:
            self._give_back(work)
        if self._device is not None:
            self._device.state_to_host(work.offset, work.offset + work.numel, work.state)
        if device is not None and self._keeps_state:
            device.state_from_host(work.offset, work.offset + work.numel, work.state)
        if work.residual is not None:
            values = work.residual.load()
            moved = make_residual(self.scheme.residual_dtype, work.numel) if device is None else device.residual(work.numel)
            moved.keep(values)
            work.residual = moved

    def decode(self, key: int, flags: int, payload: Bytes | None, own: bool) -> None:
        """Take one round's result. The last round's is decoded into the array, and the residual is committed. own: whether this rank's payload is part of it.
        Raises PayloadError for a payload that its codec did not write."""
        work, index = self._by_key[key]
        payload = np.empty(0, np.uint8) if payload is None else payload
        device = self._place(work)
        if work.add_back:  # this rank had nothing to encode, and the result may overwrite the last step's payloads
            self._give_back(work)
        if index < len(work.slots) - 1:
            work.poisoned = bool(flags & Flag.NONFINITE)
            if not flags & (Flag.NONFINITE | Flag.SKIPPED):
                self._take(device, work, index, payload)
            return
        if self._owed is not None and flags & (Flag.NONFINITE | Flag.SKIPPED):
            self._owed.unpaid(work.offset)
        if device is not None:
            try:
                self._apply_there(device, work, flags, payload, own)
            except DeviceError as error:
                raise self._named(error, work) from error
        elif not flags & Flag.SKIPPED:
            target = self._loaded()[work.offset : work.offset + work.numel]
            if flags & Flag.NONFINITE:
                target.fill(np.nan)
            else:
                self._apply(work, payload, target, own)
        self._skipped = bool(flags & Flag.SKIPPED)

    def store(self) -> None:
        """All results have been decoded: give the aggregate to its tensors."""
        assert self._buffer is not None
        self._buffer.store(self._skipped)
        self._buffer = self._array = None

    def _take(self, device: DeviceBucket | None, work: _SliceWork, index: int, payload: Bytes) -> None:
        if device is None:
            work.state.take(index, payload)
            return
        try:
            device.take(index, work.offset, work.offset + work.numel, payload)
        except DeviceError as error:
            raise self._named(error, work) from error

    def _apply(self, work: _SliceWork, payload: Bytes, target: NDArray[Any], own: bool) -> None:
        own = own and (self._initial is None or self.step > 1)
        residual = None if work.residual is None or not own else work.residual.load()
        work.state.apply(payload, work.sent, target, residual, work.rescale)
        if own:
            work.committed = True
        if work.residual is not None and residual is not None:
            work.residual.keep(residual)
            work.rescale = 1.0

    def _apply_there(self, device: DeviceBucket, work: _SliceWork, flags: int, payload: Bytes, own: bool) -> None:
        lo, hi = work.offset, work.offset + work.numel
        if flags & Flag.SKIPPED:
            return
        if flags & Flag.NONFINITE:
            device.fill(lo, hi, np.nan)
            return
        device.apply(lo, hi, payload, work.residual if own else None, work.rescale)
        if own:
            work.committed = True
            work.rescale = 1.0 if work.residual is not None else work.rescale

    def _give_back(self, work: _SliceWork) -> None:
        """Add the elements that the slots' payloads encode back to the residual."""
        assert work.residual is not None
        if self._device is not None:
            self._device.add_back(work.offset, work.offset + work.numel, work.residual)
            work.add_back = False
            return
        residual = work.residual.load()
        work.state.add_back(work.sent, residual)
        work.residual.keep(residual)
        work.add_back = False

    def remembered(self, dropped: bool = False) -> dict[str, TensorMemory]:
        """The state between steps, by tensor. None of the bucket's steps may be under way. dropped: the trainer did not apply the last
        result, and servers have not been told so yet."""
        residual, velocity = np.zeros(self.bucket.numel, np.float32), np.zeros(self.bucket.numel, np.float32)
        factors: dict[str, NDArray[np.float32]] = {}
        has_velocity = False
        for work in self._slices:
            place = slice(work.offset, work.offset + work.numel)
            kept = self._kept(work, dropped)
            if kept is not None:
                residual[place] = kept.load() * np.float32(work.rescale)
            self._load_state(work)
            state = work.state.saved
            if state is not None:
                velocity[place], has_velocity = state * np.float32(work.rescale), True
            factors |= {self._tensor_at(work.offset + first): values for first, values in work.state.factors.items()}
        if self._owed is not None:
            residual = self._owed.left(dropped and not self._servers_add_back)
        has_residual = self.keeps_residual or self._owed is not None
        memories = {
            name: TensorMemory(
                residual[place].copy() if has_residual else None, velocity[place].copy() if has_velocity else None, factors.get(name)
            )
            for name, place in self.tensor_places()
        }
        return {name: memory for name, memory in memories.items() if any(values is not None for values in memory)}

    def remember(self, memories: Mapping[str, TensorMemory]) -> None:
        """Go on from what was remembered of these tensors; the bucket's other tensors start without state. A residual that this codec does
        not keep is owed: it is added to the first gradient."""
        residual, velocity = np.zeros(self.bucket.numel, np.float32), np.zeros(self.bucket.numel, np.float32)
        factors: dict[int, NDArray[np.float32]] = {}
        for name, place in self.tensor_places():
            memory = memories.get(name, TensorMemory())
            if memory.residual is not None:
                residual[place] = memory.residual
            if memory.velocity is not None:
                velocity[place] = memory.velocity
            if memory.factors is not None:
                factors[place.start] = memory.factors
        self._owed = Owed(residual) if residual.any() and not self.keeps_residual else None
        for work in self._slices:
            place = slice(work.offset, work.offset + work.numel)
            if work.residual is not None:
                work.residual.keep(residual[place])
            work.rescale, work.committed, work.add_back = 1.0, False, False
            if work.state.saved is not None:
                work.state.restore(velocity[place])
            end = work.offset + work.numel
            work.state.restore_factors({first - work.offset: q for first, q in factors.items() if work.offset <= first < end})
            self._keep_state(work)

    def _load_state(self, work: _SliceWork) -> None:
        """Bring the slice's state on the host to what the device has."""
        if self._device is not None:
            self._device.state_to_host(work.offset, work.offset + work.numel, work.state)

    def _keep_state(self, work: _SliceWork) -> None:
        """Go on from the slice's state on the host, wherever its elements lie."""
        self._keeps_state = True
        if self._device is not None:
            self._device.state_from_host(work.offset, work.offset + work.numel, work.state)

    def _kept(self, work: _SliceWork, dropped: bool) -> Residual | None:
        """The residual of a slice. If a skipped step must be added back, this is a copy that includes it: reading changes no state."""
        if work.residual is None or not (work.add_back or (self._adds_back and dropped and work.committed)):
            return work.residual
        values = work.residual.load().copy()
        if self._device is not None:
            there = self._device.residual(work.numel)
            there.keep(values)
            self._device.add_back(work.offset, work.offset + work.numel, there)
            return there
        work.state.add_back(work.sent, values)
        kept = make_residual(self.scheme.residual_dtype, work.numel)
        kept.keep(values)
        return kept

    @property
    def exact_place(self) -> str:
        """Where a saved state has what ``exact`` gives."""
        return f"worker {self.bucket.index}"

    def exact(self, dropped: bool = False) -> dict[int, ExactResidual]:
        """The exact residuals, by slice number, where ``remembered`` gives rounded ones."""
        kept = ((number, work, self._kept(work, dropped)) for number, work in enumerate(self._slices))
        rounded = self.scheme.residual_dtype != "float32"
        for work in self._slices:
            self._load_state(work)
        return {
            number: ExactResidual(work.rescale, residual.bytes.copy(), work.state.saved)
            for number, work, residual in kept
            if residual is not None and (rounded or work.rescale != 1.0)
        }

    def set_exact(self, residuals: Mapping[int, ExactResidual]) -> None:
        """Go on from the ``exact`` of a bucket with the same slices; called after ``remember``. Raises UsageError if the slices differ."""
        for number, exact in residuals.items():
            work = self._slices[number] if number < len(self._slices) else None
            if work is None or work.residual is None or work.residual.bytes.size != exact.bytes.size:
                raise UsageError(f"the saved residual of slice {number} of {self.name} is another codec's; is it another job's state?")
            work.residual.keep_bytes(exact.bytes)
            work.rescale = exact.rescale
            if exact.velocity is not None and work.state.saved is not None:
                work.state.restore(exact.velocity)
                self._keep_state(work)

    def server_parts(self) -> list[Part]:
        """The parts of which the server keeps a residual, element by element."""
        if self.layout.kind == "broadcast":
            return []
        rounds = ((part, self.scheme.rounds(part.numel)[part.round]) for part in self.bucket.parts)
        return [part for part, round_ in rounds if round_.pair.pull.feedback and round_.numel == part.numel]

    def tensor_places(self) -> Iterator[tuple[str, slice]]:
        """Where each tensor's elements lie in the bucket."""
        return self.layout.places(self.bucket)

    def first_nonfinite(self, key: int) -> str | None:
        """The tensor of the part's first NaN or infinity, or None."""
        work, _ = self._by_key[key]
        if self._device is not None:
            there = self._device.nonfinite(work.offset, work.offset + work.numel)
            return None if there is None else self._tensor_at(work.offset + there)
        array = self._loaded()
        first = first_nonfinite(array[work.offset : work.offset + work.numel], self.bucket.dtype)
        return None if first is None else self._tensor_at(work.offset + first)

    def _tensor_at(self, element: int) -> str:
        return self.layout.tensor_at(self.bucket, element)

    def _loaded(self) -> NDArray[Any]:
        with self._lock:
            if self._array is None:
                assert self._buffer is not None
                self._array = self._buffer.load()
                assert self._array.size == self.bucket.numel, (self._array.size, self.bucket)
            return self._array
