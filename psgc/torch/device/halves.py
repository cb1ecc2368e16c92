"""A bucket's elements on a device, encoded there and decoded on the host, or the other way round, as a plan may have it.

The residual lies where gradients are encoded. What is not encoded crosses between device and host as it is, through the engine's staging rings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from psgc.codecs.codec import Codec, Encoded, Stream
from psgc.codecs.scheme import slices
from psgc.device.codec import DeviceCodec
from psgc.torch.device.elements import DeviceElements
from psgc.torch.device.engine import Engine
from psgc.worker.device import Bytes, EncodedThen
from psgc.worker.residuals.residual import F32, Float32Residual, Residual

Elements = Callable[[], torch.Tensor]


class DecodedOnHost(DeviceElements):
    """Encoded on the device by ``push``; results are decoded on the host by ``pull``, to the codecs' ``array_dtype``, and copied up."""

    def __init__(self, engine: Engine, push: DeviceCodec, pull: Codec, elements: Elements, array_dtype: Any) -> None:
        super().__init__(engine, push, push, elements)
        self._host_pull, self._array_dtype = pull, array_dtype

    def apply(self, lo: int, hi: int, payload: Bytes, residual: Residual | None, rescale: float) -> None:
        pull, target, numel = self._host_pull, self._elements()[lo:hi], hi - lo
        pull.validate(payload, numel)
        self._commit(lo, hi, residual, rescale)
        values = np.empty(numel, self._array_dtype)
        for first, last in slices(pull, numel):
            pull.decode(payload, numel, first, last, values[first:last])
        with self._engine.incoming([values.view(np.uint8)]) as (arrived,):
            self._engine.compute_on(lambda: target.copy_(arrived.view(target.dtype)), [arrived], [target])


class EncodedOnHost(DeviceElements):
    """Copied down and encoded on the host by ``push``; results are decoded on the device by ``pull``."""

    def __init__(self, engine: Engine, push: Codec, pull: DeviceCodec, elements: Elements, array_dtype: Any) -> None:
        super().__init__(engine, pull, pull, elements)
        self._host_push, self._array_dtype = push, array_dtype
        self._encoded: dict[tuple[int, int], tuple[NDArray[Any], Bytes]] = {}  # by slice: what was encoded last, and its payload

    def residual(self, numel: int) -> Residual:
        return Float32Residual(numel)

    def encode(
        self, index: int, lo: int, hi: int, residual: Residual | None, rescale: float, stream: Stream, out: Bytes, then: EncodedThen
    ) -> None:
        gradient = np.empty(hi - lo, self._array_dtype)
        self.to_host(lo, hi, gradient)
        encoded: Encoded = self._host_push.encode(gradient, _loaded(residual), rescale, stream, out)
        self._encoded[lo, hi] = gradient, out[: encoded.payload_bytes]
        then(encoded)

    def apply(self, lo: int, hi: int, payload: Bytes, residual: Residual | None, rescale: float) -> None:
        push, pull, target, numel = self._host_push, self._codec(1), self._elements()[lo:hi], hi - lo
        pull.codec.validate(payload, numel)
        kept = _loaded(residual)
        if kept is not None:
            gradient, sent = self._encoded[lo, hi]
            for first, last in slices(push, numel):
                push.commit(sent, numel, first, last, gradient[first:last], kept[first:last], rescale)
        with self._engine.incoming([payload]) as (arrived,):
            self._engine.compute_on(lambda: pull.decode(arrived, numel, target), [arrived], [target])

    def add_back(self, lo: int, hi: int, residual: Residual) -> None:
        push, kept = self._host_push, residual.load()
        _, sent = self._encoded[lo, hi]
        for first, last in slices(push, hi - lo):
            push.fold([sent], hi - lo, first, last, kept[first:last], False)


def _loaded(residual: Residual | None) -> F32 | None:
    return None if residual is None else residual.load()
