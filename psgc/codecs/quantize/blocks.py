"""Codes in blocks that share a scale: the payload of `int8`, `int4`, `fp8`, `dithering` and `tbq`.

| offset        | type                                | meaning                                                            |
|---------------|-------------------------------------|--------------------------------------------------------------------|
| 0             | f32 [ceil(numel / block)]           | scale of each block: its norm over the codec's largest code; >= 0  |
| 4 * blocks    | u8 [...]                            | codes, block by block; the element is its code's value * scale     |

Codes of 2 or 4 bits lie in planes: with m elements in a block and w = ceil(m / per) bytes for them (per = 4 or 2 codes a byte), element
i has byte i mod w and, counted from the least significant bits, place i // w; so both ends read and write whole rows. They are stored plus
2 or 8; places beyond the block hold that, too. Codes of 8 bits are an element each.

Owns these bytes and the scales. The codec defines how an element becomes a code, and which value a code has (``code_helpers``,
``reference_codes``, ``reference_values``). The norm is max|p| or ||p||_2 of the block, the latter summed in float32 in 16 lanes (lane j takes
elements j, j + 16, ...; then lanes j and j + 8, ... are added) over p / max|p|. A block whose scale would be below the smallest normal
float, and one with NaN or infinity, has scale 0 and codes 0. Without feedback codes are rounded at random, by the part's random stream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psgc.codecs.codec import F32, Array, Bytes, Stream
from psgc.codecs.common.bits import INFINITY_BITS, MAX_F32, bits_of_f32, f32_of_bits, top_bits, view_f32, view_i8, view_u8
from psgc.codecs.common.chunks import NO_DRAWS, ChunkCodec, ChunkFormat
from psgc.codecs.common.feedback import rounding_contraction
from psgc.codecs.common.payloads import check_scales, check_size
from psgc.codecs.common.streams import reference_uniform
from psgc.codecs.jit.kernel import helper
from psgc.codecs.quantize.rows import ROW, CodeWords, row_readers

LEAST_SCALE: Final = np.finfo(np.float32).tiny
_LANES: Final = 16
MAX_BLOCK: Final = 4096  # elements; a block lies within a chunk
Norm = Literal["max", "l2"]


class CodeHelpers(NamedTuple):
    """A codec's codes, for kernels. settings: the values of the largest code and of code 1, before the scale.

    write(values, factor, codes, scratch, settings, draws)
        Write one block's codes of ``values * factor`` to its bytes; ``scratch`` has a byte for each element of a block.
    read(codes, scale, settings, out)
        out <- the values of one block's codes, times the scale.
    words: for codes that can be read as rows, see `rows`.
    """

    write: Callable[..., Any]
    read: Callable[..., Any]
    words: CodeWords | None = None


class BlockCodec(ChunkCodec):
    """A codec of codes in blocks. Subclasses define the codes' width, how they are written, and their values."""

    fixed_size = True
    bits: int
    block: ClassVar[int]  # elements that share a scale; divides 4096
    top_code: float  # what the largest code stands for, before the scale
    least_code: float = 1  # what code 1 stands for
    norm: Norm = "max"

    def code_helpers(self) -> CodeHelpers:
        raise NotImplementedError

    def reference_codes(self, scaled: F32, random: F32 | None) -> Array:
        """Codes of one block's elements, already multiplied with its factor; rounded to nearest where ``random`` is None."""
        raise NotImplementedError

    def reference_values(self, codes: Array) -> F32:
        """The values of codes, before the scale."""
        raise NotImplementedError

    @functools.cached_property
    def settings(self) -> F32:  # type: ignore[override]
        return np.array([self.top_code, self.least_code], np.float32)

    @property
    def chunk_format(self) -> ChunkFormat:
        return _chunk_format(self.bits, self.block, self.norm, self.code_helpers())

    def draws(self, stream: Stream, lo: int) -> NDArray[np.uint32]:
        return NO_DRAWS if self._ef else super().draws(stream, lo)

    def contraction(self, numel: int) -> float | None:
        return rounding_contraction(self.top_code / self.least_code, min(numel, self.block)) if self.feedback else None

    def payload_bound(self, numel: int) -> int:
        return 4 * -(-numel // self.block) + code_bytes(self.bits, self.block, numel)

    def validate(self, payload: Bytes, numel: int) -> None:
        check_size(self.name, payload, numel, self.payload_bound(numel))
        check_scales(self.name, payload[: 4 * -(-numel // self.block)])

    def reference_payload(self, p: Array, stream: Stream) -> bytes:
        random = None if self.feedback else reference_uniform(stream, 0, p.size)
        scales, packed = [], []
        for start in range(0, p.size, self.block):
            values = p[start : start + self.block]
            scale, factor = reference_scale(values, self.norm, self.top_code)
            scales.append(scale)
            with np.errstate(invalid="ignore"):
                scaled = values * factor if scale else np.zeros_like(values)
            codes = self.reference_codes(scaled, None if random is None or not scale else random[start : start + self.block])
            packed.append(reference_pack(codes if scale else np.zeros(values.size), self.bits))
        return np.array(scales, np.float32).tobytes() + b"".join(packed)

    def reference_elements(self, payload: bytes, numel: int) -> Array:
        blocks = -(-numel // self.block)
        scales, place, out = np.frombuffer(payload, np.float32, blocks), 4 * blocks, np.empty(numel, np.float32)
        with np.errstate(over="ignore"):
            for number, start in enumerate(range(0, numel, self.block)):
                target = out[start : start + self.block]
                end = place + code_bytes(self.bits, self.block, target.size)
                target[:] = self.reference_values(reference_unpack(payload[place:end], self.bits, target.size)) * scales[number]
                place = end
        return out


def code_bytes(bits: int, block: int, numel: int) -> int:
    """Bytes that the codes of numel elements take."""
    if bits == 8:
        return numel
    full, rest = divmod(numel, block)
    return full * -(-block * bits // 8) + -(-rest * bits // 8)


def reference_norm(block: F32, norm: Norm) -> np.float32:
    """The norm of one block; NaN if an element is not finite, infinity if it overflows."""
    top = np.abs(block).max()
    if not np.isfinite(block).all():
        return np.float32(np.nan)
    if norm == "max" or top == 0:
        return np.float32(top)
    padded = np.zeros(-(-block.size // _LANES) * _LANES, np.float32)
    padded[: block.size] = block / top
    lanes = np.zeros(_LANES, np.float32)
    for row in padded.reshape(-1, _LANES):
        lanes = lanes + row * row
    while lanes.size > 1:
        lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    with np.errstate(over="ignore"):
        return np.float32(np.sqrt(lanes[0]) * top)


def reference_scale(block: F32, norm: Norm, top_code: float) -> tuple[np.float32, np.float32]:
    """The block's scale, and the factor that its elements are multiplied with before they are rounded; both 0 for an empty block."""
    length = reference_norm(block, norm)
    scale = length / np.float32(top_code)
    if not length <= MAX_F32 or scale < LEAST_SCALE:
        return np.float32(0), np.float32(0)
    most = np.nextafter(MAX_F32 / np.float32(top_code), np.float32(0))
    return min(scale, most), np.float32(top_code) / length


def reference_pack(codes: Array, bits: int) -> bytes:
    """Codes (integers) of one block as bytes."""
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
    """The codes of one block of ``count`` elements."""
    rows = np.frombuffer(packed, np.uint8)
    if bits == 8:
        return rows.view(np.int8)
    bias, mask = 1 << (bits - 1), (1 << bits) - 1
    planes = [((rows >> np.uint8(bits * place)) & mask).astype(np.int16) - bias for place in range(8 // bits)]
    return np.concatenate(planes)[:count]


@helper
def _norm_l2(values: Any, top: Any, lanes: Any) -> Any:
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


# An allocation for each chunk would cost a tenth of the time of `int8`: only formats that need memory get some.
@helper
def _new_lanes(p: Any) -> Any:
    return np.empty(_LANES, np.float32)


@helper
def _no_lanes(p: Any) -> Any:
    return view_f32(p, 0, 0)


@helper
def _new_scratch(payload: Any) -> Any:
    return np.empty(MAX_BLOCK, np.uint8)


@helper
def _no_scratch(payload: Any) -> Any:
    return view_u8(payload, 0, 0)


@functools.cache
def _chunk_format(bits: int, block: int, norm: Norm, codes_: CodeHelpers) -> ChunkFormat:
    """The chunk format of these codes: the norm and scale of each block of a chunk, then its codes."""
    write_codes, block_bytes = codes_.write, block * bits // 8
    zero = np.uint8(0 if bits == 8 else sum(1 << (bits - 1) << bits * place for place in range(8 // bits)))
    l2 = norm == "l2"
    lanes_for, scratch_for = _new_lanes if l2 else _no_lanes, _no_scratch if bits == 8 else _new_scratch

    @helper
    def write(p: Any, payload: Any, numel: Any, start: Any, settings: Any, draws: Any) -> Any:
        blocks = -(-numel // block)
        scales = view_f32(payload, 4 * (start // block), -(-p.size // block))
        lanes, scratch, most, top_code = lanes_for(p), scratch_for(payload), np.uint32(0), settings[0]
        largest = MAX_F32 / top_code
        for number in range(scales.size):
            low = number * block
            values = view_f32(p, low, min(block, p.size - low))  # a slice would cost an atomic count
            codes = view_u8(payload, 4 * blocks + (start // block + number) * block_bytes, (values.size * bits + 7) // 8)
            top = top_bits(values)
            most = max(most, top)
            length = f32_of_bits(top)
            if l2 and np.uint32(0) < top < INFINITY_BITS:
                length = _norm_l2(values, f32_of_bits(top), lanes)
            scale = length / top_code
            if not length <= MAX_F32 or scale < LEAST_SCALE:
                scales[number] = np.float32(0)
                codes[:] = zero
                continue
            scales[number] = f32_of_bits(bits_of_f32(largest) - np.uint32(1)) if scale >= largest else scale
            write_codes(values, top_code / length, codes, scratch, settings, (np.uint32(draws[0] + np.uint32(low)), draws[1], draws[2]))
        return most < INFINITY_BITS

    return block_reading_format(bits, block, codes_, write)


@functools.cache
def block_reading_format(bits: int, block: int, codes_: CodeHelpers, write: Callable[..., Any]) -> ChunkFormat:
    """The chunk format that writes with ``write`` and reads blocks of these codes; whole ones as rows, if the codes have words and a block has whole rows."""
    read_codes, block_bytes = codes_.read, block * bits // 8

    @helper
    def read(payload: Any, numel: Any, start: Any, settings: Any, out: Any) -> None:
        blocks = -(-numel // block)
        scales = view_f32(payload, 4 * (start // block), -(-out.size // block))
        for number in range(scales.size):
            target = view_f32(out, number * block, min(block, out.size - number * block))
            codes = view_u8(payload, 4 * blocks + (start // block + number) * block_bytes, (target.size * bits + 7) // 8)
            read_codes(codes, scales[number], settings, target)

    if codes_.words is None or block_bytes % ROW:
        return ChunkFormat(write, read)
    return ChunkFormat(write, *row_readers(block, read, codes_.words))


@functools.cache
def planar_codes(bits: int, code_of: Callable[..., Any], value_of: Callable[..., Any], words: CodeWords | None = None) -> CodeHelpers:
    """Codes packed as the module's text says, one element at a time.

    code_of(value, factor, settings, draws) has an element's code in its low bits, as uint32; value_of(code, settings) is what an int32 code
    stands for, before the scale.
    """
    per, bias, mask = 8 // bits, np.uint32(1 << (bits - 1) if bits < 8 else 0), np.uint8((1 << bits) - 1)
    signed_bias, keep = np.int32(bias), np.uint32((1 << bits) - 1)

    @helper
    def write_codes(values: Any, factor: Any, codes: Any, scratch: Any, settings: Any, draws: Any) -> None:
        width, index = codes.size, draws[0]
        limits = (settings[0], settings[1])
        unpacked = view_u8(scratch if per > 1 else codes, 0, per * width)
        for i in range(values.size):
            code = code_of(values[i], factor, limits, (np.uint32(index + np.uint32(i)), draws[1], draws[2]))
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
        width, limits = codes.size, (settings[0], settings[1])
        if per == 1:
            signed = view_i8(codes, 0, width)
            for i in range(width):
                out[i] = value_of(np.int32(signed[i]), limits) * scale
            return
        for place in range(per):
            row = view_f32(out, place * width, max(0, min(width, out.size - place * width)))
            shift = np.uint8(bits * place)
            for i in range(row.size):
                row[i] = value_of(np.int32((codes[i] >> shift) & mask) - signed_bias, limits) * scale

    return CodeHelpers(write_codes, read_codes, words)
