"""A device's streams, and what is enqueued on them beside the trainer's kernels.

Three streams: one computes (encodes, decodes, packs), one copies down to the host, one copies up (``staging.py``). Events order them among each other, and with
the trainer's stream. Host threads that wait: pool threads for a free slot, the completions' thread for events. Owns no buckets.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from psgc.codecs import Scheme
from psgc.codecs.codec import F32, Codec
from psgc.device.codec import DeviceCodec
from psgc.device.state import DeviceState
from psgc.torch.device.faults import device_faults
from psgc.torch.device.launches import Coming, Launches
from psgc.torch.device.results import Results
from psgc.torch.device.rings import SLOT_BYTES, SLOTS
from psgc.torch.device.runtime import Event, Runtime, Stream
from psgc.torch.device.staging import Down, Up

Bytes = NDArray[np.uint8]


class Engine:
    """See the module's text."""

    def __init__(self, runtime: Runtime, slots: int = SLOTS, slot_bytes: int = SLOT_BYTES) -> None:
        self.runtime = runtime
        self.name = str(runtime.device)
        self.compute = runtime.stream()
        self._down = Down(runtime, self.name, slots, slot_bytes)
        self._up = Up(runtime, self.name, slots, slot_bytes)
        self._scratch: torch.Tensor | None = None
        self._scratch_lock = threading.Lock()
        self._codecs: dict[tuple[str, str], DeviceCodec | None] = {}
        self.launches, self.results = Launches(self, slot_bytes), Results(self, slot_bytes)

    @property
    def down(self) -> Stream:
        """That copies to the host."""
        return self._down.stream

    @property
    def up(self) -> Stream:
        """That copies to the device."""
        return self._up.stream

    def side_stream(self) -> Stream:
        """A further stream, for a group's collectives: two groups never share one, since ranks may begin their collectives in different orders."""
        return self.runtime.stream()

    def codec(self, codec: Codec) -> DeviceCodec | None:
        """The codec's kernels for this device; None where it has none."""
        key = codec.canonical, codec.dtype
        if key not in self._codecs:
            self._codecs[key] = self.runtime.codec(codec)
        return self._codecs[key]

    def state(self, scheme: Scheme, numel: int) -> DeviceState | None:
        """A new state of the scheme, whose memory is ``compute``'s; None where the device has no kernels for it. Raises CodecError."""
        made: list[DeviceState | None] = []
        self.compute_on(lambda: made.append(self.runtime.state(scheme, numel)), [], [])
        return made[0]

    @contextmanager
    def scratch(self, nbytes: int) -> Iterator[torch.Tensor]:
        """Memory for one kernel's intermediate values, to be enqueued on ``compute`` within the block."""
        with self._scratch_lock:
            if self._scratch is None or self._scratch.numel() < nbytes:
                self._scratch = self.empty(max(nbytes, 16), torch.uint8)
            yield self._scratch

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory on the device. Raises DeviceError where there is too little."""
        with device_faults(self.name):
            return self.runtime.empty(numel, dtype)

    def download(self, coming: Sequence[Coming], ready: Event) -> Event:
        """See ``Down.copy``."""
        return self._down.copy(coming, ready)

    def upload(self, payload: Bytes, target: torch.Tensor) -> Event:
        """See ``Up.copy``."""
        return self._up.copy(payload, target)

    def incoming(self, payloads: Sequence[Bytes]) -> AbstractContextManager[list[torch.Tensor]]:
        """See ``Up.arriving``."""
        return self._up.arriving(payloads, self.compute)

    def fetch(self, tensor: torch.Tensor) -> NDArray[Any]:
        """A copy on the host of what ``compute`` leaves in the tensor. Waits for the device; for use between steps, and on the way to an error."""
        with device_faults(self.name):
            host = torch.empty(tensor.shape, dtype=tensor.dtype)
            self.compute.run(lambda: host.copy_(tensor), [tensor], [host])
            self.compute.record().synchronize()
        self.runtime.host_reads(host)
        return host.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else host.numpy()

    def put(self, values: NDArray[Any], target: torch.Tensor) -> None:
        """Write host values to a tensor on the device, before what ``compute`` does next. May wait for the device; for use between steps."""
        with device_faults(self.name):
            host = torch.from_numpy(np.array(values))
            self.runtime.host_writes(host)
            self.compute.run(lambda: target.copy_(host), [host], [target])

    def brought(self, values: F32) -> torch.Tensor:
        """A copy of host values on the device, flat, for what ``compute`` does next; for use between steps."""
        target = self.empty(values.size, torch.float32)
        self.put(values.reshape(-1), target)
        return target

    def compute_on(self, work: Callable[[], object], reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        """Enqueue ``work`` on ``compute``."""
        with device_faults(self.name):
            self.compute.run(work, reads, writes)
