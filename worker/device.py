"""What a bucket asks of a device that its elements lie on: to encode slices there, to apply results, and to keep residuals.

Owns the interface only; ``psgc/torch/device`` implements it over CUDA streams. Knows host bytes and numbers, not tensors. Methods enqueue work and
return: none waits for the device, but for a free place in a staging ring. All raise DeviceError, whose text says what failed and on which device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from psgc.codecs import Encoded, SchemeState, Stream
from psgc.errors import DeviceError
from psgc.worker.residuals.residual import F32, Residual

Bytes = NDArray[np.uint8]
EncodedThen = Callable[["Encoded | DeviceError"], None]  # called once, in another thread


class DevicePayload(Protocol):
    """A payload that stays on the device. One whose length varies lies at the beginning of memory of its bound."""

    def to_host(self) -> Bytes:
        """A copy of its bytes. Waits for the device."""


class DeviceBucket(Protocol):
    """A bucket's elements on a device. Slices are named by their first element and the one after their last."""

    def residual(self, numel: int) -> Residual:
        """A residual on the device, of zeros. Its ``load`` gives a copy, for use between steps."""

    def encode(
        self, index: int, lo: int, hi: int, residual: Residual | None, rescale: float, stream: Stream, out: Bytes, then: EncodedThen
    ) -> None:
        """Encode round ``index`` of a slice, and call ``then`` when its payload is in ``out``, which is host memory."""

    def take(self, index: int, lo: int, hi: int, payload: Bytes) -> None:
        """Take the result of a round that is not the last. On return the payload has been read. Raises PayloadError."""

    def apply(self, lo: int, hi: int, payload: Bytes, residual: Residual | None, rescale: float) -> None:
        """Take the last round's result: commit the residual (None: nothing to commit) to what the step's payloads left out, and make the slice the
        aggregate. On return the payload has been read. Raises PayloadError."""

    def add_back(self, lo: int, hi: int, residual: Residual) -> None:
        """Add the elements that the payloads of the slice's last step encode to the residual."""

    def state_to_host(self, lo: int, hi: int, state: SchemeState) -> None:
        """Bring ``state`` to what the scheme keeps of a slice on the device between steps, besides the residual. Waits for the device."""

    def state_from_host(self, lo: int, hi: int, state: SchemeState) -> None:
        """Have the device go on from what ``state`` keeps of a slice. Between steps."""

    def add(self, lo: int, values: F32) -> None:
        """Add to the elements from ``lo`` on."""

    def fill(self, lo: int, hi: int, value: float) -> None:
        """Set a slice's elements."""

    def nonfinite(self, lo: int, hi: int) -> int | None:
        """The first element of a slice that is NaN or infinite, from ``lo`` on, or None. Waits for the device."""

    # what programs over groups ask: slot 0 encodes with the push codec, the others with the pull codec

    def finish(
        self, slot: int, lo: int, hi: int, old: Residual | None, new: Residual | None, rescale: float, stream: Stream, out: Bytes,
        then: EncodedThen,
    ) -> None:  # fmt: skip
        """As ``encode``, of what may be a sum, and write to ``new`` what the payload leaves out of it and of ``old``."""

    def finish_there(
        self, slot: int, lo: int, hi: int, old: Residual | None, new: Residual | None, rescale: float, stream: Stream, place: int
    ) -> DevicePayload:  # fmt: skip
        """As ``finish``, of a payload that stays on the device until the next one of the same slice and place."""

    def tell(self, payloads: Sequence[DevicePayload], then: Callable[[bool | DeviceError], None]) -> None:
        """Call ``then``, once and in another thread, with whether an input of any of these was NaN or infinite. payloads: one or more of ``finish_there``."""

    def fold(self, slot: int, lo: int, hi: int, payloads: Sequence[Bytes | DevicePayload]) -> None:
        """A slice becomes the sum of these payloads, left to right. On return those on the host have been read. Raises PayloadError for one of these."""

    def add_payload(self, slot: int, payload: Bytes | DevicePayload, residual: Residual, numel: int) -> None:
        """Add the elements that a payload encodes to the residual."""

    def divide(self, lo: int, hi: int, divisor: int) -> None:
        """Divide a slice's elements, correctly rounded."""

    def to_host(self, lo: int, hi: int, target: NDArray[Any]) -> None:
        """Copy a slice's elements, of the dtype that they have there. Waits for the device."""

    def from_host(self, lo: int, hi: int, values: NDArray[Any]) -> None:
        """Set a slice's elements; on return the values have been read."""


def bytes_of(payload: Bytes | DevicePayload) -> Bytes:
    """A payload's bytes on the host. Waits for the device where it has stayed there."""
    return payload if isinstance(payload, np.ndarray) else payload.to_host()
