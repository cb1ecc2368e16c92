"""The `dithering` and `ternary` codecs: elements rounded at random to a few levels, so that their mean is right.

Payload: as `grouped` says, in groups of 256, with codes in -k..k of 2 bits (k = 1), 4 bits (k up to 7) or 8 bits. Owns the parameters, named
as BytePS names them: k, the number of levels above zero; normalize, the norm that the group is divided by.

Without feedback, the default, codes are rounded at random and unbiased. With it (``ef=1``) they are rounded to nearest, which is a
contraction, because the group's largest element is then sent as it is. That asks for normalize=max: divided by ||p||_2, all
elements of a group may round to nothing; and for k >= 2: with k = 1 almost all do. An unbiased code of one level is refused inside feedback for
the opposite reason, that its error is larger than the gradient itself, so that residuals grow.
Source: Alistarh et al. 2017 (QSGD), section 3.1; Wen et al. 2017 (TernGrad), section 3, whose layer-wise scale is here one of a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final, cast

from psgc.codecs.codec import Codec
from psgc.codecs.grouped import GroupedCodec, Norm
from psgc.codecs.parameters import read_switch, with_defaults
from psgc.errors import CodecError

MOST_K: Final = 127


class DitheringCodec(GroupedCodec):
    """QSGD with fixed-width codes: 4.125 bits an element for k = 4."""

    name = "dithering"
    codec_id = 13
    advice = "where the mean must be right without memory for residuals; int4 with feedback errs less in as many bytes"
    group = 256
    defaults: ClassVar[dict[str, str]] = {"k": "7", "normalize": "max", "ef": "0"}

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
        self.top_code = self._k = k
        self.norm = normalize
        self.unbiased = not ef

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str], dtype: str) -> Codec:
        given = with_defaults(cls, parameters)
        k, normalize = given["k"], given["normalize"]
        if not (k.isascii() and k.isdigit()):
            raise CodecError(f"codec {cls.name}: parameter k is a whole number from 1 to {MOST_K}, not {k!r}")
        if normalize not in ("max", "l2"):
            raise CodecError(f"codec {cls.name}: parameter normalize is max or l2, not {normalize!r}")
        return cls(dtype, k=int(k), normalize=cast("Norm", normalize), ef=read_switch(cls, "ef", given["ef"]))

    @property
    def parameters(self) -> dict[str, str]:
        given = {"k": str(self._k), "normalize": self.norm, "ef": "1" if self.feedback else "0"}
        return {key: value for key, value in given.items() if value != self.defaults[key]}


class TernaryCodec(GroupedCodec):
    """TernGrad: -s, 0 or s, with s the group's largest magnitude; 2.125 bits an element."""

    name = "ternary"
    codec_id = 11
    advice = "comparisons with TernGrad: its noise exceeds the gradient; onebit with feedback sends half as much and converges"
    bits = 2
    group = 256
    top_code = 1
    unbiased = True
    defaults: ClassVar[dict[str, str]] = {"ef": "0"}

    def __init__(self, dtype: str = "float32") -> None:
        super().__init__(dtype, ef=False)

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str], dtype: str) -> Codec:
        if read_switch(cls, "ef", with_defaults(cls, parameters)["ef"]):
            raise CodecError(
                "codec ternary: ef=1 is refused: its error is unbiased but larger than the gradient (no contraction), so that residuals "
                "would grow; use ef=0, or onebit, which is made for feedback"
            )
        return cls(dtype)

    @property
    def parameters(self) -> dict[str, str]:
        return {}
