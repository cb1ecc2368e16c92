"""One part at work: its program's steps on this rank's numbers.

Numbers and groups only: which step runs when is ``psgc.program.run``'s, threads are ``executor``'s. The array is the part's, given for each step of the
layout and worked on in place. At most one step of a part runs at a time.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psgc.codecs.codec import Codec, CodecPair, Encoded, Stream
from psgc.codecs.common.payloads import MAX_PAYLOADS
from psgc.codecs.none import NoneCodec
from psgc.codecs.scheme import slices
from psgc.errors import DeviceError
from psgc.program.groups import DeviceGroup, Group, Groups
from psgc.program.ranks import Range
from psgc.program.steps import Decode, Encode, Exchange, Piece, Program, Raw, Serve, Step, Transfer
from psgc.transport.memory.segment import Place
from psgc.wire.frames import Flag
from psgc.worker.device import DeviceBucket, DevicePayload, bytes_of
from psgc.worker.executor.feedback import Feedback
from psgc.worker.session import RAISED

Bytes = NDArray[np.uint8]
Payload = Bytes | DevicePayload
_LENGTH: Final = np.dtype(np.int32)


@dataclass(slots=True)
class Control:
    """What ranks agree on at the end of a step."""

    contributed: bool
    nonfinite: bool
    previous_skipped: bool
    on_host: bool = True  # some rank's gradient does not lie on a GPU, or is to be exchanged through the host's memory
    disagreed: bool = False  # some rank's trainer applied the last step, and another's did not
    raised: int = -1  # the rank, or the last of those, whose trainer did not since its backward had raised

    def word(self) -> NDArray[np.int32]:
        """The word whose maximum over the ranks is taken."""
        flags = self.contributed, self.nonfinite, self.previous_skipped, not self.previous_skipped, self.on_host
        return np.array([*flags, self.raised], np.int32)

    @classmethod
    def of(cls, word: NDArray[np.int32]) -> Control:
        contributed, nonfinite, skipped, applied, on_host = (bool(value) for value in word[:-1])
        return cls(contributed, nonfinite, skipped, on_host, skipped and applied, int(word[-1]))


class PartWork:
    """See the module's text. first: the part's first element in its bucket. stream: of the bucket, for this rank; each slot and piece
    has one of its own. divisor: what the sum is divided by. places: where payloads for servers are encoded, of each piece that this rank pushes. again: of
    ``same_pieces``."""

    def __init__(
        self, program: Program, pair: CodecPair, dtype: str, first: int, stream: Stream, divisor: int = 1,
        places: Mapping[Range, Place] | None = None, again: Mapping[int, bool] | None = None,
    ) -> None:  # fmt: skip
        self.program, self.pair, self.dtype, self.first, self.stream = program, pair, dtype, first, stream
        self._places, self._again = places or {}, again or {}
        self._fresh = set(self._places)  # those whose pages are still to be made
        self.servers_add_back = pair.pull.feedback and program.has_servers
        self.rescale = 1.0  # of the step under way
        # The last result was not given to the trainer since all ranks had skipped; servers, to which they pushed zeros, are to be told with the next push.
        self.unapplied = False
        self.dropped: int = 0  # whether the last step counts as not applied, by the trainer's word (RAISED: as in ``Session.submit``) or since ``unapplied``
        self._poisoned: set[Range] = set()  # pieces whose payload for a server would hold NaN or infinity
        self._served = frozenset(piece for piece in program.served if any(_serves_payloads(step) for step in program.steps))
        self.control = Control(False, False, False)
        self.moved_bytes = 0  # payloads and slices that this rank has sent and received
        self._array: NDArray[Any] = np.empty(0)
        self._payloads: dict[Range, list[Payload]] = {}
        self._own: dict[Range, Payload] = {}  # what slot 0 has written, until the next step is encoded
        self._buffers: dict[tuple[int, int, int], Bytes] = {}
        self._feedback: dict[tuple[int, Range], Feedback] = {}
        self._leads: set[tuple[int, Range]] = set()  # slots and pieces of which this rank answers for the residual
        self._device: DeviceBucket | None = None  # where the program works on the part's floats, too
        self._there = False  # whether that has them now, and the array does not
        self._lies: DeviceBucket | None = None  # where this rank's gradient lay when it last said so to the others
        self.groups_on_gpus = (
            False  # whether each rank's gradient lay on a GPU in the last step: the floats of this step go from GPU to GPU, where they can
        )
        self._through_hosts: set[int] = set()  # actions whose payloads are encoded and decoded on GPUs that are not connected
        self._told = threading.Condition()
        self._untold = 0  # encodes on the device of which the host does not know yet whether they met a NaN or infinity
        self._fault: DeviceError | None = None  # in finding that out
        self._owns_array = False
        self._gpu_slots = {step.slot for step in program.steps if isinstance(step, Encode) and step.device == "gpu"}
        self._divisor, self._divides = divisor, _only_sum(program)
        for step in program.steps:
            if isinstance(step, Encode) and self._codec(step.slot).feedback:
                self._leads |= {
                    (step.slot, piece) for piece, leader in zip(step.pieces, step.leaders, strict=True) if leader == stream.rank
                }
                self._feedback |= {(step.slot, piece): Feedback(piece[1] - piece[0]) for piece in step.pieces}

    def _codec(self, slot: int) -> Codec:
        return self.pair.push if self._encoder(slot) == 0 else self.pair.pull

    def _encoder(self, slot: int) -> int:
        """0 for the push codec, else the slot. A pull codec that takes only sums of payloads is, for other pieces, the push codec."""
        return slot if not self.pair.pull.of_sums or self._again.get(slot, False) else 0

    # a step of the layout

    def begin(
        self, array: NDArray[Any], step: int, skip: bool, previous_skipped: int, rescale: float, lies: DeviceBucket | None = None
    ) -> None:
        """array: the part's gradient, of the push codec's ``array_dtype`` where the option encodes, else of the tensors' own dtype. lies: the device that it
        has been copied from, if groups may exchange it there."""
        self._device = None
        self._array, self._owns_array = array, False
        if skip:
            array.fill(0)
        self._begin(step, skip, previous_skipped, rescale, lies)

    def begin_there(
        self, device: DeviceBucket, step: int, skip: bool, previous_skipped: int, rescale: float, groups: bool = False,
        dtype: Any = np.float32,
    ) -> None:  # fmt: skip
        """As ``begin``, where the part's floats lie on a device: steps take them to where they need them. groups: whether groups may exchange them there."""
        if self._array.size != self.program.numel or self._array.dtype != np.dtype(dtype) or not self._owns_array:
            self._array, self._owns_array = np.empty(self.program.numel, dtype), True
        self._device, self._there = device, True
        for (slot, _), feedback in self._feedback.items():
            feedback.move(device if slot in self._gpu_slots else None)
        self._begin(step, skip, previous_skipped, rescale, device if groups else None)

    def _begin(self, step: int, skip: bool, previous_skipped: int, rescale: float, lies: DeviceBucket | None) -> None:
        self.stream = replace(self.stream, step=step)
        self._lies = lies or self._lies
        self.control = Control(
            not skip, False, bool(previous_skipped), lies is None, raised=self.stream.rank if previous_skipped == RAISED else -1
        )
        self.rescale = rescale
        self.dropped, self.unapplied = previous_skipped or self.unapplied, False
        self._poisoned.clear()
        if self.dropped:
            self._take_back()
        for feedback in self._feedback.values():
            feedback.begin(rescale)

    def _take_back(self) -> None:
        codec = self._codec(0)
        for (slot, piece), feedback in self._feedback.items():
            if slot:
                feedback.take_back()
            elif feedback.committed and not self.servers_add_back:
                if feedback.on is not None:
                    feedback.on.add_payload(0, self._own[piece], feedback.value, feedback.numel)
                else:
                    _add_back(codec, bytes_of(self._own[piece]), feedback.value)
                feedback.encoded()

    def on_gpu(self, step: Step) -> bool:
        """Whether the step is one for ``encode_there`` or ``decode_there``."""
        return self._device is not None and isinstance(step, Encode | Decode) and step.device == "gpu"

    def _to_host(self) -> None:
        """The floats are needed on the host."""
        if self._device is not None and self._there:
            self._device.to_host(self.first, self.first + self.program.numel, self._array)
            self._there = False

    def _to_device(self) -> None:
        if self._device is not None and not self._there:
            self._device.from_host(self.first, self.first + self.program.numel, self._array)
            self._there = True

    def encode_there(self, step: Encode, then: Callable[[DeviceError | None], None]) -> None:
        """``encode`` on the device. ``then`` is called once the step is over: where payloads stay on the device, when all is enqueued; else, in another thread,
        once all payloads are in host memory, or one could not be made."""
        assert self._device is not None
        self._to_device()
        self._payloads = {}
        if self._stays(step):
            self._finish_there(self._device, step)
            then(None)
        else:
            self._finish(self._device, step, then)

    def _stays(self, step: Encode) -> bool:
        """Whether the encode's payloads need not come to the host."""
        if step.slot == 0 and self._served:
            return False
        steps = self.program.steps
        for later in steps[steps.index(step) + 1 :]:
            exchanges = [one for one in later.collectives if len(one.members) > 1] if isinstance(later, Transfer) else []
            if isinstance(later, Transfer) and exchanges:
                on_gpu = all(isinstance(one, Exchange) and one.on_gpu for one in exchanges)
                return on_gpu and self.groups_on_gpus and later.action not in self._through_hosts
            if not isinstance(later, Transfer):
                return isinstance(later, Decode) and later.device == "gpu"
        return False

    def _finish_there(self, device: DeviceBucket, step: Encode) -> None:
        made = []
        for piece, leader in zip(step.pieces, step.leaders, strict=True):
            old, new, rescale, stream = self._inputs(step, piece, leader)
            lo, hi = self.first + piece[0], self.first + piece[1]
            payload = device.finish_there(self._encoder(step.slot), lo, hi, old, new, rescale, stream, step.slot)
            made.append(payload)
            self._keep(step, piece, payload, False, False)
        with self._told:
            self._untold += 1
        device.tell(made, self._tell)

    def _tell(self, nonfinite: bool | DeviceError) -> None:
        """In another thread: what the device says of an encode."""
        with self._told:
            if isinstance(nonfinite, DeviceError):
                self._fault = nonfinite
            elif nonfinite:
                self.control.nonfinite = True
            self._untold -= 1
            self._told.notify_all()

    def _finish(self, device: DeviceBucket, step: Encode, then: Callable[[DeviceError | None], None]) -> None:
        codec = self._codec(step.slot)
        lock, left, faults = threading.Lock(), [len(step.pieces)], list[DeviceError]()

        def encoded(piece: Range, out: Bytes, served: bool, found: Encoded | DeviceError) -> None:
            with lock:
                if isinstance(found, DeviceError):
                    faults.append(found)
                else:
                    self._keep(step, piece, out[: found.payload_bytes], found.nonfinite, served)
                left[0] -= 1
                if left[0]:
                    return
            then(faults[0] if faults else None)

        for number, (piece, leader) in enumerate(zip(step.pieces, step.leaders, strict=True)):
            lo, hi = piece
            served = step.slot == 0 and piece in self._served
            out = self._slot(piece) if served else self._buffer(step.action, number, 0, codec.payload_bound(hi - lo))
            old, new, rescale, stream = self._inputs(step, piece, leader)
            done = partial(encoded, piece, out, served)
            device.finish(self._encoder(step.slot), self.first + lo, self.first + hi, old, new, rescale, stream, out, done)

    def _inputs(self, step: Encode, piece: Range, leader: int) -> tuple[Any, Any, float, Stream]:
        """The residual that a piece is encoded with, the place of the new one, the residual's factor, and the random stream, which is the leader's."""
        feedback = self._feedback.get((step.slot, piece))
        stream = replace(self.stream, rank=4 * leader + step.slot, first=self.first + piece[0])
        if feedback is None:
            return None, None, 1.0, stream
        feedback.encoded()
        return feedback.value, feedback.new, feedback.rescale, stream

    def decode_there(self, step: Decode) -> None:
        """``decode`` on the device."""
        assert self._device is not None
        for (lo, hi), payloads in self._payloads.items():
            self._device.fold(self._encoder(step.slot), self.first + lo, self.first + hi, payloads)
        self._payloads, self._there = {}, True

    def _keep(self, step: Encode, piece: Range, payload: Payload, nonfinite: bool, served: bool) -> None:
        if nonfinite and served:  # the server tells all ranks that contribute to the key
            self._poisoned.add(piece)
        elif nonfinite:
            self.control.nonfinite = True
        self._payloads[piece] = [payload]
        if step.slot == 0:
            self._own[piece] = payload

    def encode(self, step: Encode) -> None:
        codec = self._codec(step.slot)
        self._to_host()
        self._payloads = {}
        for number, (piece, leader) in enumerate(zip(step.pieces, step.leaders, strict=True)):
            lo, hi = piece
            numel = hi - lo
            served = step.slot == 0 and piece in self._served
            out = self._slot(piece) if served else self._buffer(step.action, number, 0, codec.payload_bound(numel))
            value, left, rescale, stream = self._inputs(step, piece, leader)
            payload_bytes, nonfinite = 0, False
            for a, b in slices(codec, numel):
                old = None if value is None else value[a:b]
                new = None if left is None else left[a:b]
                encoded = codec.finish(self._array[lo + a : lo + b], numel, a, b, 1, old, new, rescale, stream, out)
                payload_bytes, nonfinite = encoded.payload_bytes, nonfinite or encoded.nonfinite
            self._keep(step, piece, out[:payload_bytes], nonfinite, served)

    def decode(self, step: Decode) -> None:
        codec = self._codec(step.slot)
        for (lo, hi), held in self._payloads.items():
            numel, payloads = hi - lo, [bytes_of(payload) for payload in held]
            for payload in payloads:
                codec.validate(payload, numel)
            for a, b in slices(codec, numel):
                for begin in range(0, len(payloads), MAX_PAYLOADS):
                    codec.fold(payloads[begin : begin + MAX_PAYLOADS], numel, a, b, self._array[lo + a : lo + b], begin == 0)
        self._payloads, self._there = {}, False

    def contribution(self, step: Serve, piece: Range) -> tuple[int, bool]:
        """Make what this rank pushes of a piece, in its place. Returns its bytes, and whether it holds NaN or infinity and so has no payload."""
        if step.slot is None:
            lo, hi = piece
            if self._device is not None and self._there:
                self._device.to_host(self.first + lo, self.first + hi, self._array[lo:hi])
            stream = replace(self.stream, first=self.first + lo)
            encoded = self.pair.push.encode(self._array[lo:hi], None, 1.0, stream, self._slot(piece))
            return encoded.payload_bytes, encoded.nonfinite
        (payload,) = self._payloads.pop(piece)
        return len(bytes_of(payload)), piece in self._poisoned

    def take(self, step: Serve, piece: Range, flags: int, payload: Bytes | None) -> None:
        """A server's result of a piece. This rank's payload is part of it, so what it left out counts as kept from now on. Raises PayloadError."""
        lo, hi = piece
        if flags & Flag.NONFINITE:
            self._array[lo:hi].fill(np.nan)
            if self._device is not None:
                self._device.fill(self.first + lo, self.first + hi, np.nan)
            return
        codec, numel = self.pair.pull, hi - lo
        payload = np.empty(0, np.uint8) if payload is None else payload
        codec.validate(payload, numel)
        if step.slot is None:
            for a, b in slices(codec, numel):
                codec.decode(payload, numel, a, b, self._array[lo + a : lo + b])
            if self._device is not None and self._there:
                self._device.from_host(self.first + lo, self.first + hi, self._array[lo:hi])
            return
        self._payloads[piece] = [payload.copy()]  # the server's memory, which it may use again
        feedback = self._feedback.get((step.slot, piece))
        if feedback is not None:
            feedback.commit()

    def _slot(self, piece: Range) -> Bytes:
        place = self._places[piece]
        if piece in self._fresh:
            self._fresh.discard(piece)
            place.populate()
        return place.bytes

    def transfer(self, collective: Raw | Exchange, groups: Groups, action: int, number: int) -> None:
        """One collective of a transfer, the ``number``-th of its action."""
        asks = self.groups_on_gpus and len(collective.members) > 1 and (isinstance(collective, Raw) or collective.on_gpu)
        on_gpus = groups.on_device(collective.members, self._lies) if asks else None
        if isinstance(collective, Exchange):
            if asks and on_gpus is None:
                self._through_hosts.add(action)
            if on_gpus is not None:
                self._exchange_on_gpus(collective, on_gpus, action, number)
            else:
                self._exchange(collective, groups.group(collective.members), action, number)
        elif on_gpus is not None:
            self._raw_on_gpus(collective, on_gpus)
        else:
            self._raw(collective, groups.group(collective.members))

    def _raw_on_gpus(self, raw: Raw, group: DeviceGroup) -> None:
        lo, hi = raw.region
        cuts = [cut - lo for cut in raw.cuts]
        divisor = self._divisor if raw == self._divides else 1
        index = raw.members.index(self.stream.rank)
        self.moved_bytes += _moved(raw, len(raw.members), index, self._array[lo:hi].nbytes)
        if self._device is None:
            group.raw_array(self._array[lo:hi], self._array_dtype, raw.op, cuts, raw.root, divisor)
            return
        self._to_device()
        group.raw(self._device, self.first + lo, self.first + hi, raw.op, cuts, raw.root, divisor)

    def _raw(self, raw: Raw, group: Group) -> None:
        self._to_host()
        lo, hi = raw.region
        array = self._array[lo:hi]
        cuts = [cut - lo for cut in raw.cuts]
        self.moved_bytes += _moved(raw, len(group.members), group.index, array.nbytes)
        if raw.op == "all_reduce":
            group.all_reduce(array, self._array_dtype)
        elif raw.op == "reduce":
            group.reduce(array, self._array_dtype, raw.root)
        elif raw.op == "broadcast":
            group.broadcast(array, self._array_dtype, raw.root)
        elif raw.op == "reduce_scatter":
            group.reduce_scatter(array, self._array_dtype, cuts, self._divisor if raw == self._divides else 1)
        else:
            group.all_gather(array, self._array_dtype, cuts)

    @property
    def _array_dtype(self) -> str:
        return "float32" if self._array.dtype == np.float32 else self.dtype

    def _exchange_on_gpus(self, exchange: Exchange, group: DeviceGroup, action: int, number: int) -> None:
        assert self._device is not None
        own, codecs = exchange.members.index(self.stream.rank), self._codecs_of(exchange)
        outgoing = [list(zip(self._sent(pieces), _bounds(pieces, codecs), strict=True)) for pieces in exchange.sends]
        coming = [[] if member == own else _bounds(pieces, codecs) for member, pieces in enumerate(exchange.receives)]
        root = exchange.root if exchange.op == "broadcast" else 0
        came = group.exchange(self._device, (self.first, action, number), exchange.op, outgoing, coming, root)
        self.moved_bytes += sum(bound for member, each in enumerate(outgoing) if member != own for _, bound in each)
        self.moved_bytes += sum(bound for bounds in coming for bound in bounds)
        self._came(exchange, own, came)

    def _sent(self, pieces: Sequence[Piece]) -> list[Payload]:
        """The payloads of these pieces, in order."""
        return [payload for piece in pieces for payload in self._payloads[piece.range]]

    def _came(self, exchange: Exchange, own: int, came: Sequence[Sequence[Payload]]) -> None:
        """Go on with what has come from each member; what this rank has sent to itself has stayed."""
        arrived: dict[Range, list[Payload]] = {}
        for member, pieces in enumerate(exchange.receives):
            left = iter(self._sent(pieces) if member == own else came[member])
            for piece in pieces:
                arrived.setdefault(piece.range, []).extend(itertools.islice(left, piece.payloads))
        for piece in (piece for pieces in exchange.sends for piece in pieces):  # pieces of the transfer's other collectives stay
            self._payloads.pop(piece.range, None)
        self._payloads |= arrived

    def _exchange(self, exchange: Exchange, group: Group, action: int, number: int) -> None:
        """Payloads of known length travel one behind the other in one message; where lengths vary they are exchanged first."""
        for piece in (piece for pieces in exchange.sends for piece in pieces):
            self._payloads[piece.range] = [bytes_of(payload) for payload in self._payloads[piece.range]]
        own = group.index
        lengths = self._lengths(exchange, group)
        outgoing: list[Bytes | None] = []
        incoming: list[Bytes | None] = []
        for member, (sends, expected) in enumerate(zip(exchange.sends, lengths, strict=True)):
            payloads = [bytes_of(payload) for payload in self._sent(sends)]
            away = member != own
            outgoing.append(_together(payloads) if payloads and away else None)
            total = sum(expected)
            incoming.append(self._buffer(action, number, 1 + member, total) if total and away else None)
        group.exchange(outgoing, incoming)
        self.moved_bytes += sum(len(payload) for payload in (*outgoing, *incoming) if payload is not None)
        came: list[list[Payload]] = []
        for buffer, expected in zip(incoming, lengths, strict=True):
            ends = list(itertools.accumulate(expected))
            whole = np.empty(0, np.uint8) if buffer is None else np.asarray(buffer)
            came.append([whole[end - length : end] for end, length in zip(ends, expected, strict=True)])
        self._came(exchange, own, came)

    def _lengths(self, exchange: Exchange, group: Group) -> list[list[int]]:
        """Of the payloads that come from each member."""
        codecs = self._codecs_of(exchange)
        if all(codec.fixed_size for codec in codecs.values()):
            return [_bounds(pieces, codecs) for pieces in exchange.receives]
        sent: list[Bytes | None] = []
        coming: list[Bytes | None] = []
        for member, (sends, receives) in enumerate(zip(exchange.sends, exchange.receives, strict=True)):
            lengths = [len(bytes_of(payload)) for payload in self._sent(sends)]
            away = member != group.index
            sent.append(np.array(lengths, _LENGTH).view(np.uint8) if lengths and away else None)
            count = sum(piece.payloads for piece in receives)
            coming.append(np.empty(_LENGTH.itemsize * count, np.uint8) if count and away else None)
        group.exchange(sent, coming)
        told = [[] if buffer is None else [int(length) for length in buffer.view(_LENGTH)] for buffer in coming]
        for lengths, pieces in zip(told, exchange.receives, strict=True):
            for length, bound in zip(lengths, _bounds(pieces, codecs), strict=False):
                if not 0 <= length <= bound:
                    raise ValueError(f"a payload of {length} bytes was announced, at most {bound} are possible")
        return told

    def _codecs_of(self, exchange: Exchange) -> dict[int, Codec]:
        """By slot, of what the exchange moves."""
        return {piece.slot: self._codec(piece.slot) for pieces in (*exchange.sends, *exchange.receives) for piece in pieces}

    def agree(self, group: Group) -> None:
        """The last step: all ranks learn what any of them has met. Raises DeviceError where this rank's device cannot say what it has met."""
        with self._told:
            self._told.wait_for(lambda: not self._untold)
            if self._fault is not None:
                raise self._fault
        word = self.control.word()
        group.maximum(word)
        self.agreed(Control.of(word))

    def agreed(self, control: Control) -> None:
        """The ranks have agreed on this."""
        self.control = control
        self.groups_on_gpus = not control.on_host

    def end(self) -> None:
        """After ``agree``, on every rank alike: commit residuals, and turn the sum into the mean."""
        if not self.control.contributed:
            self.unapplied = self.program.has_servers
            return
        if self.control.nonfinite:
            self._array.fill(np.nan)
            self._there = False
            self._to_device()
            return
        for (slot, piece), feedback in self._feedback.items():
            if slot or piece not in self._served:
                feedback.commit()
        if self._divisor != 1 and self._divides is None:
            if self._device is not None and self._there:
                self._device.divide(self.first, self.first + self.program.numel, self._divisor)
            else:
                self._divide(self._divisor)
        self._to_device()

    def _divide(self, divisor: int) -> None:
        """In place, as servers divide: in the accumulator, 16-bit floats in float32, integers by floor."""
        if self._array.dtype == np.float32:
            self._array /= np.float32(divisor)
            return
        codec = NoneCodec(self.dtype)
        payload = self._array.view(np.uint8)
        for lo, hi in slices(codec, self._array.size):
            acc = np.empty(hi - lo, codec.acc_dtype)
            codec.fold([payload], self._array.size, lo, hi, acc, True)
            codec.finish(acc, self._array.size, lo, hi, divisor, None, None, 1.0, self.stream, payload)

    def has_none(self, element: int) -> bool:
        """Whether the piece that begins with this element has no result, since some rank met a NaN or infinity in what it encoded."""
        if not self.program.encodes:
            return False
        if self._device is not None:
            self._to_host()
            self._there = True  # both have it
        return bool(np.isnan(self._array[element]))

    # between steps

    def remembered(self, dropped: bool) -> NDArray[np.float32]:
        """What this rank's slots hold together, by element, in the next step's units; of what several ranks keep alike, the first one's.
        dropped: the trainer did not apply the last step."""
        total = np.zeros(self.program.numel, np.float32)
        dropped = dropped or self.unapplied
        for (slot, (lo, hi)), feedback in self._feedback.items():
            if (slot, (lo, hi)) not in self._leads:
                continue
            if not dropped or not feedback.committed or (slot == 0 and self.servers_add_back):
                total[lo:hi] += feedback.load()
            elif slot:
                total[lo:hi] += feedback.without_last()
            else:
                values = feedback.copy()
                _add_back(self._codec(0), bytes_of(self._own[lo, hi]), values)
                total[lo:hi] += values * np.float32(feedback.rescale)
        return total

    def exact(self, dropped: bool) -> list[tuple[NDArray[np.float32], float]]:
        """What each slot of this rank keeps of each piece, and the factor by which it must still be multiplied. dropped: as in ``remembered``."""
        found = []
        dropped = dropped or self.unapplied
        for (slot, piece), feedback in self._feedback.items():
            if not dropped or not feedback.committed or (slot == 0 and self.servers_add_back):
                found.append((feedback.copy(), feedback.rescale))
            elif slot:
                found.append(feedback.before_last)
            else:
                values = feedback.copy()
                _add_back(self._codec(0), bytes_of(self._own[piece]), values)
                found.append((values, feedback.rescale))
        return found

    @property
    def feedbacks(self) -> list[Feedback]:
        """In the order of ``exact``."""
        return list(self._feedback.values())

    @property
    def keeps_residual(self) -> bool:
        return bool(self._feedback)

    def _buffer(self, action: int, number: int, place: int, size: int) -> Bytes:
        """Memory for a payload, the same in every step."""
        key = action, number, place
        found = self._buffers.get(key)
        if found is None or found.size < size:
            found = self._buffers[key] = np.empty(size, np.uint8)
        return found[:size]


