"""A script's pairs of functions, by the names that they have been given in this process. Loads no compiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from psgc.codecs.codec import F32, Bytes

LEAST_PER_ELEMENT: Final = 0.001  # parts are made so long that a payload is worth a message


@dataclass(frozen=True, slots=True)
class Functions:
    """A codec's two halves. ``compress`` gets float32 elements that it may overwrite; ``decompress`` gets a payload and how many elements
    there are, and gives as many float32 elements. Both may be called from several threads."""

    compress: Callable[[F32], Bytes]
    decompress: Callable[[Bytes, int], F32]
    bytes_per_element: float
    extra_bytes: int
    feedback: bool


_registered: dict[str, Functions] = {}


def known_functions() -> dict[str, Functions]:
    """Registered functions, by the names that ``registry`` has given them in this process."""
    return _registered
