"""Encodes objects of plain types as bytes, and decodes them. Decoding untrusted bytes yields values only and never runs code.

Plain are None, bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict and OrderedDict of plain things; torch
tensors (dense), torch.Size, torch.dtype, torch.device; numpy arrays, scalars and dtypes of numbers, times and text. Exactly these: an instance of a
subclass would come back as something else.

A value is a tag of one byte and what the tag says; lengths and counts are u64, little-endian.
"""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from psgc.errors import RemoteProtocolError, UsageError

MAX_DEPTH: Final = 100
_COUNT: Final = struct.Struct("<Q")
_FLOAT: Final = struct.Struct("<d")
_COMPLEX: Final = struct.Struct("<dd")
NUMPY_KINDS: Final = "biufcmMSU"
PLAIN_TEXT: Final = (
    "None, bool, int, float, complex, str, bytes, list, tuple, set, dict, torch tensors and dtypes, numpy arrays and scalars"
)


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Stands for a tensor that travels on its own."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def encode(value: Any, name: str, whose: str = "psgc", pickles: bool = True) -> bytes:
    """``value`` as bytes. name, whose: begin error messages. pickles: whether the caller can pickle instead. Raises UsageError for an object of another type,
    with its place in ``value``."""
    out: list[bytes] = []
    _Encoder(out, whose, pickles).put(value, name, 0)
    return b"".join(out)


def decode(data: bytes | bytearray | memoryview) -> Any:
    """The value that ``encode`` was given. Raises RemoteProtocolError for bytes that ``encode`` does not make."""
    reader = _Decoder(memoryview(data))
    try:
        value = reader.take_value(0)
    except (ValueError, TypeError, OverflowError, RuntimeError, struct.error) as error:
        raise RemoteProtocolError(f"bytes that are not an object: {error}") from None
    if reader.left:
        raise RemoteProtocolError(f"bytes that are not an object: {reader.left} more than it has")
    return value