def _only_sum(program: Program) -> Raw | None:
    """The reduce_scatter over all ranks of a program that sums nothing else and encodes nothing: it divides before it rounds, as servers do."""
    if program.encodes or any(transfer.level != "flat" for transfer in program.transfers):
        return None
    raws = [one for transfer in program.transfers for one in transfer.collectives if isinstance(one, Raw)]
    return next((raw for raw in raws if raw.op == "reduce_scatter"), None)


def _serves_payloads(step: Step) -> bool:
    return isinstance(step, Serve) and step.slot is not None


def _moved(raw: Raw, members: int, index: int, nbytes: int) -> int:
    """Bytes of the region that a rank sends and receives in one collective, as a ring (of reduce and broadcast: a chain) moves them."""
    if members == 1:
        return 0
    if raw.op in ("reduce", "broadcast"):
        return nbytes * (1 if index == raw.root else 2)
    return 2 * nbytes * (members - 1) // members * (2 if raw.op == "all_reduce" else 1)


def _add_back(codec: Codec, payload: Bytes, residual: NDArray[np.float32]) -> None:
    for lo, hi in slices(codec, residual.size):
        codec.fold([payload], residual.size, lo, hi, residual[lo:hi], False)


def _bounds(pieces: Sequence[Piece], codecs: dict[int, Codec]) -> list[int]:
    return [codecs[piece.slot].payload_bound(piece.range[1] - piece.range[0]) for piece in pieces for _ in range(piece.payloads)]


def _together(payloads: list[Bytes]) -> Bytes:
    return payloads[0] if len(payloads) == 1 else np.concatenate(payloads)
