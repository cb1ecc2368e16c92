"""The `randomk` codec: k elements of each part at random places. All ranks draw the same places, so that only values are sent.

| offset | type          | meaning                                                                                       |
|--------|---------------|-----------------------------------------------------------------------------------------------|
| 0      | u32 [2]       | the stream's keys, which determine the values' places                                         |
| 8      | f32 [count]   | a value for each stratum, in turn; count is k, or ceil(k * numel) for a fraction              |

The keys are those of the stream (seed, step, layout, bucket, first element), without a rank. Places: the part, taken as a ring, is turned by a
random offset and cut into ``count`` strata of equal size (the first ``numel mod count`` have one element more), and one element is
drawn from each; words ``j`` of the stream draw, words ``count`` and ``count + 1`` turn. No place is drawn twice, and each element is
equally likely, whatever the sizes of the strata: of the ``numel`` turns of one draw, ``count`` show it. Places ascend along the ring, and
a slice finds those within it without the others.

Owns these bytes and places, and their sums. Payloads with the same keys are added without decoding. If servers answer with `randomk`,
too, the answer is this sum divided by the divisor, and there is no residual. With feedback, a value is the element; without, it is the element times
numel / count, limited to the largest float, so that the decoded mean is p. Places are drawn within a part.
Source: Stich et al. 2018 (random-k with memory); Cochran 1977, chapters 5 and 8, for strata and systematic samples.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from psgc.codecs.codec import F32, Adder, Array, Bytes, Codec, Encoded, Stream
from psgc.codecs.common.bits import MAX_F32, top_bits, view_f32, view_u32
from psgc.codecs.common.chunks import ChunkCodec, ChunkFormat
from psgc.codecs.common.parameters import read_switch, with_defaults
from psgc.codecs.common.payloads import check_size, reference_sum
from psgc.codecs.common.streams import keys, reference_hash, word
from psgc.codecs.jit.kernel import I64, IN_BYTES, IN_F32, OUT_F32, SCALAR_F32, helper, kernel
from psgc.codecs.sparsify.counts import check_count, check_part, count_of, read_k, write_k
from psgc.errors import CodecError, PayloadError

_INFINITY_BITS: Final = np.uint32(0x7F800000)
_KEYS: Final = 8  # bytes


def reference_places(numel: int, count: int, before: int, between: int) -> NDArray[np.int64]:
    """The element drawn from each stratum."""
    words = reference_hash(np.arange(count + 2, dtype=np.uint32), before, between).astype(np.int64)
    turn = (int(words[count]) << 32 | int(words[count + 1])) * numel >> 64
    strata, (size, wide) = np.arange(count), divmod(numel, count)
    starts, sizes = strata * size + np.minimum(strata, wide), size + (strata < wide)
    return np.asarray((starts + (words[:count] * sizes >> 32) + turn) % numel, np.int64)


@helper
def _turn(numel: Any, count: Any, before: Any, between: Any) -> Any:
    high, low = np.uint64(word(np.uint32(count), before, between)), np.uint64(word(np.uint32(count + 1), before, between))
    return np.int64((high * np.uint64(numel) + (low * np.uint64(numel) >> np.uint64(32))) >> np.uint64(32))


@helper
def _place(stratum: Any, size: Any, wide: Any, turn: Any, numel: Any, before: Any, between: Any) -> Any:
    """The element drawn from a stratum; those before ``wide`` have one more than ``size``."""
    elements = np.uint64(size + 1 if stratum < wide else size)
    drawn = np.int64(np.uint64(word(np.uint32(stratum), before, between)) * elements >> np.uint64(32))
    place = stratum * size + min(stratum, wide) + drawn + turn
    return place - numel if place >= numel else place


@helper
def _stratum_of(position: Any, size: Any, wide: Any) -> Any:
    """The stratum that a position on the ring, before it is turned, lies in."""
    edge = wide * (size + 1)
    return position // (size + 1) if position < edge else wide + (position - edge) // size


@helper
def _strata(start: Any, elements: Any, size: Any, wide: Any, turn: Any, numel: Any, count: Any) -> Any:
    """The first stratum that overlaps some elements from ``start`` on, and how many do, one after the other around the ring."""
    begin = start - turn if start >= turn else start - turn + numel
    end = begin + elements - 1
    first = _stratum_of(begin, size, wide)
    if end < numel:
        return first, _stratum_of(end, size, wide) - first + 1
    return first, min(count, count + _stratum_of(end - numel, size, wide) - first + 1)


@helper
def _write(p: Any, payload: Any, numel: Any, start: Any, settings: Any, draws: Any) -> Any:
    header, count = view_u32(payload, 0, 2), (payload.size - _KEYS) // 4
    before, between = draws[1], draws[2]
    header[0], header[1] = before, between
    values, size, wide, turn = view_f32(payload, _KEYS, count), numel // count, numel % count, _turn(numel, count, before, between)
    scale = np.float32(numel / count) if settings[0] > 0 else np.float32(1)
    stratum, strata = _strata(start, p.size, size, wide, turn, numel, count)
    for _ in range(strata):
        place = _place(stratum, size, wide, turn, numel, before, between) - start
        if 0 <= place < p.size:
            values[stratum] = min(max(p[place] * scale, -MAX_F32), MAX_F32)
        stratum = stratum + 1 if stratum + 1 < count else 0
    return top_bits(p) < _INFINITY_BITS


@helper
def _scatter(payload: Any, numel: Any, start: Any, out: Any, subtracts: Any) -> None:
    """Write the payload's elements to ``out``, which begins at ``start``, at their places only; or take them from what is there."""
    header, count = view_u32(payload, 0, 2), (payload.size - _KEYS) // 4
    before, between = header[0], header[1]
    values, size, wide, turn = view_f32(payload, _KEYS, count), numel // count, numel % count, _turn(numel, count, before, between)
    stratum, strata = _strata(start, out.size, size, wide, turn, numel, count)
    for _ in range(strata):
        place = _place(stratum, size, wide, turn, numel, before, between) - start
        if 0 <= place < out.size:
            out[place] = out[place] - values[stratum] if subtracts else values[stratum]
        stratum = stratum + 1 if stratum + 1 < count else 0


