"""The `int4` codec: four bits an element, and one scale, max|p| / 7, for each block of 128.

| offset        | type                    | meaning                                                                          |
|---------------|-------------------------|----------------------------------------------------------------------------------|
| 0             | f32 [ceil(numel / 128)] | max|p| / 7 of each block, finite, >= 0                                           |
| 4 * blocks    | u8 [64] of each block   | byte i: element i's code + 8 in the low, element i + 64's in the high four bits  |

A code is p * 7 / max|p|, rounded to an integer in -7..7; the element is code * scale. The last block has half as many bytes as elements,
rounded up; `quantize/blocks.py` says what they hold.

Owns the parameters. ``IntegerCodec`` rounds (and rotates, with ``rotate=1``: id 9); its base ``BlockCodec`` owns the bytes; the base of
``BlockCodec``, ``ChunkCodec``, runs the kernels. Blocks of 128 cost 4.25 bits an element; blocks of 32 would cost 5 for two thirds of the squared
error on Gaussian values.
Source: Wang et al. 2023 (ZeRO++, qgZ), section 3.3; Xie et al. 2024 (LoCo) for four bits under feedback.
"""

from __future__ import annotations

from psgc.codecs.quantize.integers import IntegerCodec


class Int4Codec(IntegerCodec):
    """4.25 bits an element; unbiased without feedback."""

    name = "int4"
    codec_id = 7
    rotated_id = 9
    advice = "half of int8's bytes where the link still limits; keep feedback on, and take rotate=1 against outliers"
    bits = 4
    block = 128
    top_code = 7
