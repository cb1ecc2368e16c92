"""Torch tensors as a bucket: one flat NumPy array to encode from and decode into.

Owns element types, packing in logical order (whatever the strides), and what becomes of tensors on a GPU: encoded there (``psgc/torch/device``), or
copied through pinned memory and encoded on the CPU. Copies run in pool threads and, on the CPU, use NumPy and the codecs' kernels: a torch copy there
would start a team of OpenMP threads beside the trainer's.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from psgc.codecs import BucketContext, Scheme, parse_scheme
from psgc.codecs.codec import DTYPES, CodecPair
from psgc.codecs.common.floats import FLOAT_KERNELS
from psgc.codecs.scheme import PairScheme
from psgc.errors import UsageError
from psgc.layout import ITEM_BYTES, Bucket
from psgc.torch.device.elements import DeviceElements
from psgc.torch.device.engine import Engine
from psgc.torch.device.engines import engine_of
from psgc.torch.device.faults import device_faults
from psgc.torch.device.halves import DecodedOnHost, EncodedOnHost
from psgc.torch.device.runtime import Event, Stream
from psgc.torch.device.states import StateElements
from psgc.worker.session import DeviceBuffer

Array = NDArray[Any]
TORCH_DTYPES: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in ITEM_BYTES}
_NAMES: Final = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_PARTS: Final = {torch.complex64: torch.float32, torch.complex128: torch.float64}  # of complex dtypes


def dtype_name(tensor: torch.Tensor, what: str) -> str:
    """The layout's name of ``tensor``'s dtype; of a complex one, that of its real and imaginary parts (``real_of``). Raises UsageError naming ``what`` for one
    that psgc does not carry, for a DTensor, and for what is no tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"{what}: expected a tensor, got a {type(tensor).__name__}; torch.as_tensor() makes one of numbers and arrays")
    if type(tensor) not in _PLAIN and hasattr(tensor, "to_local"):
        raise UsageError(
            f"{what}: it is a DTensor, of which this rank has a piece; give tensor.to_local(), among ranks that have the same piece "
            f"(psgc.init(mesh=mesh, dim=...))"
        )
    name = _NAMES.get(_PARTS.get(tensor.dtype, tensor.dtype))
    if name is None:
        raise UsageError(f"{what}: psgc does not carry {_text(tensor.dtype)}; it carries {', '.join(_NAMES.values())}, and complex ones")
    if tensor.device.type not in ("cpu", "cuda"):
        raise UsageError(f"{what}: it lies on {tensor.device}; psgc carries tensors of the CPU and of CUDA devices")
    if tensor.layout != torch.strided:
        raise UsageError(f"{what}: psgc carries dense tensors, not {_text(tensor.layout)}; convert it with to_dense()")
    if tensor.is_conj() or tensor.is_neg():
        kind, remedy = ("conjugate", "resolve_conj()") if tensor.is_conj() else ("negation", "resolve_neg()")
        raise UsageError(f"{what}: it is a {kind} that is not computed yet, so nothing could be written to it; call {remedy}")
    return name


def real_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as it travels: itself; of a complex one, its real and imaginary parts, in the same memory."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; of a conjugate or a negation that is not computed yet, as autograd leaves some gradients, the computed one."""
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Of ``real_of``."""
    return (*tensor.shape, 2) if tensor.is_complex() else tuple(tensor.shape)


def _text(value: object) -> str:
    return str(value).removeprefix("torch.")


@functools.lru_cache(maxsize=256)
def staging_dtype(codec: str, dtype: str) -> torch.dtype:
    """What the codec wants a bucket of ``dtype`` handed over in: its own dtype, or float32."""
    wanted = np.dtype(parse_scheme(codec, BucketContext(dtype)).array_dtype)
    return TORCH_DTYPES[dtype] if wanted == np.dtype(DTYPES[dtype]) else torch.float32


def as_array(tensor: torch.Tensor) -> Array:
    """The same memory as NumPy, strides kept; bfloat16 as its bits (uint16)."""
    plain = tensor.detach() if tensor.requires_grad else tensor  # each call into torch lets go of the GIL, and the network thread takes it
    return (plain.view(torch.uint16) if plain.dtype == torch.bfloat16 else plain).numpy()


def contiguous_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy that is part of no graph."""
    return (tensor.detach() if tensor.requires_grad else tensor).clone(memory_format=torch.contiguous_format)


