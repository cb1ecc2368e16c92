"""The `shared` scheme: integers in a scale that all workers share, so that servers add them without decoding.

Round 0, the largest magnitudes (`max`); the server answers with the largest of all workers':

| offset | type                     | meaning                                    |
|--------|--------------------------|--------------------------------------------|
| 0      | f32 [ceil(numel / 256)]  | max|p| of each block, finite, >= 0         |

Round 1, codes in steps of max|p| / 127 up, and their integer sums down:

| offset | type                     | meaning                                    |
|--------|--------------------------|--------------------------------------------|
| 0      | i8 [numel]               | up: codes in -127..127                     |
| 0      | i16 or i32 [numel]       | down: sums; i16 for up to 258 workers      |

Owns these three layouts. The element is sum * scale / divisor, with the scale max|p| / 127, each operation rounded to float32. Sums of
integers do not depend on the order. If the largest possible sum of a block, 127 * workers, times its scale exceeds float32, the server flags
round 0 as non-finite, and the step is treated like one of a gradient with an infinity. With feedback, codes are rounded to nearest even; without,
stochastically, with each rank's own stream, so that the decoded mean is unbiased. Blocks whose scale would not be a normal float have codes
0. Only workers' encoding loses anything, so servers keep no residual.
Source: Li et al. 2024 (THC, NSDI'24), uniform homomorphic compression, with max-norm blocks in place of its rotation and table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np
from numba import types

from psgc.codecs.codec import F32, FLOATS, Array, Bytes, Codec, CodecPair, Encoded, Stream
from psgc.codecs.common.bits import bits_of_f32, borrowed, f32_of_bits, top_bits, view_f32, view_i8, view_i16, view_i32
from psgc.codecs.common.feedback import CHUNK, NO_RESIDUAL, corrected_chunk, reference_corrected
from psgc.codecs.common.parameters import read_switch, with_defaults
from psgc.codecs.common.payloads import MAX_PAYLOADS, check_scales, check_size, eight, reference_sum
from psgc.codecs.common.streams import reference_uniform, stream_position, uniform
from psgc.codecs.jit.kernel import BOOL, I64, IN_BYTES, IN_F32, OUT_BYTES, OUT_F32, SCALAR_F32, U32, helper, kernel
from psgc.codecs.scheme import BucketContext, Round, Scheme, SchemeState, check_part
from psgc.errors import CodecError, PayloadError

BLOCK: Final = 256  # elements that share a scale
TOP: Final = np.float32(127)
NARROW_WORKERS: Final = 32767 // 127  # whose sums of codes fit 16 bits
MOST_WORKERS: Final = (2**31 - 1) // 127
_INFINITY_BITS: Final = np.uint32(0x7F800000)
_ROUNDER: Final = np.float32(1.5 * 2**23)  # x + this has x, rounded to nearest even, in its low bits for |x| < 2**22
LEAST_TOP: Final = np.float32(127 * np.finfo(np.float32).tiny * 1.0001)  # below, the scale might not be a normal float
IN_I32: Final = types.Array(types.int32, 1, "C", readonly=True)
OUT_I32: Final = types.Array(types.int32, 1, "C")


def reference_maxima(p: F32) -> F32:
    """max|p| of each block of 256."""
    return np.array([np.abs(p[start : start + BLOCK]).max() for start in range(0, p.size, BLOCK)], np.float32)


def reference_codes(p: F32, maxima: F32, random: F32 | None) -> Array:
    """Codes of p in the shared scales; rounded stochastically where there are random numbers, else to nearest even."""
    tops = np.repeat(maxima, BLOCK)[: p.size]
    live = tops >= LEAST_TOP
    factors = np.divide(TOP, tops, out=np.zeros_like(tops), where=live)
    scaled = np.clip(p * factors, -TOP, TOP)
    if random is None:
        return np.where(live, np.rint(scaled), 0).astype(np.int8)
    below = np.floor(scaled)
    return np.where(live, below + (random < scaled - below), 0).astype(np.int8)


def reference_elements(sums: Array, maxima: F32, divisor: int) -> F32:
    """Elements of summed codes."""
    scales = np.repeat(np.where(maxima >= LEAST_TOP, maxima / TOP, np.float32(0)), BLOCK)[: sums.size]
    elements = sums.astype(np.float32) * scales.astype(np.float32)
    return np.asarray(elements if divisor == 1 else elements / np.float32(divisor), np.float32)


@helper
def _write_nearest(p: Any, factor: Any, codes: Any) -> None:
    for i in range(p.size):
        codes[i] = np.int8(bits_of_f32(p[i] * factor + _ROUNDER))


@helper
def _write_at_random(p: Any, factor: Any, codes: Any, index: Any, before: Any, between: Any) -> None:
    for i in range(p.size):
        scaled = p[i] * factor
        scaled = TOP if scaled > TOP else scaled
        scaled = -TOP if scaled < -TOP else scaled
        below = np.floor(scaled)
        up = np.float32(1) if uniform(np.uint32(index + np.uint32(i)), before, between) < scaled - below else np.float32(0)
        codes[i] = np.int8(bits_of_f32(below + up + _ROUNDER))


@kernel(BOOL(IN_F32, IN_F32, SCALAR_F32, OUT_BYTES))
def _write_maxima(grad: Any, residual: Any, rescale: Any, out: Any) -> bool:
    p, most = np.empty(CHUNK, np.float32), np.uint32(0)
    for start in range(0, grad.size, CHUNK):
        g = grad[start : start + CHUNK]
        corrected_chunk(g, residual[start : start + CHUNK], rescale, p[: g.size])
        maxima = view_f32(out, 4 * (start // BLOCK), -(-g.size // BLOCK))
        for block in range(maxima.size):
            top = top_bits(p[block * BLOCK : min((block + 1) * BLOCK, g.size)])
            most = max(most, top)
            maxima[block] = f32_of_bits(top) if top < _INFINITY_BITS else np.float32(0)
    return bool(most < _INFINITY_BITS)


@kernel(types.void(IN_F32, IN_F32, SCALAR_F32, IN_F32, BOOL, U32, U32, U32, OUT_BYTES))
def _write_codes(
    grad: Any, residual: Any, rescale: Any, maxima: Any, random: Any, first: Any, before: Any, between: Any, out: Any
) -> None:  # fmt: skip
    p = np.empty(CHUNK, np.float32)
    for start in range(0, grad.size, CHUNK):
        g = grad[start : start + CHUNK]
        corrected_chunk(g, residual[start : start + CHUNK], rescale, p[: g.size])
        codes = view_i8(out, start, g.size)
        for low in range(0, g.size, BLOCK):
            values, target = p[low : min(low + BLOCK, g.size)], codes[low : min(low + BLOCK, g.size)]
            top = maxima[(start + low) // BLOCK]
            if top < LEAST_TOP:
                target[:] = np.int8(0)
            elif random:
                _write_at_random(values, TOP / top, target, np.uint32(first + np.uint32(start + low)), before, between)
            else:
                _write_nearest(values, TOP / top, target)


@kernel(types.void(IN_BYTES, IN_F32, SCALAR_F32, BOOL, IN_BYTES, BOOL, OUT_F32, OUT_F32, SCALAR_F32))
def _apply(sums: Any, maxima: Any, divisor: Any, narrow: Any, sent: Any, commit: Any, target: Any, residual: Any, rescale: Any) -> None:
    """residual <- target + rescale * residual - codes * scale, then target <- sums * scale / divisor, a block at a time."""
    p, numel = np.empty(BLOCK, np.float32), target.size
    codes = view_i8(sent, 0, numel)
    short, long = view_i16(sums, 0, numel), view_i32(sums, 0, numel)
    for low in range(0, numel, BLOCK):
        high = min(low + BLOCK, numel)
        target_block, top = target[low:high], maxima[low // BLOCK]
        scale = top / TOP if top >= LEAST_TOP else np.float32(0)
        if commit:
            residual_block, sent_codes = residual[low:high], codes[low:high]
            corrected_chunk(target_block, residual_block, rescale, p[: target_block.size])
            for i in range(target_block.size):
                residual_block[i] = p[i] - np.float32(sent_codes[i]) * scale
        if narrow:
            narrow_sums = short[low:high]
            for i in range(target_block.size):
                target_block[i] = np.float32(narrow_sums[i]) * scale
        else:
            wide_sums = long[low:high]
            for i in range(target_block.size):
                target_block[i] = np.float32(wide_sums[i]) * scale
        if divisor != 1:
            for i in range(target_block.size):
                target_block[i] /= divisor


@kernel(types.void(IN_BYTES, IN_F32, OUT_F32))
def _add_codes(sent: Any, maxima: Any, residual: Any) -> None:
    codes = view_i8(sent, 0, residual.size)
    for i in range(residual.size):
        top = maxima[i // BLOCK]
        residual[i] += np.float32(codes[i]) * (top / TOP if top >= LEAST_TOP else np.float32(0))


@kernel(types.void(*[IN_BYTES] * MAX_PAYLOADS, I64, I64, OUT_I32, BOOL))
def _fold_codes(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, count: Any, lo: Any, acc: Any, fresh: Any) -> None:
    payloads = (*borrowed(a, b, c, d), *borrowed(e, f, g, h))
    for start in range(0, acc.size, CHUNK):
        chunk, done = acc[start : start + CHUNK], 0
        if count >= 4:  # constant indices: a switch over eight arrays is slow
            codes_a, codes_b = view_i8(payloads[0], lo + start, chunk.size), view_i8(payloads[1], lo + start, chunk.size)
            codes_c, codes_d = view_i8(payloads[2], lo + start, chunk.size), view_i8(payloads[3], lo + start, chunk.size)
            if fresh:  # a sum that begins needs no pass of zeros, nor to be read
                for i in range(chunk.size):
                    chunk[i] = np.int32(np.int16(codes_a[i]) + np.int16(codes_b[i])) + np.int32(np.int16(codes_c[i]) + np.int16(codes_d[i]))
            else:
                for i in range(chunk.size):
                    chunk[i] += np.int32(np.int16(codes_a[i]) + np.int16(codes_b[i])) + np.int32(
                        np.int16(codes_c[i]) + np.int16(codes_d[i])
                    )
            done = 4
        elif fresh:
            chunk[:] = np.int32(0)
        for k in range(done, count):
            codes = view_i8(payloads[k], lo + start, chunk.size)
            for i in range(chunk.size):
                chunk[i] += np.int32(codes[i])


@kernel(types.void(IN_I32, I64, BOOL, OUT_BYTES))
def _write_sums(acc: Any, lo: Any, narrow: Any, out: Any) -> None:
    if narrow:
        short = view_i16(out, 2 * lo, acc.size)
        for i in range(acc.size):
            short[i] = np.int16(acc[i])
    else:
        long = view_i32(out, 4 * lo, acc.size)
        for i in range(acc.size):
            long[i] = acc[i]


class _InnerCodec(Codec):
    """A codec of one round. It has no text form of its own; the worker's side of it is in the ``SchemeState``."""

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str], dtype: str) -> Codec:
        raise CodecError(f"codec {cls.name} is a round of codec shared; use shared")

    @property
    def parameters(self) -> dict[str, str]:
        return {}


