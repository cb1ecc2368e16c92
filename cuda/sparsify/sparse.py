"""What the GPU sides of codecs share that send some elements: a payload changes a part where it has elements, and leaves the others as they are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Final

import torch

from psgc.codecs.codec import Codec, Stream
from psgc.cuda.common.checks import check_part, check_payload, check_payloads, check_status
from psgc.cuda.common.decoded_kernels import ADDS
from psgc.cuda.common.launching import launch, rescaling
from psgc.cuda.common.many import Reading, ReadingTables
from psgc.cuda.common.scratch import Plan, planned_bytes
from psgc.cuda.sparsify.many.reading_kernels import read_many_kernel
from psgc.cuda.sparsify.scatter_kernels import ADD, PUT, TAKE, TILE, correct_kernel
from psgc.cuda.sparsify.selection import Source
from psgc.device.codec import Decoding, DeviceCodec, DeviceStream

ONE_PROGRAM_ELEMENTS: Final = (
    1 << 15
)  # of a part that one program encodes or decodes: 16 tiles, each read five times or more; the launches of a larger one take less time than that would
MANY_TILE: Final = 2048  # elements of such a part that are looked at at once


class SparseDevice(DeviceCodec):
    """Subclasses give ``_launch_write``, ``_launch_apply`` and, where they need scratch, ``_plans``; arguments have been checked.

    first: how the first payload of a sum changes the zeros: PUT keeps the sign of a zero, ADD does not."""

    first = ADD

    @abstractmethod
    def _launch_write(
        self, source: Source, numel: int, stream: Stream | DeviceStream, out: torch.Tensor, status: torch.Tensor, scratch: torch.Tensor | None,
        kept: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Write the payload of ``source``. kept: None, or becomes what the payload leaves out."""

    @abstractmethod
    def _launch_apply(self, payload: torch.Tensor, numel: int, out: torch.Tensor, mode: int) -> None:
        """Change the elements of ``out`` that the payload has a value for. mode: PUT, ADD or TAKE."""

    def _plans(self, numel: int) -> Sequence[Plan]:
        """What scratch may have to hold, one of them at a time."""
        return ()

    def scratch_bytes(self, numel: int) -> int:
        return max((planned_bytes(plan) for plan in self._plans(numel)), default=0)

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
        self._sum(payloads, numel, total)
        if not fresh:
            acc += total

    def fold_and_finish(
        self, push: Codec, payloads: Sequence[torch.Tensor], numel: int, divisor: int, residual: torch.Tensor | None,
        residual_out: torch.Tensor | None, rescale: float | torch.Tensor, stream: Stream | DeviceStream, out: torch.Tensor,
        status: torch.Tensor, scratch: torch.Tensor | None = None,
    ) -> bool:  # fmt: skip
        """Payloads have other elements each, so that they are added up in memory of torch's first."""
        if push.name != self.codec.name:
            return False
        check_part(self.codec, out.device, numel, residual=residual, residual_out=residual_out)
        check_payloads(push, out.device, numel, payloads)
        total = torch.zeros(numel, dtype=torch.float32, device=out.device)
        self._folding(push)._sum(payloads, numel, total)
        self._write(Source(total, residual, rescale, divisor), numel, stream, out, status, scratch, residual_out)
        return True

    def _folding(self, push: Codec) -> SparseDevice:
        """What reads the push codec's payloads, which may have another number of elements than this codec's."""
        return self if push.canonical == self.codec.canonical else type(self)(push)

    def _sum(self, payloads: Sequence[torch.Tensor], numel: int, total: torch.Tensor) -> None:
        """Add the payloads to zeros."""
        for number, payload in enumerate(payloads):
            self._apply(payload, numel, total, ADD if number else self.first)

    def _write(
        self, source: Source, numel: int, stream: Stream | DeviceStream, out: torch.Tensor, status: torch.Tensor, scratch: torch.Tensor | None,
        kept: torch.Tensor | None,
    ) -> None:  # fmt: skip
        check_payload(self.codec, out.device, numel, out, "out")
        check_status(self.codec, out.device, status)
        self._launch_write(source, numel, stream, out, status, scratch, kept)

    def _apply(self, payload: torch.Tensor, numel: int, out: torch.Tensor, mode: int) -> None:
        check_payload(self.codec, out.device, numel, payload)
        self._launch_apply(payload, numel, out, mode)


class GapsDevice(SparseDevice):
    """Of codecs whose payloads say by packed gaps where their elements are. Subclasses give ``_readings``, of one program a part, and call ``_use_many``."""

    _readings: ReadingTables

    def _use_many(self, items: Sequence[Decoding], most: int, block: int) -> None:
        """Use the payloads of parts of up to ``most`` elements by one launch, those of the others one by one. block: elements of a block, or 0."""
        small = [item for item in items if item.numel <= most]
        for item in items:
            if item.numel > most:
                self.decode_one(item)
        for batch in self._readings.batches(small):
            self._read_many(batch, block)

    def _read_many(self, batch: Reading, block: int) -> None:
        twice = batch.use == ADDS.value and batch.count > 1  # payloads are added up before their sum is added
        parts = len(batch.table)
        rooms = torch.empty(parts * batch.most * (2 if twice else 1), dtype=torch.int32, device=batch.table.device)
        launch(
            read_many_kernel, parts, batch.table, batch.numbers, rooms, batch.most, block, *rescaling(batch.rescale), num_warps=8, BLOCKS=block > 0,
            TWICE=twice, TILE=MANY_TILE, **batch.constants,
        )  # fmt: skip