def copy_elements(source: torch.Tensor, target: torch.Tensor) -> None:
    """``target[...] = source`` between CPU tensors of one shape, in logical order, casting where the dtypes differ."""
    read, write = as_array(source), as_array(target)
    if source.dtype == target.dtype:
        np.copyto(write, read)
        return
    bf16 = torch.bfloat16
    if source.dtype == bf16:
        read = np.left_shift(read, 16, dtype=np.uint32).view(np.float32)
    if target.dtype == bf16:
        read = _narrow(read)
    with np.errstate(over="ignore"):
        np.copyto(write, read, casting="unsafe")


def _narrow(values: Array) -> Array:
    flat = np.ascontiguousarray(values, np.float32).reshape(-1)
    bits = np.empty(flat.size, np.uint16)
    if flat.size:
        FLOAT_KERNELS["bfloat16"].finish(flat, 0, 1, bits.view(np.uint8))
    return bits.reshape(values.shape)


# Where a bucket is encoded, and decoded if elsewhere: on the device that it lies on, if that has the codec's kernels, or as a plan says.
Where = Literal["", "cpu", "gpu", "gpu/cpu", "cpu/gpu"]
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)  # a subclass may make gradients of its own kind
_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)
_PLANNED: Final[dict[str, Where]] = {"gpu": "gpu", "gpu/cpu": "gpu/cpu", "cpu/gpu": "cpu/gpu"}


def where_of(bucket: Bucket, on_gpu: bool) -> Where:
    """on_gpu: whether a bucket of which the layout says nothing may be encoded on a GPU."""
    left_open: Where = "" if on_gpu else "cpu"
    return _PLANNED.get(bucket.device, left_open)


@dataclass(frozen=True, slots=True, eq=False)
class _Bound:
    """The tensors of one step. likes: what those that are missing are made like. events: by device, after all that had been enqueued when they were bound."""

    tensors: tuple[torch.Tensor | None, ...] = ()
    likes: tuple[torch.Tensor, ...] = ()
    engines: Mapping[torch.device, Engine] = field(default_factory=dict)
    events: Mapping[torch.device, Event] = field(default_factory=dict)

    @property
    def pairs(self) -> Iterator[tuple[torch.Tensor | None, torch.Tensor]]:
        """Each tensor, with what it would be made like."""
        return itertools.zip_longest(self.tensors, self.likes)

    @property
    def present(self) -> list[torch.Tensor]:
        """Each tensor, or what it would be made like."""
        return [like if tensor is None else tensor for tensor, like in self.pairs]

    @property
    def engine(self) -> Engine | None:
        """Of the one device that all lie on."""
        found = {engine_of(tensor) for tensor in self.present}
        return found.pop() if len(found) == 1 else None

    def engine_of(self, tensor: torch.Tensor) -> Engine | None:
        return self.engines.get(tensor.device) if self.engines and engine_of(tensor) is not None else None


class _FlatOnDevice:
    """A bucket's elements, flat, on the device that they lie on. elements: of this step, once they are laid out. wide: they are laid out in float32, whatever
    the tensors' dtype."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self.elements: torch.Tensor | None = None
        self.wide = False
        self._shapes = shapes
        self._fused: torch.Tensor | None = None  # where buckets of several tensors are laid out
        self._loading = threading.Lock()

    def lay_out(self, engine: Engine, bound: _Bound) -> torch.Tensor:
        """For work on the engine's ``compute`` stream."""
        with self._loading:
            if self.elements is None:
                self.elements = self._laid_out(engine, bound)
            return self.elements

    def _laid_out(self, engine: Engine, bound: _Bound) -> torch.Tensor:
        given = next(t for t in (*bound.tensors, *bound.likes) if t is not None)
        with device_faults(engine.name):
            engine.compute.wait(bound.events[given.device])
            for tensor in bound.tensors:
                if tensor is not None:
                    engine.compute.hold(tensor)
            lone = bound.tensors[0] if len(bound.tensors) == 1 else None
            dtype = torch.float32 if self.wide else given.dtype
            if lone is not None and lone.is_contiguous() and lone.dtype == dtype:
                return lone.view(-1)
            if self._fused is None or self._fused.dtype != dtype or self._fused.device != given.device:
                self._fused = engine.empty(_numel(self._shapes), dtype)
            flat = self._fused
            pairs = list(zip(bound.tensors, _places(flat, self._shapes), strict=True))
            there = [(t, place) for t, place in pairs if t is not None]
            missing = [place for t, place in pairs if t is None]

            def lay_out() -> None:
                if there:
                    torch._foreach_copy_([place for _, place in there], [t for t, _ in there])
                for place in missing:
                    place.zero_()

            engine.compute.run(lay_out, [t for t, _ in there], [flat])
            return flat

    def unpack(self, engine: Engine, targets: list[torch.Tensor]) -> Event:
        """From the elements to the tensors. Returns the event after which they have been written."""
        flat = self.elements
        assert flat is not None
        if flat is self._fused:
            places = _places(flat, self._shapes)
            engine.compute.run(lambda: torch._foreach_copy_(targets, places), [flat], targets)
        return engine.compute.record()


