"""How a worker keeps the residual of a part: in float32, or as an `int8` payload.

``load`` gives float32 to read and write, ``keep`` takes it back. In eight bits (1.016 bytes an element instead of 4; LoCo, Xie et al. 2024)
each step loses the rounding error of the residual: at most 1/254 of the largest of 256 elements. NaN and infinity are kept as zeros.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from psgc.codecs import ResidualDtype, Stream, parse_codec

F32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]
_NOWHERE: Final = Stream(0, 0, 0, 0)  # rounding to nearest draws no numbers


class TensorMemory(NamedTuple):
    """The state that a rank keeps of one tensor between steps, float32 [numel], in gradient units of its last step. residual: None if the
    codec keeps none; velocity: None without momentum. factors: flat; state that is equal on all ranks (PowerSGD's Q), of any unit."""

    residual: F32 | None = None
    velocity: F32 | None = None
    factors: F32 | None = None


class ExactResidual(NamedTuple):
    """A part's residual to the last bit, for parts whose float32 residual would be rounded: its bytes as they are kept, and the factor by
    which it, and the velocity, must still be multiplied."""

    rescale: float
    bytes: Bytes
    velocity: F32 | None = None


@dataclass(slots=True)
class LayoutMemory:
    """The state that a rank keeps of a layout.

    tensors: its own state, by the tensors' names. servers: the servers' residuals by name, of the tensors that this rank answers for.
    exact: by place, residuals that these two hold only rounded; valid in the same layout only. steps: how many the tensors have taken,
    including those of earlier jobs. seed, stream: of their random streams, as a declaration's, where they are to go on.
    """

    tensors: dict[str, TensorMemory] = field(default_factory=dict)
    servers: dict[str, F32] = field(default_factory=dict)
    exact: dict[str, ExactResidual] = field(default_factory=dict)
    steps: int = 0
    seed: int = -1
    stream: str = ""


class Residual(Protocol):
    @property
    def bytes(self) -> Bytes:
        """The bytes as they are kept, to read."""

    def load(self) -> F32: ...
    def keep(self, values: F32) -> None: ...

    def keep_bytes(self, saved: Bytes) -> None:
        """Go on from another one's ``bytes``."""


class Float32Residual:
    def __init__(self, numel: int) -> None:
        self._values = np.zeros(numel, np.float32)

    @property
    def bytes(self) -> Bytes:
        return self._values.view(np.uint8)

    def load(self) -> F32:
        return self._values

    def keep(self, values: F32) -> None:
        if values is not self._values:
            self._values[:] = values

    def keep_bytes(self, saved: Bytes) -> None:
        self.bytes[:] = saved


class Int8Residual:
    def __init__(self, numel: int) -> None:
        self._codec = parse_codec("int8")
        self._payload = np.zeros(self._codec.payload_bound(numel), np.uint8)  # scales of 0
        self._numel = numel

    @property
    def bytes(self) -> Bytes:
        return self._payload

    def load(self) -> F32:
        values = np.empty(self._numel, np.float32)
        self._codec.decode(self._payload, self._numel, 0, self._numel, values)
        return values

    def keep(self, values: F32) -> None:
        self._codec.encode(values, None, 1.0, _NOWHERE, self._payload)

    def keep_bytes(self, saved: Bytes) -> None:
        self._payload[:] = saved


def make_residual(dtype: ResidualDtype, numel: int) -> Residual:
    return Int8Residual(numel) if dtype == "int8" else Float32Residual(numel)
