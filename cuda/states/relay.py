"""The GPU side of relay: a relayed answer goes to the device as the payloads that it holds, which are decoded and summed there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from psgc.codecs.backends import cuda_side
from psgc.codecs.codec import Bytes, Stream
from psgc.codecs.common.payloads import MAX_PAYLOADS
from psgc.codecs.relay import RelayScheme, split_payloads
from psgc.codecs.scheme import BucketContext, Round, Scheme, check_part
from psgc.device.codec import DeviceCodec
from psgc.device.state import DeviceState


class RelayDeviceState(DeviceState):
    """Keeps nothing but the push codec's GPU side."""

    def __init__(self, round_: Round, push: DeviceCodec, context: BucketContext, device: torch.device) -> None:
        self.rounds = (round_,)
        self._push, self._numel, self._workers = push, round_.numel, context.workers
        self._divisor = torch.full((1,), context.workers, dtype=torch.float32, device=device) if context.mean else None

    def scratch_bytes(self) -> int:
        return self._push.scratch_bytes(self._numel)

    def encode(
        self, index: int, grad: torch.Tensor, residual: torch.Tensor | None, rescale: float, stream: Stream, out: torch.Tensor,
        status: torch.Tensor, scratch: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self._push.encode(grad, residual, rescale, stream, out, status, scratch)

    def pieces(self, answer: Bytes) -> list[Bytes]:
        payloads = split_payloads(answer, self._workers)
        for payload in payloads:
            self._push.codec.validate(payload, self._numel)
        return payloads

    def apply(
        self, pieces: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], target: torch.Tensor, residual: torch.Tensor | None, rescale: float
    ) -> None:  # fmt: skip
        if residual is not None:
            self._push.commit(sent[0], self._numel, target, residual, rescale)
        total = target if target.dtype == torch.float32 else torch.empty(self._numel, device=target.device)
        for first in range(0, len(pieces), MAX_PAYLOADS):
            self._push.fold(pieces[first : first + MAX_PAYLOADS], self._numel, total, first == 0)
        if self._divisor is not None:
            total /= self._divisor
        if total is not target:
            target.copy_(total)

    def add_back(self, sent: Sequence[torch.Tensor], residual: torch.Tensor) -> None:
        self._push.fold([sent[0]], self._numel, residual, False)


def relay_state(scheme: Scheme, numel: int, device: torch.device) -> RelayDeviceState | None:
    """A worker's state for one part; None where the codec has no GPU side."""
    assert isinstance(scheme, RelayScheme)
    check_part(scheme.canonical, numel)
    (round_,) = scheme.rounds(numel)
    push = cuda_side(round_.pair.push)
    return None if push is None else RelayDeviceState(round_, push, scheme.context, device)
