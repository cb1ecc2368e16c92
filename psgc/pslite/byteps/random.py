"""BytePS's random numbers: xorshift128+, one stream for each compressor, which begins anew with each part."""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from psgc.codecs.jit.kernel import helper

State = NDArray[np.uint64]
STATE_TYPE = types.Array(types.uint64, 1, "C")


def new_state(seed: int) -> State:
    """seed: 0 for a random one, as in BytePS."""
    return np.array([seed, seed] if seed else [secrets.randbits(32), secrets.randbits(32)], np.uint64)


@helper
def draw(state: Any) -> Any:
    """The next 64 bits."""
    t, s = state[0], state[1]
    state[0] = s
    t ^= t << np.uint64(23)
    t ^= t >> np.uint64(17)
    t ^= s ^ (s >> np.uint64(26))
    state[1] = t
    return t + s
