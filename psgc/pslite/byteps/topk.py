"""BytePS's topk: the k elements of largest magnitude, as pairs of a uint32 index and a float32 value, in the order of a binary heap.

The heap is that of GNU's C++ library (std::push_heap, std::pop_heap), smallest magnitude first, fed with the elements in turn: payloads show its order, so it
is followed step by step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from psgc.codecs.jit.kernel import I64, IN_F32, OUT_F32, helper, kernel
from psgc.pslite.byteps.compressor import F32, PAIR, Compressor, pairs_of

_OUT_U32 = types.Array(types.uint32, 1, "C")


@helper
def _rise(index: Any, value: Any, hole: Any, new_index: Any, new_value: Any) -> Any:
    """Put an element into the heap at ``hole``, or above it."""
    while hole > 0:
        parent = (hole - 1) // 2
        if not abs(value[parent]) > abs(new_value):
            break
        index[hole], value[hole] = index[parent], value[parent]
        hole = parent
    index[hole], value[hole] = new_index, new_value
    return 0


@helper
def _pop(index: Any, value: Any, size: Any) -> Any:
    """Take the smallest element off a heap of ``size``; the last one finds its place among the others."""
    last = size - 1
    moved_index, moved_value = index[last], value[last]
    index[last], value[last] = index[0], value[0]
    hole = child = 0
    while child < (last - 1) // 2:
        child = 2 * (child + 1)
        if abs(value[child]) > abs(value[child - 1]):
            child -= 1
        index[hole], value[hole] = index[child], value[child]
        hole = child
    if last % 2 == 0 and child == (last - 2) // 2:
        child = 2 * (child + 1)
        index[hole], value[hole] = index[child - 1], value[child - 1]
        hole = child - 1
    return _rise(index, value, hole, moved_index, moved_value)


@kernel(types.void(IN_F32, I64, _OUT_U32, OUT_F32))
def _select(values: Any, k: Any, index: Any, value: Any) -> None:
    for i in range(values.size):
        if i < k:
            _rise(index, value, i, np.uint32(i), values[i])
        elif abs(values[i]) > abs(value[0]):
            if k > 1:
                _pop(index, value, k)
            _rise(index, value, k - 1, np.uint32(i), values[i])


class TopK(Compressor):
    """k: elements that are sent."""

    def __init__(self, numel: int, k: int) -> None:
        super().__init__(numel)
        self.k = k

    def encode(self, values: F32) -> bytes:
        index, value = np.empty(self.k, np.uint32), np.empty(self.k, np.float32)
        _select(values, self.k, index, value)
        pairs = np.empty(self.k, PAIR)
        pairs["index"], pairs["value"] = index, value
        return pairs.tobytes()

    def decode(self, payload: bytes | memoryview) -> F32:
        return pairs_of(payload, self.numel)
