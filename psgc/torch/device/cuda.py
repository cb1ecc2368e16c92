"""The runtime over torch.cuda. Imported where a CUDA tensor is met, never before."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from psgc.codecs import Scheme
from psgc.codecs.backends import device_codec, device_state
from psgc.codecs.codec import Codec
from psgc.device.codec import DeviceCodec
from psgc.device.state import DeviceState
from psgc.errors import UsageError
from psgc.torch.device.runtime import Event, Mark, Stream
from psgc.transport.memory.numa import bus_of, memory_on, node_of

logger = logging.getLogger(__name__)


class CudaMark:
    """See Mark. event: a torch.cuda.Event with timing."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def us_to(self, later: CudaMark) -> float | None:
        return 1e3 * float(self._event.elapsed_time(later._event)) if later._event.query() else None


class CudaStream:
    """See Stream. stream: a torch.cuda.Stream."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def record(self) -> Event:
        event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # a thread that waits for it sleeps
        event.record(self._stream)
        found: Event = event
        return found

    def mark(self) -> Mark:
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return CudaMark(event)

    def wait(self, event: Event) -> None:
        self._stream.wait_event(event)

    def run(self, work: Callable[[], object], reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        with torch.cuda.stream(self._stream), torch.no_grad():
            work()

    def hold(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._stream)


def numa_node(properties: Any, root: Path = Path("/sys")) -> int | None:
    """The NUMA node that a GPU is on, by torch's properties of it; None where there is no choice, or nobody says."""
    numbers = [getattr(properties, f"pci_{name}_id", -1) for name in ("domain", "bus", "device")]  # older versions of torch lack them
    return node_of(bus_of(*numbers), root)


class CudaRuntime:
    """See Runtime."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: list[Any] = []
        self._node = numa_node(torch.cuda.get_device_properties(device))

    def current(self) -> Stream:
        with torch.cuda.device(self.device):
            if torch.cuda.is_current_stream_capturing():
                raise UsageError(
                    f"gradients on {self.device} became ready while a CUDA graph was being captured; psgc's exchange cannot be part of a graph: capture "
                    "inside `with optimizer.no_sync():`, and call optimizer.replayed() after each replay"
                )
        return CudaStream(torch.cuda.current_stream(self.device))

    def stream(self) -> Stream:
        stream: Any = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._streams.append(stream)
        return CudaStream(stream)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        first, *others = self._streams
        with torch.cuda.stream(first):
            made = torch.empty(numel, dtype=dtype, device=self.device)
        for stream in others:
            stream.wait_stream(first)  # which may still use this memory for a tensor that has been dropped
            made.record_stream(stream)
        return made

    def pinned(self, nbytes: int) -> torch.Tensor:
        with memory_on(self._node):  # pinning touches the pages, in this thread
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def codec(self, codec: Codec) -> DeviceCodec | None:
        found: DeviceCodec | None = device_codec(codec, self.device) if self._has_kernels else None
        return found

    def state(self, scheme: Scheme, numel: int) -> DeviceState | None:
        found: DeviceState | None = device_state(scheme, numel, self.device) if self._has_kernels else None
        return found

    @functools.cached_property
    def _has_kernels(self) -> bool:
        """Whether kernels can run here; where they cannot, gradients are encoded on the CPU, and the log says why."""
        from psgc.cuda.common.usable import why_not

        with torch.cuda.device(self.device):
            reason = why_not()
        if reason:
            logger.warning("%s: gradients are encoded on the CPU, because kernels cannot run on this GPU: %s", self.device, reason)
        return not reason

    @property
    def gpu(self) -> str:
        return str(getattr(torch.cuda.get_device_properties(self.device), "uuid", ""))

    @property
    def nccl(self) -> str:
        if not (dist.is_available() and dist.is_nccl_available()):
            return ""
        return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]

    def process_group(self, store: Any, index: int, size: int, timeout_s: float) -> Any:
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timedelta(seconds=timeout_s)
        with torch.cuda.device(self.device):
            return nccl(store, index, size, options)

    def host_reads(self, tensor: torch.Tensor) -> None:
        return

    def host_writes(self, tensor: torch.Tensor) -> None:
        return

    def handed(self, thing: object) -> None:
        return

    def received(self, thing: object) -> None:
        return
