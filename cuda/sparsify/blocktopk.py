"""The GPU side of `blocktopk`. Squares are summed in the order that `psgc.codecs.blocktopk` defines; blocks are chosen as `selection` does."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

import torch

from psgc.codecs.blocktopk import MOST_BLOCK, BlockTopKCodec
from psgc.codecs.codec import Codec, Stream
from psgc.codecs.common.sums import LEAF
from psgc.cuda.common.launching import TRITON_DTYPES, launch, rescaling
from psgc.cuda.common.many import ReadingTables, Tables
from psgc.cuda.common.scratch import Plan, allocated, cut, given_scratch, planned_bytes
from psgc.cuda.sparsify.block_kernels import apply_blocks_kernel, keys_kernel, squares_kernel, write_blocks_kernel
from psgc.cuda.sparsify.gaps import SCAN, pack, packing_plan, unpack, unpacking_plan
from psgc.cuda.sparsify.many.blocktopk_kernels import blocktopk_many_kernel
from psgc.cuda.sparsify.select_kernels import CHOSEN
from psgc.cuda.sparsify.selection import NO_GUESS, Source, clear, emit, rank_keys, selection_plan
from psgc.cuda.sparsify.sparse import MANY_TILE, ONE_PROGRAM_ELEMENTS, GapsDevice
from psgc.device.codec import Decoding, DeviceStream, Encoding

KEY_BITS: Final = 63
UNITS: Final = 32  # runs whose squares one program sums
RUNS: Final = MOST_BLOCK // LEAF
ROWS: Final = 16
TILE: Final = 256


class BlockTopKDevice(GapsDevice):
    """See the module's text."""

    def __init__(self, codec: Codec) -> None:
        assert isinstance(codec, BlockTopKCodec)
        super().__init__(codec)
        self._blocktopk = codec
        self._work = functools.lru_cache(1024)(self._planned)
        self._readings = ReadingTables(codec, lambda numel: 1, lambda numel: codec.blocks(numel)[:1])
        self._tables = Tables(codec, lambda numel: 1, None, codec.blocks)

    def encode_many(self, items: Sequence[Encoding]) -> None:
        small = []
        for item in items:
            if item.grad.numel() > ONE_PROGRAM_ELEMENTS:
                super().encode_many((item,))
            else:
                given_scratch(self.codec, self._work(item.grad.numel())[1], item.scratch)
                small.append(item)
        for batch in self._tables.batches(small):
            block = self._blocktopk.block
            launch(
                blocktopk_many_kernel, len(batch.table), batch.table, batch.numbers, *rescaling(batch.rescale), block, min(block, LEAF), self._runs,
                num_warps=8, DTYPE=TRITON_DTYPES[batch.dtype], FEEDBACK=batch.feedback, ALIGNED=batch.aligned, **self._summing, UNITS=UNITS, ROWS=ROWS,
                TILE=MANY_TILE,
            )  # fmt: skip

    def decode_many(self, items: Sequence[Decoding]) -> None:
        self._use_many(items, ONE_PROGRAM_ELEMENTS, self._blocktopk.block)

    def _plans(self, numel: int) -> Sequence[Plan]:
        return (self._work(numel)[0],)

    def _planned(self, numel: int) -> tuple[Plan, int]:
        """What encoding a part takes, and its bytes."""
        count, blocks = self._blocktopk.blocks(numel)
        own = {"keys": (torch.int64, blocks), "squares": (torch.float64, blocks * self._runs)}
        plan = {**selection_plan(blocks, NO_GUESS), **packing_plan(count), **own}
        return plan, planned_bytes(plan)

    @property
    def _runs(self) -> int:
        return -(-self._blocktopk.block // LEAF)

    @property
    def _summing(self) -> dict[str, int]:
        """How kernels sum the squares of a block's runs."""
        runs = RUNS if self._runs > 1 else 1
        return {"RUNS": runs, "STEPS": runs.bit_length() - 1}

    def _launch_write(
        self, source: Source, numel: int, stream: Stream | DeviceStream, out: torch.Tensor, status: torch.Tensor, scratch: torch.Tensor | None,
        kept: torch.Tensor | None,
    ) -> None:  # fmt: skip
        block, (count, blocks) = self._blocktopk.block, self._blocktopk.blocks(numel)
        plan, nbytes = self._work(numel)
        memory = given_scratch(self.codec, nbytes, scratch)
        arrays = cut(plan, memory)
        units, keys, state = blocks * self._runs, arrays["keys"], arrays["state"]
        clear(memory)
        launch(
            squares_kernel, -(-units // UNITS), *source.arguments, kept, arrays["squares"], keys if self._runs == 1 else None, status, numel, block,
            min(block, LEAF), self._runs, units, UNITS=UNITS, num_warps=8, **source.constants,
        )  # fmt: skip
        if self._runs > 1:
            launch(keys_kernel, -(-blocks // ROWS), arrays["squares"], keys, status, self._runs, blocks, ROWS=ROWS, **self._summing)
        keyed = Source(keys, keyed=True)
        rank_keys(keyed, blocks, count, NO_GUESS, KEY_BITS, False, arrays)
        emit(keyed, blocks, count, NO_GUESS, KEY_BITS, arrays, None, None)
        pack(arrays, out, status, 0, 0, blocks, SCAN)
        tiles = -(-block // TILE)
        launch(
            write_blocks_kernel, count * tiles, *source.arguments, arrays["indices"], out, state, status, kept, numel, block, tiles, count, blocks,
            TILE=TILE, **source.constants,
        )  # fmt: skip

    def _launch_apply(self, payload: torch.Tensor, numel: int, out: torch.Tensor, mode: int) -> None:
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
