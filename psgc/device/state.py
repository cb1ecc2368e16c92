"""What the GPU side of a scheme's state is; ``psgc.codecs.backends`` finds it for a scheme and a device.

A ``DeviceState`` does on a GPU what its ``SchemeState`` does on the CPU, for a whole part. Tensors, ``status``, ``rescale`` and what calls may do are those of
``codec``; ``stream`` is a ``Stream``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from psgc.codecs.codec import Bytes, Stream
from psgc.codecs.scheme import Round


class DeviceState(ABC):
    """A worker's state for one part, on the device."""

    rounds: tuple[Round, ...]

    def scratch_bytes(self) -> int:
        """Bytes of device memory that ``encode`` needs besides its arguments."""
        return 0

    @abstractmethod
    def encode(
        self, index: int, grad: torch.Tensor, residual: torch.Tensor | None, rescale: float, stream: Stream, out: torch.Tensor,
        status: torch.Tensor, scratch: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Write round ``index``'s payload to ``out``. ``grad`` and ``residual`` are the same in every round of a step, and are not modified."""

    def take(self, index: int, payload: torch.Tensor) -> None:
        """Take in the result of a round that is not the last."""
        raise NotImplementedError

    def pieces(self, answer: Bytes) -> Sequence[Bytes]:
        """The last round's answer, checked, as the pieces that go to the device, each to a multiple of 16 bytes: one, or the payloads of a relayed
        answer. Work of the host. Raises PayloadError."""
        last = self.rounds[-1]
        last.pair.pull.validate(answer, last.numel)
        return [answer]

    @abstractmethod
    def apply(
        self, pieces: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], target: torch.Tensor, residual: torch.Tensor | None, rescale: float
    ) -> None:  # fmt: skip
        """Take the last round's answer: ``target``, which holds the gradient, becomes the result; the residual (None: this rank sent nothing) becomes what
        ``sent``, the payloads of all rounds, left out. pieces: what ``pieces`` gave, on the device."""

    @abstractmethod
    def add_back(self, sent: Sequence[torch.Tensor], residual: torch.Tensor) -> None:
        """Add what the last step sent to the residual, because its result was thrown away."""

    @property
    def saved(self) -> torch.Tensor | None:
        """A copy of what is kept for each element besides the residual, float32 [numel], in gradient units; or None. Checkpoints hold it."""
        return None

    def restore(self, saved: torch.Tensor) -> None:
        """Go on from what ``saved`` of another state was, on the CPU or on a device."""
        raise NotImplementedError

    @property
    def factors(self) -> Mapping[int, torch.Tensor]:
        """What is saved with a checkpoint besides the residual, by the first element of the tensor that it belongs to."""
        return {}

    def restore_factors(self, factors: Mapping[int, torch.Tensor]) -> None:  # noqa: B027 - most schemes have none
        """Take what ``factors`` gave."""
