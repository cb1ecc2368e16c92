"""The kit's operators on torch tensors: the results of `psgc.codecs.kit.ops`, to the bit.

``select`` and ``filter`` make vectors whose length the host has to learn, so they wait for the device. All others work on several parts of one length
at once, whose vectors are the rows of a matrix.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import torch

from psgc.codecs.codec import BLOCK, Stream
from psgc.codecs.common.streams import stream_position
from psgc.codecs.kit.dct import matrix
from psgc.codecs.kit.ops import _NEUTRAL, How, Ops, Type
from psgc.cuda.common.many import on_device
from psgc.cuda.common.tensor_streams import uniform, uniform_rows
from psgc.cuda.kit.vectors import HELD, DeviceVector, wrapped
from psgc.errors import CodecError

_BITS: Final = {"f32": 32, "u32": 32, "i32": 32, "f16": 16, "u16": 16, "i16": 16}


class OnePartOnly(CodecError):
    """An operator whose result has another length for each part was asked for several parts at once."""


class TorchOps(Ops):
    """See ``Ops``. streams: of the parts, where there are several at once."""

    def __init__(self, device: torch.device, streams: Sequence[Stream] | None = None) -> None:
        self.device, self._streams = device, streams

    def _f32(self, data: torch.Tensor) -> DeviceVector:
        return DeviceVector(data, "f32")

    def cast(self, x: DeviceVector, type_: Type) -> DeviceVector:
        return DeviceVector(wrapped(x.data.to(HELD[type_]), type_), type_)

    def bitcast(self, x: DeviceVector, type_: Type) -> DeviceVector:
        if _BITS.get(x.type) != _BITS.get(type_) or x.type not in _BITS:
            raise CodecError(f"bitcast of {x.dtype} to {type_}: types of the same width expected")
        signed = torch.int32 if _BITS[type_] == 32 else torch.int16
        bits = x.data.view(signed) if x.type in ("f32", "f16") else x.data.to(signed)
        return DeviceVector(bits.view(HELD[type_]) if type_ in ("f32", "f16") else wrapped(bits.to(HELD[type_]), type_), type_)

    def lookup(self, table: Sequence[float], codes: DeviceVector) -> DeviceVector:
        return self._f32(_table(tuple(table), self.device)[codes.data.long()])

    def nearest(self, table: Sequence[float], x: DeviceVector) -> DeviceVector:
        numbers = _table(tuple(table), self.device).double()
        middles, values = (numbers[1:] + numbers[:-1]) * 0.5, x.data.double()
        below, above = (torch.searchsorted(middles, values, right=right) for right in (False, True))
        return DeviceVector(torch.where(below % 2 == 0, below, above).to(torch.uint8), "u8")

    def absolute(self, x: DeviceVector) -> DeviceVector:
        return DeviceVector(x.data.abs(), x.type)

    def minimum(self, x: DeviceVector, y: Any) -> DeviceVector:
        return x._both(y, torch.minimum)

    def maximum(self, x: DeviceVector, y: Any) -> DeviceVector:
        return x._both(y, torch.maximum)

    def clip(self, x: DeviceVector, low: float, high: float) -> DeviceVector:
        return self.minimum(self.maximum(x, low), high)

    def divide(self, x: DeviceVector, y: DeviceVector) -> DeviceVector:
        left, right = torch.broadcast_tensors(x.data.float(), y.data.float())
        zero = right == 0
        return self._f32(torch.where(zero, 0.0, torch.div(left, torch.where(zero, 1.0, right))))

    def floor(self, x: DeviceVector) -> DeviceVector:
        return DeviceVector(x.data.floor(), x.type)

    def round(self, x: DeviceVector) -> DeviceVector:
        return DeviceVector(x.data.round(), x.type)

    def round_at_random(self, x: DeviceVector, uniform: DeviceVector) -> DeviceVector:
        below = x.data.floor()
        return self._f32(below + (uniform.data < x.data - below).float())

    def where(self, mask: DeviceVector, x: Any, y: Any) -> DeviceVector:
        left, right = (
            value.data.float() if isinstance(value, DeviceVector) else torch.full((1,), value, device=self.device) for value in (x, y)
        )
        return self._f32(torch.where(mask.data, left, right))

    def select(self, mask: DeviceVector) -> DeviceVector:
        return DeviceVector(torch.nonzero(self._only(mask, "select")).reshape(-1), "i64")

    def filter(self, mask: DeviceVector, x: DeviceVector) -> DeviceVector:
        return DeviceVector(self._only(x, "filter")[self._only(mask, "filter")], x.type)

    def _only(self, x: DeviceVector, name: str) -> torch.Tensor:
        """The vector of the one part that there is."""
        if self._streams is not None:
            raise OnePartOnly(f"{name} is done for one part at a time")
        return x.data

    def largest(self, x: DeviceVector, k: int) -> DeviceVector:
        magnitudes = x.data.contiguous().view(torch.int32) & 0x7FFFFFFF
        chosen = torch.sort(magnitudes, descending=True, stable=True).indices[..., :k]
        return DeviceVector(chosen.sort().values, "i64")

    def block_largest(self, x: DeviceVector, block: int, k: int) -> DeviceVector:
        blocks = -(-x.size // block)
        rows = torch.full((*x.data.shape[:-1], blocks * block), -1, dtype=torch.int32, device=self.device)
        rows[..., : x.size] = x.data.contiguous().view(torch.int32) & 0x7FFFFFFF
        order = torch.sort(rows.unflatten(-1, (blocks, block)), dim=-1, descending=True, stable=True).indices[..., :k]
        places = (order.sort(-1).values + torch.arange(blocks, device=self.device)[:, None] * block).flatten(-2)
        last = min(k, x.size - (blocks - 1) * block)  # what fills up the last block lies behind its elements
        return DeviceVector(places[..., : (blocks - 1) * min(k, block) + last], "i64")

    def turned(self, x: DeviceVector, side: int, rest: DeviceVector | None = None) -> DeviceVector:
        squares = x.data.unflatten(-1, (-1, side, side)) if x.size else x.data
        made = self._f32(squares.transpose(-1, -2).flatten(-3).contiguous() if x.size else x.data)
        return made if rest is None else self.concat(made, self._rest(rest, side))

    def _whole(self, x: DeviceVector, side: int) -> DeviceVector:
        return self._f32(x.data[..., : x.size // (side * side) * side * side])

    def _rest(self, x: DeviceVector, side: int) -> DeviceVector:
        return self._f32(x.data[..., x.size // (side * side) * side * side :])

    def extract(self, x: DeviceVector, indices: DeviceVector) -> DeviceVector:
        data, places = _rows_of(x.data, indices.data)
        return DeviceVector(data.gather(-1, places), x.type)

    def scatter(self, indices: DeviceVector, values: DeviceVector, numel: int) -> DeviceVector:
        places, data = _rows_of(indices.data, values.data.float())
        return self._f32(torch.zeros(*data.shape[:-1], numel, device=self.device).scatter_(-1, places, data))

    def concat(self, *vectors: DeviceVector) -> DeviceVector:
        return DeviceVector(torch.cat(_rows_of(*(vector.data for vector in vectors)), dim=-1), vectors[0].type)

    def range(self, numel: int) -> DeviceVector:
        return DeviceVector(torch.arange(numel, device=self.device), "i64")

    def fill(self, value: float, numel: int) -> DeviceVector:
        return self._f32(torch.full((numel,), value, dtype=torch.float32, device=self.device))

    def reduce(self, x: DeviceVector, how: How) -> DeviceVector:
        x = x if x.size else self.fill(_NEUTRAL[how], 1)
        if how != "sum":
            return self._f32(_most(x.data[..., None, :], how))
        x = self.block_reduce(x, BLOCK, how)
        while x.size > 1:
            x = self.block_reduce(x, BLOCK, how)
        return x

    def block_reduce(self, x: DeviceVector, block: int, how: How) -> DeviceVector:
        rows = torch.full((*x.data.shape[:-1], -(-x.size // block) * block), _NEUTRAL[how], device=self.device)
        rows[..., : x.size] = x.data
        rows = rows.unflatten(-1, (-1, block))
        return self._f32(_halved(rows) if how == "sum" else _most(rows, how))

    def spread(self, x: DeviceVector, block: int, numel: int) -> DeviceVector:
        return DeviceVector(x.data.repeat_interleave(block, dim=-1)[..., :numel], x.type)

    def dct(self, x: DeviceVector, block: int) -> DeviceVector:
        return self._transformed(x, block, inverse=False)

    def idct(self, coefficients: DeviceVector, block: int) -> DeviceVector:
        return self._transformed(coefficients, block, inverse=True)

    def _transformed(self, x: DeviceVector, block: int, *, inverse: bool) -> DeviceVector:
        factors, whole, made = _cosines(block, inverse, self.device), x.size // block * block, x.data.clone()
        rows, out = (data[..., :whole].unflatten(-1, (whole // block, block)) for data in (x.data, made))
        for k in range(block):
            out[..., k] = _halved(rows * factors[k])
        return self._f32(made)

    def pack(self, codes: DeviceVector, bits: int) -> DeviceVector:
        places = torch.arange(8, dtype=torch.uint8, device=self.device)
        flat = ((codes.data[..., None] >> places[:bits]) & 1).flatten(-2)
        padded = torch.zeros(*flat.shape[:-1], -(-flat.shape[-1] // 8) * 8, dtype=torch.uint8, device=self.device)
        padded[..., : flat.shape[-1]] = flat
        return DeviceVector((padded.unflatten(-1, (-1, 8)) << places).sum(-1, dtype=torch.uint8), "u8")

    def unpack(self, packed: DeviceVector, bits: int, count: int) -> DeviceVector:
        places = torch.arange(8, dtype=torch.uint8, device=self.device)
        flat = ((packed.data[..., None] >> places) & 1).flatten(-2)[..., : bits * count]
        return DeviceVector((flat.unflatten(-1, (count, bits)) << places[:bits]).sum(-1, dtype=torch.uint8), "u8")

    def pack_indices(self, indices: DeviceVector) -> DeviceVector:
        raise CodecError("fields of indices, whose length depends on data, are written on the CPU alone")

    def unpack_indices(self, packed: DeviceVector, count: int) -> DeviceVector:
        raise CodecError("fields of indices, whose length depends on data, are read on the CPU alone")

    def saturate(self, x: DeviceVector) -> DeviceVector:
        return DeviceVector(torch.nan_to_num(x.data), x.type)

    def uniform(self, stream: Stream, lo: int, count: int) -> DeviceVector:
        if self._streams is None:
            first, before, between = stream_position(stream, lo)
            return self._f32(uniform(int(first), count, before, between, self.device))
        words = on_device(self.device, [number for each in self._streams for number in stream_position(each, lo)]).view(-1, 3)
        return self._f32(uniform_rows(words, count))


def _rows_of(*data: torch.Tensor) -> list[torch.Tensor]:
    """The vectors, each with a row for every part where one of them has these."""
    shape = torch.broadcast_shapes(*(each.shape[:-1] for each in data))
    return [each.expand(*shape, -1) for each in data]


def _most(rows: torch.Tensor, how: How) -> torch.Tensor:
    if how == "magnitude":
        return rows.abs().amax(-1)
    return rows.amax(-1) if how == "max" else rows.amin(-1)


def _halved(rows: torch.Tensor) -> torch.Tensor:
    """Each row's sum, its halves added until one element is left."""
    while rows.shape[-1] > 1:
        half = rows.shape[-1] // 2
        rows = rows[..., :half] + rows[..., half:]
    return rows[..., 0]


@functools.lru_cache(maxsize=64)
def _table(numbers: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32).to(device)


@functools.lru_cache(maxsize=16)
def _cosines(block: int, inverse: bool, device: torch.device) -> torch.Tensor:
    factors = torch.from_numpy(matrix(block).copy())
    return (factors.T.contiguous() if inverse else factors).to(device)
