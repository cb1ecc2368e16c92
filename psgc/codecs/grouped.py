"""Codecs of small codes in groups that share a scale: what `int4`, `ternary`, `dithering`, `tbq` and `fp8` have in common.

| offset        | type                                | meaning                                                            |
|---------------|-------------------------------------|--------------------------------------------------------------------|
| 0             | f32 [ceil(numel / group)]           | scale of each group: its norm over the codec's largest code; >= 0  |
| 4 * groups    | u8 [...]                            | codes, group by group; the element is its code's value * scale     |

Codes of 2 or 4 bits lie in planes: with m elements in a group and w = ceil(m / per) bytes for them (per = 4 or 2 codes a byte), element
i has byte i mod w and, counted from the least significant bits, place i // w; so both ends read and write whole rows. They are stored plus
2 or 8; places beyond the group hold that, too. Codes of 8 bits are an element each.

Owns these bytes, the scales and the passes over groups; ``write_codes`` and ``read_codes`` are the codec's own. The norm is max|p| or
||p||_2 of the group, the latter summed in float32 in 16 lanes (lane j takes elements j, j + 16, ...; then lanes j and j + 8, ... are added)
over p / max|p|. A group whose scale would be below the smallest normal float, and one with NaN or infinity, has scale 0 and codes 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, Final, Literal

import numpy as np

from psgc.codecs.bits import bits_of_f32, f32_of_bits, view_f32, view_i8, view_u8
from psgc.codecs.blocks import BlockCodec, BlockFormat
from psgc.codecs.codec import F32, Array, Bytes, Stream
from psgc.codecs.feedback import rounding_contraction
from psgc.codecs.kernel import helper
from psgc.codecs.payloads import check_scales, check_size
from psgc.codecs.random import define_uniform, uniform

LEAST_SCALE: Final = np.finfo(np.float32).tiny
MAX_F32: Final = np.finfo(np.float32).max
ROUNDER: Final = np.float32(1.5 * 2**23)  # x + this has x, rounded to nearest even, in its low bits for |x| < 2**22
INFINITY_BITS: Final = np.uint32(0x7F800000)  # magnitudes whose bits are not below these are not finite
LANES: Final = 16
Norm = Literal["max", "l2"]


def code_bytes(bits: int, group: int, numel: int) -> int:
    """Bytes that the codes of numel elements take."""
    full, rest = divmod(numel, group)
    return full * -(-group * bits // 8) + -(-rest * bits // 8)


def define_lane_sum(terms: F32) -> np.float32:
    """Sum of a group's terms in the documented order."""
    padded = np.zeros(-(-terms.size // LANES) * LANES, np.float32)
    padded[: terms.size] = terms
    lanes = np.zeros(LANES, np.float32)
    for row in padded.reshape(-1, LANES):
        lanes = lanes + row
    while lanes.size > 1:
        lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    return np.float32(lanes[0])


def define_norm(group: F32, norm: Norm) -> np.float32:
    """The norm of one group; NaN if an element is not finite, infinity if it overflows."""
    top = np.abs(group).max()
    if not np.isfinite(group).all():
        return np.float32(np.nan)
    if norm == "max" or top == 0:
        return np.float32(top)
    with np.errstate(over="ignore"):
        return np.float32(np.sqrt(define_lane_sum(np.square(group / top))) * top)


def define_scale(group: F32, norm: Norm, top_code: float) -> tuple[np.float32, np.float32]:
    """The group's scale, and the factor that its elements are multiplied with before they are rounded; both 0 for an empty group."""
    length = define_norm(group, norm)
    scale = length / np.float32(top_code)
    if not length <= MAX_F32 or scale < LEAST_SCALE:
        return np.float32(0), np.float32(0)
    most = np.nextafter(MAX_F32 / np.float32(top_code), np.float32(0))
    return min(scale, most), np.float32(top_code) / length


def define_pack(codes: Array, bits: int) -> bytes:
    """Codes (integers) of one group as bytes."""
    if bits == 8:
        return codes.astype(np.int8).tobytes()
    per, bias = 8 // bits, 1 << (bits - 1)
    width = -(-codes.size // per)
    planes = np.full(per * width, bias, np.uint8)
    planes[: codes.size] = codes.astype(np.int16) + bias
    packed = np.zeros(width, np.uint8)
    for place, plane in enumerate(planes.reshape(per, width)):
        packed |= plane << np.uint8(bits * place)
    return packed.tobytes()


def define_unpack(packed: bytes, bits: int, count: int) -> Array:
    """The codes of one group of ``count`` elements."""
    rows = np.frombuffer(packed, np.uint8)
    if bits == 8:
        return rows.view(np.int8)
    bias, mask = 1 << (bits - 1), (1 << bits) - 1
    planes = [((rows >> np.uint8(bits * place)) & mask).astype(np.int16) - bias for place in range(8 // bits)]
    return np.concatenate(planes)[:count]


@helper
def add_lanes(lanes: Any) -> Any:
    """The lanes' sum, in halves."""
    width = LANES // 2
    while width > 0:
        for j in range(width):
            lanes[j] += lanes[width + j]
        width //= 2
    return lanes[0]


@helper
def _group_norm_l2(values: Any, top: Any, lanes: Any) -> Any:
    lanes[:] = np.float32(0)
    whole = values.size - values.size % LANES
    for start in range(0, whole, LANES):
        row = values[start : start + LANES]
        for j in range(LANES):
            part = row[j] / top
            lanes[j] += part * part
    for i in range(whole, values.size):
        part = values[i] / top
        lanes[i - whole] += part * part
    return np.sqrt(add_lanes(lanes)) * top


@helper
def top_bits(p: Any) -> Any:
    """Bits of max|p|. As signed integers they order like the values, NaN above infinity, and only so does LLVM vectorise this."""
    top = np.int32(0)
    for i in range(p.size):
        top = max(top, np.int32(bits_of_f32(p[i]) & np.uint32(0x7FFFFFFF)))
    return np.uint32(top)


@functools.cache
def grouped_format(
    tag: str, bits: int, group: int, norm: Norm, write_codes: Callable[..., Any], read_codes: Callable[..., Any]
) -> BlockFormat:  # fmt: skip
    """The block format of these codes.

    write_codes(values, factor, codes, settings, index, before, between) writes one group's codes to its bytes;
    read_codes(codes, scale, settings, out) reads them. settings: what the largest code stands for, and what code 1 does.
    """
    per_group = group * bits // 8
    zero = np.uint8(0 if bits == 8 else sum(1 << (bits - 1) << bits * place for place in range(8 // bits)))
    l2 = norm == "l2"

    @helper
    def write(
        p: Any, payload: Any, numel: Any, start: Any, settings: Any, index: Any, before: Any, between: Any
    ) -> Any:  # fmt: skip
        groups = -(-numel // group)
        scales = view_f32(payload, 4 * (start // group), -(-p.size // group))
        lanes, most, top_code = np.empty(LANES, np.float32), np.uint32(0), settings[0]
        largest = MAX_F32 / top_code
        for number in range(scales.size):
            low = number * group
            values = view_f32(p, low, min(group, p.size - low))  # a slice would cost an atomic count
            codes = view_u8(payload, 4 * groups + (start // group + number) * per_group, (values.size * bits + 7) // 8)
            top = top_bits(values)
            most = max(most, top)
            length = f32_of_bits(top)
            if l2 and np.uint32(0) < top < INFINITY_BITS:
                length = _group_norm_l2(values, f32_of_bits(top), lanes)
            scale = length / top_code
            if not length <= MAX_F32 or scale < LEAST_SCALE:
                scales[number] = np.float32(0)
                codes[:] = zero
                continue
            scales[number] = f32_of_bits(bits_of_f32(largest) - np.uint32(1)) if scale >= largest else scale
            write_codes(values, top_code / length, codes, settings, np.uint32(index + np.uint32(low)), before, between)
        return most < INFINITY_BITS

    return BlockFormat(tag, write, group_reader(bits, group, read_codes))


@functools.cache
def group_reader(bits: int, group: int, read_codes: Callable[..., Any]) -> Callable[..., Any]:
    """The ``read`` of a block format whose groups ``read_codes`` reads."""
    per_group = group * bits // 8

    @helper
    def read(payload: Any, numel: Any, start: Any, settings: Any, out: Any) -> None:
        groups = -(-numel // group)
        scales = view_f32(payload, 4 * (start // group), -(-out.size // group))
        for number in range(scales.size):
            target = view_f32(out, number * group, min(group, out.size - number * group))
            codes = view_u8(payload, 4 * groups + (start // group + number) * per_group, (target.size * bits + 7) // 8)
            read_codes(codes, scales[number], settings, target)

    return read


@functools.cache
def _rounded(random: bool) -> Callable[..., Any]:
    """value * factor, at most an ulp beyond [-top, top], as the integer that it is rounded to: at random, or to nearest even."""

    @helper
    def at_random(value: Any, factor: Any, top: Any, least: Any, index: Any, before: Any, between: Any) -> Any:
        x = value * factor
        x = top if x > top else x
        x = -top if x < -top else x
        below = np.floor(x)
        x = below + (np.float32(1) if uniform(index, before, between) < x - below else np.float32(0))
        return bits_of_f32(x + ROUNDER)

    @helper
    def to_nearest(value: Any, factor: Any, top: Any, least: Any, index: Any, before: Any, between: Any) -> Any:
        return bits_of_f32(value * factor + ROUNDER)

    return at_random if random else to_nearest


@helper
def integer_value(code: Any, least: Any) -> Any:
    """What an integer code stands for: itself."""
    return np.float32(code)


def integer_codes(bits: int, random: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """``write_codes`` and ``read_codes`` of integers."""
    return planar_codes(bits, _rounded(random), integer_value)


@functools.cache
def planar_codes(
    bits: int, code_of: Callable[..., Any], value_of: Callable[..., Any]
) -> tuple[Callable[..., Any], Callable[..., Any]]:  # fmt: skip
    """``write_codes`` and ``read_codes`` of codes packed as the module's text says.

    code_of(value, factor, top, least, index, before, between) has an element's code in its low bits, as uint32; value_of(code, least) is what
    an int32 code stands for, before the scale. top, least: the settings.
    """
    per, bias, mask = 8 // bits, np.uint32(1 << (bits - 1) if bits < 8 else 0), np.uint8((1 << bits) - 1)
    signed_bias, keep = np.int32(bias), np.uint32((1 << bits) - 1)

    @helper
    def write_codes(
        values: Any, factor: Any, codes: Any, settings: Any, index: Any, before: Any, between: Any
    ) -> None:  # fmt: skip
        width, top, least = codes.size, settings[0], settings[1]
        for place in range(per):
            row = view_f32(values, place * width, max(0, min(width, values.size - place * width)))
            first, shift = np.uint32(index + np.uint32(place * width)), np.uint32(bits * place)
            if place == 0:
                for i in range(row.size):
                    code = code_of(row[i], factor, top, least, np.uint32(first + np.uint32(i)), before, between)
                    codes[i] = np.uint8((code + bias) & keep)
            else:
                for i in range(row.size):
                    code = code_of(row[i], factor, top, least, np.uint32(first + np.uint32(i)), before, between)
                    codes[i] |= np.uint8(((code + bias) & keep) << shift)
            for i in range(row.size, width):
                codes[i] |= np.uint8(bias << shift)

    @helper
    def read_codes(codes: Any, scale: Any, settings: Any, out: Any) -> None:
        width, least = codes.size, settings[1]
        if per == 1:
            signed = view_i8(codes, 0, width)
            for i in range(width):
                out[i] = value_of(np.int32(signed[i]), least) * scale
            return
        for place in range(per):
            row = view_f32(out, place * width, max(0, min(width, out.size - place * width)))
            shift = np.uint8(bits * place)
            for i in range(row.size):
                row[i] = value_of(np.int32((codes[i] >> shift) & mask) - signed_bias, least) * scale

    return write_codes, read_codes


class GroupedCodec(BlockCodec):
    """A codec over groups. Subclasses say how wide codes are, what they stand for, and how they are written."""

    bits: int
    group: ClassVar[int]
    top_code: float  # what the largest code stands for, before the scale
    least_code: float = 1  # what code 1 stands for
    norm: Norm = "max"

    @functools.cached_property
    def settings(self) -> F32:  # type: ignore[override]
        return np.array([self.top_code, self.least_code], np.float32)

    @property
    def block_format(self) -> BlockFormat:
        random = not self.feedback
        tag = f"integers-{self.bits}-{self.group}-{self.norm}-{'random' if random else 'nearest'}"
        return grouped_format(tag, self.bits, self.group, self.norm, *integer_codes(self.bits, random))

    def contraction(self, numel: int) -> float | None:
        return rounding_contraction(self.top_code / self.least_code, min(numel, self.group)) if self.feedback else None

    def payload_bound(self, numel: int) -> int:
        return 4 * -(-numel // self.group) + code_bytes(self.bits, self.group, numel)

    def validate(self, payload: Bytes, numel: int) -> None:
        check_size(self.name, payload, numel, self.payload_bound(numel))
        check_scales(self.name, payload[: 4 * -(-numel // self.group)])

    def define_codes(self, scaled: F32, random: F32 | None) -> Array:
        """Codes of one group's elements, already multiplied with its factor."""
        scaled = np.clip(scaled, -np.float32(self.top_code), np.float32(self.top_code))
        if random is None:
            return np.rint(scaled)
        below = np.floor(scaled)
        return np.asarray(below + (random < scaled - below), np.float32)

    def define_values(self, codes: Array) -> F32:
        """What codes stand for, before the scale."""
        return codes.astype(np.float32)

    def define_payload(self, p: Array, stream: Stream) -> bytes:
        random = None if self.feedback else define_uniform(stream, 0, p.size)
        scales, packed = [], []
        for start in range(0, p.size, self.group):
            values = p[start : start + self.group]
            scale, factor = define_scale(values, self.norm, self.top_code)
            scales.append(scale)
            with np.errstate(invalid="ignore"):
                scaled = values * factor if scale else np.zeros_like(values)
            codes = self.define_codes(scaled, None if random is None or not scale else random[start : start + self.group])
            packed.append(define_pack(codes if scale else np.zeros(values.size), self.bits))
        return np.array(scales, np.float32).tobytes() + b"".join(packed)

    def define_elements(self, payload: bytes, numel: int) -> Array:
        groups = -(-numel // self.group)
        scales, place, out = np.frombuffer(payload, np.float32, groups), 4 * groups, np.empty(numel, np.float32)
        with np.errstate(over="ignore"):
            for number, start in enumerate(range(0, numel, self.group)):
                target = out[start : start + self.group]
                end = place + code_bytes(self.bits, self.group, target.size)
                target[:] = self.define_values(define_unpack(payload[place:end], self.bits, target.size)) * scales[number]
                place = end
        return out
