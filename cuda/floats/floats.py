"""The GPU side of `bf16`, `fp16` and `none`.

Every operation is one pass: each input is read once, each output written once. `none` of integers, bool and float64 is a few of torch's own
passes, for such parts are rare and small. NaN sums of float32 have the bits that the GPU gives them; casts write one NaN only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from psgc.codecs.codec import FLOATS, Codec, Stream
from psgc.cuda.common.checks import check_part, check_payload, check_payloads, check_place, check_status
from psgc.cuda.common.launching import TRITON_DTYPES, launch
from psgc.cuda.common.many import ReadingTables, Tables
from psgc.cuda.floats.kernels import add_kernel, cast_many_kernel, mean_kernel, read_many_kernel
from psgc.device.codec import Decoding, DeviceCodec, DeviceStream, Encoding
from psgc.errors import CodecError

TILE: Final = 2048  # elements a program
_ITEMS: Final = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def programs(numel: int) -> int:
    """How many tiles a part has."""
    return -(-numel // TILE)


class FloatDeviceCodec(DeviceCodec):
    """A codec whose payload is an array of floats. items: their dtype."""

    def __init__(self, codec: Codec) -> None:
        super().__init__(codec)
        self.items: torch.dtype = _ITEMS[codec.name] or getattr(torch, codec.dtype)
        self._tables, self._readings = Tables(codec, programs, None), ReadingTables(codec, programs)

    def encode(
        self, grad: torch.Tensor, residual: torch.Tensor | None, rescale: float | torch.Tensor, stream: Stream | DeviceStream,
        out: torch.Tensor, status: torch.Tensor, scratch: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        numel = grad.numel()
        check_part(self.codec, out.device, numel, grad=grad)
        self._write((grad,), numel, 1, out, status)

    def encode_many(self, items: Sequence[Encoding]) -> None:
        for batch in self._tables.batches(items):
            launch(
                cast_many_kernel, batch.owners.numel(), batch.table, batch.owners, DTYPE=TRITON_DTYPES[batch.dtype], ITEMS=TRITON_DTYPES[self.items],
                COPIES=self._copies(batch.dtype), ALIGNED=batch.aligned, TILE=TILE,
            )  # fmt: skip

    def decode_many(self, items: Sequence[Decoding]) -> None:
        for batch in self._readings.batches(items):
            launch(
                read_many_kernel, batch.owners.numel(), batch.table, batch.owners, ITEMS=TRITON_DTYPES[self.items],
                COPIES=batch.count == 1 and self._copies(batch.target), TILE=TILE, **batch.constants,
            )  # fmt: skip

    def _copies(self, dtype: torch.dtype) -> bool:
        """Whether elements of this dtype travel as they are, NaNs with all their bits."""
        return self.codec.name == "none" and dtype == self.items

    def decode(self, payload: torch.Tensor, numel: int, out: torch.Tensor) -> None:
        check_part(self.codec, out.device, numel, out=out)
        check_payload(self.codec, out.device, numel, payload)
        launch(mean_kernel, programs(numel), (self._elements(payload, numel),), out, None, numel, 0, 1.0, COUNT=1, DIVIDES=False, TILE=TILE)

    def fold(self, payloads: Sequence[torch.Tensor], numel: int, acc: torch.Tensor, fresh: bool) -> None:
        check_part(self.codec, acc.device, numel, acc=acc)
        check_payloads(self.codec, acc.device, numel, payloads)
        sources, count = tuple(self._elements(payload, numel) for payload in payloads), len(payloads)
        if fresh:
            launch(mean_kernel, programs(numel), sources, acc, None, numel, 0, 1.0, COUNT=count, DIVIDES=False, TILE=TILE)
        else:
            launch(add_kernel, programs(numel), sources, acc, numel, COUNT=count, TILE=TILE)

    def finish(
        self, acc: torch.Tensor, numel: int, divisor: int, residual: torch.Tensor | None, residual_out: torch.Tensor | None,
        rescale: float | torch.Tensor, stream: Stream | DeviceStream, out: torch.Tensor, status: torch.Tensor,
        scratch: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        check_part(self.codec, out.device, numel, acc=acc)
        self._write((acc,), numel, divisor, out, status)

    def fold_and_finish(
        self, push: Codec, payloads: Sequence[torch.Tensor], numel: int, divisor: int, residual: torch.Tensor | None,
        residual_out: torch.Tensor | None, rescale: float | torch.Tensor, stream: Stream | DeviceStream, out: torch.Tensor,
        status: torch.Tensor, scratch: torch.Tensor | None = None,
    ) -> bool:  # fmt: skip
        if push.name not in _ITEMS or push.dtype not in FLOATS:
            return False
        check_payloads(push, out.device, numel, payloads)
        items = _ITEMS[push.name] or getattr(torch, push.dtype)
        self._write(tuple(payload[: numel * items.itemsize].view(items) for payload in payloads), numel, divisor, out, status)
        return True

    def _write(self, sources: tuple[torch.Tensor, ...], numel: int, divisor: int, out: torch.Tensor, status: torch.Tensor) -> None:
        check_payload(self.codec, out.device, numel, out, "out")
        check_status(self.codec, out.device, status)
        size, target = self.codec.payload_bound(numel), self._elements(out, numel)
        tile = TILE if divisor == 1 else TILE // 2  # a division takes registers
        launch(
            mean_kernel, -(-numel // tile), sources, target, status, numel, size, float(divisor), COUNT=len(sources), DIVIDES=divisor != 1, TILE=tile
        )  # fmt: skip

    def _elements(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        return payload[: numel * self.items.itemsize].view(self.items)


class NoneDeviceCodec(FloatDeviceCodec):
    """`none` of floats: encoding and decoding are copies where the dtype is the part's own."""

    def encode(
        self, grad: torch.Tensor, residual: torch.Tensor | None, rescale: float | torch.Tensor, stream: Stream | DeviceStream,
        out: torch.Tensor, status: torch.Tensor, scratch: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        copy_in(self.codec, self.items, grad, out, status)

    def encode_many(self, items: Sequence[Encoding]) -> None:
        for item in items:
            check_items(self.codec, self.items, item.grad)
        super().encode_many(items)

    def decode(self, payload: torch.Tensor, numel: int, out: torch.Tensor) -> None:
        if out.dtype != self.items:
            super().decode(payload, numel, out)
            return
        check_part(self.codec, out.device, numel, out=out)
        check_payload(self.codec, out.device, numel, payload)
        out.copy_(self._elements(payload, numel))


class PlainDeviceCodec(DeviceCodec):
    """`none` of integers, bool and float64: integers and bool add in int64, float64 in float64."""

    def __init__(self, codec: Codec) -> None:
        super().__init__(codec)
        self.items: torch.dtype = getattr(torch, codec.dtype)
        self._sums = torch.float64 if codec.dtype == "float64" else torch.int64

    def encode(
        self, grad: torch.Tensor, residual: torch.Tensor | None, rescale: float | torch.Tensor, stream: Stream | DeviceStream,
        out: torch.Tensor, status: torch.Tensor, scratch: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        copy_in(self.codec, self.items, grad, out, status)

    def decode(self, payload: torch.Tensor, numel: int, out: torch.Tensor) -> None:
        check_place(self.codec, "out", out, payload.device)
        check_payload(self.codec, out.device, numel, payload)
        if out.dtype != self.items or out.numel() != numel:
            raise CodecError(f"codec {self.codec.name}: out is {self.items} [{numel}], not {out.dtype} {list(out.shape)}")
        out.copy_(self._elements(payload, numel))

    def fold(self, payloads: Sequence[torch.Tensor], numel: int, acc: torch.Tensor, fresh: bool) -> None:
        check_place(self.codec, "acc", acc, payloads[0].device)
        check_payloads(self.codec, acc.device, numel, payloads)
        if acc.dtype != self._sums or acc.numel() != numel:
            raise CodecError(f"codec {self.codec.name}: acc is {self._sums} [{numel}], not {acc.dtype} {list(acc.shape)}")
        total = acc if fresh else torch.empty_like(acc)
        total.copy_(self._elements(payloads[0], numel))
        for payload in payloads[1:]:
            total.add_(self._elements(payload, numel).to(self._sums))
        if not fresh:
            acc.add_(total)

    def finish(
        self, acc: torch.Tensor, numel: int, divisor: int, residual: torch.Tensor | None, residual_out: torch.Tensor | None,
        rescale: float | torch.Tensor, stream: Stream | DeviceStream, out: torch.Tensor, status: torch.Tensor,
        scratch: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        check_payload(self.codec, acc.device, numel, out, "out")
        check_status(self.codec, acc.device, status)
        if divisor != 1 and self._sums == torch.int64:
            acc.div_(divisor, rounding_mode="floor")
        elif divisor != 1:
            acc.div_(
                torch.full((1,), divisor, dtype=self._sums, device=acc.device)
            )  # by a number, torch would multiply with its reciprocal
        self._elements(out, numel).copy_(acc != 0 if self.items == torch.bool else acc)
        status[1].fill_(self.codec.payload_bound(numel))

    def _elements(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        return payload[: numel * self.items.itemsize].view(self.items)


def copy_in(codec: Codec, items: torch.dtype, grad: torch.Tensor, out: torch.Tensor, status: torch.Tensor) -> None:
    """Copy the part's own bytes to its payload."""
    check_place(codec, "grad", grad, out.device)
    check_payload(codec, out.device, grad.numel(), out, "out")
    check_status(codec, out.device, status)
    check_items(codec, items, grad)
    size = grad.numel() * items.itemsize
    out[:size].view(items).copy_(grad)
    status[1].fill_(size)


def check_items(codec: Codec, items: torch.dtype, grad: torch.Tensor) -> None:
    """Raise CodecError unless the gradient has the part's own dtype."""
    if grad.dtype != items:
        raise CodecError(f"codec {codec.name}: grad is {grad.dtype}, the part is {codec.dtype}; name the dtype when the codec is built")


def none_device_codec(codec: Codec) -> DeviceCodec:
    """The GPU side of `none` for the codec's dtype."""
    return NoneDeviceCodec(codec) if codec.dtype in FLOATS else PlainDeviceCodec(codec)
