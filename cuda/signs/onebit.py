"""The GPU side of `onebit`: bits and block scales, and with ``scale=unit`` bits alone.

Encoding is one pass, as are decoding, sums and commits. A server pass that keeps what is left out reads its inputs twice, the second time from the L2 cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from psgc.codecs.codec import BLOCK, Codec, Stream
from psgc.codecs.onebit import UnitOneBitCodec
from psgc.cuda.common.checks import check_part, check_payload, check_payloads, check_status
from psgc.cuda.common.device_codec import DeviceCodec, DeviceStream, Encoding
from psgc.cuda.common.launching import TRITON_DTYPES, launch, rescaling
from psgc.cuda.common.many import Tables
from psgc.cuda.signs import sign_kernels as kernels

# Blocks that one warp takes: 2 give each thread 16 bytes of a row, but leave a GPU idle that has too few to work on. With what is left out, a
# program's inputs must stay in the L2 cache until they are read again. Programs of several warps would wait for each other at each row.
WIDE_BLOCKS: Final = 2
WIDE_FROM: Final = 2048 * BLOCK  # elements


class OneBitDeviceCodec(DeviceCodec):
    """`onebit` with either scale."""

    def __init__(self, codec: Codec) -> None:
        super().__init__(codec)
        self._unit = isinstance(codec, UnitOneBitCodec)
        self._tables = Tables(codec, lambda numel: -(-numel // BLOCK), draws=False)

    def encode(
        self, grad: torch.Tensor, residual: torch.Tensor | None, rescale: float | torch.Tensor, stream: Stream | DeviceStream,
        out: torch.Tensor, status: torch.Tensor, scratch: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        numel = grad.numel()
        check_part(self.codec, out.device, numel, grad=grad, residual=residual)
        self._write((grad,), 0, numel, 1, residual, None, rescale, out, status)

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

    def decode(self, payload: torch.Tensor, numel: int, out: torch.Tensor) -> None:
        check_part(self.codec, out.device, numel, out=out)
        check_payload(self.codec, out.device, numel, payload)
        self._read((payload,), numel, out, None, 1.0, kernels.DECODES.value)

    def commit(self, payload: torch.Tensor, numel: int, grad: torch.Tensor, residual: torch.Tensor, rescale: float | torch.Tensor) -> None:
        check_part(self.codec, residual.device, numel, grad=grad, residual=residual)
        check_payload(self.codec, residual.device, numel, payload)
        self._read((payload,), numel, residual, grad, rescale, kernels.COMMITS.value)

    def fold(self, payloads: Sequence[torch.Tensor], numel: int, acc: torch.Tensor, fresh: bool) -> None:
        check_part(self.codec, acc.device, numel, acc=acc)
        check_payloads(self.codec, acc.device, numel, payloads)
        self._read(tuple(payloads), numel, acc, None, 1.0, kernels.DECODES.value if fresh else kernels.ADDS.value)

    def finish(
        self, acc: torch.Tensor, numel: int, divisor: int, residual: torch.Tensor | None, residual_out: torch.Tensor | None,
        rescale: float | torch.Tensor, stream: Stream | DeviceStream, out: torch.Tensor, status: torch.Tensor,
        scratch: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        check_part(self.codec, out.device, numel, acc=acc, residual=residual, residual_out=residual_out)
        self._write((acc,), 0, numel, divisor, residual, residual_out, rescale, out, status)

    def fold_and_finish(
        self, push: Codec, payloads: Sequence[torch.Tensor], numel: int, divisor: int, residual: torch.Tensor | None,
        residual_out: torch.Tensor | None, rescale: float | torch.Tensor, stream: Stream | DeviceStream, out: torch.Tensor,
        status: torch.Tensor, scratch: torch.Tensor | None = None,
    ) -> bool:  # fmt: skip
        if push.codec_id != self.codec.codec_id:
            return False
        check_part(self.codec, out.device, numel, residual=residual, residual_out=residual_out)
        check_payloads(push, out.device, numel, payloads)
        self._write(tuple(payloads), len(payloads), numel, divisor, residual, residual_out, rescale, out, status)
        return True

    def _write(
        self, sources: tuple[torch.Tensor, ...], count: int, numel: int, divisor: int, residual: torch.Tensor | None,
        kept: torch.Tensor | None, rescale: float | torch.Tensor, out: torch.Tensor, status: torch.Tensor,
    ) -> None:  # fmt: skip
        check_payload(self.codec, out.device, numel, out, "out")
        check_status(self.codec, out.device, status)
        size, blocks = self.codec.payload_bound(numel), -(-numel // BLOCK)
        if self._unit:
            launch(
                kernels.signs_kernel, blocks, sources, float(divisor), out, status, numel, size, COUNT=count, DIVIDES=divisor != 1
            )  # fmt: skip
            return
        taken = WIDE_BLOCKS if kept is None and numel >= WIDE_FROM else 1
        launch(
            kernels.write_kernel, -(-blocks // taken), sources, float(divisor), residual, *rescaling(rescale), kept, out, status, numel, size,
            num_warps=1, COUNT=count, DIVIDES=divisor != 1, BLOCKS=taken,
        )  # fmt: skip

    def _read(
        self, payloads: tuple[torch.Tensor, ...], numel: int, target: torch.Tensor, grad: torch.Tensor | None, rescale: float | torch.Tensor,
        use: int,
    ) -> None:  # fmt: skip
        launch(
            kernels.read_kernel, -(-numel // BLOCK), payloads, target, grad, *rescaling(rescale), numel,
            USE=use, COUNT=len(payloads), UNIT=self._unit,
        )  # fmt: skip
