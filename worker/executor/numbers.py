"""The numbers of one part: its floats, and the payloads of its pieces.

Floats lie in an array on the host, and may lie on a device, too. Invariant: where there is a device, one flag says which of the two is up to date, and
whoever works on the floats has asked for them there first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from psgc.codecs.codec import Stream
from psgc.codecs.none import NoneCodec
from psgc.codecs.scheme import slices
from psgc.program.ranks import Range
from psgc.worker.device import DeviceBucket, DevicePayload

Bytes = NDArray[np.uint8]
Payload = Bytes | DevicePayload


class Numbers:
    """first: the part's first element in its bucket; dtype: of the bucket's tensors. Ranges are counted from the part's beginning."""

    def __init__(self, first: int, numel: int, dtype: str) -> None:
        self.first, self.numel, self._dtype = first, numel, dtype
        self.array: NDArray[Any] = np.empty(0)
        self.device: DeviceBucket | None = None  # where the program works on the floats, too
        self._there = False  # whether that has the newest floats
        self._owns_array = False
        self.payloads: dict[Range, list[Payload]] = {}
        self._buffers: dict[tuple[int, int, int], Bytes] = {}

    def lie_on_host(self, array: NDArray[Any]) -> None:
        """The step's floats are these, which are worked on in place."""
        self.device, self.array, self._owns_array = None, array, False

    def lie_on(self, device: DeviceBucket, dtype: Any) -> None:
        """The step's floats lie on a device; steps take them to where they need them. dtype: theirs on the host."""
        if self.array.size != self.numel or self.array.dtype != np.dtype(dtype) or not self._owns_array:
            self.array, self._owns_array = np.empty(self.numel, dtype), True
        self.device, self._there = device, True

    @property
    def dtype(self) -> str:
        """psgc's name of the array's type."""
        return "float32" if self.array.dtype == np.float32 else self._dtype

    # floats

    def in_bucket(self, piece: Range) -> Range:
        """A piece's elements as the bucket numbers them, and its device."""
        return self.first + piece[0], self.first + piece[1]

    def to_host(self) -> None:
        """The floats are needed on the host."""
        if self.device is not None and self._there:
            self.device.to_host(*self.in_bucket((0, self.numel)), self.array)
            self._there = False

    def to_device(self) -> None:
        """The floats are needed on the device, if they have one."""
        if self.device is not None and not self._there:
            self.device.from_host(*self.in_bucket((0, self.numel)), self.array)
            self._there = True

    def load(self, piece: Range) -> NDArray[Any]:
        """A piece's floats on the host, to read."""
        lo, hi = piece
        if self.device is not None and self._there:
            self.device.to_host(*self.in_bucket(piece), self.array[lo:hi])
        return self.array[lo:hi]

    def stored(self, piece: Range) -> None:
        """A piece's floats have been written to the array."""
        lo, hi = piece
        if self.device is not None and self._there:
            self.device.from_host(*self.in_bucket(piece), self.array[lo:hi])

    def decoded(self, on_device: bool) -> None:
        """All payloads have been decoded, on the host or on the device."""
        self.payloads, self._there = {}, on_device

    def fill(self, piece: Range, value: float) -> None:
        """Set a piece's floats, wherever they are."""
        self.array[piece[0] : piece[1]].fill(value)
        if self.device is not None:
            self.device.fill(*self.in_bucket(piece), value)

    def divide(self, divisor: int) -> None:
        """In place, as servers divide: in the accumulator, 16-bit floats in float32, integers by floor."""
        if self.device is not None and self._there:
            self.device.divide(*self.in_bucket((0, self.numel)), divisor)
            return
        if self.array.dtype == np.float32:
            self.array /= np.float32(divisor)
            return
        codec, numel, payload = NoneCodec(self._dtype), self.array.size, self.array.view(np.uint8)
        for lo, hi in slices(codec, numel):
            acc = np.empty(hi - lo, codec.acc_dtype)
            codec.fold([payload], numel, lo, hi, acc, True)
            codec.finish(acc, numel, lo, hi, divisor, None, None, 1.0, Stream(0, 0, 0, 0), payload)  # which draws no random numbers

    def is_nan(self, element: int) -> bool:
        """Whether an element is NaN, wherever the floats are."""
        return bool(np.isnan(self.load((element, element + 1))[0]))

    # payloads

    def buffer(self, action: int, number: int, place: int, size: int) -> Bytes:
        """Memory for a payload, the same in every step."""
        key = action, number, place
        found = self._buffers.get(key)
        if found is None or found.size < size:
            found = self._buffers[key] = np.empty(size, np.uint8)
        return found[:size]
