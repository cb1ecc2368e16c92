"""The block DCT of the kit: the orthonormal cosine transform (DCT-II and its inverse) of each block, to the same bits on every machine.

Coefficient k of a block of B elements is the sum of C[k, n] * x[n], with C[k, n] = s * cos(pi * (2 n + 1) * k / (2 B)), s = sqrt(2 / B), but
sqrt(1 / B) for k = 0. The inverse multiplies with the transpose of C. Elements after the last whole block
are not transformed. Products and sums are rounded to float32, and a sum adds its terms n and
n + B / 2, then n and n + B / 4, ... until one is left.

Owns the matrix C and this order. The cosines are Taylor series in float64 additions and multiplications, because the last bits of a library's
cos differ between machines; C is rounded to float32.
Source: Ahmed, Natarajan and Rao 1974 (discrete cosine transform); Peng, Quesnelle and Kingma 2024 (DeMo) for gradients.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from psgc.errors import CodecError

F32 = npt.NDArray[np.float32]
MAX_BLOCK: Final = 256  # an element costs ``block`` multiplications
TERMS: Final = 10  # of a series; up to pi / 4 the next term is below 1e-20


@functools.cache
def matrix(block: int) -> F32:
    """C [block, block], read-only. Raises CodecError for a block that is not a power of two from 2 to ``MAX_BLOCK``."""
    if not 2 <= block <= MAX_BLOCK or block & (block - 1):
        raise CodecError(f"dct of blocks of {block} elements: a power of two from 2 to {MAX_BLOCK} expected")
    rows = [[math.sqrt((2 if k else 1) / block) * _cosine((2 * n + 1) * k, block) for n in range(block)] for k in range(block)]
    made = np.array(rows, np.float64).astype(np.float32)
    made.setflags(write=False)
    return made


def transformed(x: F32, block: int, *, inverse: bool = False) -> F32:
    """The coefficients of x's whole blocks (``inverse``: their elements), then the elements after the last whole block, unchanged."""
    factors = matrix(block).T if inverse else matrix(block)
    whole = x.size // block * block
    made = x.astype(np.float32)
    rows, out = x[:whole].reshape(-1, block), made[:whole].reshape(-1, block)
    for k in range(block):
        terms = rows * factors[k]
        while terms.shape[1] > 1:
            half = terms.shape[1] // 2
            terms = terms[:, :half] + terms[:, half:]
        out[:, k] = terms[:, 0]
    return made


def _cosine(m: int, block: int) -> float:
    """cos(pi * m / (2 * block))."""
    m %= 4 * block
    m = min(m, 4 * block - m)  # cos(-x) = cos(x)
    if m > block:
        return -_cosine(2 * block - m, block)
    if 2 * m > block:  # cos(x) = sin(pi / 2 - x)
        x = math.pi * (block - m) / (2 * block)
        return x * _series(x * x, range(2, 2 * TERMS, 2))
    x = math.pi * m / (2 * block)
    return _series(x * x, range(1, 2 * TERMS, 2))


def _series(square: float, first_factors: Iterable[int]) -> float:
    """1 - square / (a (a + 1)) * (1 - square / (b (b + 1)) * ...) for the factors a, b, ..., the innermost first."""
    total = 1.0
    for factor in reversed(list(first_factors)):
        total = 1.0 - square / (factor * (factor + 1)) * total
    return total
