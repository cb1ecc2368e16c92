"""The GPU side of `psgc.codecs.momentum`: velocity and clipping in one pass over the gradient, before the inner state encodes.

The velocity, float32, begins as -0.0 everywhere, which leaves any gradient that is added to it as it is, as the CPU's first step does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from psgc.codecs.backends import cuda_side, cuda_state
from psgc.codecs.codec import Bytes, Stream
from psgc.codecs.common.sums import LEAF
from psgc.codecs.momentum import MomentumScheme
from psgc.codecs.scheme import Scheme
from psgc.cuda.common.launching import launch
from psgc.cuda.common.scratch import allocated
from psgc.cuda.common.sums import STEPS, sums_plan, total
from psgc.cuda.states.momentum_kernels import advance_kernel, squares_kernel
from psgc.device.codec import DeviceCodec
from psgc.device.state import DeviceState

TILE: Final = 2048  # elements a program


class MomentumDeviceState(DeviceState):
    """Compresses the velocity, or the gradient moved along it."""

    def __init__(self, scheme: MomentumScheme, inner: DeviceState, push: DeviceCodec, numel: int, device: torch.device) -> None:
        self.rounds = inner.rounds
        self._inner, self._push, self._numel = inner, push, numel
        self._kind, self._mu = scheme.momentum.momentum, scheme.momentum.mu
        self._limit = torch.tensor([scheme.clip], dtype=torch.float64, device=device) if scheme.clip else None
        self._velocity = torch.full((numel if self._kind != "none" else 0,), -0.0, device=device)
        self._begun = False

    def scratch_bytes(self) -> int:
        return self._inner.scratch_bytes()

    def encode(
        self, index: int, grad: torch.Tensor, residual: torch.Tensor | None, rescale: float, stream: Stream, out: torch.Tensor,
        status: torch.Tensor, scratch: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        moved = torch.empty(self._numel, device=grad.device)
        self._advance(grad, rescale, moved, None, None)
        self._inner.encode(index, moved, residual, rescale, stream, out, status, scratch)

    def pieces(self, answer: Bytes) -> Sequence[Bytes]:
        return self._inner.pieces(answer)

    def apply(
        self, pieces: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], target: torch.Tensor, residual: torch.Tensor | None, rescale: float
    ) -> None:  # fmt: skip
        if residual is None:  # this rank skipped: nothing of its own to remember
            self._inner.apply(pieces, sent, target, None, rescale)
            return
        decoded = None
        if self._kind == "dgc":
            decoded = torch.empty(self._numel, device=target.device)
            self._push.decode(sent[0], self._numel, decoded)
        moved = target if target.dtype == torch.float32 else torch.empty(self._numel, device=target.device)
        self._advance(target, rescale, moved, self._velocity, decoded)
        self._begun = True
        self._inner.apply(pieces, sent, moved, residual, rescale)
        if moved is not target:
            target.copy_(moved)

    def add_back(self, sent: Sequence[torch.Tensor], residual: torch.Tensor) -> None:
        self._inner.add_back(sent, residual)

    @property
    def saved(self) -> torch.Tensor | None:
        if self._kind == "none":
            return None
        return self._velocity.clone() if self._begun else torch.zeros_like(self._velocity)

    def restore(self, saved: torch.Tensor) -> None:
        self._velocity.copy_(saved)
        self._begun = True

    def _advance(
        self, grad: torch.Tensor, rescale: float, moved: torch.Tensor, advanced: torch.Tensor | None, decoded: torch.Tensor | None
    ) -> None:  # fmt: skip
        """moved <- what is compressed of ``grad``; advanced: None, or becomes the velocity of the next step."""
        square = None if self._limit is None else self._square(grad)
        launch(
            advance_kernel, -(-self._numel // TILE), grad, self._velocity, decoded, advanced, moved, square, self._limit, self._mu, float(rescale),
            self._numel, REMEMBERS=self._kind != "none", NESTEROV=self._kind == "nesterov", CLIPS=square is not None, TILE=TILE,
        )  # fmt: skip

    def _square(self, grad: torch.Tensor) -> torch.Tensor:
        """The sum of the gradient's squares, the first element of a float64 tensor."""
        arrays = allocated(sums_plan(self._numel), grad.device)
        sums = arrays["sums"]
        launch(squares_kernel, sums.numel(), grad, sums, self._numel, LEAF=LEAF, STEPS=STEPS, num_warps=8)
        return total(sums, arrays["more_sums"])


def momentum_state(scheme: Scheme, numel: int, device: torch.device) -> DeviceState | None:
    """A worker's state for one part; None where a codec has no GPU side."""
    assert isinstance(scheme, MomentumScheme)
    inner: DeviceState | None = cuda_state(scheme.inner, numel, device)
    if inner is None or (scheme.momentum.momentum == "none" and not scheme.clip):
        return inner
    return MomentumDeviceState(scheme, inner, cuda_side(scheme.push), numel, device)
