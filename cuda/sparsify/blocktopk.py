"""The GPU side of `blocktopk`. Squares are summed in the order that `psgc.codecs.blocktopk` defines; blocks are chosen as `selection` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from psgc.codecs.blocktopk import MOST_BLOCK, BlockTopKCodec
from psgc.codecs.codec import Codec, Stream
from psgc.codecs.common.sums import LEAF
from psgc.cuda.common.checks import check_part, check_payload, check_payloads, check_status
from psgc.cuda.common.device_codec import DeviceCodec, DeviceStream
from psgc.cuda.common.launching import launch, rescaling
from psgc.cuda.common.scratch import Plan, allocated, cut, given_scratch, planned_bytes
from psgc.cuda.sparsify.block_kernels import apply_blocks_kernel, keys_kernel, squares_kernel, write_blocks_kernel
from psgc.cuda.sparsify.gaps import SCAN, pack, packing_plan, unpack, unpacking_plan
from psgc.cuda.sparsify.scatter_kernels import ADD, PUT, TAKE, correct_kernel
from psgc.cuda.sparsify.scatter_kernels import TILE as PART_TILE
from psgc.cuda.sparsify.select_kernels import CHOSEN
from psgc.cuda.sparsify.selection import NO_GUESS, Source, choose_largest, clear, emit, selection_plan

KEY_BITS: Final = 63
UNITS: Final = 32  # runs whose squares one program sums
RUNS: Final = MOST_BLOCK // LEAF
ROWS: Final = 16
TILE: Final = 256


class BlockTopKDevice(DeviceCodec):
    """See the module's text."""

    def __init__(self, codec: Codec) -> None:
        assert isinstance(codec, BlockTopKCodec)
        super().__init__(codec)
        self._blocktopk = codec

    def scratch_bytes(self, numel: int) -> int:
        return planned_bytes(self._plan(numel))

    def encode(
        self, grad: torch.Tensor, residual: torch.Tensor | None, rescale: float | torch.Tensor, stream: Stream | DeviceStream,
        out: torch.Tensor, status: torch.Tensor, scratch: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        check_part(self.codec, out.device, grad.numel(), grad=grad, residual=residual)
        self._write(Source(grad, residual, rescale), grad.numel(), out, status, scratch, None)

    def finish(
        self, acc: torch.Tensor, numel: int, divisor: int, residual: torch.Tensor | None, residual_out: torch.Tensor | None,
        rescale: float | torch.Tensor, stream: Stream | DeviceStream, out: torch.Tensor, status: torch.Tensor,
        scratch: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        check_part(self.codec, out.device, numel, acc=acc, residual=residual, residual_out=residual_out)
        self._write(Source(acc, residual, rescale, divisor), numel, out, status, scratch, residual_out)

    def decode(self, payload: torch.Tensor, numel: int, out: torch.Tensor) -> None:
        check_part(self.codec, payload.device, numel, out=out)
        out.zero_()
        self._apply(payload, numel, out, PUT)

    def commit(self, payload: torch.Tensor, numel: int, grad: torch.Tensor, residual: torch.Tensor, rescale: float | torch.Tensor) -> None:
        check_part(self.codec, payload.device, numel, grad=grad, residual=residual)
        launch(
            correct_kernel, -(-numel // PART_TILE), grad, residual, 1, *rescaling(rescale), residual, numel, DIVIDES=False, TILE=PART_TILE
        )  # fmt: skip
        self._apply(payload, numel, residual, TAKE)

    def fold(self, payloads: Sequence[torch.Tensor], numel: int, acc: torch.Tensor, fresh: bool) -> None:
        check_part(self.codec, acc.device, numel, acc=acc)
        check_payloads(self.codec, acc.device, numel, payloads)
        total = acc.zero_() if fresh else torch.zeros_like(acc)
        for payload in payloads:
            self._apply(payload, numel, total, ADD)
        if not fresh:
            acc += total

    def _plan(self, numel: int) -> Plan:
        count, blocks = self._blocktopk.blocks(numel)
        own = {"keys": (torch.int64, blocks), "squares": (torch.float64, blocks * self._runs)}
        return {**selection_plan(blocks, NO_GUESS), **packing_plan(count), **own}

    @property
    def _runs(self) -> int:
        return -(-self._blocktopk.block // LEAF)

    def _write(
        self, source: Source, numel: int, out: torch.Tensor, status: torch.Tensor, scratch: torch.Tensor | None, kept: torch.Tensor | None
    ) -> None:  # fmt: skip
        check_payload(self.codec, out.device, numel, out, "out")
        check_status(self.codec, out.device, status)
        block, (count, blocks) = self._blocktopk.block, self._blocktopk.blocks(numel)
        arrays = cut(plan := self._plan(numel), given_scratch(self.codec, plan, scratch))
        units, keys, state = blocks * self._runs, arrays["keys"], arrays["state"]
        clear(arrays)
        launch(
            squares_kernel, -(-units // UNITS), *source.arguments, kept, arrays["squares"], numel, block, min(block, LEAF), self._runs, units,
            UNITS=UNITS, **source.constants,
        )  # fmt: skip
        runs = RUNS if self._runs > 1 else 1
        launch(
            keys_kernel, -(-blocks // ROWS), arrays["squares"], keys, status, self._runs, blocks, RUNS=runs, ROWS=ROWS, STEPS=runs.bit_length() - 1
        )  # fmt: skip
        keyed = Source(keys, keyed=True)
        choose_largest(keyed, blocks, count, NO_GUESS, KEY_BITS, arrays)
        emit(keyed, blocks, count, NO_GUESS, arrays, None, None)
        pack(arrays, out, status, 0, 0, blocks, SCAN)
        tiles = -(-block // TILE)
        launch(
            write_blocks_kernel, count * tiles, *source.arguments, arrays["indices"], out, state, status, kept, numel, block, tiles, count, blocks,
            TILE=TILE, **source.constants,
        )  # fmt: skip

    def _apply(self, payload: torch.Tensor, numel: int, out: torch.Tensor, mode: int) -> None:
        check_payload(self.codec, out.device, numel, payload)
        block, (count, _) = self._blocktopk.block, self._blocktopk.blocks(numel)
        arrays = allocated(unpacking_plan(count), out.device)
        arrays["state"].zero_()
        arrays["state"][int(CHOSEN) : int(CHOSEN) + 1].fill_(count)
        unpack(arrays, payload, 0, 0, SCAN)
        tiles = -(-block // TILE)
        launch(
            apply_blocks_kernel, count * tiles, payload, arrays["places"], arrays["totals"], arrays["state"], out, numel, block, tiles,
            MODE=mode, TILE=TILE,
        )  # fmt: skip
