"""Torch tensors as a bucket: one flat NumPy array to encode from and decode into.

Owns element types, packing in logical order (whatever the strides), and the copies through pinned memory for tensors on a GPU. Copies run in
pool threads and use NumPy and the codecs' kernels: a torch copy there would start a team of OpenMP threads beside the trainer's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from psgc.codecs import BucketContext, parse_scheme
from psgc.codecs.codec import DTYPES
from psgc.codecs.common.floats import FLOAT_KERNELS
from psgc.errors import UsageError
from psgc.layout import ITEM_BYTES

Array = NDArray[Any]
TORCH_DTYPES: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in ITEM_BYTES}
_NAMES: Final = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def dtype_name(tensor: torch.Tensor, what: str) -> str:
    """The layout's name of ``tensor``'s dtype. Raises UsageError naming ``what`` for one that psgc does not carry."""
    name = _NAMES.get(tensor.dtype)
    if name is None:
        raise UsageError(f"{what}: psgc does not carry {_text(tensor.dtype)}; it carries {', '.join(_NAMES.values())}")
    if tensor.layout != torch.strided:
        raise UsageError(f"{what}: psgc carries dense tensors, not {_text(tensor.layout)}; convert it with to_dense()")
    return name


def _text(value: object) -> str:
    return str(value).removeprefix("torch.")


def staging_dtype(codec: str, dtype: str) -> torch.dtype:
    """What the codec wants a bucket of ``dtype`` handed over in: its own dtype, or float32."""
    wanted = np.dtype(parse_scheme(codec, BucketContext(dtype)).array_dtype)
    return TORCH_DTYPES[dtype] if wanted == np.dtype(DTYPES[dtype]) else torch.float32


def as_array(tensor: torch.Tensor) -> Array:
    """The same memory as NumPy, strides kept; bfloat16 as its bits (uint16)."""
    plain = tensor.detach()
    return (plain.view(torch.uint16) if plain.dtype == torch.bfloat16 else plain).numpy()


def copy_elements(source: torch.Tensor, target: torch.Tensor) -> None:
    """``target[...] = source`` between CPU tensors of one shape, in logical order, casting where the dtypes differ."""
    read, write = as_array(source), as_array(target)
    bf16 = torch.bfloat16
    if source.dtype == bf16 and target.dtype != bf16:
        read = np.left_shift(read, 16, dtype=np.uint32).view(np.float32)
    if target.dtype == bf16 and source.dtype != bf16:
        read = _narrow(read)
    with np.errstate(over="ignore"):
        np.copyto(write, read, casting="unsafe")


def _narrow(values: Array) -> Array:
    flat = np.ascontiguousarray(values, np.float32).reshape(-1)
    bits = np.empty(flat.size, np.uint16)
    if flat.size:
        FLOAT_KERNELS["bfloat16"].finish(flat, 0, 1, bits.view(np.uint8))
    return bits.reshape(values.shape)


class TensorsBuffer:
    """A bucket's tensors, laid out one after the other; the BucketBuffer that sessions see.

    ``bind`` says before each step which tensors take part. None stands for a tensor that does not exist yet: it counts as zeros, and
    after a step that was not skipped ``made`` holds what it would be. A lone contiguous CPU tensor of the right dtype is used in place.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:
        self._shapes = tuple(shapes)
        self._dtype = dtype
        self._tensors: tuple[torch.Tensor | None, ...] = ()
        self._likes: tuple[torch.Tensor, ...] = ()
        self._events: dict[torch.device, Any] = {}
        self._staging: torch.Tensor | None = None
        self._in_place = False
        self.skipped = False
        self.made: tuple[torch.Tensor | None, ...] = ()

    def bind(self, tensors: Sequence[torch.Tensor | None], likes: Sequence[torch.Tensor] | None = None) -> None:
        """Take these tensors for the next step. likes: what a missing tensor is made like; needed only where one is missing."""
        self._tensors = tuple(None if t is None else t.detach() for t in tensors)
        self._likes = tuple(likes or ())
        self.made = (None,) * len(self._tensors)
        self.skipped = False
        self._events = _events({t.device for t in (*self._tensors, *self._likes) if t is not None and t.is_cuda})

    @property
    def waits(self) -> bool:
        return bool(self._events)

    def load(self) -> Array:
        lone = self._tensors[0] if len(self._tensors) == 1 else None
        self._in_place = lone is not None and lone.device.type == "cpu" and lone.dtype == self._dtype and lone.is_contiguous()
        if self._in_place:
            assert lone is not None
            return as_array(lone).reshape(-1)
        staging = self._staged()
        for tensor, place in zip(self._tensors, self._places(staging), strict=True):
            if tensor is None:
                as_array(place).fill(0)
            elif tensor.is_cuda:
                self._from_device(tensor, place)
            else:
                copy_elements(tensor, place)
        return as_array(staging)

    def store(self, skipped: bool) -> None:
        self.skipped = skipped
        if not skipped and not self._in_place:
            self._unpack()
        self._tensors, self._events = (), {}

    def _unpack(self) -> None:
        made: list[torch.Tensor | None] = []
        for index, place in enumerate(self._places(self._staged())):
            target = self._tensors[index]
            made.append(torch.empty_like(self._likes[index]) if target is None else None)
            target = made[index] if target is None else target
            assert target is not None
            if target.is_cuda:
                self._to_device(place, target)
            else:
                copy_elements(place, target)
        self.made = tuple(made)

    def _staged(self) -> torch.Tensor:
        if self._staging is None:
            numel = sum(math.prod(shape) for shape in self._shapes)
            self._staging = torch.empty(numel, dtype=self._dtype, pin_memory=bool(self._events))
        return self._staging

    def _places(self, staging: torch.Tensor) -> list[torch.Tensor]:
        places, offset = [], 0
        for shape in self._shapes:
            numel = math.prod(shape)
            places.append(staging[offset : offset + numel].view(shape))
            offset += numel
        return places

    def _from_device(self, tensor: torch.Tensor, place: torch.Tensor) -> None:
        stream = _copy_stream(tensor.device)
        with torch.cuda.stream(stream):
            stream.wait_event(self._events[tensor.device])
            place.copy_(tensor.to(place.dtype), non_blocking=True)
        stream.synchronize()

    def _to_device(self, place: torch.Tensor, target: torch.Tensor) -> None:
        """On return the target holds the values for whatever stream reads it next."""
        stream = _copy_stream(target.device)
        with torch.cuda.stream(stream):
            stream.wait_event(self._events[target.device])
            target.copy_(place.to(target.device, non_blocking=True))
        stream.synchronize()


def _events(devices: set[torch.device]) -> dict[torch.device, Any]:
    """For each device an event after all that the calling thread has enqueued: what fills the tensors to be read."""
    return {device: torch.cuda.current_stream(device).record_event() for device in devices}


_streams: dict[torch.device, Any] = {}


def _copy_stream(device: torch.device) -> Any:
    """The stream that psgc copies on, one a device, so that copies do not wait for the trainer's kernels."""
    stream = _streams.get(device)
    if stream is None:
        stream = _streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    return stream
