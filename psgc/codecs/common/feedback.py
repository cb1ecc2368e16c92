"""Error feedback: the part of a gradient that a lossy codec does not send stays in a residual and is sent later.

Owns the algebra, as NumPy definitions and as the helpers that kernels call a chunk at a time; knows no payload layout.

    worker   p = g + f * e         m = encode(p)       when the result has come:   e <- p - decode(m)
    server   p = sum / W + f * E   m = encode(p)       E' = p - decode(m)

``f`` (rescale) is the loss scale over the last step's, times the last learning rate over this one's where residuals are asked to follow
it. Every operation is rounded to float32 on its own (no fused multiply-add), so that any kernel, on any device, has the same bytes.
Source: Karimireddy et al. 2019 (EF-SignSGD),
Algorithm 2; Tang et al. 2019 (DoubleSqueeze) for the two sides.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

import numpy as np

from psgc.codecs.codec import F32, Codec
from psgc.codecs.jit.kernel import helper

NO_RESIDUAL: Final[F32] = np.empty(0, np.float32)  # kernels take an empty array for "none"
CHUNK: Final = 4096  # elements of p that kernels hold at once: 16 KB stay in L1


def reference_corrected(grad: F32, residual: F32 | None, rescale: float) -> F32:
    """p = grad + rescale * residual, in float32 with both operations rounded; grad itself where there is no residual."""
    return grad.copy() if residual is None else grad + np.float32(rescale) * residual


def reference_mean(acc: F32, divisor: int) -> F32:
    """The accumulated sum over the divisor, by true division in float32."""
    return acc / np.float32(divisor)


@helper
def corrected_chunk(grad: Any, residual: Any, rescale: Any, p: Any) -> None:
    """p <- grad + rescale * residual for one chunk; an empty residual is none."""
    if residual.size == 0:
        for i in range(p.size):
            p[i] = grad[i]
    else:
        for i in range(p.size):
            p[i] = grad[i] + rescale * residual[i]


@helper
def mean_corrected_chunk(acc: Any, divisor: Any, residual: Any, rescale: Any, p: Any) -> None:
    """p <- acc / divisor + rescale * residual for one chunk; an empty residual is none."""
    if divisor == 1:
        corrected_chunk(acc, residual, rescale, p)
    elif residual.size == 0:
        for i in range(p.size):
            p[i] = acc[i] / divisor
    else:
        for i in range(p.size):
            p[i] = acc[i] / divisor + rescale * residual[i]


class FeedbackCodec(Codec):
    """A lossy codec whose parameter ``ef`` says whether it keeps a residual."""

    defaults: ClassVar[dict[str, str]] = {"ef": "1"}

    def __init__(self, dtype: str = "float32", *, ef: bool = True) -> None:
        super().__init__(dtype)
        self._ef = ef

    @property
    def parameters(self) -> dict[str, str]:
        return {} if self._ef else {"ef": "0"}

    @property
    def feedback(self) -> bool:
        return self._ef


def rounding_contraction(top: float, count: int) -> float:
    """The contraction of rounding ``count`` elements or fewer to the nearest multiple of max|p| / top.

    In units of that multiple: the largest element is ``top`` and is sent exactly; an element at distance f from its nearest multiple leaves
    f * f. The worst case is that all others are 1/2: the residual then has (count - 1) / 4 of the square top**2 + (count - 1) / 4.
    """
    return 4 * top**2 / (4 * top**2 + count - 1)
