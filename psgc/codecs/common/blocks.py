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
from typing import Any, ClassVar, Final, Literal, NamedTuple

import numpy as np

from psgc.codecs.codec import F32, Array, Bytes, Stream
from psgc.codecs.common.bits import bits_of_f32, f32_of_bits, view_f32, view_i8, view_u8
from psgc.codecs.common.chunks import BlockCodec, BlockFormat
from psgc.codecs.common.feedback import rounding_contraction
from psgc.codecs.common.payloads import check_scales, check_size
from psgc.codecs.common.rows import ROW, CodeWords, row_codes, row_sum
from psgc.codecs.common.streams import reference_uniform, uniform
from psgc.codecs.jit.kernel import helper

LEAST_SCALE: Final = np.finfo(np.float32).tiny
MAX_F32: Final = np.finfo(np.float32).max
ROUNDER: Final = np.float32(1.5 * 2**23)  # x + this has x, rounded to nearest even, in its low bits for |x| < 2**22
INFINITY_BITS: Final = np.uint32(0x7F800000)  # magnitudes whose bits are not below these are not finite
_LANES: Final = 16
Norm = Literal["max", "l2"]


def code_bytes(bits: int, group: int, numel: int) -> int:
    """Bytes that the codes of numel elements take."""
    full, rest = divmod(numel, group)
    return full * -(-group * bits // 8) + -(-rest * bits // 8)


def reference_norm(group: F32, norm: Norm) -> np.float32:
    """The norm of one group; NaN if an element is not finite, infinity if it overflows."""
    top = np.abs(group).max()
    if not np.isfinite(group).all():
        return np.float32(np.nan)
    if norm == "max" or top == 0:
        return np.float32(top)
    padded = np.zeros(-(-group.size // _LANES) * _LANES, np.float32)
    padded[: group.size] = group / top
    lanes = np.zeros(_LANES, np.float32)
    for row in padded.reshape(-1, _LANES):
        lanes = lanes + row * row
    while lanes.size > 1:
        lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    with np.errstate(over="ignore"):
        return np.float32(np.sqrt(lanes[0]) * top)


def reference_scale(group: F32, norm: Norm, top_code: float) -> tuple[np.float32, np.float32]:
    """The group's scale, and the factor that its elements are multiplied with before they are rounded; both 0 for an empty group."""
    length = reference_norm(group, norm)
    scale = length / np.float32(top_code)
    if not length <= MAX_F32 or scale < LEAST_SCALE:
        return np.float32(0), np.float32(0)
    most = np.nextafter(MAX_F32 / np.float32(top_code), np.float32(0))
    return min(scale, most), np.float32(top_code) / length


def reference_pack(codes: Array, bits: int) -> bytes:
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


def reference_unpack(packed: bytes, bits: int, count: int) -> Array:
    """The codes of one group of ``count`` elements."""
    rows = np.frombuffer(packed, np.uint8)
    if bits == 8:
        return rows.view(np.int8)
    bias, mask = 1 << (bits - 1), (1 << bits) - 1
    planes = [((rows >> np.uint8(bits * place)) & mask).astype(np.int16) - bias for place in range(8 // bits)]
    return np.concatenate(planes)[:count]


@helper
def _group_norm_l2(values: Any, top: Any, lanes: Any) -> Any:
    lanes[:] = np.float32(0)
    whole = values.size - values.size % _LANES
    for start in range(0, whole, _LANES):
        row = values[start : start + _LANES]
        for j in range(_LANES):
            part = row[j] / top
            lanes[j] += part * part
    for i in range(whole, values.size):
        part = values[i] / top
        lanes[i - whole] += part * part
    width = _LANES // 2
    while width > 0:
        for j in range(width):
            lanes[j] += lanes[width + j]
        width //= 2
    return np.sqrt(lanes[0]) * top


@helper
def top_bits(p: Any) -> Any:
    """Bits of max|p|. As signed integers they order like the values, NaN above infinity, and only so does LLVM vectorise this."""
    top = np.int32(0)
    for i in range(p.size):
        top = max(top, np.int32(bits_of_f32(p[i]) & np.uint32(0x7FFFFFFF)))
    return np.uint32(top)


@functools.cache
def grouped_format(
    bits: int, group: int, norm: Norm, write_codes: Callable[..., Any], read_codes: Callable[..., Any],
    words: CodeWords | None = None,
) -> BlockFormat:  # fmt: skip
    """The block format of these codes.

    write_codes(values, factor, codes, scratch, settings, index, before, between) writes one group's codes to its bytes, with a byte of scratch
    for each element of a group; read_codes(codes, scale, settings, out) reads them. settings: what the largest code stands for, what code 1 does.
    words: for codes that can be read as rows.
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
        lanes, scratch, most, top_code = np.empty(_LANES, np.float32), np.empty(group, np.uint8), np.uint32(0), settings[0]
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
            write_codes(values, top_code / length, codes, scratch, settings, np.uint32(index + np.uint32(low)), before, between)
        return most < INFINITY_BITS

    return BlockFormat(write, *group_readers(bits, group, read_codes, words))


class GroupReaders(NamedTuple):
    """A block format's helpers that read."""

    read: Callable[..., Any]
    fold_four: Callable[..., Any] | None = None
    take_away: Callable[..., Any] | None = None


@functools.cache
def group_readers(bits: int, group: int, read_codes: Callable[..., Any], words: CodeWords | None) -> GroupReaders:
    """How a block format reads groups that ``read_codes`` reads; whole ones as rows, if there are words for that."""
    read = _group_reader(bits, group, read_codes)
    if words is None:
        return GroupReaders(read)
    per_group = group * bits // 8
    set_one, add_one, set_four, add_four = (row_sum(words, per_group, from_base) for from_base in (False, True, False, True))

    @helper
    def scales_of(payload: Any, start: Any, count: Any) -> Any:
        return view_f32(payload, 4 * (start // group), count)

    @helper
    def codes_of(payload: Any, numel: Any, start: Any, count: Any) -> Any:
        return view_u8(payload, 4 * (-(-numel // group)) + start // group * per_group, count * per_group)

    @helper
    def read_rest(payload: Any, numel: Any, start: Any, settings: Any, out: Any, low: Any) -> None:
        if low < out.size:
            read(payload, numel, start + low, settings, view_f32(out, low, out.size - low))

    @helper
    def read_rows(payload: Any, numel: Any, start: Any, settings: Any, out: Any) -> None:
        whole = out.size // group
        scales, codes = scales_of(payload, start, whole), codes_of(payload, numel, start, whole)
        for number in range(whole):
            for byte in range(0, per_group, ROW):
                set_one(out, number * group + byte, out, (codes,), number * per_group + byte, (scales[number],))
        read_rest(payload, numel, start, settings, out, whole * group)

    @helper
    def fold_four(payloads: Any, numel: Any, start: Any, settings: Any, total: Any, first: Any) -> None:
        a, b, c, d = payloads
        whole = total.size // group
        sa, sb, sc, sd = scales_of(a, start, whole), scales_of(b, start, whole), scales_of(c, start, whole), scales_of(d, start, whole)
        ca, cb = codes_of(a, numel, start, whole), codes_of(b, numel, start, whole)
        cc, cd = codes_of(c, numel, start, whole), codes_of(d, numel, start, whole)
        for number in range(whole):
            scales = (sa[number], sb[number], sc[number], sd[number])
            for byte in range(0, per_group, ROW):
                low, place = number * group + byte, number * per_group + byte
                if first:
                    set_four(total, low, total, (ca, cb, cc, cd), place, scales)
                else:
                    add_four(total, low, total, (ca, cb, cc, cd), place, scales)
        if whole * group < total.size:
            rest, term = view_f32(total, whole * group, total.size - whole * group), np.empty(group, np.float32)
            for k in range(4):
                if first and k == 0:
                    read(a, numel, start + whole * group, settings, rest)
                else:
                    read(payloads[k], numel, start + whole * group, settings, view_f32(term, 0, rest.size))
                    for i in range(rest.size):
                        rest[i] += term[i]

    @helper
    def take_away(payload: Any, numel: Any, start: Any, settings: Any, p: Any, kept: Any) -> None:
        whole = p.size // group
        scales, codes = scales_of(payload, start, whole), codes_of(payload, numel, start, whole)
        for number in range(whole):
            for byte in range(0, per_group, ROW):
                add_one(kept, number * group + byte, p, (codes,), number * per_group + byte, (-scales[number],))
        if whole * group < p.size:
            sent = np.empty(group, np.float32)
            read(payload, numel, start + whole * group, settings, view_f32(sent, 0, p.size - whole * group))
            for i in range(whole * group, p.size):
                kept[i] = p[i] - sent[i - whole * group]

    return GroupReaders(read_rows, fold_four, take_away)


def _group_reader(bits: int, group: int, read_codes: Callable[..., Any]) -> Callable[..., Any]:
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
    write_codes, read_codes = planar_codes(bits, _rounded(random), integer_value)
    return (write_codes if random else _in_rows(bits, write_codes)), read_codes


@functools.cache
def _in_rows(bits: int, write_codes: Callable[..., Any]) -> Callable[..., Any]:
    """``write_codes`` of integers to nearest, a row at a time where a group has whole rows."""
    per, write_row = 8 // bits, row_codes(bits, float(ROUNDER))

    @helper
    def write_rows(
        values: Any, factor: Any, codes: Any, scratch: Any, settings: Any, index: Any, before: Any, between: Any
    ) -> None:  # fmt: skip
        if codes.size % ROW == 0 and values.size == codes.size * per:
            for byte in range(0, codes.size, ROW):
                write_row(values, byte, codes.size, factor, codes, byte)
        else:
            write_codes(values, factor, codes, scratch, settings, index, before, between)

    return write_rows


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
        values: Any, factor: Any, codes: Any, scratch: Any, settings: Any, index: Any, before: Any, between: Any
    ) -> None:  # fmt: skip
        width, top, least = codes.size, settings[0], settings[1]
        unpacked = view_u8(scratch if per > 1 else codes, 0, per * width)
        for i in range(values.size):
            code = code_of(values[i], factor, top, least, np.uint32(index + np.uint32(i)), before, between)
            unpacked[i] = np.uint8((code + bias) & keep)
        for i in range(values.size, unpacked.size):
            unpacked[i] = np.uint8(bias)
        if per == 2:
            high = view_u8(scratch, width, width)
            for i in range(width):
                codes[i] = scratch[i] | high[i] << np.uint8(4)
        elif per == 4:
            second, third, last = view_u8(scratch, width, width), view_u8(scratch, 2 * width, width), view_u8(scratch, 3 * width, width)
            for i in range(width):
                codes[i] = scratch[i] | second[i] << np.uint8(2) | third[i] << np.uint8(4) | last[i] << np.uint8(6)

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
        codes = integer_codes(self.bits, random=not self.feedback)
        return grouped_format(self.bits, self.group, self.norm, *codes, CodeWords(self.bits))

    def contraction(self, numel: int) -> float | None:
        return rounding_contraction(self.top_code / self.least_code, min(numel, self.group)) if self.feedback else None

    def payload_bound(self, numel: int) -> int:
        return 4 * -(-numel // self.group) + code_bytes(self.bits, self.group, numel)

    def validate(self, payload: Bytes, numel: int) -> None:
        check_size(self.name, payload, numel, self.payload_bound(numel))
        check_scales(self.name, payload[: 4 * -(-numel // self.group)])

    def reference_codes(self, scaled: F32, random: F32 | None) -> Array:
        """Codes of one group's elements, already multiplied with its factor."""
        scaled = np.clip(scaled, -np.float32(self.top_code), np.float32(self.top_code))
        if random is None:
            return np.rint(scaled)
        below = np.floor(scaled)
        return np.asarray(below + (random < scaled - below), np.float32)

    def reference_values(self, codes: Array) -> F32:
        """What codes stand for, before the scale."""
        return codes.astype(np.float32)

    def reference_payload(self, p: Array, stream: Stream) -> bytes:
        random = None if self.feedback else reference_uniform(stream, 0, p.size)
        scales, packed = [], []
        for start in range(0, p.size, self.group):
            values = p[start : start + self.group]
            scale, factor = reference_scale(values, self.norm, self.top_code)
            scales.append(scale)
            with np.errstate(invalid="ignore"):
                scaled = values * factor if scale else np.zeros_like(values)
            codes = self.reference_codes(scaled, None if random is None or not scale else random[start : start + self.group])
            packed.append(reference_pack(codes if scale else np.zeros(values.size), self.bits))
        return np.array(scales, np.float32).tobytes() + b"".join(packed)

    def reference_elements(self, payload: bytes, numel: int) -> Array:
        groups = -(-numel // self.group)
        scales, place, out = np.frombuffer(payload, np.float32, groups), 4 * groups, np.empty(numel, np.float32)
        with np.errstate(over="ignore"):
            for number, start in enumerate(range(0, numel, self.group)):
                target = out[start : start + self.group]
                end = place + code_bytes(self.bits, self.group, target.size)
                target[:] = self.reference_values(reference_unpack(payload[place:end], self.bits, target.size)) * scales[number]
                place = end
        return out
