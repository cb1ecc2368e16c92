"""Where the floats of a bucket lie in a step: on the host, or on a device that programs work on, or that groups exchange them from.

Owns the choice only. Invariant: it depends on the buffer and on what all ranks agreed on in the last step, and on nothing else that changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from psgc.codecs import Scheme
from psgc.codecs.none import NoneCodec
from psgc.errors import ConfigError, UsageError
from psgc.layout import Bucket
from psgc.worker.device import DeviceBucket
from psgc.worker.session import BucketBuffer, DeviceBuffer


class Location(NamedTuple):
    """device: which the floats stay on, None: the host; dtype: theirs on the host; exchanged: the device that groups may exchange them from."""

    device: DeviceBucket | None
    dtype: Any
    exchanged: DeviceBucket | None


class Whereabouts(Protocol):
    def find(self, buffer: BucketBuffer, on_gpus: bool) -> Location:
        """on_gpus: every rank's gradient lay on a GPU in the last step. Raises ConfigError or UsageError where it must lie on a GPU, and does not."""


class OnHost:
    """Of a bucket that only the host works on."""

    def find(self, buffer: BucketBuffer, on_gpus: bool) -> Location:
        return Location(None, np.float32, None)


class OverServers:
    """Of a bucket that every rank pushes: on the device that has kernels for its scheme. slices: the bucket's, as of ``DeviceBuffer.on_device``; name: of the
    bucket's first tensor, where it is of a model's gradients, else ""."""

    def __init__(self, scheme: Scheme, slices: Sequence[tuple[int, int]], name: str) -> None:
        self._scheme, self._slices, self._name = scheme, slices, name

    def find(self, buffer: BucketBuffer, on_gpus: bool) -> Location:
        try:
            device = buffer.on_device(self._scheme, slices=self._slices) if self._name and isinstance(buffer, DeviceBuffer) else None
        except UsageError as error:
            raise UsageError(f"gradient of {self._name!r}: {error}") from None
        return Location(device, self._scheme.array_dtype, None)


class OverGroups:
    """collectives: PSGC_COLLECTIVES of a bucket that groups may exchange from GPU to GPU, else "host"; name: of the bucket's first tensor."""

    def __init__(self, bucket: Bucket, scheme: Scheme, collectives: str, name: str) -> None:
        self._scheme, self._collectives, self._name = scheme, collectives, name
        self._on_gpu = any(action.endswith("@gpu") for action in bucket.option)
        encodes = any("@" in action for action in bucket.option)
        # Without a codec the gradient can lie on a GPU all through the program, as it is.
        self._moves_floats = collectives != "host" and not encodes and bucket.dtype in ("float32", "bfloat16", "float16")
        self._dtype = NoneCodec(bucket.dtype).array_dtype if self._moves_floats else np.float32

    def find(self, buffer: BucketBuffer, on_gpus: bool) -> Location:
        if not isinstance(buffer, DeviceBuffer):  # it holds an array, which lies on the host alone
            return self._host(None)
        if self._on_gpu:
            device = buffer.on_device(self._scheme, wanted=True)
            if device is None:
                raise UsageError(f"the plan has the bucket of {self._name!r} encoded on a GPU, but it lies on the CPU")
            return Location(device, self._dtype, device if self._collectives != "host" else None)
        device = buffer.located() if self._moves_floats else None
        return Location(device, self._dtype, device) if device is not None and on_gpus else self._host(device)

    def _host(self, device: DeviceBucket | None) -> Location:
        if self._moves_floats and self._collectives == "nccl" and device is None:
            raise ConfigError(
                f"PSGC_COLLECTIVES=nccl, but the gradients in the bucket of {self._name!r} do not lie on one GPU; move them there, "
                "or set PSGC_COLLECTIVES=auto or host"
            )
        return Location(None, self._dtype, device)