class MaxCodec(_InnerCodec):
    """Round 0: magnitudes up, their maxima down. workers: how many codes are summed in round 1."""

    name = "max"
    codec_id = 24

    def __init__(self, workers: int) -> None:
        super().__init__("float32")
        self._most = np.float32(int(TOP) * workers)

    def payload_bound(self, numel: int) -> int:
        return 4 * numel

    def validate(self, payload: Bytes, numel: int) -> None:
        check_size(self.name, payload, numel, 4 * numel)
        check_scales(self.name, payload)

    def encode(self, grad: Array, residual: F32 | None, rescale: float, stream: Stream, out: Bytes) -> Encoded:
        out[: 4 * grad.size] = grad.view(np.uint8)
        return Encoded(4 * grad.size, not bool(np.isfinite(grad).all()))

    def decode(self, payload: Bytes, numel: int, lo: int, hi: int, out: Array) -> None:
        out.view(np.uint8)[:] = payload[4 * lo : 4 * hi]

    def fold(self, payloads: Sequence[Bytes], numel: int, lo: int, hi: int, acc: Array, fresh: bool) -> None:
        for index, payload in enumerate(payloads):
            magnitudes = payload[4 * lo : 4 * hi].view(np.float32)
            if fresh and index == 0:
                acc[:] = magnitudes
            else:
                np.maximum(acc, magnitudes, out=acc)

    def finish(
        self, acc: Array, numel: int, lo: int, hi: int, divisor: int, residual: F32 | None, residual_out: F32 | None,
        rescale: float, stream: Stream, out: Bytes,
    ) -> Encoded:  # fmt: skip
        out[4 * lo : 4 * hi] = acc.view(np.uint8)
        with np.errstate(over="ignore"):
            largest = self._most * (acc.max() / TOP)
        return Encoded(4 * numel, not bool(np.isfinite(largest)))

    def reference_payload(self, p: Array, stream: Stream) -> bytes:
        return p.tobytes()

    def reference_elements(self, payload: bytes, numel: int) -> Array:
        return np.frombuffer(payload, np.float32)


