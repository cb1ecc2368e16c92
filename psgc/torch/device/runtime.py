"""What psgc asks of a device's runtime: streams, events and memory. ``cuda.py`` implements it over torch.cuda.

Every piece of work says which tensors it reads and which it writes. CUDA has no use for that; the recording stand-in of the tests does: it finds two
uses of one piece of memory, at least one of them a write, that no event orders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from psgc.codecs import Scheme
from psgc.codecs.codec import Codec
from psgc.device.codec import DeviceCodec
from psgc.device.state import DeviceState


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Sleep until the device has come to this point. Never called in the training thread."""

    def query(self) -> bool:
        """Whether the device has come to this point. Does not wait."""


class Mark(Protocol):
    """A point in a stream's work, and the time at which the device comes to it."""

    def us_to(self, later: Any) -> float | None:
        """Microseconds from here to a later mark of the same stream; None while the device has not come to it. Does not wait."""


class Stream(Protocol):
    """Work that the device does in order."""

    def mark(self) -> Mark:
        """A mark after all that has been enqueued so far."""

    def record(self) -> Event:
        """An event after all that has been enqueued so far."""

    def wait(self, event: Event) -> None:
        """What is enqueued from now on begins after the event."""

    def run(self, work: Callable[[], object], reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        """Enqueue ``work``, which calls kernels or copies; it does not wait for them."""

    def hold(self, tensor: torch.Tensor) -> None:
        """Keep the tensor's memory from being given to others before what this stream has enqueued is over, whoever drops the tensor."""


class Runtime(Protocol):
    """One device."""

    @property
    def device(self) -> torch.device: ...

    def current(self) -> Stream:
        """The calling thread's stream: the one that backward and optimizers run on. Raises UsageError while it is captured in a CUDA graph."""

    def stream(self) -> Stream:
        """A new stream of psgc's own."""

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory on the device, that lives as long as the tensor and may be used on any stream of psgc's."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Host memory, uint8, that the device copies to and from without waiting."""

    def codec(self, codec: Codec) -> DeviceCodec | None:
        """The codec's kernels for this device; None where it has none."""

    def state(self, scheme: Scheme, numel: int) -> DeviceState | None:
        """A new state of the scheme for a part, on this device; None where it has no kernels for it. Called within ``Stream.run`` of the stream that all
        its work is on. Raises CodecError for a part that its kernels do not take."""

    @property
    def gpu(self) -> str:
        """The device's id, unique among all devices; "" where nobody says."""

    @property
    def nccl(self) -> str:
        """The version of the library that connects devices; "" where there is none."""

    def process_group(self, store: Any, index: int, size: int, timeout_s: float) -> Any:
        """A process group of torch.distributed for tensors on this device: this is member ``index``, and members meet in the store. timeout_s: after which the
        library itself gives up a collective. Raises what the library raises."""

    def host_reads(self, tensor: torch.Tensor) -> None:
        """This thread is about to read pinned memory."""

    def host_writes(self, tensor: torch.Tensor) -> None:
        """This thread is about to write pinned memory."""

    def handed(self, thing: object) -> None:
        """This thread is done with ``thing``, and gives it to another thread."""

    def received(self, thing: object) -> None:
        """This thread has got ``thing`` from another thread."""
