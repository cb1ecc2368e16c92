"""The GPU side of `topk` and its other names: exact, by a sampled threshold, and MSTop-K.

A payload's length is known on the device alone, before the end of ``finish`` and ``encode`` by ``status[1]``; payloads lie in buffers of
``payload_bound``. Of the elements, their order and their bytes see `psgc.codecs.sparsify`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from psgc.codecs.codec import Codec, Stream
from psgc.codecs.sparsify.largest import MOST_OVER, sample_size, sampled_rank
from psgc.codecs.topk import TopKCodec
from psgc.cuda.common.launching import TRITON_DTYPES, launch, rescaling
from psgc.cuda.common.many import ReadingTables, Tables
from psgc.cuda.common.scratch import Plan, allocated, cut, given_scratch, planned_bytes
from psgc.cuda.sparsify import bisection
from psgc.cuda.sparsify.gaps import CLOSE, OPEN, pack, packing_plan, unpack, unpacking_plan
from psgc.cuda.sparsify.many.topk_kernels import topk_many_kernel
from psgc.cuda.sparsify.scatter_kernels import (
    TILE,
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
    clear,
    emit,
    find_candidates,
    guess,
    rank_keys,
    selection_plan,
)
from psgc.cuda.sparsify.sparse import MANY_TILE, ONE_PROGRAM_ELEMENTS, GapsDevice
from psgc.device.codec import Decoding, DeviceStream, Encoding
from psgc.errors import CodecError


class TopKDevice(GapsDevice):
    """See the module's text."""

    def __init__(self, codec: Codec) -> None:
        assert isinstance(codec, TopKCodec)
        super().__init__(codec)
        self._topk = codec
        self._readings = ReadingTables(codec, lambda numel: 1)
        self._work = functools.lru_cache(1024)(_work)
        self._tables = {stage.canonical: Tables(codec, lambda numel: 1, None, partial(_numbers, stage)) for stage in (codec, *codec.stages)}

    def encode_many(self, items: Sequence[Encoding]) -> None:
        stages: dict[str, tuple[TopKCodec, list[Encoding]]] = {}
        for item in items:
            numel = item.grad.numel()
            stage = self._stage(item.stream, numel)
            if numel > ONE_PROGRAM_ELEMENTS or stage.select == "mstopk":
                super().encode_many((item,))
            else:
                stages.setdefault(stage.canonical, (stage, []))[1].append(item)
        for stage, small in stages.values():
            for item in small:
                given_scratch(stage, self._work(stage, item.grad.numel()).nbytes, item.scratch)
            for batch in self._tables[stage.canonical].batches(small):
                launch(
                    topk_many_kernel, len(batch.table), batch.table, batch.numbers, *rescaling(batch.rescale), num_warps=8,
                    DTYPE=TRITON_DTYPES[batch.dtype], FEEDBACK=batch.feedback, ALIGNED=batch.aligned, SAMPLED=stage.select == "sampled", TILE=MANY_TILE,
                )  # fmt: skip

    def decode_many(self, items: Sequence[Decoding]) -> None:
        self._use_many(items, ONE_PROGRAM_ELEMENTS, 0)

    def _plans(self, numel: int) -> Sequence[Plan]:
        return [self._work(stage, numel).plan for stage in (self._topk, *self._topk.stages)]

    def _launch_write(
        self, source: Source, numel: int, stream: Stream | DeviceStream, out: torch.Tensor, status: torch.Tensor, scratch: torch.Tensor | None,
        kept: torch.Tensor | None,
    ) -> None:  # fmt: skip
        codec = self._stage(stream, numel)
        plan, nbytes, guessed, k, most = self._work(codec, numel)
        memory = given_scratch(codec, nbytes, scratch)
        arrays = cut(plan, memory)
        values = out[: out.numel() // 4 * 4].view(torch.float32)
        clear(memory)
        levels = -(-KEY_BITS // 8) if codec.select == "sampled" else SAMPLE_LEVELS
        find_candidates(source, numel, guessed, levels, arrays, status, kept)
        sampled, bisects = codec.select == "sampled", codec.select == "mstopk" and k < numel
        if bisects:
            bisection.choose(source, numel, k, guessed, arrays)
        else:
            rank_keys(source, numel, k, guessed, KEY_BITS, sampled, arrays)
        emit(source, numel, k, guessed, KEY_BITS, arrays, values[1:], kept, ranks=not bisects, sampled=sampled)
        pack(arrays, out, status, 4, 4, numel, CLOSE)
        if 2 * most > numel:
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

    def _launch_apply(self, payload: torch.Tensor, numel: int, out: torch.Tensor, mode: int) -> None:
        _, most = self._topk.counts(numel)
        arrays = allocated(unpacking_plan(most), out.device)
        values = payload[: payload.numel() // 4 * 4].view(torch.float32)
        unpack(arrays, payload, 4, 4, OPEN)
        launch(scatter_kernel, -(-most // TILE), values, arrays["places"], arrays["totals"], arrays["state"], out, MODE=mode, TILE=TILE)
        if 2 * most > numel:
            launch(everything_kernel, -(-numel // TILE), values, arrays["state"], out, numel, MODE=mode, TILE=TILE)


class Work(NamedTuple):
    """What encoding a part takes, by its length alone. most: elements of a payload, at most."""

    plan: Plan
    nbytes: int
    guessed: Guess
    k: int
    most: int


def _work(codec: TopKCodec, numel: int) -> Work:
    guessed, most = guess_for(codec, numel), codec.most(numel)
    plan = {**selection_plan(numel, guessed), **packing_plan(most), **bisection.plan(codec, numel)}
    return Work(plan, planned_bytes(plan), guessed, codec.count(numel), most)


def guess_for(codec: TopKCodec, numel: int) -> Guess:
    """How the codec's candidates are found."""
    k = codec.count(numel)
    if codec.select == "sampled":
        return Guess(sample_size(numel, k), sampled_rank(numel, k), 0, min(numel, MOST_OVER * k))
    if codec.select == "mstopk":
        return guess(numel, k + 1) if k < numel else NO_GUESS
    return guess(numel, k)


def _numbers(codec: TopKCodec, numel: int) -> tuple[int, ...]:
    """What `topk_kernels` is told of a part."""
    k = codec.count(numel)
    size, _, _, room = guess_for(codec, numel) if codec.select == "sampled" else NO_GUESS
    return k, size, (size - 1).bit_length(), sampled_rank(numel, k), room
