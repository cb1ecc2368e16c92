"""The pieces of a part that this rank pushes to servers, as floats or as payloads.

Invariant: a piece has one contribution in each step, and its payload stays in the key's slot until the result has been taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from psgc.codecs.scheme import slices
from psgc.program.ranks import Range
from psgc.program.steps import Program, Serve
from psgc.transport.memory.segment import Place
from psgc.wire.frames import Flag
from psgc.worker.contributions import Contribution
from psgc.worker.device import bytes_of
from psgc.worker.executor.numbers import Bytes, Numbers
from psgc.worker.executor.slots import Slots


class ServedPieces:
    """keys: the key of each piece; places: where this rank's payload of each is encoded."""

    def __init__(self, program: Program, numbers: Numbers, slots: Slots, keys: Mapping[Range, int], places: Mapping[Range, Place]) -> None:
        self._numbers, self._slots, self._keys, self._places = numbers, slots, keys, places
        serves = [step for step in program.steps if isinstance(step, Serve) and step.slot is not None]
        self.encoded = frozenset(piece for step in serves for piece in step.pieces)  # those that are pushed as payloads
        self._fresh = set(places)  # those whose pages are still to be made
        self._poisoned: set[Range] = set()  # those whose payload would hold NaN or infinity: the server tells all ranks that contribute
        self._dropped, self._rescale = 0, 1.0  # of the step under way

    def begin(self, dropped: int, rescale: float) -> None:
        """A step starts. Both are told to the servers (``Contribution``)."""
        self._poisoned.clear()
        self._dropped, self._rescale = dropped, rescale

    def place(self, piece: Range) -> Bytes:
        """Where the piece's payload is encoded."""
        place = self._places[piece]
        if piece in self._fresh:
            self._fresh.discard(piece)
            place.populate()
        return place.bytes

    def poison(self, piece: Range) -> None:
        """Encoding the piece has met a NaN or infinity."""
        self._poisoned.add(piece)

    def contribution(self, step: Serve, piece: Range, then: Callable[[int, Any], None]) -> Contribution:
        """What this rank pushes of a piece, which is now in its place."""
        if step.slot is None:
            payload_bytes, nonfinite = self._slots.push(self._numbers.load(piece), piece, self.place(piece))
        else:
            (payload,) = self._numbers.payloads.pop(piece)
            payload_bytes, nonfinite = len(bytes_of(payload)), piece in self._poisoned
        return Contribution(self._keys[piece], payload_bytes, nonfinite, self._dropped, self._rescale, then)

    def take(self, step: Serve, piece: Range, flags: int, payload: Bytes | None) -> int:
        """A server's result of a piece. This rank's payload is part of it, so what it left out counts as kept from now on. Returns the key. Raises
        PayloadError."""
        key, (lo, hi) = self._keys[piece], piece
        if flags & Flag.NONFINITE:
            self._numbers.fill(piece, np.nan)
            return key
        codec, numel = self._slots.pair.pull, hi - lo
        payload = np.empty(0, np.uint8) if payload is None else payload
        codec.validate(payload, numel)
        if step.slot is None:
            for a, b in slices(codec, numel):
                codec.decode(payload, numel, a, b, self._numbers.array[lo + a : lo + b])
            self._numbers.stored(piece)
        else:
            self._numbers.payloads[piece] = [payload.copy()]  # the server's memory, which it may use again
            self._slots.commit(step.slot, piece)
        return key
