"""The `topk` codec: the elements of largest magnitude of each part, and where they are.

Payload: as `elements` says. Owns the parameters, and with them how many elements are sent:

| text                       | elements sent                                                         | id |
|----------------------------|-----------------------------------------------------------------------|----|
| ``topk:k=0.01``            | exactly k, or ceil(k * numel) for a fraction: the largest             | 5  |
| ``topk:select=mstopk``     | exactly k, nearly the largest, found by bisection: see `largest`      | 31 |
| ``topk:select=sampled``    | those above a sampled threshold: about k, from 0 to 2 k               | 20 |

``topk:warmup=N`` sends more in the first N steps, as DGC's warm-up does: 25 % in the first quarter of them, then 6.25, 1.5625 and 0.390625 %,
or k where that is more. Payloads say how many elements they hold, so a server takes any number from k to 25 %.

Source: Stich et al. 2018 (error feedback for top-k); Lin et al. 2018 (DGC) for the sampled threshold; Shi et al. 2021 (MSTop-K); Aji and
Heafield 2017 (gradient dropping), section 3, which drops by a sampled threshold what is kept in the residual.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import ClassVar, Final, Literal

from psgc.codecs.codec import F32, Array, Bytes, Codec, Encoded, Stream
from psgc.codecs.common.parameters import read_choice, read_switch, read_whole, with_defaults
from psgc.codecs.common.sums import magnitudes_kernel
from psgc.codecs.sparsify.counts import check_count, check_part, count_of, read_k, write_k
from psgc.codecs.sparsify.elements import ElementsCodec
from psgc.codecs.sparsify.largest import (
    MOST_OVER,
    Chosen,
    Indices,
    above_sample,
    largest,
    probed,
    reference_above_sample,
    reference_largest,
    reference_probed,
    sampled_rank,
)  # fmt: skip

Selector = Literal["exact", "sampled", "mstopk"]
WARMUP_SHARES: Final = tuple(Fraction(1, 4**power) for power in (1, 2, 3, 4))
MOST_STEPS: Final = 10**9
_CHOOSE: Final = {"exact": largest, "sampled": above_sample, "mstopk": probed}
_REFERENCE: Final = {"exact": reference_largest, "sampled": reference_above_sample, "mstopk": reference_probed}


class TopKCodec(ElementsCodec):
    """About 42 bits for each element that is sent, at 1 %; nothing for the others."""

    name = "topk"
    codec_id = 5
    advice = "the slowest links, and gradients with few large elements, under SGD with momentum; costs quality under plain Adam"
    defaults: ClassVar[dict[str, str]] = {"k": "0.01", "select": "exact", "warmup": "0", "ef": "1"}

    def __init__(
        self, dtype: str = "float32", *, k: Fraction | int = Fraction(1, 100), select: Selector = "exact", warmup: int = 0, ef: bool = True
    ) -> None:  # fmt: skip
        super().__init__(dtype, ef=ef)
        self._k, self.select, self._warmup = k, select, warmup
        self.codec_id = {"exact": 5, "sampled": 20, "mstopk": 31}[select]
        shares = WARMUP_SHARES if warmup else ()
        self.stages = tuple(TopKCodec(dtype, k=share, select=select, ef=ef) for share in shares)

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str], dtype: str) -> Codec:
        given = with_defaults(cls, parameters)
        select: Selector = read_choice(cls, "select", given["select"], tuple(_CHOOSE))  # type: ignore[assignment]
        warmup = read_whole(cls, "warmup", given["warmup"], 0, MOST_STEPS)
        return cls(dtype, k=read_k(cls, given["k"]), select=select, warmup=warmup, ef=read_switch(cls, "ef", given["ef"]))

    @property
    def parameters(self) -> dict[str, str]:
        given = {"k": write_k(self._k), "select": self.select, "warmup": str(self._warmup)}
        return super().parameters | {key: text for key, text in given.items() if text != self.defaults[key]}

    def count(self, numel: int) -> int:
        """How many elements of a part are wanted."""
        check_part(self, numel)
        return count_of(self._k, numel)

    def counts(self, numel: int) -> tuple[int, int]:
        least = 0 if self.select == "sampled" else self.count(numel)
        return least, max((self.most(numel), *(stage.most(numel) for stage in self.stages)))

    def most(self, numel: int) -> int:
        """Most elements of a part that are sent once a warm-up is over."""
        count = self.count(numel)
        return min(numel, MOST_OVER * count) if self.select == "sampled" else count

    def check_bucket(self, numel: int) -> None:
        check_count(self, self._k, numel, "elements")

    def contraction(self, numel: int) -> float | None:
        if not self.feedback:
            return None
        count = self.count(numel)  # the largest squares are at least their share of all
        return (sampled_rank(numel, count) if self.select == "sampled" else count) / numel

    def choose(self, values: F32, residual: F32, rescale: float) -> Chosen:
        return _CHOOSE[self.select](values, residual, rescale, self.count(values.size))

    def reference_indices(self, p: F32) -> Indices:
        return _REFERENCE[self.select](p, self.count(p.size))

    def warm(self) -> None:
        if self.select == "mstopk":
            magnitudes_kernel()

    def encode(self, grad: Array, residual: F32 | None, rescale: float, stream: Stream, out: Bytes) -> Encoded:
        stage = self.stage(stream.step, grad.size)
        return super().encode(grad, residual, rescale, stream, out) if stage is None else stage.encode(grad, residual, rescale, stream, out)

    def finish(
        self, acc: Array, numel: int, lo: int, hi: int, divisor: int, residual: F32 | None, residual_out: F32 | None,
        rescale: float, stream: Stream, out: Bytes,
    ) -> Encoded:  # fmt: skip
        stage = self.stage(stream.step, numel)
        finish = super().finish if stage is None else stage.finish
        return finish(acc, numel, lo, hi, divisor, residual, residual_out, rescale, stream, out)

    def reference_payload(self, p: Array, stream: Stream) -> bytes:
        stage = self.stage(stream.step, p.size)
        return super().reference_payload(p, stream) if stage is None else stage.reference_payload(p, stream)

    def stage(self, step: int, numel: int) -> TopKCodec | None:
        """The codec with a larger k of this step of the warm-up (the first step is 1); None once the warm-up is over."""
        number = len(self.stages) * max(step - 1, 0) // self._warmup if self._warmup else 0
        stage = self.stages[number] if number < len(self.stages) else None
        return stage if stage is not None and stage.count(numel) > self.count(numel) else None
