"""The payloads of codes in blocks, in plain torch on any device: the definition that the kernels beside it are held against.

Obvious rather than fast. Equal, bit for bit, to ``reference_payload`` and ``reference_elements`` of the codecs, which are NumPy's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

import torch

from psgc.codecs.codec import Codec, Stream
from psgc.codecs.common.streams import stream_position
from psgc.codecs.dithering import NaturalDitheringCodec
from psgc.codecs.fp8 import FORMATS, Fp8Codec
from psgc.codecs.quantize.blocks import BlockCodec, code_bytes
from psgc.codecs.quantize.rotation import GROUP
from psgc.codecs.tbq import TbqCodec

_LANES: Final = 16
_MAX_F32: Final = torch.finfo(torch.float32).max
_LEAST_SCALE: Final = torch.finfo(torch.float32).tiny
_MASK: Final = 0xFFFFFFFF


def reference_encode(codec: Codec, p: torch.Tensor, stream: Stream) -> torch.Tensor:
    """The payload, uint8, of p, float32 [numel]."""
    block = cast("BlockCodec", codec)
    words = None if codec.feedback else random_words(stream, p.numel(), p.device)
    if codec.parameters.get("rotate") == "1":
        p = rotated(p, inverse=False)
    scales, packed = [], []
    for start, rows in _block_ranges(p.numel(), block.block):
        width = min(block.block, p.numel() - start)
        values = p[start : start + rows * width].reshape(rows, width)
        sent, scale, factor = block_scales(block, values)
        draws = None if words is None else words[start : start + rows * width].reshape(rows, width)
        codes = torch.where(sent, block_codes(block, values, factor, draws), 0)
        scales.append(scale.reshape(-1))
        packed.append(pack(codes, block.bits).reshape(-1))
    return torch.cat([torch.cat(scales).view(torch.uint8), *packed])


def reference_decode(codec: Codec, payload: torch.Tensor, numel: int) -> torch.Tensor:
    """The elements, float32 [numel], of a payload."""
    block, place, out = cast("BlockCodec", codec), 4 * -(-numel // cast("BlockCodec", codec).block), []
    scales = payload[:place].clone().view(torch.float32)
    for start, rows in _block_ranges(numel, block.block):
        width = min(block.block, numel - start)
        size = code_bytes(block.bits, block.block, width)
        codes = unpack(payload[place : place + rows * size].reshape(rows, size), block.bits, width)
        first = start // block.block
        out.append((code_values(block, codes) * scales[first : first + rows, None]).reshape(-1))
        place += rows * size
    elements = torch.cat(out)
    return rotated(elements, inverse=True) if codec.parameters.get("rotate") == "1" else elements


def _block_ranges(numel: int, block: int) -> Sequence[tuple[int, int]]:
    """(first element, blocks) of the whole blocks, and of the last one if it is shorter."""
    whole = numel // block
    ranges = [(0, whole), (whole * block, 1 if numel % block else 0)]
    return [(start, rows) for start, rows in ranges if rows]


def random_words(stream: Stream, numel: int, device: torch.device) -> torch.Tensor:
    """32 random bits for each element, int64."""
    first, before, between = stream_position(stream, 0)
    h = (torch.arange(numel, device=device) + first + before) & _MASK
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & _MASK
    h = ((h ^ between ^ (h >> 15)) * 0x846CA68B) & _MASK
    return h ^ (h >> 16)


def block_scales(codec: BlockCodec, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(whether a block is sent, its scale, its factor), [rows, 1] each."""
    top = values.abs().amax(1, keepdim=True)  # NaN if an element is
    if isinstance(codec, TbqCodec):
        sent = top <= _MAX_F32
        tau = torch.full_like(top, float(codec.settings[2]))
        return sent, torch.where(sent, tau, 0.0), tau
    length = top
    if codec.norm == "l2":
        safe = torch.where((top > 0) & (top <= _MAX_F32), top, 1.0)
        x = torch.nn.functional.pad(values / safe, (0, -values.shape[1] % _LANES)).reshape(len(values), -1, _LANES)
        lanes = torch.zeros_like(x[:, 0])
        for row in range(x.shape[1]):
            lanes = lanes + x[:, row] * x[:, row]
        while lanes.shape[1] > 1:
            half = lanes.shape[1] // 2
            lanes = lanes[:, :half] + lanes[:, half:]
        length = torch.where(safe == top, lanes.sqrt() * top, top)
    largest = torch.full_like(top, codec.top_code)
    scale = length / largest
    sent = (length <= _MAX_F32) & (scale >= _LEAST_SCALE)
    most = torch.nextafter(torch.full_like(top, _MAX_F32) / largest, torch.zeros_like(top))
    return sent, torch.where(sent, torch.minimum(scale, most), 0.0), largest / torch.where(sent, length, 1.0)