class CodesCodec(_InnerCodec):
    """Round 1: codes up (what a worker pushes), or their sums down (``narrow``: in 16 bits)."""

    name = "codes"
    additive = True
    chunk = 65536

    def __init__(self, *, down: bool, narrow: bool = True) -> None:
        super().__init__("float32")
        self._down, self._narrow = down, narrow
        self._item = (2 if narrow else 4) if down else 1
        self.codec_id = (26 if narrow else 28) if down else 25

    @property
    def acc_dtype(self) -> Any:
        return np.int32

    def payload_bound(self, numel: int) -> int:
        return self._item * numel

    def validate(self, payload: Bytes, numel: int) -> None:
        check_size(self.name, payload, numel, self._item * numel)
        if not self._down and (payload.view(np.int8) == -128).any():
            raise PayloadError("codes payload holds -128; codes lie in -127..127")

    def encode(self, grad: Array, residual: F32 | None, rescale: float, stream: Stream, out: Bytes) -> Encoded:
        raise NotImplementedError("the shared scales are needed: see SharedState")

    def decode(self, payload: Bytes, numel: int, lo: int, hi: int, out: Array) -> None:
        raise NotImplementedError("the shared scales are needed: see SharedState")

    def fold(self, payloads: Sequence[Bytes], numel: int, lo: int, hi: int, acc: Array, fresh: bool) -> None:
        _fold_codes(*eight(payloads), len(payloads), lo, acc, fresh)

    def finish(
        self, acc: Array, numel: int, lo: int, hi: int, divisor: int, residual: F32 | None, residual_out: F32 | None,
        rescale: float, stream: Stream, out: Bytes,
    ) -> Encoded:  # fmt: skip
        _write_sums(acc, lo, self._narrow, out)
        return Encoded(self._item * numel, nonfinite=False)

    def reference_payload(self, p: Array, stream: Stream) -> bytes:
        return p.astype(np.int16 if self._narrow else np.int32).tobytes()

    def reference_elements(self, payload: bytes, numel: int) -> Array:
        return np.frombuffer(payload, np.int8).astype(np.int32)


