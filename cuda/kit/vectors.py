"""``DeviceVector``: a vector of the kit on a device, with the arithmetic of NumPy's.

Owns types and operators. Every operation is one torch kernel, so that each is rounded by itself. A divisor is always a tensor on the device: torch
multiplies by the reciprocal of a number. u32 lies in int64 and u16 in int32, because torch computes little in them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from psgc.errors import CodecError

HELD: Final = {
    "f32": torch.float32, "f16": torch.float16, "u8": torch.uint8, "i8": torch.int8, "u16": torch.int32, "i16": torch.int16, "u32": torch.int64,
    "i32": torch.int32, "i64": torch.int64, "bool": torch.bool,
}  # fmt: skip
NUMPY: Final = {
    "f32": np.float32, "f16": np.float16, "u8": np.uint8, "i8": np.int8, "u16": np.uint16, "i16": np.int16, "u32": np.uint32, "i32": np.int32,
    "i64": np.int64, "bool": np.bool_,
}  # fmt: skip
NAMES: Final = {np.dtype(dtype): name for name, dtype in NUMPY.items()}
_WRAPPED: Final = {"u32": 0xFFFFFFFF, "u16": 0xFFFF}


class DeviceVector:
    """data: of the dtype that ``HELD`` has for ``type``; one-dimensional, or a row for each of several parts, of which size and shape are then one part's."""

    __slots__ = ("data", "type")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, data: torch.Tensor, type_: str) -> None:
        self.data, self.type = data, type_

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(NUMPY[self.type])

    @property
    def size(self) -> int:
        return self.data.shape[-1]

    @property
    def ndim(self) -> int:
        return 1

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.size,)

    def _both(
        self, other: Any, operation: Callable[[Any, Any], torch.Tensor], *, turned: bool = False, compares: bool = False
    ) -> DeviceVector:
        if isinstance(other, DeviceVector):
            type_, right = NAMES[np.result_type(self.dtype, other.dtype)], other.data
        else:
            type_ = NAMES[np.result_type(self.dtype, other)]
            right = torch.full((1,), other, dtype=HELD[type_], device=self.data.device)
        left, right = self.data.to(HELD[type_]), right.to(HELD[type_])
        made = operation(right, left) if turned else operation(left, right)
        return DeviceVector(made, "bool") if compares else DeviceVector(wrapped(made, type_), type_)

    def _floats(self, other: Any, turned: bool) -> DeviceVector:
        if self.type not in ("f32", "f16"):
            raise CodecError(f"a vector of {self.type} is divided: cast it to f32 first")
        return self._both(other, torch.div, turned=turned)

    def __add__(self, other: Any) -> DeviceVector:
        return self._both(other, torch.add)

    __radd__ = __add__

    def __sub__(self, other: Any) -> DeviceVector:
        return self._both(other, torch.sub)

    def __rsub__(self, other: Any) -> DeviceVector:
        return self._both(other, torch.sub, turned=True)

    def __mul__(self, other: Any) -> DeviceVector:
        return self._both(other, torch.mul)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> DeviceVector:
        return self._floats(other, False)

    def __rtruediv__(self, other: Any) -> DeviceVector:
        return self._floats(other, True)

    def __and__(self, other: Any) -> DeviceVector:
        return self._both(other, torch.bitwise_and)

    __rand__ = __and__

    def __or__(self, other: Any) -> DeviceVector:
        return self._both(other, torch.bitwise_or)

    __ror__ = __or__

    def __lshift__(self, other: Any) -> DeviceVector:
        return self._both(other, torch.bitwise_left_shift)

    def __rshift__(self, other: Any) -> DeviceVector:
        return self._both(other, torch.bitwise_right_shift)

    def __neg__(self) -> DeviceVector:
        return DeviceVector(wrapped(-self.data, self.type), self.type)

    def __invert__(self) -> DeviceVector:
        return DeviceVector(wrapped(~self.data, self.type), self.type)

    def __lt__(self, other: Any) -> DeviceVector:
        return self._both(other, torch.lt, compares=True)

    def __le__(self, other: Any) -> DeviceVector:
        return self._both(other, torch.le, compares=True)

    def __gt__(self, other: Any) -> DeviceVector:
        return self._both(other, torch.gt, compares=True)

    def __ge__(self, other: Any) -> DeviceVector:
        return self._both(other, torch.ge, compares=True)

    def __eq__(self, other: Any) -> DeviceVector:  # type: ignore[override]
        return self._both(other, torch.eq, compares=True)

    def __ne__(self, other: Any) -> DeviceVector:  # type: ignore[override]
        return self._both(other, torch.ne, compares=True)


def wrapped(data: torch.Tensor, type_: str) -> torch.Tensor:
    """The tensor, whose unsigned numbers of 32 and 16 bits count modulo their range."""
    return data & _WRAPPED[type_] if type_ in _WRAPPED else data


def from_bytes(data: torch.Tensor, dtype: np.dtype[Any]) -> DeviceVector:
    """The vector that these bytes are."""
    type_ = NAMES[dtype]
    plain = {"u32": torch.int32, "u16": torch.int16}.get(type_, HELD[type_])
    return DeviceVector(wrapped(data.clone(memory_format=torch.contiguous_format).view(plain).to(HELD[type_]), type_), type_)


def to_bytes(vector: DeviceVector) -> torch.Tensor:
    """The vector's bytes."""
    plain = {"u32": torch.int32, "u16": torch.int16}.get(vector.type, HELD[vector.type])
    return vector.data.contiguous().to(plain).view(torch.uint8)
