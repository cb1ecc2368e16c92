"""BytePS's randomk: k elements at random places, as pairs of a uint32 index and a float32 value. A place may come twice, and values are not scaled.

With a common seed all workers and the server draw the same places, step for step; without one, each draws its own, and the server's second
choice is unrelated to the first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from psgc.codecs.jit.kernel import I64, kernel
from psgc.pslite.byteps.compressor import F32, PAIR, Compressor, pairs_of
from psgc.pslite.byteps.random import STATE_TYPE, draw, new_state


@kernel(types.void(STATE_TYPE, I64, types.Array(types.uint32, 1, "C")))
def _places(state: Any, numel: Any, places: Any) -> None:
    for i in range(places.size):
        places[i] = draw(state) % np.uint64(numel)


class RandomK(Compressor):
    """k: elements that are sent. seed: 0 for none."""

    def __init__(self, numel: int, k: int, seed: int) -> None:
        super().__init__(numel)
        self.k = k
        self._state = new_state(seed)

    def encode(self, values: F32) -> bytes:
        places = np.empty(self.k, np.uint32)
        _places(self._state, values.size, places)
        pairs = np.empty(self.k, PAIR)
        pairs["index"], pairs["value"] = places, values[places]
        return pairs.tobytes()

    def decode(self, payload: bytes | memoryview) -> F32:
        return pairs_of(payload, self.numel)
