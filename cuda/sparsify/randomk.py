"""The GPU side of `randomk`. Of a ``DeviceStream``, ``words`` are those of ``psgc.codecs.randomk.shared_stream(stream)``, which all ranks share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from psgc.codecs.codec import Codec, Stream
from psgc.codecs.randomk import RandomKCodec, shared_stream
from psgc.cuda.common.checks import check_part, check_payload, check_payloads, check_status
from psgc.cuda.common.device_codec import DeviceCodec, DeviceStream
from psgc.cuda.common.launching import draws, launch, rescaling
from psgc.cuda.sparsify.randomk_kernels import apply_kernel, gather_kernel, scan_kernel
from psgc.cuda.sparsify.scatter_kernels import ADD, PUT, TAKE, TILE, correct_kernel
from psgc.cuda.sparsify.selection import Source


class RandomKDevice(DeviceCodec):
    """See the module's text."""

    def __init__(self, codec: Codec) -> None:
        assert isinstance(codec, RandomKCodec)
        super().__init__(codec)
        self._randomk = codec

    def encode(
        self, grad: torch.Tensor, residual: torch.Tensor | None, rescale: float | torch.Tensor, stream: Stream | DeviceStream,
        out: torch.Tensor, status: torch.Tensor, scratch: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        check_part(self.codec, out.device, grad.numel(), grad=grad, residual=residual)
        self._write(Source(grad, residual, rescale), grad.numel(), stream, out, status, None)

    def finish(
        self, acc: torch.Tensor, numel: int, divisor: int, residual: torch.Tensor | None, residual_out: torch.Tensor | None,
        rescale: float | torch.Tensor, stream: Stream | DeviceStream, out: torch.Tensor, status: torch.Tensor,
        scratch: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        check_part(self.codec, out.device, numel, acc=acc, residual=residual, residual_out=residual_out)
        self._write(Source(acc, residual, rescale, divisor), numel, stream, out, status, residual_out)

    def decode(self, payload: torch.Tensor, numel: int, out: torch.Tensor) -> None:
        check_part(self.codec, payload.device, numel, out=out)
        out.zero_()
        self._apply(payload, numel, out, PUT)

    def commit(self, payload: torch.Tensor, numel: int, grad: torch.Tensor, residual: torch.Tensor, rescale: float | torch.Tensor) -> None:
        check_part(self.codec, payload.device, numel, grad=grad, residual=residual)
        launch(correct_kernel, -(-numel // TILE), grad, residual, 1, *rescaling(rescale), residual, numel, DIVIDES=False, TILE=TILE)
        self._apply(payload, numel, residual, TAKE)

    def fold(self, payloads: Sequence[torch.Tensor], numel: int, acc: torch.Tensor, fresh: bool) -> None:
        """The payloads must have the same keys, as ``RandomKCodec.fold`` checks on the CPU: a step's payloads do."""
        check_part(self.codec, acc.device, numel, acc=acc)
        check_payloads(self.codec, acc.device, numel, payloads)
        total = acc.zero_() if fresh else torch.zeros_like(acc)
        for number, payload in enumerate(payloads):
            self._apply(payload, numel, total, ADD if number else PUT)
        if not fresh:
            acc += total

    def _strata(self, numel: int) -> tuple[int, int, int, int]:
        """The kernels' arguments numel, count, size and wide."""
        count = self._randomk.count(numel)
        return numel, count, numel // count, numel % count

    def _write(
        self, source: Source, numel: int, stream: Stream | DeviceStream, out: torch.Tensor, status: torch.Tensor, kept: torch.Tensor | None
    ) -> None:  # fmt: skip
        check_payload(self.codec, out.device, numel, out, "out")
        check_status(self.codec, out.device, status)
        strata, payload_bytes = self._strata(numel), self.codec.payload_bound(numel)
        scale = numel / strata[1] if self._randomk.settings[0] else 1.0
        shared = stream if isinstance(stream, DeviceStream) else shared_stream(stream)
        launch(scan_kernel, -(-numel // TILE), *source.arguments, kept, status, numel, payload_bytes, TILE=TILE, **source.constants)
        launch(
            gather_kernel, -(-strata[1] // TILE), *source.arguments, kept, _numbers(out, payload_bytes), *draws(shared), *strata, scale,
            TILE=TILE, **source.constants,
        )  # fmt: skip

    def _apply(self, payload: torch.Tensor, numel: int, out: torch.Tensor, mode: int) -> None:
        check_payload(self.codec, out.device, numel, payload)
        strata = self._strata(numel)
        numbers = _numbers(payload, self.codec.payload_bound(numel))
        launch(apply_kernel, -(-strata[1] // TILE), numbers, out, *strata, MODE=mode, TILE=TILE)


def _numbers(payload: torch.Tensor, payload_bytes: int) -> torch.Tensor:
    return payload[:payload_bytes].view(torch.int32)
