"""The `dithering` codec: elements rounded at random to a few levels, so that their mean is right.

Payload: as `blocks` says, in blocks of 256, with codes in -k..k of 2 bits (k = 1), 4 bits (k up to 7) or 8 bits. Owns the parameters, named
as BytePS names them: k, the number of levels above zero; partition, where they are; normalize, the norm that the block is divided by.

* ``partition=linear`` (codec id 13): the levels are 0, 1/k, 2/k, ..., 1 times the norm, and the scale is norm / k.
* ``partition=natural`` (id 14): 0, 2**(1 - k), ..., 1/4, 1/2, 1 times the norm, which is the scale. See `natural`.

Without feedback, the default, codes are rounded at random and unbiased. With it (``ef=1``) they are rounded to nearest, which is a
contraction, because the block's largest element is then sent as it is. That asks for normalize=max: divided by ||p||_2, all
elements of a block may round to nothing; and for k >= 2: with k = 1 almost all do. An unbiased code of one level is refused inside feedback for
the opposite reason, that its error is larger than the gradient itself, so that residuals grow.
Source: Alistarh et al. 2017 (QSGD), section 3.1; Horvath et al. 2019 (natural dithering), definition 3; Wen et al. 2017 (TernGrad), section 3,
whose layer-wise scale is here one of a block (``ternary`` is another name of ``dithering:k=1``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final, cast

from psgc.codecs.codec import F32, Array, Codec
from psgc.codecs.common.parameters import read_choice, read_switch, read_whole, with_defaults
from psgc.codecs.quantize.blocks import CodeHelpers, Norm, planar_codes
from psgc.codecs.quantize.integers import IntegerCodec
from psgc.codecs.quantize.natural import level_of, nearest_contraction, power_of, reference_levels, reference_powers
from psgc.errors import CodecError

MOST_K: Final = 127


class DitheringCodec(IntegerCodec):
    """QSGD with fixed-width codes: 4.125 bits an element for k = 4."""

    name = "dithering"
    codec_id = 13
    advice = "where the mean must be right without memory for residuals; int4 with feedback errs less in as many bytes"
    block = 256
    partition: ClassVar[str] = "linear"
    defaults: ClassVar[dict[str, str]] = {"k": "7", "partition": "linear", "normalize": "max", "ef": "0"}

    def __init__(self, dtype: str = "float32", *, k: int = 7, normalize: Norm = "max", ef: bool = False) -> None:
        super().__init__(dtype, ef=ef)
        if not 1 <= k <= MOST_K:
            raise CodecError(f"codec {self.name}: parameter k is a whole number from 1 to {MOST_K}, not '{k}'")
        if ef and (k == 1 or normalize == "l2"):
            raise CodecError(
                f"codec {self.name}: k={k}, normalize={normalize} is unsafe inside feedback (ef=1): what it leaves out may be as large as "
                f"the gradient, so residuals would grow; use ef=0, or k >= 2 with normalize=max, or onebit"
            )
        self.bits = 2 if k == 1 else 4 if k <= 7 else 8
        self.top_code: float = k
        self.norm = normalize
        self._k = k

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str], dtype: str) -> Codec:
        given = with_defaults(cls, parameters)
        partition = read_choice(cls, "partition", given["partition"], ("linear", "natural"))
        return (NaturalDitheringCodec if partition == "natural" else DitheringCodec)(
            dtype,
            k=read_whole(cls, "k", given["k"], 1, MOST_K),
            normalize=cast("Norm", read_choice(cls, "normalize", given["normalize"], ("max", "l2"))),
            ef=read_switch(cls, "ef", given["ef"]),
        )

    @property
    def parameters(self) -> dict[str, str]:
        given = {"k": str(self._k), "partition": self.partition, "normalize": self.norm, "ef": "1" if self.feedback else "0"}
        return {key: value for key, value in given.items() if value != self.defaults[key]}


class NaturalDitheringCodec(DitheringCodec):
    """The codec of ``dithering:partition=natural``."""

    codec_id = 14
    partition = "natural"

    def __init__(self, dtype: str = "float32", *, k: int = 7, normalize: Norm = "max", ef: bool = False) -> None:
        super().__init__(dtype, k=k, normalize=normalize, ef=ef)
        self.top_code, self.least_code = 1, 2.0 ** (1 - k)

    def code_helpers(self) -> CodeHelpers:
        return planar_codes(self.bits, level_of(not self.feedback), power_of)

    def contraction(self, numel: int) -> float | None:
        return nearest_contraction(self._k, min(numel, self.block)) if self.feedback else None

    def reference_codes(self, scaled: F32, random: F32 | None) -> Array:
        return reference_levels(scaled, random, self._k)

    def reference_values(self, codes: Array) -> F32:
        return reference_powers(codes, self._k)
