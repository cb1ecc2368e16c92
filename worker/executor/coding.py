"""The computations of a part: its encodes and decodes, on the host or on the device that the floats lie on.

Invariant: after an encode the payloads are those of its pieces, and the floats mean nothing; after a decode there are none, and the floats are where it ran.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial

from psgc.codecs.codec import Encoded
from psgc.codecs.common.payloads import MAX_PAYLOADS
from psgc.codecs.scheme import slices
from psgc.errors import DeviceError
from psgc.program.ranks import Range
from psgc.program.steps import Decode, Encode, Program, Transfer
from psgc.worker.device import DeviceBucket, bytes_of
from psgc.worker.executor.control import Agreement
from psgc.worker.executor.numbers import Bytes, Numbers, Payload
from psgc.worker.executor.pieces import ServedPieces
from psgc.worker.executor.slots import Slots
from psgc.worker.executor.transfers import Transfers


class Coding:
    """See the module's text. transfers: to ask whether they take payloads on the device."""

    def __init__(
        self, program: Program, numbers: Numbers, slots: Slots, agreement: Agreement, transfers: Transfers, pieces: ServedPieces
    ) -> None:
        self._program, self._numbers, self._slots = program, numbers, slots
        self._agreement, self._transfers, self._pieces = agreement, transfers, pieces

    def run(self, step: Encode | Decode, then: Callable[[DeviceError | None], None]) -> None:
        """``then`` is called once the step is over: at once, or, of payloads that come from the device to the host, in another thread, when all are there or
        one could not be made."""
        device = self._numbers.device if step.device == "gpu" else None
        if isinstance(step, Encode) and device is not None:
            self._numbers.to_device()
            self._numbers.payloads = {}
            if not self._stays(step):
                self._encode_to_host(step, device, then)
                return
            self._encode_there(step, device)
        elif isinstance(step, Encode):
            self._encode(step)
        elif device is not None:
            for piece, payloads in self._numbers.payloads.items():
                device.fold(self._slots.encoder(step.slot), *self._numbers.in_bucket(piece), payloads)
            self._numbers.decoded(on_device=True)
        else:
            self._decode(step)
        then(None)

    def _encode(self, step: Encode) -> None:
        numbers, codec = self._numbers, self._slots.codec(step.slot)
        numbers.to_host()
        numbers.payloads = {}
        for piece, leader, out in self._outputs(step):
            (lo, hi), (old, new, rescale, stream) = piece, self._slots.inputs(step, piece, leader)
            payload_bytes, nonfinite = 0, False
            for a, b in slices(codec, hi - lo):
                kept, left = (None, None) if old is None else (old[a:b], new[a:b])
                encoded = codec.finish(numbers.array[lo + a : lo + b], hi - lo, a, b, 1, kept, left, rescale, stream, out)
                payload_bytes, nonfinite = encoded.payload_bytes, nonfinite or encoded.nonfinite
            self._keep(step, piece, out[:payload_bytes], nonfinite)

    def _outputs(self, step: Encode) -> Iterator[tuple[Range, int, Bytes]]:
        """Each piece, its leader, and where its payload is written on the host."""
        codec = self._slots.codec(step.slot)
        for number, (piece, leader) in enumerate(zip(step.pieces, step.leaders, strict=True)):
            if self._is_served(step, piece):
                yield piece, leader, self._pieces.place(piece)
            else:
                yield piece, leader, self._numbers.buffer(step.action, number, 0, codec.payload_bound(piece[1] - piece[0]))

    def _is_served(self, step: Encode, piece: Range) -> bool:
        return step.slot == 0 and piece in self._pieces.encoded

    def _keep(self, step: Encode, piece: Range, payload: Payload, nonfinite: bool) -> None:
        if nonfinite and self._is_served(step, piece):
            self._pieces.poison(piece)
        elif nonfinite:
            self._agreement.control.nonfinite = True
        self._numbers.payloads[piece] = [payload]
        self._slots.wrote(step.slot, piece, payload)

    def _stays(self, step: Encode) -> bool:
        """Whether the encode's payloads need not come to the host."""
        if step.slot == 0 and self._pieces.encoded:
            return False
        steps = self._program.steps
        for later in steps[steps.index(step) + 1 :]:
            if not isinstance(later, Transfer):
                return isinstance(later, Decode) and later.device == "gpu"
            if any(len(one.members) > 1 for one in later.collectives):
                return self._transfers.on_gpus(later)
        return False

    def _encode_there(self, step: Encode, device: DeviceBucket) -> None:
        made = []
        for piece, leader in zip(step.pieces, step.leaders, strict=True):
            (lo, hi), (old, new, rescale, stream) = self._numbers.in_bucket(piece), self._slots.inputs(step, piece, leader)
            made.append(device.finish_there(self._slots.encoder(step.slot), lo, hi, old, new, rescale, stream, step.slot))
            self._keep(step, piece, made[-1], False)
        device.tell(made, self._agreement.awaited())

    def _encode_to_host(self, step: Encode, device: DeviceBucket, then: Callable[[DeviceError | None], None]) -> None:
        lock, left, faults = threading.Lock(), [len(step.pieces)], list[DeviceError]()

        def encoded(piece: Range, out: Bytes, found: Encoded | DeviceError) -> None:
            with lock:
                if isinstance(found, DeviceError):
                    faults.append(found)
                else:
                    self._keep(step, piece, out[: found.payload_bytes], found.nonfinite)
                left[0] -= 1
                if left[0]:
                    return
            then(faults[0] if faults else None)

        for piece, leader, out in self._outputs(step):
            (lo, hi), (old, new, rescale, stream) = self._numbers.in_bucket(piece), self._slots.inputs(step, piece, leader)
            done = partial(encoded, piece, out)
            device.finish(self._slots.encoder(step.slot), lo, hi, old, new, rescale, stream, out, done)

    def _decode(self, step: Decode) -> None:
        codec, numbers = self._slots.codec(step.slot), self._numbers
        for (lo, hi), held in numbers.payloads.items():
            numel, payloads = hi - lo, [bytes_of(payload) for payload in held]
            for payload in payloads:
                codec.validate(payload, numel)
            for a, b in slices(codec, numel):
                for begin in range(0, len(payloads), MAX_PAYLOADS):
                    codec.fold(payloads[begin : begin + MAX_PAYLOADS], numel, a, b, numbers.array[lo + a : lo + b], begin == 0)
        numbers.decoded(on_device=False)
