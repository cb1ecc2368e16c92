"""How a worker keeps the residual of a part: as it is, or as an `int8` payload.

``load`` gives float32 to read and write, ``keep`` takes it back. In eight bits (1.016 bytes an element instead of 4; LoCo, Xie et al. 2024)
what rounding loses of the residual is lost: at most 1/254 of the largest in 256 elements, each step. An array that holds a NaN or infinity
is kept as zeros where it does.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from psgc.codecs import ResidualDtype, Stream, parse_codec

F32 = NDArray[np.float32]
_NOWHERE: Final = Stream(0, 0, 0, 0)  # rounding to nearest draws no numbers


class TensorMemory(NamedTuple):
    """What a rank remembers of one tensor between steps, float32 [numel], in gradient units of its last step. velocity: None without
    momentum."""

    residual: F32
    velocity: F32 | None


class Residual(Protocol):
    def load(self) -> F32: ...
    def keep(self, values: F32) -> None: ...


class Float32Residual:
    def __init__(self, numel: int) -> None:
        self._values = np.zeros(numel, np.float32)

    def load(self) -> F32:
        return self._values

    def keep(self, values: F32) -> None:
        if values is not self._values:
            self._values[:] = values


class Int8Residual:
    def __init__(self, numel: int) -> None:
        self._codec = parse_codec("int8")
        self._payload = np.zeros(self._codec.payload_bound(numel), np.uint8)  # scales of 0
        self._numel = numel

    def load(self) -> F32:
        values = np.empty(self._numel, np.float32)
        self._codec.decode(self._payload, self._numel, 0, self._numel, values)
        return values

    def keep(self, values: F32) -> None:
        self._codec.encode(values, None, 1.0, _NOWHERE, self._payload)


def make_residual(dtype: ResidualDtype, numel: int) -> Residual:
    return Int8Residual(numel) if dtype == "int8" else Float32Residual(numel)