def _numel(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _places(flat: torch.Tensor, shapes: Iterable[tuple[int, ...]]) -> list[torch.Tensor]:
    """Where tensors of these shapes lie in it, one after the other."""
    places, offset = [], 0
    for shape in shapes:
        numel = math.prod(shape)
        places.append(flat[offset : offset + numel].view(shape))
        offset += numel
    return places


class _FlatOnHost:
    """A bucket's elements, flat, on the host: a lone tensor itself, where it can be used ``in_place``; else memory that tensors of any device are copied to and
    from, packed in logical order."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.in_place = False
        self._shapes = shapes
        self._memory: torch.Tensor | None = None
        self._places: list[torch.Tensor] = []  # of each tensor in the memory

    def lie_in(self, memory: Array | None) -> list[torch.Tensor]:
        """Use these bytes from now on; None: memory of its own. Returns each tensor's place, whose version is not that of any other."""
        self._memory = torch.empty(_numel(self._shapes), dtype=self.dtype) if memory is None else torch.from_numpy(memory).view(self.dtype)
        self._places = _places(self._memory, self._shapes)
        return [place.data for place in self._places]

    def load(self, bound: _Bound, stored: Mapping[torch.device, Event]) -> Array:
        """The tensors' elements. stored: when the last step's results have left the memory. Waits for devices."""
        tensors, engines = bound.tensors, bound.engines
        lone = tensors[0] if len(tensors) == 1 else None
        self.in_place = lone is not None and engine_of(lone) is None and lone.dtype == self.dtype and lone.is_contiguous()
        if self.in_place:
            assert lone is not None
            return as_array(lone).reshape(-1)
        memory = self._made(bound)
        for each in engines.values():
            each.runtime.received(self)
        for event in stored.values():
            event.synchronize()
        copied: dict[torch.device, Engine] = {}
        for tensor, place in zip(tensors, self._places, strict=True):
            if tensor is None:
                for each in engines.values():
                    each.runtime.host_writes(place)
                as_array(place).fill(0)
            elif tensor.data_ptr() == place.data_ptr():
                pass  # it is a view of its place
            elif (engine := bound.engine_of(tensor)) is not None:
                _from_device(engine, bound.events[tensor.device], tensor, place)
                copied[tensor.device] = engine
            else:
                copy_elements(tensor, place)
        for engine in copied.values():
            with device_faults(engine.name):
                engine.down.record().synchronize()
            engine.runtime.host_reads(memory)
        for engine in engines.values():
            engine.runtime.handed(self)
        return as_array(memory)

    def unpack(self, bound: _Bound, targets: Sequence[torch.Tensor]) -> dict[torch.device, Event]:
        """From the memory to the tensors. Returns, by device, the event after which they have been written."""
        memory = self._made(bound)
        copied: dict[torch.device, Engine] = {}
        for target, place in zip(targets, self._places, strict=True):
            engine = bound.engine_of(target)
            if target.data_ptr() == place.data_ptr():
                pass  # it is a view of its place
            elif engine is None:
                copy_elements(place, target)
            else:
                if target.device not in copied:
                    engine.runtime.received(self)
                    engine.runtime.host_writes(memory)
                _to_device(engine, place, target)
                copied[target.device] = engine
        for engine in copied.values():
            engine.runtime.handed(self)
        return {device: engine.up.record() for device, engine in copied.items()}

    def _made(self, bound: _Bound) -> torch.Tensor:
        if self._memory is None:
            numel = _numel(self._shapes)
            engine = next(iter(bound.engines.values()), None)
            if engine is None:
                self._memory = torch.empty(numel, dtype=self.dtype)
            else:
                self._memory = engine.runtime.pinned(numel * self.dtype.itemsize).view(self.dtype)
            self._places = _places(self._memory, self._shapes)
        return self._memory


def _from_device(engine: Engine, ready: Event, tensor: torch.Tensor, place: torch.Tensor) -> None:
    with device_faults(engine.name):
        engine.down.wait(ready)
        engine.down.hold(tensor)
        engine.down.run(lambda: place.copy_(tensor.to(place.dtype), non_blocking=True), [tensor], [place])


def _to_device(engine: Engine, place: torch.Tensor, target: torch.Tensor) -> None:
    """``load`` has waited for what fills the target before the step."""
    with device_faults(engine.name):
        engine.up.hold(target)
        engine.up.run(lambda: target.copy_(place.to(target.device, non_blocking=True)), [place], [target])


class TensorsBuffer(DeviceBuffer):
    """A bucket's tensors, laid out one after the other; the BucketBuffer that sessions see.

    ``bind`` says before each step which tensors take part. None stands for a tensor that does not exist yet: it counts as zeros, and
    after a step that was not skipped ``made`` holds what it would be. A lone contiguous CPU tensor of the right dtype is used in place, as is one on a
    device that encodes it.

    Tensors on a device are read after what the binding thread has enqueued. late: whoever reads them after the step calls ``arrive`` first; otherwise
    ``store`` waits until they have been written.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, where: Where = "cpu", late: bool = False) -> None:
        shapes = tuple(shapes)
        self._where, self._late = where, late
        self._bound = _Bound()
        self._stored: dict[torch.device, Event] = {}  # after the last step's results have been written
        self._there: tuple[Engine, str, DeviceElements] | None = None  # with the codec that it is of
        self._host, self._flat = _FlatOnHost(shapes, dtype), _FlatOnDevice(shapes)
        self.skipped = False
        self._made: tuple[torch.Tensor | None, ...] = ()
        self._views: tuple[torch.Tensor | None, ...] = (None,) * len(shapes)
        self._complex: tuple[bool, ...] = ()  # whether a missing tensor is made complex

    def lie_in(self, memory: Array) -> None:
        """Pack several tensors, that lie on the host, in this memory, which is as long as the bucket."""
        self._host.lie_in(memory)

    def give_views(self, likes: Sequence[torch.Tensor], memory: Array | None) -> tuple[torch.Tensor | None, ...]:
        """As ``lie_in``; None: in memory of its own. Returns, for tensors like these, views of the bucket's elements, which are loaded and stored without a
        copy; where such a tensor is missing, ``made`` has the view. None for tensors in another order or in another dtype."""
        places = self._host.lie_in(memory)
        self._views = tuple(place if is_like(place, like) else None for place, like in zip(places, likes, strict=True))
        return self._views

    def bind(self, tensors: Sequence[torch.Tensor | None], likes: Sequence[torch.Tensor] | None = None) -> None:
        """Take these tensors for the next step. likes: what a missing tensor is made like; needed only where one is missing."""
        # Not detach(): what psgc writes to gradients must not count as a change by the script, which tensors' versions tell of.
        given = tuple(None if t is None else real_of(t.data) for t in tensors)
        wanted = tuple(real_of(like.data) if like.is_complex() else like for like in likes or ())
        self._complex = tuple(like.is_complex() for like in likes or ())
        found = {t.device: engine for t in (*given, *wanted) if t is not None and (engine := engine_of(t)) is not None}
        events = {device: engine.runtime.current().record() for device, engine in found.items()}  # refuses graphs that are being captured
        self._bound = _Bound(given, wanted, found, events)
        self._made = (None,) * len(given)
        self.skipped = False
        self._flat.elements = None

    @property
    def made(self) -> tuple[torch.Tensor | None, ...]:
        """By tensor: None for those that were there."""
        if not any(self._complex):
            return self._made
        pairs = zip(self._made, self._complex, strict=True)
        return tuple(torch.view_as_complex(made) if made is not None and is_complex else made for made, is_complex in pairs)

    @property
    def waits(self) -> bool:
        return bool(self._bound.events)

    def on_device(self, scheme: Scheme, wanted: bool = False, slices: Sequence[tuple[int, int]] = ()) -> DeviceElements | None:
        """See psgc.worker.session.DeviceBuffer."""
        if not wanted and (self._where == "cpu" or not self._bound.tensors):
            return None
        engine, there = self._bound.engine, self._there
        if there is not None and there[0] is engine and there[1] == scheme.canonical:
            return there[2]
        made: DeviceElements | None = None
        if engine is not None and scheme.residual_dtype == "float32":
            if type(scheme) is PairScheme:
                made = _elements_on(engine, scheme.pair, scheme.array_dtype, "gpu" if wanted else self._where, self._elements)
            elif not wanted and self._where in ("", "gpu"):
                made = StateElements.of(engine, scheme, slices, self._elements)
        if engine is None or made is None:
            if wanted or self._where:
                lies = "it does not lie on one GPU" if engine is None else f"{engine.name} has no kernels for {scheme.canonical}"
                raise UsageError(f"the plan has this bucket encoded on a GPU, but {lies}; plan with devices = ['cpu'], or another codec")
            return None
        self._there = engine, scheme.canonical, made
        self._flat.wide = wanted or (isinstance(made, DecodedOnHost | EncodedOnHost) and self._host.dtype == torch.float32)
        return made

    def located(self) -> DeviceElements | None:
        """See psgc.worker.session.DeviceBuffer."""
        found, engine = self._bound.present, self._bound.engine
        if engine is None or found[0].dtype not in _FLOATS or any(t.dtype != found[0].dtype for t in found):
            return None
        there = self._there
        if there is None or there[0] is not engine or there[1]:
            there = self._there = engine, "", DeviceElements(engine, None, None, self._elements)
            self._flat.wide = False
        return there[2]

    def _elements(self) -> torch.Tensor:
        """This step's elements, flat, on the device; for work on its ``compute`` stream."""
        assert self._there is not None
        return self._flat.lay_out(self._there[0], self._bound)

    def load(self) -> Array:
        return self._host.load(self._bound, self._stored)

    def store(self, skipped: bool) -> None:
        self.skipped = skipped
        if not skipped and self._flat.elements is not None:
            self._unpack_there()
        elif not skipped and not self._host.in_place:
            self._make_missing(None)
            self._stored = self._host.unpack(self._bound, self._targets())
        if skipped:
            self._stored = {}
        if not self._late:
            for event in self._stored.values():
                event.synchronize()
        self._bound = _Bound((), self._bound.likes, self._bound.engines)
        self._flat.elements = None

    def arrive(self) -> None:
        """What the calling thread enqueues from now on begins when the last step's results have been written."""
        for device, event in self._stored.items():
            engine = self._bound.engines[device]
            current = engine.runtime.current()
            current.wait(event)
            for tensor in self._made:
                if tensor is not None and tensor.device == device:
                    current.hold(tensor)

    def _unpack_there(self) -> None:
        """From the flat elements on the device to the tensors."""
        assert self._there is not None
        engine = self._there[0]
        with device_faults(engine.name):
            self._make_missing(engine)
            targets = self._targets()
            self._stored = {targets[0].device: self._flat.unpack(engine, targets)}

    def _make_missing(self, engine: Engine | None) -> None:
        made: list[torch.Tensor | None] = []
        for view, (tensor, like) in zip(self._views, self._bound.pairs, strict=True):
            own = None if tensor is not None else self._bound.engine_of(like)
            if tensor is not None:
                made.append(None)
            elif own is None:
                made.append(view if view is not None and is_like(view, like) else torch.empty_like(like))
            else:
                made.append(_empty_like(own, like, own.compute if engine is not None else own.up))
        self._made = tuple(made)

    def _targets(self) -> list[torch.Tensor]:
        found = (made if tensor is None else tensor for tensor, made in zip(self._bound.tensors, self._made, strict=True))
        return [tensor for tensor in found if tensor is not None]


def is_like(view: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a view can stand for what would be made like ``tensor``."""
    return tensor.device == view.device and tensor.dtype == view.dtype and tensor.is_contiguous() and type(tensor) in _PLAIN


def _elements_on(
    engine: Engine, pair: CodecPair, array_dtype: Any, where: Where, elements: Callable[[], torch.Tensor]
) -> DeviceElements | None:
    """None where the device has no kernels for what is to be done there."""
    push = None if where == "cpu/gpu" else engine.codec(pair.push)
    pull = None if where == "gpu/cpu" else engine.codec(pair.pull)
    if push is not None and pull is not None:
        return DeviceElements(engine, push, pull, elements)
    if push is not None and where == "gpu/cpu":
        return DecodedOnHost(engine, push, pair.pull, elements, array_dtype)
    if pull is not None and where == "cpu/gpu":
        return EncodedOnHost(engine, pair.push, pull, elements, array_dtype)
    return None


def _empty_like(engine: Engine, like: torch.Tensor, stream: Stream) -> torch.Tensor:
    made: list[torch.Tensor] = []
    stream.run(lambda: made.append(torch.empty_like(like)), [], [])
    return made[0]
