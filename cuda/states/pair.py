"""The GPU side of a pair's state: the push codec encodes and commits, the pull codec decodes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from psgc.codecs.backends import cuda_side
from psgc.codecs.codec import Stream
from psgc.codecs.scheme import PairScheme, Round, Scheme, check_part
from psgc.device.codec import DeviceCodec
from psgc.device.state import DeviceState


class PairDeviceState(DeviceState):
    """Keeps nothing but the codecs' GPU sides. The round's codecs encode and decode parts of ``numel`` elements."""

    def __init__(self, round_: Round, push: DeviceCodec, pull: DeviceCodec) -> None:
        self.rounds = (round_,)
        self._push, self._pull, self._numel = push, pull, round_.numel

    def scratch_bytes(self) -> int:
        return self._push.scratch_bytes(self._numel)

    def encode(
        self, index: int, grad: torch.Tensor, residual: torch.Tensor | None, rescale: float, stream: Stream, out: torch.Tensor,
        status: torch.Tensor, scratch: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self._push.encode(grad, residual, rescale, stream, out, status, scratch)

    def apply(
        self, pieces: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], target: torch.Tensor, residual: torch.Tensor | None, rescale: float
    ) -> None:  # fmt: skip
        if residual is not None:
            self._push.commit(sent[0], self._numel, target, residual, rescale)
        self._pull.decode(pieces[0], self._numel, target)

    def add_back(self, sent: Sequence[torch.Tensor], residual: torch.Tensor) -> None:
        self._push.fold([sent[0]], self._numel, residual, False)


def pair_state(scheme: Scheme, numel: int, device: torch.device) -> PairDeviceState | None:
    """A worker's state for one part; None where one of the codecs has no GPU side."""
    assert isinstance(scheme, PairScheme)
    check_part(scheme.canonical, numel)
    push, pull = cuda_side(scheme.pair.push), cuda_side(scheme.pair.pull)
    return None if push is None or pull is None else PairDeviceState(Round(scheme.pair, numel), push, pull)
