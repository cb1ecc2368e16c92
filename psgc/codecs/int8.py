"""The `int8` codec: one byte an element, and one scale, max|p| / 127, for each block of 256.

| offset        | type                         | meaning                                                   |
|---------------|------------------------------|-----------------------------------------------------------|
| 0             | f32 [ceil(numel / 256)]      | max|p| / 127 of each block, finite, >= 0                  |
| 4 * blocks    | i8 [numel]                   | codes in -127..127; the element is code * scale           |

Owns the parameters; see `int4` for who does what. With feedback (``ef=1``) a code is p * (127 / max|p|) rounded to nearest even; without,
it is rounded up with the probability of its fraction, so that the decoded mean is p. A block whose scale would be below the smallest normal
float (max|p| < 1.5e-36), and one with NaN or infinity, has scale 0 and codes 0. The scale is at most the largest float whose 127-fold is finite.
With ``rotate=1`` the bytes have the same layout, and id 8.
Source: Alistarh et al. 2017 (QSGD) for stochastic rounding, with max-norm blocks; Dettmers et al. 2022 for block scales.
"""

from __future__ import annotations

from psgc.codecs.quantize.integers import IntegerCodec


class Int8Codec(IntegerCodec):
    """8.125 bits an element; unbiased without feedback."""

    name = "int8"
    codec_id = 3
    rotated_id = 8
    advice = "the safe choice below 16 bits: an error far under a gradient's own noise, sound with Adam too"
    bits = 8
    block = 256
    top_code = 127