class SharedScheme(Scheme):
    """8.125 bits an element up and 16.125 down (32.125 for more than 258 workers)."""

    name: ClassVar[str] = "shared"
    defaults: ClassVar[Mapping[str, str]] = {"ef": "1"}
    advice: ClassVar[str] = (
        "many workers, busy servers: they add integers instead of decoding, and the answer loses nothing; a small extra round a step"
    )

    def __init__(self, context: BucketContext = BucketContext(), *, ef: bool = True) -> None:  # noqa: B008 - immutable
        if context.dtype not in FLOATS:
            raise CodecError(f"codec shared carries {', '.join(FLOATS)}, not {context.dtype}; use 'none' for this tensor")
        if context.workers > MOST_WORKERS:
            raise CodecError(f"codec shared: sums of {context.workers} workers do not fit 32 bits; at most {MOST_WORKERS}")
        self.context, self._ef = context, ef

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str], context: BucketContext) -> SharedScheme:
        """Build from the text form's parameters. Raises CodecError naming the parameter."""
        return cls(context, ef=read_switch(cls, "ef", with_defaults(cls, parameters)["ef"]))

    @property
    def parameters(self) -> dict[str, str]:
        return {} if self._ef else {"ef": "0"}

    @property
    def feedback(self) -> bool:
        return self._ef

    @property
    def unbiased(self) -> bool:
        return not self._ef

    @property
    def additive(self) -> bool:
        return True

    @property
    def narrow(self) -> bool:
        """Whether sums travel in 16 bits."""
        return self.context.workers <= NARROW_WORKERS

    def rounds(self, numel: int) -> tuple[Round, ...]:
        maxima, codes, sums = MaxCodec(self.context.workers), CodesCodec(down=False), CodesCodec(down=True, narrow=self.narrow)
        return Round(CodecPair(maxima, maxima), -(-numel // BLOCK), divides=False), Round(CodecPair(codes, sums), numel, divides=False)

    def new_state(self, numel: int) -> SharedState:
        check_part(self.canonical, numel)
        return SharedState(self.rounds(numel), self.context, random=not self._ef, narrow=self.narrow)


class SharedState(SchemeState):
    """Keeps a step's shared maxima from round 0 on, until those of the next step arrive."""

    def __init__(self, rounds: tuple[Round, ...], context: BucketContext, *, random: bool, narrow: bool) -> None:
        self.rounds = rounds
        self._random, self._narrow = random, narrow
        self._divisor = context.workers if context.mean else 1
        self._maxima = np.zeros(rounds[0].numel, np.float32)

    def encode(self, index: int, grad: Array, residual: F32 | None, rescale: float, stream: Stream, out: Bytes) -> Encoded:
        old = NO_RESIDUAL if residual is None else residual
        if index == 0:
            return Encoded(4 * self._maxima.size, not _write_maxima(grad, old, rescale, out))
        random = stream_position(stream, 0) if self._random else (0, 0, 0)
        _write_codes(grad, old, rescale, self._maxima, self._random, *random, out)
        return Encoded(grad.size, nonfinite=False)

    def take(self, index: int, payload: Bytes) -> None:
        pull = self.rounds[0].pair.pull
        pull.validate(payload, self._maxima.size)
        pull.decode(payload, self._maxima.size, 0, self._maxima.size, self._maxima)

    def apply(self, payload: Bytes, sent: Sequence[Bytes], target: Array, residual: F32 | None, rescale: float) -> None:
        self.rounds[1].pair.pull.validate(payload, target.size)
        codes = sent[1] if residual is not None else payload
        _apply(
            payload, self._maxima, self._divisor, self._narrow, codes, residual is not None, target,
            np.empty(0, np.float32) if residual is None else residual, rescale,
        )  # fmt: skip

    def add_back(self, sent: Sequence[Bytes], residual: F32) -> None:
        _add_codes(sent[1], self._maxima, residual)


def reference_step(
    grads: Sequence[F32], residuals: Sequence[F32] | None, rescale: float, streams: Sequence[Stream], divisor: int
) -> tuple[F32, list[F32]]:  # fmt: skip
    """One step of all workers: the aggregate, and the residuals (empty without feedback)."""
    ps = [reference_corrected(g, None if residuals is None else residuals[i], rescale) for i, g in enumerate(grads)]
    maxima = np.asarray(np.max([reference_maxima(p) for p in ps], axis=0), np.float32)
    codes = [
        reference_codes(p, maxima, None if residuals is not None else reference_uniform(stream, 0, p.size))
        for p, stream in zip(ps, streams, strict=True)
    ]
    sums = reference_sum([c.astype(np.int32) for c in codes], None)
    kept = (
        [] if residuals is None else [np.asarray(p - reference_elements(c, maxima, 1), np.float32) for p, c in zip(ps, codes, strict=True)]
    )
    return reference_elements(sums, maxima, divisor), kept
