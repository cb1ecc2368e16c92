"""Helpers for the payloads of several codecs: how many are folded at once, the order of their sum, and their checks.

Owns no layout and no kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from psgc.codecs.codec import Array, Bytes
from psgc.errors import PayloadError

MAX_PAYLOADS: Final = 8  # payloads of one fold
_LARGEST_BITS: Final = np.uint32(0x7F7FFFFF)  # of a finite float32; the bits of negative ones, infinity and NaN lie above


def eight(payloads: Sequence[Bytes]) -> tuple[Bytes, ...]:
    """The payloads filled up to the eight arguments of fold kernels, which never read the added ones."""
    return (*payloads, *(payloads[0],) * (MAX_PAYLOADS - len(payloads)))


def reference_sum(terms: Sequence[Array], acc: Array | None) -> Array:
    """The terms added left to right in their own dtype, then, as one sum, to ``acc``."""
    total = terms[0].copy()
    for term in terms[1:]:
        total = total + term
    return total if acc is None else acc + total


def check_size(name: str, payload: Bytes, numel: int, expected: int) -> None:
    """Raise PayloadError unless the payload has the one length that numel elements take."""
    if payload.size != expected:
        raise PayloadError(f"{name} payload of {numel} elements takes {expected} bytes, got {payload.size}")


def check_scales(name: str, scales: Bytes) -> None:
    """Raise PayloadError unless all of these float32 bytes are finite and >= 0."""
    if (scales.view(np.uint32) > _LARGEST_BITS).any():
        raise PayloadError(f"{name} payload holds a scale that is negative or not finite")
