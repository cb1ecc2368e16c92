"""The `topk` codec: the elements of largest magnitude of each part, and where they are; `graddrop`, its first form.

Payload: as `elements` says. Owns the parameters, and with them how many elements are sent:

| text                       | elements sent                                                         | id |
|----------------------------|-----------------------------------------------------------------------|----|
| ``topk:k=0.01``            | exactly k, or ceil(k * numel) for a fraction: the largest             | 5  |
| ``topk:select=mstopk``     | as many, the smaller ones found by bisection: see `largest`           | 5  |
| ``topk:select=sampled``    | those above a sampled threshold: about k, from 0 to 2 k               | 20 |
| ``graddrop:drop=0.99``     | as ``topk:select=sampled``, with k = 1 - drop                         | 18 |

Source: Stich et al. 2018 (error feedback for top-k); Lin et al. 2018 (DGC) for the sampled threshold; Shi et al. 2021 (MSTop-K); Aji and
Heafield 2017 (gradient dropping), section 3, which drops by a sampled threshold what is kept in the residual.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import ClassVar, Final, Literal

from psgc.codecs.codec import F32, Codec
from psgc.codecs.counts import check_count, check_part, count_of, read_k, read_share, write_k
from psgc.codecs.elements import ElementsCodec
from psgc.codecs.largest import (
    MOST_OVER,
    Chosen,
    Indices,
    above_sample,
    define_above_sample,
    define_largest,
    define_probed,
    largest,
    probed,
    sampled_rank,
)  # fmt: skip
from psgc.codecs.parameters import read_choice, read_switch, with_defaults

Selector = Literal["exact", "sampled", "mstopk"]
_CHOOSE: Final = {"exact": largest, "sampled": above_sample, "mstopk": probed}
_DEFINE: Final = {"exact": define_largest, "sampled": define_above_sample, "mstopk": define_probed}


class _Selecting(ElementsCodec):
    """k, or a share of each part, chosen by a selector."""

    def __init__(
        self, dtype: str = "float32", *, k: Fraction | int = Fraction(1, 100), select: Selector = "exact", ef: bool = True
    ) -> None:
        super().__init__(dtype, ef=ef)
        self._k, self._select = k, select

    def count(self, numel: int) -> int:
        """How many elements of a part are wanted."""
        check_part(self, numel)
        return count_of(self._k, numel)

    def counts(self, numel: int) -> tuple[int, int]:
        count = self.count(numel)
        return (0, min(numel, MOST_OVER * count)) if self._select == "sampled" else (count, count)

    def check_bucket(self, numel: int) -> None:
        check_count(self, self._k, numel, "elements")

    def contraction(self, numel: int) -> float | None:
        if not self.feedback:
            return None
        count = self.count(numel)  # the largest squares are at least their share of all
        return (sampled_rank(numel, count) if self._select == "sampled" else count) / numel

    def choose(self, values: F32, residual: F32, rescale: float) -> Chosen:
        return _CHOOSE[self._select](values, residual, rescale, self.count(values.size))

    def define_indices(self, p: F32) -> Indices:
        return _DEFINE[self._select](p, self.count(p.size))


class TopKCodec(_Selecting):
    """About 42 bits for each element that is sent, at 1 %; nothing for the others."""

    name = "topk"
    codec_id = 5
    advice = "the slowest links, and gradients with few large elements, under SGD with momentum; costs quality under plain Adam"
    defaults: ClassVar[dict[str, str]] = {"k": "0.01", "select": "exact", "ef": "1"}

    def __init__(
        self, dtype: str = "float32", *, k: Fraction | int = Fraction(1, 100), select: Selector = "exact", ef: bool = True
    ) -> None:
        super().__init__(dtype, k=k, select=select, ef=ef)
        if select == "sampled":
            self.codec_id = 20

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str], dtype: str) -> Codec:
        given = with_defaults(cls, parameters)
        select: Selector = read_choice(cls, "select", given["select"], tuple(_CHOOSE))  # type: ignore[assignment]
        return cls(dtype, k=read_k(cls, given["k"]), select=select, ef=read_switch(cls, "ef", given["ef"]))

    @property
    def parameters(self) -> dict[str, str]:
        k = write_k(self._k)
        given = {"k": k, "select": self._select}
        return super().parameters | {key: text for key, text in given.items() if text != self.defaults[key]}


class GradDropCodec(_Selecting):
    """Drops a share of each part, by a sampled threshold."""

    name = "graddrop"
    codec_id = 18
    advice = "topk by a sampled threshold: the fastest choice of elements, their number only nearly as asked"
    defaults: ClassVar[dict[str, str]] = {"drop": "0.99", "ef": "1"}

    def __init__(self, dtype: str = "float32", *, drop: Fraction = Fraction(99, 100), ef: bool = True) -> None:
        super().__init__(dtype, k=1 - drop, select="sampled", ef=ef)
        self._drop = drop

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str], dtype: str) -> Codec:
        given = with_defaults(cls, parameters)
        return cls(dtype, drop=read_share(cls, "drop", given["drop"]), ef=read_switch(cls, "ef", given["ef"]))

    @property
    def parameters(self) -> dict[str, str]:
        drop = write_k(self._drop)
        return super().parameters | ({} if drop == self.defaults["drop"] else {"drop": drop})
