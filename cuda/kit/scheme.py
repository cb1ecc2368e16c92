"""The GPU side of schemes that are written with the kit: their functions, run with `ops.TorchOps`, around the two codecs' GPU sides."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from psgc.codecs.backends import cuda_side
from psgc.codecs.codec import Stream
from psgc.codecs.kit.scheme import KitScheme
from psgc.codecs.scheme import Scheme, check_part
from psgc.cuda.kit.ops import TorchOps
from psgc.cuda.kit.vectors import DeviceVector
from psgc.device.codec import DeviceCodec
from psgc.device.state import DeviceState
from psgc.errors import CodecError


class KitDeviceState(DeviceState):
    """unit: the rescale that the state has taken already since the residual was last committed."""

    def __init__(self, scheme: KitScheme, push: DeviceCodec, pull: DeviceCodec, numel: int, device: torch.device) -> None:
        self.rounds = scheme.rounds(numel)
        self._scheme, self._push, self._pull, self._numel, self._device = scheme, push, pull, numel, device
        self._ops = TorchOps(device)
        self._state = torch.zeros(numel if scheme.keeps_state else 0, device=device)
        self._unit = 1.0

    def scratch_bytes(self) -> int:
        return self._push.scratch_bytes(self._numel)

    def encode(
        self, index: int, grad: torch.Tensor, residual: torch.Tensor | None, rescale: float, stream: Stream, out: torch.Tensor,
        status: torch.Tensor, scratch: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        before = torch.zeros(self._numel, device=self._device) if residual is None else residual * rescale
        self._push.encode(self._outgoing(grad, before), None, 1.0, stream, out, status, scratch)

    def apply(
        self, pieces: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], target: torch.Tensor, residual: torch.Tensor | None, rescale: float
    ) -> None:  # fmt: skip
        if residual is not None:
            before = residual * rescale
            p, decoded = _vector(self._outgoing(target, before)), self._decoded(self._push, sent[0])
            residual.copy_(self._scheme.left_over(self._ops, p, _vector(before), decoded).data)
        state = _vector(self._state * (rescale / self._unit))
        result, after = self._scheme.incoming(self._ops, self._decoded(self._pull, pieces[0]), state)
        target.copy_(result.data)
        self._state.copy_(after.data)
        self._unit = 1.0 if residual is not None else rescale

    def add_back(self, sent: Sequence[torch.Tensor], residual: torch.Tensor) -> None:
        back = self._scheme.put_back(self._ops, _vector(residual.clone()), self._decoded(self._push, sent[0]))
        residual.copy_(back.data)

    @property
    def saved(self) -> torch.Tensor | None:
        unit = torch.full((1,), self._unit, device=self._device)  # by a number, torch would multiply with its reciprocal
        return self._state / unit if self._scheme.keeps_state else None

    def restore(self, saved: torch.Tensor) -> None:
        self._state.copy_(saved)
        self._unit = 1.0

    def _outgoing(self, grad: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        p = self._scheme.outgoing(self._ops, _vector(grad.float()), _vector(before))
        if p.type != "f32" or p.shape != (self._numel,):
            raise CodecError(f"codec {self._scheme.name}: outgoing gave {p.dtype}{list(p.shape)}, not float32[{self._numel}]")
        data: torch.Tensor = p.data
        return data.contiguous()

    def _decoded(self, codec: DeviceCodec, payload: torch.Tensor) -> DeviceVector:
        out = torch.empty(self._numel, device=self._device)
        codec.decode(payload, self._numel, out)
        return _vector(out)


def kit_state(scheme: Scheme, numel: int, device: torch.device) -> KitDeviceState | None:
    """A worker's state for one part; None where one of the codecs has no GPU side."""
    assert isinstance(scheme, KitScheme)
    check_part(scheme.canonical, numel)
    pair = scheme.rounds(numel)[0].pair
    push, pull = cuda_side(pair.push), cuda_side(pair.pull)
    return None if push is None or pull is None else KitDeviceState(scheme, push, pull, numel, device)


def _vector(data: torch.Tensor) -> DeviceVector:
    return DeviceVector(data, "f32")
