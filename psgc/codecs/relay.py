"""Relay: the server forwards every worker's payload, and each worker decodes and sums them itself.

| offset             | type                 | meaning                                                             |
|--------------------|----------------------|---------------------------------------------------------------------|
| 0                  | u32                  | count: how many payloads (skipping ranks have none), 1..workers     |
| 4                  | u32 [count]          | bytes of each, in rank order                                        |
| 4 + 4 * count      | bytes                | the payloads, one after the other                                   |

Owns this answer, written by the server and read by workers. It carries W payloads where a re-encoded sum would be one payload, but the
pull is lossless. Payloads are added in eights, left to right, then the eights: for up to
8 workers in rank order, and alike on every worker.
Source: the all-gather of Espresso (EuroSys'23) section 4 and of PyTorch's communication hooks, through a server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from psgc.codecs.codec import F32, Array, Bytes, Codec, CodecPair, Encoded, Stream
from psgc.codecs.common.payloads import MAX_PAYLOADS
from psgc.codecs.scheme import BucketContext, Round, Scheme, SchemeState, check_part, slices
from psgc.errors import CodecError, PayloadError


def join_payloads(payloads: Sequence[Bytes], out: Bytes) -> int:
    """Write the answer above; returns its length."""
    head = np.array([len(payloads), *(len(payload) for payload in payloads)], np.uint32).view(np.uint8)
    out[: head.size] = head
    place = head.size
    for payload in payloads:
        out[place : place + len(payload)] = payload
        place += len(payload)
    return int(place)


def split_payloads(answer: Bytes, workers: int) -> list[Bytes]:
    """The payloads in an answer. Raises PayloadError if it is malformed."""
    count = int(answer[:4].view(np.uint32)[0]) if answer.size >= 4 else 0
    if not 1 <= count <= workers or answer.size < 4 + 4 * count:
        raise PayloadError(f"relayed answer of {answer.size} bytes holds {count} payloads; 1 to {workers} expected, with their lengths")
    lengths = answer[4 : 4 + 4 * count].copy().view(np.uint32).astype(np.int64)
    ends = 4 + 4 * count + np.cumsum(lengths)
    if ends[-1] != answer.size:
        raise PayloadError(f"relayed answer has {answer.size} bytes, but its {count} payloads end at {ends[-1]}")
    return [answer[end - length : end] for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)]


class RelayCodec(Codec):
    """Represents the server's answer in a pair. The server makes its bytes with ``join_payloads`` and computes no sum."""

    name = "relay"
    codec_id = 27
    chunk = 0

    def __init__(self, push: Codec, workers: int) -> None:
        super().__init__(push.dtype)
        self._push, self._workers = push, workers

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str], dtype: str) -> Codec:
        raise CodecError("codec relay is an answer: write it behind another one, as in 'onebit/relay'")

    @property
    def parameters(self) -> dict[str, str]:
        return {}

    @property
    def array_dtype(self) -> Any:
        return self._push.array_dtype

    def payload_bound(self, numel: int) -> int:
        return 4 + self._workers * (4 + self._push.payload_bound(numel))

    def validate(self, payload: Bytes, numel: int) -> None:
        for part in split_payloads(payload, self._workers):
            self._push.validate(part, numel)

    def encode(self, grad: Array, residual: F32 | None, rescale: float, stream: Stream, out: Bytes) -> Encoded:
        raise NotImplementedError

    def decode(self, payload: Bytes, numel: int, lo: int, hi: int, out: Array) -> None:
        raise NotImplementedError

    def fold(self, payloads: Sequence[Bytes], numel: int, lo: int, hi: int, acc: Array, fresh: bool) -> None:
        raise NotImplementedError

    def finish(
        self, acc: Array, numel: int, lo: int, hi: int, divisor: int, residual: F32 | None, residual_out: F32 | None,
        rescale: float, stream: Stream, out: Bytes,
    ) -> Encoded:  # fmt: skip
        raise NotImplementedError

    def reference_payload(self, p: Array, stream: Stream) -> bytes:
        raise NotImplementedError

    def reference_elements(self, payload: bytes, numel: int) -> Array:
        raise NotImplementedError


def is_relayed(scheme: Scheme) -> bool:
    """Whether servers answer with workers' payloads as they are."""
    return any(isinstance(round_.pair.pull, RelayCodec) for round_ in scheme.rounds(1))


class RelayScheme(Scheme):
    """One round: workers push with ``push``, and servers answer with the payloads of all workers."""

    def __init__(self, push: Codec, context: BucketContext) -> None:
        if push.acc_dtype != np.float32 or push.array_dtype != np.float32:
            raise CodecError(f"codec {push.canonical}/relay carries floats that are summed in float32, not {push.dtype}")
        self._push, self.context = push, context

    @property
    def canonical(self) -> str:
        return f"{self._push.canonical}/relay"

    @property
    def feedback(self) -> bool:
        return self._push.feedback

    @property
    def unbiased(self) -> bool:
        return self._push.unbiased

    @property
    def flags_nonfinite(self) -> bool:
        return self._push.flags_nonfinite

    @property
    def device_codecs(self) -> tuple[Codec, ...]:
        return (self._push,)

    def rounds(self, numel: int) -> tuple[Round, ...]:
        return (Round(CodecPair(self._push, RelayCodec(self._push, self.context.workers)), numel, divides=False),)

    def new_state(self, numel: int) -> SchemeState:
        check_part(self.canonical, numel)
        return _RelayState(self._push, self.context, self.rounds(numel))


class _RelayState(SchemeState):
    def __init__(self, push: Codec, context: BucketContext, rounds: tuple[Round, ...]) -> None:
        self.rounds = rounds
        self._push, self._context, self._numel = push, context, rounds[0].numel

    def encode(self, index: int, grad: Array, residual: F32 | None, rescale: float, stream: Stream, out: Bytes) -> Encoded:
        return self._push.encode(grad, residual, rescale, stream, out)

    def apply(self, payload: Bytes, sent: Sequence[Bytes], target: Array, residual: F32 | None, rescale: float) -> None:
        push, numel = self._push, self._numel
        payloads = split_payloads(payload, self._context.workers)
        for part in payloads:
            push.validate(part, numel)
        for lo, hi in slices(push, numel):
            if residual is not None:
                push.commit(sent[0], numel, lo, hi, target[lo:hi], residual[lo:hi], rescale)
            for first in range(0, len(payloads), MAX_PAYLOADS):
                push.fold(payloads[first : first + MAX_PAYLOADS], numel, lo, hi, target[lo:hi], first == 0)
            if self._context.mean:
                target[lo:hi] /= np.float32(self._context.workers)

    def add_back(self, sent: Sequence[Bytes], residual: F32) -> None:
        for lo, hi in slices(self._push, self._numel):
            self._push.fold([sent[0]], self._numel, lo, hi, residual[lo:hi], False)