def block_codes(codec: BlockCodec, values: torch.Tensor, factor: torch.Tensor, words: torch.Tensor | None) -> torch.Tensor:
    """Codes, int64; of 8-bit floats, their bytes. ``words``: random bits, or None to round to nearest."""
    if isinstance(codec, TbqCodec):
        return (values >= factor).long() - (values <= -factor).long()
    x = values * factor
    uniform = None if words is None else (words >> 8).float() * 2.0**-24
    if isinstance(codec, NaturalDitheringCodec):
        least = float(codec.settings[1])
        y = x.abs().clamp(max=1.0)
        below = y < least
        steps = torch.full_like(x, 1 << 22, dtype=torch.int64) if words is None else words >> 9
        none = (int(torch.tensor(least).view(torch.int32)) >> 23) - 1 + below.long()
        level = ((torch.where(below, y + least, y).view(torch.int32).long() + steps) >> 23) - none
        return torch.where(x.signbit(), -level, level)
    if isinstance(codec, Fp8Codec):
        return _float8_codes(codec, x, uniform)
    if uniform is None:
        return torch.where(x.isfinite(), x, 0.0).round().long()
    x = x.clamp(-codec.top_code, codec.top_code)
    return torch.where(x.isfinite(), x.floor() + (uniform < x - x.floor()).float(), 0.0).long()


def _float8_codes(codec: Fp8Codec, x: torch.Tensor, uniform: torch.Tensor | None) -> torch.Tensor:
    mantissa, bias, largest = FORMATS[codec.parameters.get("format", "e4m3")]
    drop, least = 23 - mantissa, 2.0 ** (1 - bias)
    size = x.abs().clamp(max=largest)
    whole, counted = size.view(torch.int32).long(), torch.where(size < least, size * 2.0 ** (bias + mantissa - 1), 0.0)
    if uniform is None:
        raised = whole + (1 << (drop - 1)) - 1 + ((whole >> drop) & 1)
        small = counted.round().long()
    else:
        raised = whole + (uniform * 2.0**drop).long()
        small = (counted.floor() + (uniform < counted - counted.floor()).float()).long()
    code = torch.where(size < least, small, (raised >> drop) - ((127 - bias) << mantissa)) & 0x7F
    return code | torch.where(x.signbit(), 0x80, 0)


def code_values(codec: BlockCodec, codes: torch.Tensor) -> torch.Tensor:
    """What codes, int64 with their sign, stand for, before the scale."""
    if isinstance(codec, NaturalDitheringCodec):
        power = torch.ldexp(torch.ones_like(codes, dtype=torch.float32), codes.abs() - int(codec.parameters.get("k", codec.defaults["k"])))
        return torch.where(codes == 0, 0.0, torch.where(codes < 0, -power, power))
    if isinstance(codec, Fp8Codec):
        mantissa, bias, _ = FORMATS[codec.parameters.get("format", "e4m3")]
        size = codes & 0x7F
        fraction, exponent = (size & ((1 << mantissa) - 1)).float(), size >> mantissa
        normal = torch.ldexp(1 + fraction * 2.0**-mantissa, exponent - bias)
        value = torch.where(exponent == 0, fraction * 2.0 ** (1 - bias - mantissa), normal)
        return torch.where(codes < 0, -value, value)
    return codes.float()


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [rows, elements] as bytes [rows, bytes]."""
    if bits == 8:
        return (codes & 0xFF).to(torch.uint8)
    per, bias = 8 // bits, 1 << (bits - 1)
    width = -(-codes.shape[1] // per)
    planes = torch.nn.functional.pad(codes + bias, (0, per * width - codes.shape[1]), value=bias).reshape(len(codes), per, width)
    return sum((planes[:, place] << (bits * place) for place in range(per)), torch.zeros_like(planes[:, 0])).to(torch.uint8)


def unpack(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The codes [rows, count], int64 with their sign, of bytes."""
    if bits == 8:
        return packed.view(torch.int8).long()
    planes = [((packed.long() >> (bits * place)) & ((1 << bits) - 1)) - (1 << (bits - 1)) for place in range(8 // bits)]
    return torch.cat(planes, 1)[:, :count]


def rotated(p: torch.Tensor, inverse: bool) -> torch.Tensor:
    """The part's elements with each whole group of 1024 rotated, or rotated back."""
    whole = p.numel() - p.numel() % GROUP
    h = torch.arange(whole, device=p.device) & 4095
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & _MASK
    h = ((h ^ (h >> 15)) * 0x846CA68B) & _MASK
    signs = torch.where(((h ^ (h >> 16)) & 1) == 1, -1.0, 1.0)
    x = p[:whole] * 2.0**-5 if inverse else p[:whole] * (signs * 2.0**-5)
    for stage in range(10):
        pairs = x.reshape(-1, 2, 1 << stage)
        x = torch.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1).reshape(-1)
    return torch.cat([x * signs if inverse else x, p[whole:]])
