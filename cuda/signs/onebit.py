"""The GPU side of `onebit`: bits and block scales, and with ``scale=unit`` bits alone.

Encoding is one pass, as are decoding, sums and commits. A server pass that keeps what is left out reads its inputs twice, the second time from the L2 cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from psgc.codecs.codec import BLOCK, Codec
from psgc.codecs.onebit import UnitOneBitCodec
from psgc.cuda.common.dense import DenseDevice, Written
from psgc.cuda.common.launching import TRITON_DTYPES, launch, rescaling
from psgc.cuda.common.many import Reading, ReadingTables, Tables
from psgc.cuda.signs import sign_kernels as kernels
from psgc.device.codec import Encoding

# Blocks that one warp takes: 2 give each thread 16 bytes of a row, but leave a GPU idle that has too few to work on. With what is left out, a
# program's inputs must stay in the L2 cache until they are read again. Programs of several warps would wait for each other at each row.
WIDE_BLOCKS: Final = 2
WIDE_FROM: Final = 2048 * BLOCK  # elements


class OneBitDeviceCodec(DenseDevice):
    """`onebit` with either scale."""

    def __init__(self, codec: Codec) -> None:
        super().__init__(codec)
        self._unit = isinstance(codec, UnitOneBitCodec)
        self._tables = Tables(codec, lambda numel: -(-numel // BLOCK), None)
        self._readings = ReadingTables(codec, lambda numel: -(-numel // BLOCK))

    def encode_many(self, items: Sequence[Encoding]) -> None:
        for batch in self._tables.batches(items):
            dtype, programs = TRITON_DTYPES[batch.dtype], batch.owners.numel()
            if self._unit:
                launch(kernels.signs_many_kernel, programs, batch.table, batch.owners, DTYPE=dtype, ALIGNED=batch.aligned)
            else:
                launch(
                    kernels.write_many_kernel, programs, batch.table, batch.owners, *rescaling(batch.rescale),
                    num_warps=1, DTYPE=dtype, FEEDBACK=batch.feedback, ALIGNED=batch.aligned,
                )  # fmt: skip

    def _reads(self, push: Codec) -> bool:
        return push.codec_id == self.codec.codec_id

    def _launch_write(self, what: Written, out: torch.Tensor, status: torch.Tensor) -> None:
        numel, divides = what.numel, what.divisor != 1
        size, blocks = self.codec.payload_bound(numel), -(-numel // BLOCK)
        if self._unit:
            launch(
                kernels.signs_kernel, blocks, what.sources, float(what.divisor), out, status, numel, size, COUNT=what.added, DIVIDES=divides
            )  # fmt: skip
            return
        at_once = WIDE_BLOCKS if what.kept is None and numel >= WIDE_FROM else 1
        launch(
            kernels.write_kernel, -(-blocks // at_once), what.sources, float(what.divisor), what.residual, *rescaling(what.rescale), what.kept, out,
            status, numel, size, num_warps=1, COUNT=what.added, DIVIDES=divides, BLOCKS=at_once,
        )  # fmt: skip

    def _read(
        self, payloads: tuple[torch.Tensor, ...], numel: int, target: torch.Tensor, grad: torch.Tensor | None, rescale: float | torch.Tensor,
        use: int,
    ) -> None:  # fmt: skip
        launch(
            kernels.read_kernel, -(-numel // BLOCK), payloads, target, grad, *rescaling(rescale), numel,
            USE=use, COUNT=len(payloads), UNIT=self._unit,
        )  # fmt: skip

    def _read_many(self, batch: Reading) -> None:
        launch(
            kernels.read_many_kernel, batch.owners.numel(), batch.table, batch.owners, *rescaling(batch.rescale), UNIT=self._unit, **batch.constants
        )  # fmt: skip
