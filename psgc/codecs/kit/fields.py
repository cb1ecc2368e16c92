"""The payload of a kit codec: named arrays, and their places in it.

| offset            | type                | meaning                                                                               |
|-------------------|---------------------|---------------------------------------------------------------------------------------|
| 0                 | u32 [varying]       | the counts of the fields declared with ``at_most``, in order of declaration           |
| 4 * varying       | bytes               | the fields, in order of declaration, without padding; little-endian, at any alignment |

Codes of fewer than 8 bits ("u1" to "u7") are packed, least significant bit first, with zero bits up to the field's last byte; indices as
`gaps` says; every other field is an array of its type. Owns these bytes and their checks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from psgc.codecs.codec import Bytes
from psgc.codecs.kit.cpu import indices_well_formed
from psgc.codecs.kit.ops import TYPES, Ops, Vector, packed_bytes, packed_indices_bytes
from psgc.codecs.sparsify.gaps import GAPS
from psgc.errors import CodecError, PayloadError

INDICES: Final = "indices"
_CODES: Final = {f"u{bits}": bits for bits in range(1, 8)}


@dataclass(frozen=True, slots=True)
class Field:
    """One array of a payload. Give one of ``count`` (so many elements), ``at_most`` (any number up to it; the payload says how many) and
    ``as_many_as`` (as many as another field, declared before).

    type: "f32", "f16", "u8", "i8", "u16", "i16", "u32", "i32"; "u1" to "u7": u8 below 2, 4, ... 128, packed; or "indices": ascending,
    distinct, below numel, packed to about 9 bits each at one in a hundred. Floats are finite: when written, what overflowed becomes the
    largest number of its type. least, most: what arrives is refused if it is beyond, or if a float is NaN or infinite.
    """

    type: str
    count: int | None = None
    at_most: int | None = None
    as_many_as: str | None = None
    least: float | None = None
    most: float | None = None

    def __post_init__(self) -> None:
        if self.type not in (INDICES, *TYPES, *_CODES):
            raise CodecError(f"field of type {self.type!r}: expected {', '.join((*TYPES, *_CODES, INDICES))}")
        given = [limit for limit in (self.count, self.at_most, self.as_many_as) if limit is not None]
        if len(given) != 1:
            raise CodecError(f"field of type {self.type}: exactly one of count, at_most and as_many_as expected, got {len(given)}")

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the field's vector."""
        return np.dtype(np.int64 if self.type == INDICES else np.uint8 if self.type in _CODES else TYPES[self.type])

    @property
    def bits(self) -> int:
        """Bits of one element; not for indices."""
        return _CODES.get(self.type, 8 * self.dtype.itemsize)

    def bound(self, count: int, numel: int) -> int:
        """Upper bound on the bytes of up to ``count`` elements; exact except for indices."""
        return indices_bound(count, numel) if self.type == INDICES else packed_bytes(count, self.bits)

    def write(self, ops: Ops, values: Vector) -> Bytes:
        """The field's bytes."""
        if self.type == INDICES:
            data = ops.pack_indices(values)
        elif self.type in _CODES:
            data = ops.pack(values, self.bits)
        else:
            data = ops.saturate(values) if self.dtype.kind == "f" else values
        return np.ascontiguousarray(data).view(np.uint8)

    def read(self, ops: Ops, data: Bytes, count: int) -> tuple[Vector, int]:
        """The field that ``data`` begins with, and its bytes."""
        if self.type == INDICES:
            nbytes = packed_indices_bytes(data, count)
            return ops.unpack_indices(data[:nbytes], count), nbytes
        nbytes = packed_bytes(count, self.bits)
        if self.type in _CODES:
            return ops.unpack(data[:nbytes], self.bits, count), nbytes
        return data[:nbytes].copy().view(self.dtype), nbytes

    def taken(self, data: Bytes, count: int, numel: int) -> int:
        """Bytes of ``data`` that this field takes, or -1 if it does not begin with one of ``count`` elements."""
        if self.type != INDICES:
            nbytes = packed_bytes(count, self.bits)
            return nbytes if nbytes <= data.size else -1
        if data.size < -(-count // GAPS):
            return -1
        nbytes = packed_indices_bytes(data, count)
        return nbytes if nbytes <= data.size and indices_well_formed(data[:nbytes], count, numel) else -1

    @property
    def has_limits(self) -> bool:
        """Whether ``wrong`` can refuse a value."""
        return self.dtype.kind == "f" or self.least is not None or self.most is not None

    def wrong(self, values: Any) -> str:
        """Why values that arrived are refused; empty if they are not."""
        if not values.size:
            return ""
        least, most = values.min(), values.max()
        if not (np.isfinite(least) and np.isfinite(most)):
            return "holds NaN or infinity"
        if (self.least is not None and least < self.least) or (self.most is not None and most > self.most):
            return f"holds values from {least} to {most}, beyond {self.least} to {self.most}"
        return ""


class FieldLayout:
    """The fields of a part of ``numel`` elements. Raises CodecError for fields that cannot be laid out."""

    def __init__(self, codec: str, fields: Mapping[str, Field], numel: int) -> None:
        self.codec, self.fields, self.numel = codec, dict(fields), numel
        self.varying = [name for name, field in self.fields.items() if field.at_most is not None]
        self._most: dict[str, int] = {}
        for name, field in self.fields.items():
            if field.as_many_as is not None and field.as_many_as not in self._most:
                raise CodecError(f"codec {codec}: field {name!r} is as long as {field.as_many_as!r}, which is not declared before it")
            count = field.count if field.count is not None else field.at_most
            self._most[name] = count if count is not None else self._most[str(field.as_many_as)]
        self._head = 4 * len(self.varying)
        self.starts: dict[str, int] = {}  # where each field begins if ``fixed``
        self.bound = self._head  # most bytes of a payload
        for name, field in self.fields.items():
            self.starts[name] = self.bound
            self.bound += field.bound(self._most[name], numel)
        self.fixed = not self.varying and all(field.type != INDICES for field in self.fields.values())  # the size depends on numel alone

    def count(self, name: str) -> int:
        """Most elements of a field; exactly so many, if it does not vary."""
        return self._most[name]

    def check(self, values: Mapping[str, Vector]) -> None:
        """Raise CodecError for values that are not what the fields say."""
        if set(values) != set(self.fields):
            raise CodecError(f"codec {self.codec}: compress gave {sorted(values)}, but its fields are {sorted(self.fields)}")
        for name, field in self.fields.items():
            value, most = values[name], self._most[name]
            exact = values[field.as_many_as].size if field.as_many_as is not None else most
            right = value.size <= most if field.at_most is not None else value.size == exact
            if value.dtype != field.dtype or value.ndim != 1 or not right:
                raise CodecError(
                    f"codec {self.codec}: compress gave {value.dtype}{list(value.shape)} for field {name!r}, "
                    f"which is {field.dtype}[{'up to ' if field.at_most is not None else ''}{exact}]"
                )
            if field.type == INDICES and not _ascending(value, self.numel):
                raise CodecError(
                    f"codec {self.codec}: compress gave indices for field {name!r} that do not ascend from 0 to below {self.numel}"
                )

    def write(self, ops: Ops, values: Mapping[str, Vector], out: Bytes) -> int:
        """Write a whole payload; returns its length."""
        self.check(values)
        out[: self._head] = np.array([values[name].size for name in self.varying], "<u4").view(np.uint8)
        place = self._head
        for name, field in self.fields.items():
            data = field.write(ops, values[name])
            out[place : place + data.size] = data
            place += data.size
        return place

    def write_slice(self, ops: Ops, before: Mapping[str, int], values: Mapping[str, Vector], out: Bytes) -> int:
        """Write the fields of a slice, each behind its bytes ``before``, into a payload of fixed size; returns that size."""
        for name, field in self.fields.items():
            data, place = field.write(ops, values[name]), self.starts[name] + before[name]
            out[place : place + data.size] = data
        return self.bound

    def read(self, ops: Ops, payload: Bytes) -> dict[str, Vector]:
        """The fields of a whole payload, which has passed ``validate``."""
        counts, place, values = self._counts(payload), self._head, {}
        for name, field in self.fields.items():
            values[name], nbytes = field.read(ops, payload[place:], counts[name])
            place += nbytes
        return values

    def read_slice(self, ops: Ops, before: Mapping[str, int], counts: FieldLayout, payload: Bytes) -> dict[str, Vector]:
        """The fields of a slice, which has the ``counts``, behind the bytes ``before``."""
        return {
            name: field.read(ops, payload[self.starts[name] + before[name] :], counts.count(name))[0] for name, field in self.fields.items()
        }

    def _counts(self, payload: Bytes) -> dict[str, int]:
        varying = dict(zip(self.varying, payload[: self._head].copy().view("<u4").tolist(), strict=True))
        counts: dict[str, int] = {}
        for name, field in self.fields.items():
            counts[name] = counts[field.as_many_as] if field.as_many_as is not None else varying.get(name, self._most[name])
        return counts

    def validate(self, ops: Ops, payload: Bytes) -> None:
        """Raise PayloadError unless the payload holds these fields, within their bounds, and nothing else."""
        start = f"{self.codec} payload of {self.numel} elements"
        if payload.size < self._head:
            raise PayloadError(f"{start}: {payload.size} bytes are too few for {len(self.varying)} counts")
        counts, place = self._counts(payload), self._head
        for name, field in self.fields.items():
            if counts[name] > self._most[name]:
                raise PayloadError(f"{start}: field {name!r} has {counts[name]} elements, at most {self._most[name]} expected")
            nbytes = field.taken(payload[place:], counts[name], self.numel)
            if nbytes < 0:
                raise PayloadError(f"{start}: field {name!r} is not {counts[name]} of {field.type} within its {payload.size} bytes")
            if field.has_limits and (wrong := field.wrong(field.read(ops, payload[place:], counts[name])[0])):
                raise PayloadError(f"{start}: field {name!r} {wrong}")
            place += nbytes
        if place != payload.size:
            raise PayloadError(f"{start} has {payload.size} bytes, its fields take {place}")


def _ascending(indices: Vector, numel: int) -> bool:
    return not indices.size or bool(indices[0] >= 0 and indices[-1] < numel and (indices[1:] > indices[:-1]).all())


def indices_bound(most: int, numel: int) -> int:
    """Most bytes that up to ``most`` indices below ``numel`` take: as ``gaps.packed_bound``, in a form that grows with the count."""
    if most == 0:
        return 0
    blocks = -(-most // GAPS)
    return blocks + min(16 * blocks * numel.bit_length(), math.ceil(16 * blocks * (math.log2(numel / blocks + 1) + 1)) + 1)
