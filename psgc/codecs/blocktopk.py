"""The `blocktopk` codec: the blocks of each part with the largest Euclidean norms, all their elements, and their indices.

| offset | type                 | meaning                                                                                    |
|--------|----------------------|--------------------------------------------------------------------------------------------|
| 0      | packed indices       | of the count blocks, see `gaps`; count is k, or ceil(k * blocks) for a fraction             |
| then   | f32 [...]            | their elements, block by block; the part's last block may be shorter                        |

Owns these bytes, the parameters k and ``block`` (elements of a block), and the choice: of equal norms those at the lowest indices.
Squares are summed in float64, where none overflows or vanishes, in 8 lanes: lane j takes elements j, j + 8, ...; then lanes j and j + 4,
j and j + 2, ... are added. In blocks of more than 4096 elements (id 32) each run of 4096 is summed so, and then runs i and i + 8, i and i
+ 4, ... of 16. Unlike in `topk`, a block's elements share one index, and memory is read and written in runs.
Source: Fei et al. 2021 (OmniReduce) for blocks of 256 as the unit; Stich et al. 2018 (error feedback for top-k).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from psgc.codecs.codec import F32, Array, Bytes, Codec, Encoded, Stream
from psgc.codecs.common.feedback import corrected_chunk
from psgc.codecs.common.parameters import read_switch, read_whole, with_defaults
from psgc.codecs.common.sums import LEAF, halve, halved
from psgc.codecs.jit.kernel import BOOL, I64, IN_F32, OUT_F32, SCALAR_F32, kernel
from psgc.codecs.sparsify.counts import check_count, check_part, count_of, read_k, write_k
from psgc.codecs.sparsify.gaps import IN_U32, pack, packed_bound, packed_length, reference_packed, reference_unpacked, unpack, well_formed
from psgc.codecs.sparsify.sparse import SLICE, SparseCodec, reference_scattered
from psgc.errors import PayloadError

MOST_BLOCK: Final = 65536
_LANES: Final = 8
_RUNS: Final = MOST_BLOCK // LEAF
_MAGNITUDE: Final = np.int64(2**63 - 1)
_INFINITY_BITS: Final = 0x7FF0000000000000
_IN_I64: Final = types.Array(types.int64, 1, "C", readonly=True)


def reference_squares(p: F32, block: int) -> NDArray[np.float64]:
    """||p||_2^2 of each block."""
    squares = []
    for start in range(0, p.size, block):
        elements, runs = p[start : start + block], np.zeros((1, _RUNS))
        for number, low in enumerate(range(0, elements.size, LEAF)):
            run = elements[low : low + LEAF]
            padded = np.zeros(-(-run.size // _LANES) * _LANES)
            padded[: run.size] = run
            lanes = np.zeros((1, _LANES))
            for row in padded.reshape(-1, _LANES):
                lanes = lanes + row * row
            runs[0, number] = halved(lanes)[0]
        squares.append(halved(runs)[0])
    return np.array(squares)


def reference_heaviest(squares: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Numbers, ascending, of the heaviest blocks."""
    return np.sort(np.argsort(-_ordered(squares), kind="stable")[:count])


def places_of(blocks: NDArray[Any], block: int, numel: int) -> NDArray[np.uint32]:
    """Places of the elements of some blocks."""
    places = (blocks.astype(np.int64)[:, None] * block + np.arange(block)).ravel()
    return np.asarray(places[places < numel], np.uint32)


def _ordered(squares: NDArray[np.float64]) -> NDArray[np.int64]:
    """Integers that order like the norms, NaN above infinity."""
    return np.asarray(squares.view(np.int64) & _MAGNITUDE, np.int64)


