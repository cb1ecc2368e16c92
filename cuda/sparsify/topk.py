"""The GPU side of `topk` and its other names: exact, by a sampled threshold, and MSTop-K.

A payload's length is known on the device alone, before the end of ``finish`` and ``encode`` by ``status[1]``; payloads lie in buffers of
``payload_bound``. Of the elements, their order and their bytes see `psgc.codecs.sparsify`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from psgc.codecs.codec import Codec, Stream
from psgc.codecs.sparsify.largest import MOST_OVER, sample_size, sampled_rank
from psgc.codecs.topk import TopKCodec
from psgc.cuda.common.checks import check_part, check_payload, check_payloads, check_status
from psgc.cuda.common.device_codec import DeviceCodec, DeviceStream
from psgc.cuda.common.launching import launch, rescaling
from psgc.cuda.common.scratch import Plan, allocated, cut, given_scratch, planned_bytes
from psgc.cuda.sparsify import bisection
from psgc.cuda.sparsify.gaps import CLOSE, OPEN, pack, packing_plan, unpack, unpacking_plan
from psgc.cuda.sparsify.scatter_kernels import (
    ADD,
    PUT,
    TAKE,
    TILE,
    correct_kernel,
    everything_kernel,
    scatter_kernel,
    write_everything_kernel,
)
from psgc.cuda.sparsify.selection import (
    KEY_BITS,
    NO_GUESS,
    SAMPLE_LEVELS,
    Guess,
    Source,
    choose_largest,
    clear,
    emit,
    find_candidates,
    guess,
    selection_plan,
)
from psgc.errors import CodecError


class TopKDevice(DeviceCodec):
    """See the module's text."""

    def __init__(self, codec: Codec) -> None:
        assert isinstance(codec, TopKCodec)
        super().__init__(codec)
        self._topk = codec

    def scratch_bytes(self, numel: int) -> int:
        return max(planned_bytes(self._plan(stage, numel)) for stage in (self._topk, *self._topk.stages))

    def encode(
        self, grad: torch.Tensor, residual: torch.Tensor | None, rescale: float | torch.Tensor, stream: Stream | DeviceStream,
        out: torch.Tensor, status: torch.Tensor, scratch: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        check_part(self.codec, out.device, grad.numel(), grad=grad, residual=residual)
        self._write(Source(grad, residual, rescale), grad.numel(), stream, out, status, scratch, None)

    def finish(
        self, acc: torch.Tensor, numel: int, divisor: int, residual: torch.Tensor | None, residual_out: torch.Tensor | None,
        rescale: float | torch.Tensor, stream: Stream | DeviceStream, out: torch.Tensor, status: torch.Tensor,
        scratch: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        check_part(self.codec, out.device, numel, acc=acc, residual=residual, residual_out=residual_out)
        self._write(Source(acc, residual, rescale, divisor), numel, stream, out, status, scratch, residual_out)

    def decode(self, payload: torch.Tensor, numel: int, out: torch.Tensor) -> None:
        check_part(self.codec, payload.device, numel, out=out)
        out.zero_()
        self._apply(payload, numel, out, PUT)

    def commit(self, payload: torch.Tensor, numel: int, grad: torch.Tensor, residual: torch.Tensor, rescale: float | torch.Tensor) -> None:
        check_part(self.codec, payload.device, numel, grad=grad, residual=residual)
        launch(correct_kernel, -(-numel // TILE), grad, residual, 1, *rescaling(rescale), residual, numel, DIVIDES=False, TILE=TILE)
        self._apply(payload, numel, residual, TAKE)

    def fold(self, payloads: Sequence[torch.Tensor], numel: int, acc: torch.Tensor, fresh: bool) -> None:
        check_part(self.codec, acc.device, numel, acc=acc)
        check_payloads(self.codec, acc.device, numel, payloads)
        total = acc.zero_() if fresh else torch.zeros_like(acc)
        for payload in payloads:
            self._apply(payload, numel, total, ADD)
        if not fresh:
            acc += total

    def _plan(self, codec: TopKCodec, numel: int) -> Plan:
        return {**selection_plan(numel, guess_for(codec, numel)), **packing_plan(codec.most(numel)), **bisection.plan(codec, numel)}

    def _write(
        self, source: Source, numel: int, stream: Stream | DeviceStream, out: torch.Tensor, status: torch.Tensor, scratch: torch.Tensor | None,
        kept: torch.Tensor | None,
    ) -> None:  # fmt: skip
        check_payload(self.codec, out.device, numel, out, "out")
        check_status(self.codec, out.device, status)
        codec = self._stage(stream, numel)
        plan, guessed, k = self._plan(codec, numel), guess_for(codec, numel), codec.count(numel)
        arrays = cut(plan, given_scratch(codec, plan, scratch))
        values = out[: out.numel() // 4 * 4].view(torch.float32)
        clear(arrays)
        levels = -(-KEY_BITS // 8) if codec.select == "sampled" else SAMPLE_LEVELS
        find_candidates(source, numel, guessed, levels, arrays, status, kept)
        if codec.select == "mstopk" and k < numel:
            bisection.choose(source, numel, k, guessed, arrays)
        else:
            choose_largest(source, numel, k, guessed, KEY_BITS, arrays, sampled=codec.select == "sampled")
        emit(source, numel, k, guessed, arrays, values[1:], kept)
        pack(arrays, out, status, 4, 4, numel, CLOSE)
        if 2 * codec.most(numel) > numel:
            launch(
                write_everything_kernel, -(-numel // TILE), *source.arguments, values, arrays["state"], kept, numel, TILE=TILE, **source.constants
            )  # fmt: skip

    def _stage(self, stream: Stream | DeviceStream, numel: int) -> TopKCodec:
        """The codec of the stream's step in a warm-up."""
        if not self._topk.stages:
            return self._topk
        if isinstance(stream, DeviceStream):
            raise CodecError(
                "codec topk: with warmup, payloads depend on the step, so they are not encoded in a graph; leave warmup out there"
            )
        return self._topk.stage(stream.step, numel) or self._topk

    def _apply(self, payload: torch.Tensor, numel: int, out: torch.Tensor, mode: int) -> None:
        check_payload(self.codec, out.device, numel, payload)
        _, most = self._topk.counts(numel)
        arrays = allocated(unpacking_plan(most), out.device)
        values = payload[: payload.numel() // 4 * 4].view(torch.float32)
        unpack(arrays, payload, 4, 4, OPEN)
        launch(scatter_kernel, -(-most // TILE), values, arrays["places"], arrays["totals"], arrays["state"], out, MODE=mode, TILE=TILE)
        if 2 * most > numel:
            launch(everything_kernel, -(-numel // TILE), values, arrays["state"], out, numel, MODE=mode, TILE=TILE)


def guess_for(codec: TopKCodec, numel: int) -> Guess:
    """How the codec's candidates are found."""
    k = codec.count(numel)
    if codec.select == "sampled":
        return Guess(sample_size(numel, k), sampled_rank(numel, k), 0, min(numel, MOST_OVER * k))
    if codec.select == "mstopk":
        return guess(numel, k + 1) if k < numel else NO_GUESS
    return guess(numel, k)