@helper
def _read(payload: Any, numel: Any, start: Any, settings: Any, out: Any) -> None:
    out[:] = np.float32(0)
    _scatter(payload, numel, start, out, False)


_FORMAT: Final = ChunkFormat(_write, _read)


class _Kernels(NamedTuple):
    """Passes over a whole slice at once: its few places are then found in one go, and nothing is computed where nothing was sent."""

    decode: Any
    commit: Any


@functools.cache
def _kernels() -> _Kernels:
    @kernel(types.void(IN_BYTES, I64, I64, OUT_F32))
    def decode(payload: Any, numel: Any, lo: Any, out: Any) -> None:
        _read(payload, numel, lo, out, out)

    @kernel(types.void(IN_BYTES, I64, I64, IN_F32, OUT_F32, SCALAR_F32))
    def commit(payload: Any, numel: Any, lo: Any, grad: Any, residual: Any, rescale: Any) -> None:
        for i in range(grad.size):
            residual[i] = grad[i] + rescale * residual[i]
        _scatter(payload, numel, lo, residual, True)

    return _Kernels(decode, commit)


class RandomKCodec(ChunkCodec, Adder):
    """32 bits for each element that is sent; nothing for the others. Unbiased without feedback."""

    name = "randomk"
    codec_id = 22
    fixed_size = True
    advice = "slow links and many workers: ranks draw the same places, so servers add values alone; topk loses less in as many bytes"
    additive = True
    sparse = True
    defaults: ClassVar[dict[str, str]] = {"k": "0.01", "ef": "1"}
    chunk_format = _FORMAT

    def __init__(
        self, dtype: str = "float32", *, k: Fraction | int = Fraction(1, 100), ef: bool = True, sums: bool = False
    ) -> None:  # fmt: skip
        """sums: the codec encodes sums of its own payloads, which are zero except at the places, and whose values are already scaled."""
        super().__init__(dtype, ef=ef)
        self._k, self._sums = k, sums
        self.of_sums = sums
        self.unbiased = not ef
        self.settings = np.array([not ef and not sums], np.float32)

    @property
    def cut_anywhere(self) -> bool:
        return False  # chooses its places within a part

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str], dtype: str) -> Codec:
        given = with_defaults(cls, parameters)
        return cls(dtype, k=read_k(cls, given["k"]), ef=read_switch(cls, "ef", given["ef"]))

    @property
    def parameters(self) -> dict[str, str]:
        k = write_k(self._k)
        return super().parameters | ({} if k == self.defaults["k"] else {"k": k})

    @property
    def feedback(self) -> bool:
        return self._ef and not self._sums

    def fold_and_finish(
        self, push: Codec, payloads: Sequence[Bytes], numel: int, divisor: int, residual: F32 | None, residual_out: F32 | None,
        rescale: float, stream: Stream, out: Bytes,
    ) -> None:  # fmt: skip
        """None: with the same push codec, the answer is a sum of payloads; for other codecs there is no kernel with fewer passes."""

    def answering(self, push: Codec) -> Codec:
        if not isinstance(push, RandomKCodec):
            return self
        if push.canonical != self.canonical:
            raise CodecError(
                f"codec {self.canonical} cannot answer {push.canonical}: both draw places from one stream; give both the same parameters"
            )
        return RandomKCodec(self.dtype, k=self._k, ef=self._ef, sums=True)

    def count(self, numel: int) -> int:
        """How many elements of a part are sent."""
        check_part(self, numel)
        return count_of(self._k, numel)

    def check_bucket(self, numel: int) -> None:
        check_count(self, self._k, numel, "elements")

    def contraction(self, numel: int) -> float | None:
        return self.count(numel) / numel if self._ef else None  # on average, the squares at random places are this share of all squares

    def payload_bound(self, numel: int) -> int:
        return _KEYS + 4 * self.count(numel)

    def validate(self, payload: Bytes, numel: int) -> None:
        check_size(self.name, payload, numel, self.payload_bound(numel))

    def encode(self, grad: Array, residual: F32 | None, rescale: float, stream: Stream, out: Bytes) -> Encoded:
        return super().encode(grad, residual, rescale, shared_stream(stream), out[: self.payload_bound(grad.size)])

    def finish(
        self, acc: Array, numel: int, lo: int, hi: int, divisor: int, residual: F32 | None, residual_out: F32 | None,
        rescale: float, stream: Stream, out: Bytes,
    ) -> Encoded:  # fmt: skip
        payload = out[: self.payload_bound(numel)]
        return super().finish(acc, numel, lo, hi, divisor, residual, residual_out, rescale, shared_stream(stream), payload)

    def decode(self, payload: Bytes, numel: int, lo: int, hi: int, out: Array) -> None:
        _kernels().decode(payload, numel, lo, out)

    def commit(self, payload: Bytes, numel: int, lo: int, hi: int, grad: F32, residual: F32, rescale: float) -> None:
        _kernels().commit(payload, numel, lo, grad, residual, rescale)

    def warm(self) -> None:
        super().warm()
        _kernels()

    def fold(self, payloads: Sequence[Bytes], numel: int, lo: int, hi: int, acc: Array, fresh: bool) -> None:
        _check_keys(payloads, numel)
        super().fold(payloads, numel, lo, hi, acc, fresh)

    def add(self, payloads: Sequence[Bytes], numel: int, total: Bytes, fresh: bool) -> None:
        _check_keys(payloads if fresh else [total, *payloads], numel)
        total[:_KEYS] = payloads[0][:_KEYS]
        values = total[_KEYS : self.payload_bound(numel)].view(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            values[:] = reference_sum([payload[_KEYS:].view(np.float32) for payload in payloads], None if fresh else values)

    def divide(self, total: Bytes, numel: int, divisor: int) -> Encoded:
        payload_bytes = self.payload_bound(numel)
        values = total[_KEYS:payload_bytes].view(np.float32)
        with np.errstate(invalid="ignore"):
            values /= np.float32(divisor)
        return Encoded(payload_bytes, not np.isfinite(values).all())

    def reference_payload(self, p: Array, stream: Stream) -> bytes:
        before, between = keys(shared_stream(stream))
        places = reference_places(p.size, self.count(p.size), before, between)
        scale = np.float32(p.size / places.size) if self.settings[0] else np.float32(1)
        with np.errstate(over="ignore"):
            values = np.clip(p[places] * scale, -MAX_F32, MAX_F32)
        return np.array([before, between], np.uint32).tobytes() + values.tobytes()

    def reference_elements(self, payload: bytes, numel: int) -> Array:
        before, between = np.frombuffer(payload, np.uint32, 2).tolist()
        values, out = np.frombuffer(payload, np.float32, offset=_KEYS), np.zeros(numel, np.float32)
        out[reference_places(numel, values.size, before, between)] = values
        return out


def shared_stream(stream: Stream) -> Stream:
    """The stream that all ranks share: it depends on the part's first element, not on the rank."""
    return replace(stream, rank=stream.first)


def _check_keys(payloads: Sequence[Bytes], numel: int) -> None:
    """Raise PayloadError unless all values belong at the same places."""
    found = {payload[:_KEYS].tobytes() for payload in payloads}
    if len(found) > 1:
        raise PayloadError(
            f"randomk payloads of {numel} elements have different keys, {' and '.join(sorted(key.hex() for key in found))}: "
            f"ranks must be at one step and have the same PSGC_SEED"
        )
