"""What the GPU sides of codecs share that send something of every element: each operation is one kernel that writes payloads, or one that reads them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch

from psgc.codecs.codec import Codec, Stream
from psgc.cuda.common.checks import check_part, check_payload, check_payloads, check_status
from psgc.cuda.common.decoded_kernels import ADDS, COMMITS, DECODES
from psgc.cuda.common.many import Reading, ReadingTables
from psgc.device.codec import Decoding, DeviceCodec, DeviceStream


class Written(NamedTuple):
    """What a payload is written of: sources / divisor + rescale * residual. sources: the elements, or as many payloads as ``added`` says. kept: None,
    or gets what the payload leaves out."""

    sources: tuple[torch.Tensor, ...]
    added: int
    numel: int
    divisor: int
    residual: torch.Tensor | None
    kept: torch.Tensor | None
    rescale: float | torch.Tensor
    stream: Stream | DeviceStream


class DenseDevice(DeviceCodec):
    """Subclasses give ``_readings``, ``_launch_write``, ``_read`` and ``_read_many``; arguments have been checked."""

    _readings: ReadingTables

    @abstractmethod
    def _launch_write(self, what: Written, out: torch.Tensor, status: torch.Tensor) -> None:
        """Start the kernel that writes a payload."""

    @abstractmethod
    def _read(
        self, payloads: tuple[torch.Tensor, ...], numel: int, target: torch.Tensor, grad: torch.Tensor | None, rescale: float | torch.Tensor,
        use: int,
    ) -> None:  # fmt: skip
        """Start the kernel that sums the payloads' elements. use: DECODES, ADDS or COMMITS."""

    @abstractmethod
    def _read_many(self, batch: Reading) -> None:
        """Start the kernel that does what ``_read`` does for many parts."""

    def decode_many(self, items: Sequence[Decoding]) -> None:
        for batch in self._readings.batches(items):
            self._read_many(batch)

    def encode(
        self, grad: torch.Tensor, residual: torch.Tensor | None, rescale: float | torch.Tensor, stream: Stream | DeviceStream,
        out: torch.Tensor, status: torch.Tensor, scratch: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        numel = grad.numel()
        check_part(self.codec, out.device, numel, grad=grad, residual=residual)
        self._write(Written((grad,), 0, numel, 1, residual, None, rescale, stream), out, status)

    def decode(self, payload: torch.Tensor, numel: int, out: torch.Tensor) -> None:
        check_part(self.codec, out.device, numel, out=out)
        check_payload(self.codec, out.device, numel, payload)
        self._read((payload,), numel, out, None, 1.0, DECODES.value)

    def commit(self, payload: torch.Tensor, numel: int, grad: torch.Tensor, residual: torch.Tensor, rescale: float | torch.Tensor) -> None:
        check_part(self.codec, residual.device, numel, grad=grad, residual=residual)
        check_payload(self.codec, residual.device, numel, payload)
        self._read((payload,), numel, residual, grad, rescale, COMMITS.value)

    def fold(self, payloads: Sequence[torch.Tensor], numel: int, acc: torch.Tensor, fresh: bool) -> None:
        check_part(self.codec, acc.device, numel, acc=acc)
        check_payloads(self.codec, acc.device, numel, payloads)
        self._read(tuple(payloads), numel, acc, None, 1.0, DECODES.value if fresh else ADDS.value)

    def finish(
        self, acc: torch.Tensor, numel: int, divisor: int, residual: torch.Tensor | None, residual_out: torch.Tensor | None,
        rescale: float | torch.Tensor, stream: Stream | DeviceStream, out: torch.Tensor, status: torch.Tensor,
        scratch: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        check_part(self.codec, out.device, numel, acc=acc, residual=residual, residual_out=residual_out)
        self._write(Written((acc,), 0, numel, divisor, residual, residual_out, rescale, stream), out, status)

    def fold_and_finish(
        self, push: Codec, payloads: Sequence[torch.Tensor], numel: int, divisor: int, residual: torch.Tensor | None,
        residual_out: torch.Tensor | None, rescale: float | torch.Tensor, stream: Stream | DeviceStream, out: torch.Tensor,
        status: torch.Tensor, scratch: torch.Tensor | None = None,
    ) -> bool:  # fmt: skip
        if not self._reads(push):
            return False
        check_part(self.codec, out.device, numel, residual=residual, residual_out=residual_out)
        check_payloads(push, out.device, numel, payloads)
        self._write(Written(tuple(payloads), len(payloads), numel, divisor, residual, residual_out, rescale, stream), out, status)
        return True

    def _reads(self, push: Codec) -> bool:
        """Whether this codec's kernels read the push codec's payloads."""
        return push.canonical == self.codec.canonical

    def _write(self, what: Written, out: torch.Tensor, status: torch.Tensor) -> None:
        check_payload(self.codec, out.device, what.numel, out, "out")
        check_status(self.codec, out.device, status)
        self._launch_write(what, out, status)