class _Encoder:
    def __init__(self, out: list[bytes], what: str, pickles: bool) -> None:
        self._out, self._what, self._pickles = out, what, pickles

    def put(self, value: Any, where: str, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise UsageError(f"{self._what}: {where[:80]}... is nested deeper than {MAX_DEPTH} levels, or contains itself")
        kind = type(value)
        if value is None or kind is bool:
            self._out.append({None: b"N", True: b"T", False: b"F"}[value])
        elif kind in _SCALARS:
            tag, pack = _SCALARS[kind]
            self._bytes(tag, pack(value))
        elif kind in _SEQUENCES:
            self._count(_SEQUENCES[kind], len(value))
            for index, item in enumerate(value):
                self.put(item, f"{where}[{index}]", depth + 1)
        elif kind in _MAPPINGS:
            self._count(_MAPPINGS[kind], len(value))
            for key, item in value.items():
                self.put(key, f"a key of {where}", depth + 1)
                self.put(item, f"{where}[{key!r:.40}]", depth + 1)
        elif kind in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided and not value.is_quantized:
            self._tensor(value)
        elif kind is TensorPlace:
            self._out.append(b"@")
            self.put((value.index, value.shape, value.dtype), where, depth + 1)
        elif (kind is np.ndarray or isinstance(value, np.generic)) and value.dtype.kind in NUMPY_KINDS:
            self._array(value)
        else:
            instead = "pass allow_pickle=True (or set PSGC_ALLOW_PICKLE=1) on every rank if all of them may run code on one another"
            raise UsageError(
                f"{self._what}: {where} is a {kind.__module__}.{kind.__qualname__}, which is not a plain type; plain types are {PLAIN_TEXT}. Convert it "
                f"(vars(obj) of a namespace, dataclasses.asdict){f', or {instead}' if self._pickles else ''}"
            )

    def _bytes(self, tag: bytes, data: bytes) -> None:
        self._count(tag, len(data))
        self._out.append(data)

    def _count(self, tag: bytes, count: int) -> None:
        self._out.append(tag + _COUNT.pack(count))

    def _shape(self, shape: tuple[int, ...]) -> None:
        self._out.append(_COUNT.pack(len(shape)) + b"".join(map(_COUNT.pack, shape)))

    def _tensor(self, tensor: torch.Tensor) -> None:
        flat = tensor.detach().cpu().contiguous().flatten()
        flags = (1 if tensor.requires_grad and tensor.is_leaf else 0) | (2 if isinstance(tensor, torch.nn.Parameter) else 0)
        self._bytes(b"t", _dtype_name(tensor.dtype))
        self._out.append(bytes([flags]))
        self._shape(tuple(tensor.shape))
        self._out.append(flat.resolve_conj().resolve_neg().view(torch.uint8).numpy().tobytes() if flat.numel() else b"")

    def _array(self, array: Any) -> None:
        self._bytes(b"a" if isinstance(array, np.ndarray) else b"g", array.dtype.str.encode())
        whole = np.asarray(array, order="C")
        self._shape(whole.shape)
        self._out.append(whole.tobytes())


class _Decoder:
    def __init__(self, data: memoryview) -> None:
        self._data = data

    @property
    def left(self) -> int:
        return len(self._data)

    def _take(self, count: int) -> memoryview:
        if count > len(self._data):
            raise ValueError(f"{count} bytes are wanted, {len(self._data)} are left")
        taken, self._data = self._data[:count], self._data[count:]
        return taken

    def _take_count(self) -> int:
        return int(_COUNT.unpack(self._take(_COUNT.size))[0])

    def take_value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
        tag = bytes(self._take(1))
        if tag in _CONSTANTS:
            return _CONSTANTS[tag]
        if tag in _UNPACK:
            return _UNPACK[tag](bytes(self._take(self._take_count())))
        if tag in _FROM_ITEMS:
            return _FROM_ITEMS[tag]([self.take_value(depth + 1) for _ in range(self._fitting(1))])
        if tag in _FROM_PAIRS:
            return _FROM_PAIRS[tag]([(self.take_value(depth + 1), self.take_value(depth + 1)) for _ in range(self._fitting(2))])
        if tag == b"t":
            return self._take_tensor()
        if tag in b"ag":
            array = self._take_array()
            return array if tag == b"a" else array[()]
        if tag == b"@":
            index, shape, dtype = self.take_value(depth + 1)
            return TensorPlace(int(index), tuple(map(int, shape)), _checked_dtype(dtype))
        raise ValueError(f"tag {tag!r} is unknown")

    def _fitting(self, least: int) -> int:
        """A count of things that take at least so many bytes each."""
        count = self._take_count()
        if count * least > len(self._data):
            raise ValueError(f"{count} things are said to follow in {len(self._data)} bytes")
        return count

    def _take_shape(self) -> tuple[int, ...]:
        return tuple(self._take_count() for _ in range(self._fitting(8)))

    def _take_tensor(self) -> torch.Tensor:
        dtype = _dtype_of(bytes(self._take(self._take_count())))
        flags, shape = self._take(1)[0], self._take_shape()
        data = np.frombuffer(bytearray(self._take(math.prod(shape) * dtype.itemsize)), np.uint8)
        flat = torch.from_numpy(data).view(dtype) if data.size else torch.empty(0, dtype=dtype)
        tensor = flat.reshape(shape)
        if flags & 2:
            return torch.nn.Parameter(tensor, requires_grad=bool(flags & 1))
        return tensor.requires_grad_(bool(flags & 1))

    def _take_array(self) -> Any:
        dtype = _numpy_dtype(bytes(self._take(self._take_count())))
        shape = self._take_shape()
        return np.frombuffer(bytearray(self._take(math.prod(shape) * dtype.itemsize)), dtype).reshape(shape)


def _int_bytes(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def _dtype_name(dtype: torch.dtype) -> bytes:
    return str(dtype).removeprefix("torch.").encode()


def _dtype_of(name: bytes) -> torch.dtype:
    return _checked_dtype(getattr(torch, name.decode(), None))


def _checked_dtype(dtype: Any) -> torch.dtype:
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor's dtype is unknown to torch")
    return dtype


def _numpy_dtype(text: bytes) -> Any:
    dtype = np.dtype(text.decode())
    if dtype.kind not in NUMPY_KINDS or not dtype.itemsize:
        raise ValueError(f"an array's dtype is {dtype}")
    return dtype


# type -> tag, and how its content is written; tag -> how it is read
_SCALARS: Final[dict[type, tuple[bytes, Callable[[Any], bytes]]]] = {
    int: (b"i", _int_bytes),
    float: (b"f", _FLOAT.pack),
    complex: (b"c", lambda value: _COMPLEX.pack(value.real, value.imag)),
    str: (b"s", lambda value: value.encode("utf-8", "surrogatepass")),
    bytes: (b"b", bytes),
    bytearray: (b"B", bytes),
    torch.dtype: (b"d", _dtype_name),
    torch.device: (b"D", lambda value: str(value).encode()),
}
_CONSTANTS: Final[dict[bytes, Any]] = {b"N": None, b"T": True, b"F": False}
_UNPACK: Final[dict[bytes, Callable[[bytes], Any]]] = {
    b"i": lambda data: int.from_bytes(data, "little", signed=True),
    b"f": lambda data: _FLOAT.unpack(data)[0],
    b"c": lambda data: complex(*_COMPLEX.unpack(data)),
    b"s": lambda data: data.decode("utf-8", "surrogatepass"),
    b"b": bytes,
    b"B": bytearray,
    b"d": _dtype_of,
    b"D": lambda data: torch.device(data.decode()),
}
_SEQUENCES: Final[dict[type, bytes]] = {list: b"l", tuple: b"u", set: b"S", frozenset: b"Z", torch.Size: b"z"}
_FROM_ITEMS: Final[dict[bytes, Callable[[list[Any]], Any]]] = {b"l": list, b"u": tuple, b"S": set, b"Z": frozenset, b"z": torch.Size}
_MAPPINGS: Final[dict[type, bytes]] = {dict: b"m", OrderedDict: b"o"}
_FROM_PAIRS: Final[dict[bytes, Callable[[list[Any]], Any]]] = {b"m": dict, b"o": OrderedDict}
