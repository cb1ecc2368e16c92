"""Integer codes, which `int8`, `int4` and linear `dithering` share.

A code is ``p * factor``, rounded to nearest even with feedback, else stochastically, so that the decoded mean is p. It decodes to code * scale of
its block. With ``rotate=1`` the rotated part is encoded: see `rotation`.

Owns the rounding, as NumPy reference and as helpers of kernels; `blocks` owns the bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

import numpy as np

from psgc.codecs.codec import F32, Array, Codec, Stream
from psgc.codecs.common.bits import bits_of_f32
from psgc.codecs.common.chunks import ChunkFormat
from psgc.codecs.common.parameters import read_switch, with_defaults
from psgc.codecs.common.streams import uniform
from psgc.codecs.jit.kernel import helper
from psgc.codecs.quantize.blocks import BlockCodec, CodeHelpers, planar_codes
from psgc.codecs.quantize.rotation import reference_rotated, rotated_format
from psgc.codecs.quantize.rows import ROW, CodeWords, row_codes

_ROUNDER: Final = np.float32(1.5 * 2**23)  # x + this has x, rounded to nearest even, in its low bits for |x| < 2**22


class IntegerCodec(BlockCodec):
    """Integers from -top_code to top_code; unbiased without feedback. rotated_id: the codec id with ``rotate=1``."""

    rotated_id: ClassVar[int]
    defaults: ClassVar[dict[str, str]] = {"ef": "1", "rotate": "0"}

    def __init__(self, dtype: str = "float32", *, ef: bool = True, rotate: bool = False) -> None:
        super().__init__(dtype, ef=ef)
        self.unbiased, self._rotate = not ef, rotate
        if rotate:
            self.codec_id = self.rotated_id

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str], dtype: str) -> Codec:
        given = with_defaults(cls, parameters)
        return cls(dtype, ef=read_switch(cls, "ef", given["ef"]), rotate=read_switch(cls, "rotate", given["rotate"]))

    @property
    def parameters(self) -> dict[str, str]:
        return super().parameters | ({"rotate": "1"} if self._rotate else {})

    def code_helpers(self) -> CodeHelpers:
        return _integer_codes(self.bits, random=not self.feedback)

    @property
    def chunk_format(self) -> ChunkFormat:
        return rotated_format(super().chunk_format) if self._rotate else super().chunk_format

    def reference_codes(self, scaled: F32, random: F32 | None) -> Array:
        scaled = np.clip(scaled, -np.float32(self.top_code), np.float32(self.top_code))
        if random is None:
            return np.rint(scaled)
        below = np.floor(scaled)
        return np.asarray(below + (random < scaled - below), np.float32)

    def reference_values(self, codes: Array) -> F32:
        return codes.astype(np.float32)

    def reference_payload(self, p: Array, stream: Stream) -> bytes:
        return super().reference_payload(reference_rotated(p, inverse=False) if self._rotate else p, stream)

    def reference_elements(self, payload: bytes, numel: int) -> Array:
        elements = super().reference_elements(payload, numel)
        return reference_rotated(elements, inverse=True) if self._rotate else elements


@helper
def _at_random(value: Any, factor: Any, limits: Any, draws: Any) -> Any:
    x, top = value * factor, limits[0]
    x = top if x > top else x
    x = -top if x < -top else x
    below = np.floor(x)
    x = below + (np.float32(1) if uniform(draws[0], draws[1], draws[2]) < x - below else np.float32(0))
    return bits_of_f32(x + _ROUNDER)


@helper
def _to_nearest(value: Any, factor: Any, limits: Any, draws: Any) -> Any:
    return bits_of_f32(value * factor + _ROUNDER)  # at most an ulp beyond [-top, top]


@helper
def integer_value(code: Any, limits: Any) -> Any:
    """The value of an integer code, before the scale: the code itself."""
    return np.float32(code)


@functools.cache
def _integer_codes(bits: int, random: bool) -> CodeHelpers:
    codes = planar_codes(bits, _at_random if random else _to_nearest, integer_value, CodeWords(bits))
    # Of 8 bits LLVM vectorises the plain loop, and better than the rows' instructions; of fewer it does not.
    return codes if random or bits == 8 else codes._replace(write=_in_rows(bits, codes.write))


@functools.cache
def _in_rows(bits: int, write_codes: Callable[..., Any]) -> Callable[..., Any]:
    """``write_codes`` to nearest, a row at a time where a block has whole rows."""
    per, write_row = 8 // bits, row_codes(bits, float(_ROUNDER))

    @helper
    def write_rows(values: Any, factor: Any, codes: Any, scratch: Any, settings: Any, draws: Any) -> None:
        if codes.size % ROW == 0 and values.size == codes.size * per:
            for byte in range(0, codes.size, ROW):
                write_row(values, byte, codes.size, factor, codes, byte)
        else:
            write_codes(values, factor, codes, scratch, settings, draws)

    return write_rows
