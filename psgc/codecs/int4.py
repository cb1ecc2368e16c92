"""The `int4` codec: four bits an element, and one scale, max|p| / 7, for each group of 128.

Payload: as `grouped` says, with codes in -7..7 of 4 bits. Owns its parameters only; ``rotate=1`` is `rotation`'s. With feedback
(``ef=1``) codes are rounded to nearest even, without at random, so that the decoded mean is p. Groups of 128 cost 4.25 bits an element;
groups of 32 would cost 5 for two thirds of the squared error on Gaussian values.
Source: Wang et al. 2023 (ZeRO++, qgZ), section 3.3; Xie et al. 2024 (LoCo) for four bits under feedback.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from psgc.codecs.codec import Codec
from psgc.codecs.common.blocks import GroupedCodec
from psgc.codecs.common.parameters import read_switch, with_defaults
from psgc.codecs.common.rotation import RotatedInt4Codec


class Int4Codec(GroupedCodec):
    """4.25 bits an element; unbiased without feedback."""

    name = "int4"
    codec_id = 7
    advice = "half of int8's bytes where the link still limits; keep feedback on, and take rotate=1 against outliers"
    bits = 4
    group = 128
    top_code = 7
    defaults: ClassVar[dict[str, str]] = {"ef": "1", "rotate": "0"}

    def __init__(self, dtype: str = "float32", *, ef: bool = True) -> None:
        super().__init__(dtype, ef=ef)
        self.unbiased = not ef

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str], dtype: str) -> Codec:
        given = with_defaults(cls, parameters)
        if read_switch(cls, "rotate", given["rotate"]):
            return RotatedInt4Codec.from_parameters(given, dtype)
        return cls(dtype, ef=read_switch(cls, "ef", given["ef"]))