@kernel(types.void(IN_F32, IN_F32, SCALAR_F32, I64, types.Array(types.float64, 1, "C")))
def _sum_squares(values: Any, residual: Any, rescale: Any, block: Any, squares: Any) -> None:
    p, lanes, runs = np.empty(LEAF, np.float32), np.empty(_LANES, np.float64), np.empty(_RUNS, np.float64)
    for number in range(squares.size):
        runs[:] = 0.0
        first, last = number * block, min((number + 1) * block, values.size)
        for run in range(-(-(last - first) // LEAF)):
            start = first + run * LEAF
            stop = min(start + LEAF, last)
            v = values[start:stop]
            corrected_chunk(v, residual[start:stop], rescale, p[: v.size])
            end = -(-v.size // _LANES) * _LANES
            p[v.size : end] = np.float32(0)
            lanes[:] = 0.0
            for i in range(0, end, _LANES):
                for j in range(_LANES):
                    x = np.float64(p[i + j])
                    lanes[j] += x * x
            halve(lanes, _LANES)
            runs[run] = lanes[0]
        halve(runs, _RUNS)
        squares[number] = runs[0]


@kernel(types.void(IN_F32, IN_F32, SCALAR_F32, IN_U32, OUT_F32))
def _gather(values: Any, residual: Any, rescale: Any, places: Any, out: Any) -> None:
    for i in range(out.size):
        place = places[i]
        out[i] = values[place] if residual.size == 0 else values[place] + rescale * residual[place]


class _Sent(NamedTuple):
    """A payload's elements, by ascending place; the sum loses the sign of a zero."""

    places: NDArray[np.uint32]
    values: F32


def _decoded_values(stored: Bytes) -> F32:
    """Values, from where a payload stores them."""
    with np.errstate(invalid="ignore"):  # a peer may send a signalling NaN
        return np.asarray(stored.copy().view(np.float32) + np.float32(0), np.float32)


@kernel(types.void(IN_U32, IN_F32, _IN_I64, OUT_F32, BOOL))
def _sum(places: Any, values: Any, ends: Any, acc: Any, fresh: Any) -> None:
    """Set ``acc`` to the sum of the payloads if ``fresh``, else add that sum to it. The payloads lie one after the other in one array."""
    scratch, cursors = np.empty(SLICE, np.float32), np.zeros(ends.size, np.int64)
    cursors[1:] = ends[:-1]
    for start in range(0, acc.size, SLICE):
        block = acc[start : start + SLICE]
        total, end = block if fresh else scratch[: block.size], start + block.size
        total[:] = np.float32(0)
        for k in range(ends.size):
            at = cursors[k]
            while at < ends[k] and places[at] < end:
                total[places[at] - start] += values[at]
                at += 1
            cursors[k] = at
        if not fresh:
            for i in range(block.size):
                block[i] += total[i]


@kernel(types.void(IN_U32, IN_F32, IN_F32, OUT_F32, SCALAR_F32))
def _commit(places: Any, values: Any, grad: Any, residual: Any, rescale: Any) -> None:
    """residual <- grad + rescale * residual, less the values at their places."""
    at = 0
    for start in range(0, grad.size, SLICE):
        g, r = grad[start : start + SLICE], residual[start : start + SLICE]
        for i in range(g.size):
            r[i] = g[i] + rescale * r[i]
        end = start + g.size
        while at < places.size and places[at] < end:
            r[places[at] - start] -= values[at]
            at += 1


@kernel(types.void(IN_U32, IN_F32, OUT_F32))
def _take(places: Any, values: Any, p: Any) -> None:
    for at in range(places.size):
        p[places[at]] -= values[at]


class BlockTopKCodec(SparseCodec):
    """32 bits, and a small share of an index, for each element that is sent; nothing for the others."""

    name = "blocktopk"
    codec_id = 21
    advice = "gradients that are large in whole runs, as of embeddings; indices cost next to nothing, and memory is read in rows"
    defaults: ClassVar[dict[str, str]] = {"k": "0.01", "block": "256", "ef": "1"}

    def __init__(
        self, dtype: str = "float32", *, k: Fraction | int = Fraction(1, 100), block: int = 256, ef: bool = True
    ) -> None:  # fmt: skip
        super().__init__(dtype, ef=ef)
        self._k, self.block = k, block
        if block > LEAF:
            self.codec_id = 32

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str], dtype: str) -> Codec:
        given = with_defaults(cls, parameters)
        block = read_whole(cls, "block", given["block"], 1, MOST_BLOCK)
        return cls(dtype, k=read_k(cls, given["k"]), block=block, ef=read_switch(cls, "ef", given["ef"]))

    @property
    def parameters(self) -> dict[str, str]:
        given = {"k": write_k(self._k), "block": str(self.block)}
        return super().parameters | {key: text for key, text in given.items() if text != self.defaults[key]}

    def blocks(self, numel: int) -> tuple[int, int]:
        """How many blocks of a part are sent, and how many there are."""
        check_part(self, numel)
        blocks = -(-numel // self.block)
        return count_of(self._k, blocks), blocks

    def check_bucket(self, numel: int) -> None:
        check_count(self, self._k, -(-numel // self.block), f"blocks of {self.block}")

    def contraction(self, numel: int) -> float | None:
        if not self.feedback:
            return None
        count, blocks = self.blocks(numel)
        return count / blocks  # the largest squares are at least their share of all

    def payload_bound(self, numel: int) -> int:
        count, blocks = self.blocks(numel)
        return packed_bound(count, blocks) + 4 * min(count * self.block, numel)

    def validate(self, payload: Bytes, numel: int) -> None:
        count, blocks = self.blocks(numel)
        end = packed_length(payload, count)
        valid = end <= payload.size and well_formed(payload[:end], count, blocks)
        if not valid or payload.size != end + 4 * places_of(self._chosen(payload, count), self.block, numel).size:
            raise PayloadError(
                f"blocktopk payload of {numel} elements: its {payload.size} bytes are not {count} of {blocks} blocks and their elements"
            )

    def write(self, values: F32, residual: F32, rescale: float, out: Bytes) -> Encoded:
        count, blocks = self.blocks(values.size)
        squares = np.empty(blocks)
        _sum_squares(values, residual, rescale, self.block, squares)
        chosen = _heaviest(_ordered(squares), count)
        end = pack(chosen, out)
        places = places_of(chosen, self.block, values.size)
        sent = np.empty(places.size, np.float32)
        _gather(values, residual, rescale, places, sent)
        out[end : end + 4 * sent.size] = sent.view(np.uint8)
        return Encoded(end + 4 * sent.size, bool(_ordered(squares).max() >= _INFINITY_BITS))

    def _read(self, payload: Bytes, numel: int) -> _Sent:
        count, _ = self.blocks(numel)
        places = places_of(self._chosen(payload, count), self.block, numel)
        return _Sent(places, _decoded_values(payload[packed_length(payload, count) :]))

    def take(self, payload: Bytes, p: F32) -> None:
        _take(*self._read(payload, p.size), p)

    def fold(self, payloads: Sequence[Bytes], numel: int, lo: int, hi: int, acc: Array, fresh: bool) -> None:
        sent = [self._read(payload, numel) for payload in payloads]
        places, values = sent[0] if len(sent) == 1 else (np.concatenate(arrays) for arrays in zip(*sent, strict=True))
        _sum(places, values, np.cumsum([one.places.size for one in sent]), acc, fresh)

    def commit(self, payload: Bytes, numel: int, lo: int, hi: int, grad: F32, residual: F32, rescale: float) -> None:
        _commit(*self._read(payload, numel), grad, residual, rescale)

    @staticmethod
    def _chosen(payload: Bytes, count: int) -> NDArray[np.uint32]:
        chosen = np.empty(count, np.uint32)
        unpack(payload, chosen)
        return chosen

    def reference_payload(self, p: Array, stream: Stream) -> bytes:
        count, _ = self.blocks(p.size)
        chosen = reference_heaviest(reference_squares(p, self.block), count)
        return reference_packed(chosen) + p[places_of(chosen, self.block, p.size)].tobytes()

    def reference_elements(self, payload: bytes, numel: int) -> Array:
        count, _ = self.blocks(numel)
        chosen = reference_unpacked(payload, count)
        end = packed_length(np.frombuffer(payload, np.uint8), count)
        return reference_scattered(places_of(chosen, self.block, numel), np.frombuffer(payload, np.float32, offset=end), numel)


def _heaviest(ordered: NDArray[np.int64], count: int) -> NDArray[np.uint32]:
    least = np.partition(ordered, ordered.size - count)[ordered.size - count]
    above = np.flatnonzero(ordered > least)
    level = np.flatnonzero(ordered == least)[: count - above.size]
    return np.sort(np.concatenate([above, level])).astype(np.uint32)
