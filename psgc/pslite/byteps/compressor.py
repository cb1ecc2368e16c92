"""The base of BytePS's compressors: one object for each part, float32 in, a payload out. Two of them wrap others: error feedback and momentum."""

from __future__ import annotations

import itertools
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from psgc.errors import CodecError, PayloadError

F32 = NDArray[np.float32]
PAIR: Final = np.dtype([("index", "<u4"), ("value", "<f4")])
RATE_FILE: Final = Path("lr.s")  # where BytePS's trainer writes the learning rate, as a double


class Compressor(ABC):
    """numel: elements of the part. Payloads are those of BytePS's class of the same name, bit for bit."""

    def __init__(self, numel: int) -> None:
        self.numel = numel

    @abstractmethod
    def encode(self, values: F32) -> bytes:
        """The payload of ``values``, [numel]. Compressors that wrap another may change ``values``."""

    @abstractmethod
    def decode(self, payload: bytes | memoryview) -> F32:
        """A new array [numel] of the payload's values. Raises PayloadError for bytes that this compressor does not write."""


def count_of(k: str, aligned_bytes: int, numel: int) -> int:
    """The number of elements that ``compressor_k`` keeps. It is a number, or a fraction of BytePS's buffer, computed in single precision as by BytePS. Raises
    CodecError."""
    try:
        factor = np.float32(k)
    except ValueError:
        factor = np.float32(0)
    if not factor > 0:
        raise CodecError(f"compressor_k={k!r}: expected a number above 0: a fraction of the elements below 1, else how many")
    count = max(1, int(factor * np.float32(aligned_bytes) / np.float32(4))) if factor < 1 else int(factor)
    if count > numel // 2:
        raise CodecError(
            f"compressor_k={k}: {count} of {numel} elements; BytePS sends half of them at most, because each has an index beside it"
        )
    return count


def pairs_of(payload: bytes | memoryview, numel: int) -> F32:
    """The decoded values of a payload of indices and values. If an index occurs twice, the last value counts."""
    if len(payload) % PAIR.itemsize:
        raise PayloadError(f"a payload of {len(payload)} bytes; expected 8 for each element that is kept")
    pairs = np.frombuffer(payload, PAIR)
    if pairs.size and int(pairs["index"].max()) >= numel:
        raise PayloadError(f"a payload names element {int(pairs['index'].max())} of a part of {numel}")
    out = np.zeros(numel, np.float32)
    out[pairs["index"]] = pairs["value"]
    return out


class ErrorFeedback(Compressor):
    """``ef_type=vanilla``: error feedback. The residual is added to the next step's values, times the last learning rate divided by the present one, which the
    file ``lr.s`` holds. BytePS ends without that file; psgc then takes the ratio as 1."""

    def __init__(self, inner: Compressor, rate_file: Path = RATE_FILE) -> None:
        super().__init__(inner.numel)
        self._inner, self._file = inner, rate_file
        self._error = np.zeros(inner.numel, np.float32)
        self._rate = self._read_rate()

    def encode(self, values: F32) -> bytes:
        before, self._rate = self._rate, self._read_rate()
        corrected = values + np.float32(before / self._rate) * self._error
        payload = self._inner.encode(corrected)
        self._error = corrected - self._inner.decode(payload)
        return payload

    def decode(self, payload: bytes | memoryview) -> F32:
        return self._inner.decode(payload)

    def _read_rate(self) -> float:
        try:
            (rate,) = struct.unpack("<d", self._file.read_bytes()[:8])
        except (OSError, struct.error):
            return 1.0
        return float(rate) or 1.0


class InTurn(Compressor):
    """Encodes by each of ``inner`` in turn: those of a part whose payloads go to several keys in turn (``turns``), each with the random numbers of its
    key's compressor on the server. Decoding takes no random numbers, so any of them decodes."""

    def __init__(self, inner: Sequence[Compressor]) -> None:
        super().__init__(inner[0].numel)
        self._inner, self._next = inner, itertools.cycle(inner)

    def encode(self, values: F32) -> bytes:
        return next(self._next).encode(values)

    def decode(self, payload: bytes | memoryview) -> F32:
        return self._inner[0].decode(payload)


class NesterovMomentum(Compressor):
    """``momentum_type=nesterov``, on workers only: m <- mu m + g, and g + mu m is sent."""

    def __init__(self, inner: Compressor, mu: float) -> None:
        super().__init__(inner.numel)
        self._inner, self._mu = inner, np.float32(mu)
        self._momentum = np.zeros(inner.numel, np.float32)

    def encode(self, values: F32) -> bytes:
        self._momentum = values + self._mu * self._momentum
        return self._inner.encode(values + self._mu * self._momentum)

    def decode(self, payload: bytes | memoryview) -> F32:
        return self._inner.decode(payload)
