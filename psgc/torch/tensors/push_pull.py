"""push_pull of single tensors by name: start, poll, wait. Owns handles, names and the autograd rule; knows nothing of optimizers.

Every rank must call with the same names; between different names the order does not matter.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast
from weakref import WeakKeyDictionary

import torch

from psgc.errors import CodecError, UsageError
from psgc.layout import MAX_PRIORITY, Declaration, TensorSpec, build_layout
from psgc.torch.session import api, speed, without_effect
from psgc.torch.session.uncompiled import uncompiled
from psgc.torch.tensors.buffers import TensorsBuffer, contiguous_copy, dtype_name, resolved, shape_of, staging_dtype
from psgc.torch.tensors.byteps_options import options_text, seed_among
from psgc.torch.tensors.codec_text import CodecGiven, codec_text
from psgc.torch.tensors.declaring import declaration
from psgc.worker.session import Session, Ticket

# Unnamed calls of one signature take turns on this many names: memory stays bounded, and this many can be in flight at once.
UNNAMED_RING: Final = 16


@dataclass(frozen=True, slots=True)
class _UnderWay:
    ticket: Ticket | None
    output: torch.Tensor


@dataclass(slots=True)
class _Names:
    """The names that one session's calls have declared so far, and the calls in flight."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    declared: dict[str, Declaration] = field(default_factory=dict)
    codecs: dict[str, str] = field(default_factory=dict)  # by name, as ``declare`` was told
    versions: dict[str, int] = field(default_factory=dict)  # by name, the last one that was not 0
    unnamed: Counter[str] = field(default_factory=Counter)
    under_way: dict[int, _UnderWay] = field(default_factory=dict)


_names: WeakKeyDictionary[Session, _Names] = WeakKeyDictionary()


class _Handles:
    """The process's handles: 1, 2, ..."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0
        self._open: set[int] = set()  # not synchronized yet

    def next(self) -> int:
        with self._lock:
            self._last += 1
            self._open.add(self._last)
            return self._last

    def finish(self, handle: int) -> None:
        with self._lock:
            self._open.discard(handle)

    def finished(self, handle: Any) -> bool:
        """Whether the handle has been synchronized."""
        return isinstance(handle, int) and 0 < handle <= self._last and handle not in self._open


_handles = _Handles()


@uncompiled
def push_pull_async(
    tensor: torch.Tensor, average: bool = True, name: str | None = None, version: int = 0, priority: int = 0,
    compression: CodecGiven = None,
) -> int:  # fmt: skip
    """Start the sum (or mean) of ``tensor`` over all ranks into a new tensor; returns a handle for ``poll`` and ``synchronize``.

    tensor:       any shape, strides and device; the input is copied, so it may change at once. No elements: done at once.
    average:      True: the mean (integers floor-divide); False: the sum. Computed by the servers, in fp32 for 16- and 32-bit floats.
    name:         the same on all ranks for the same tensor, always of one shape. None: named by its shape, dtype and the order of
                  such calls, so then all ranks must make their unnamed calls of one shape in the same order.
    version:      0, or a number that rises from call to call of a name: a call that repeats one is refused, so that nothing is summed twice.
    priority:     of what this rank has ready to send, the highest leaves first. It may differ from call to call. Without effect where no servers are.
    compression:  codec text such as ``"int8"`` or ``"onebit/int8"``, an object that has it, or BytePS's options; None: what ``declare`` was told of the
                  name, else uncompressed. Lossy codecs take float32, bfloat16, float16.
    Raises:       UsageError for a dtype that psgc does not carry, a name used before for another shape, or a repeated version; CodecError.
    """
    tensor = _check_call(tensor, name, copies=True)
    declared = _declared(tensor, average, name, compression)
    _check_turn(name, version, priority)
    return _start(declared, contiguous_copy(tensor), priority)


@uncompiled
def push_pull_async_inplace(
    tensor: torch.Tensor, average: bool = True, name: str | None = None, version: int = 0, priority: int = 0,
    compression: CodecGiven = None,
) -> int:  # fmt: skip
    """Like ``push_pull_async``, with the result in ``tensor`` itself; leave it alone until ``synchronize``."""
    _check_call(tensor, name)
    if any(stride == 0 and length > 1 for stride, length in zip(tensor.stride(), tensor.shape, strict=True)):
        raise UsageError(f"push_pull of {name!r} in place: elements of an expanded tensor share memory; call contiguous() first")
    declared = _declared(tensor, average, name, compression)
    _check_turn(name, version, priority)
    return _start(declared, tensor, priority)


@uncompiled
def push_pull(
    tensor: torch.Tensor, average: bool = True, name: str | None = None, version: int = 0, priority: int = 0, compression: CodecGiven = None
) -> torch.Tensor:
    """The sum (or mean) of ``tensor`` over all ranks; see ``push_pull_async``. Differentiable: the gradient of a push_pull is the
    push_pull of the gradient, under the name with ``.backward`` after it."""
    tensor = _check_call(tensor, name, copies=True)
    if torch.is_grad_enabled() and tensor.requires_grad:
        found = name or _unnamed(tensor, average, _carried(tensor, name, compression)[1])
        return cast("torch.Tensor", _PushPull.apply(tensor, average, found, version, priority, compression))  # type: ignore[no-untyped-call]
    return _result(push_pull_async(tensor, average, name, version, priority, compression))


@uncompiled
def push_pull_inplace(
    tensor: torch.Tensor, average: bool = True, name: str | None = None, version: int = 0, priority: int = 0, compression: CodecGiven = None
) -> torch.Tensor:
    """Like ``push_pull``, with the result in ``tensor`` itself; not differentiable."""
    return _result(push_pull_async_inplace(tensor, average, name, version, priority, compression))


@uncompiled
def poll(handle: int) -> bool:
    """Whether ``synchronize(handle)`` would return the result at once. Raises UsageError for a handle that is unknown or has been synchronized, as BytePS
    raises an error."""
    ticket = _find(handle).ticket
    return ticket is None or ticket.done


@uncompiled
def synchronize(handle: int) -> torch.Tensor | None:
    """Wait for a push_pull and return its result; the handle is used up. As BytePS's, returns None for a handle that has been synchronized before. Raises
    UsageError for one that no push_pull has given."""
    return None if _handles.finished(handle) else _result(handle)


def _result(handle: int) -> torch.Tensor:
    under_way = _find(handle)
    session = api.current_session()
    if under_way.ticket is not None:
        session.wait([under_way.ticket])
    names = _names_of(session)
    with names.lock:
        names.under_way.pop(handle, None)
    _handles.finish(handle)
    torch.autograd.graph.increment_version(under_way.output)  # it was written behind autograd's back
    speed.look(session)
    return under_way.output


@uncompiled
def declare(name: str, compression: CodecGiven = None, **options: Any) -> int:
    """Say how a name's tensor travels from its next push_pull on, where that call names no codec itself; returns 0, as BytePS's does. No name needs to be
    declared, and the order of declarations does not matter. options: BytePS's (``byteps_compressor_type="onebit"``, ...).
    Raises UsageError for both at once; CodecError."""
    session = api.current_session()
    session.check()
    if not isinstance(name, str):
        raise UsageError(f"declare({name!r}): the name is a {type(name).__name__}, expected text")
    if options and compression is not None:
        raise UsageError(f"declare({name!r}): compression and {next(iter(options))} say the same; leave one out")
    names, codec = _names_of(session), codec_text(options_text(options) if options else compression, "float32")
    if (seed := seed_among(options or compression)) is not None:
        without_effect.tell_seed(session, *seed)
    with names.lock:
        names.codecs[name] = codec
    return 0


def _check_call(tensor: torch.Tensor, name: str | None, copies: bool = False) -> torch.Tensor:
    """Raise UsageError for what is no tensor, and for a name that is no text, before any rank hears of it. copies: the tensor is only read, and so may be a
    conjugate that is not computed yet. Returns the tensor to read."""
    what = f"push_pull of {name!r}" if name is not None else "push_pull"
    if not isinstance(name, str | None):
        raise UsageError(f"{what}: the name is a {type(name).__name__}, expected text, the same on all ranks, or None")
    tensor = resolved(tensor) if copies and isinstance(tensor, torch.Tensor) else tensor
    dtype_name(tensor, what)
    return tensor


def _check_turn(name: str | None, version: int, priority: int) -> None:
    """Raise UsageError for a version that is not above the name's last one, and for a priority that is none."""
    if not isinstance(priority, int) or abs(priority) >= MAX_PRIORITY:
        raise UsageError(
            f"push_pull of {name!r}: priority is {priority!r}, expected a whole number between -{MAX_PRIORITY} and {MAX_PRIORITY}"
        )
    if not isinstance(version, int) or version < 0:
        raise UsageError(f"push_pull of {name!r}: version is {version!r}, expected a whole number, 0 for none")
    if not version or name is None:
        return
    names = _names_of(api.current_session())
    with names.lock:
        last = names.versions.get(name, 0)
        if version <= last:
            raise UsageError(
                f"push_pull of {name!r}: version {version} after version {last} would be summed twice or out of order; raise the version from call to "
                f"call, or leave it at 0"
            )
        names.versions[name] = version


class _PushPull(torch.autograd.Function):
    """push_pull as autograd sees it."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, average: bool, name: str, version: int, priority: int, compression: CodecGiven
    ) -> torch.Tensor:  # fmt: skip
        ctx.average, ctx.name, ctx.version, ctx.priority = average, name, version, priority
        ctx.compression = _carried(tensor, name, compression)[1]
        return _result(push_pull_async(tensor, average, name, version, priority, compression))

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:
        mean = push_pull(grads[0], ctx.average, f"{ctx.name}.backward", ctx.version, ctx.priority, ctx.compression)
        return mean, None, None, None, None, None


def _declared(tensor: torch.Tensor, average: bool, name: str | None, compression: CodecGiven) -> Declaration:
    """The declaration of this tensor. Checks everything about the tensor, before anything is copied."""
    session = api.current_session()
    dtype, codec = _carried(tensor, name, compression)
    return _declaration(session, name or _unnamed(tensor, average, codec), shape_of(tensor), dtype, codec, average)


def _carried(tensor: torch.Tensor, name: str | None, compression: CodecGiven) -> tuple[str, str]:
    """The tensor's dtype, and the codec that carries it, in canonical text."""
    what = f"push_pull of {name!r}" if name else f"unnamed push_pull of shape {list(tensor.shape)}"
    dtype = dtype_name(tensor, what)
    if compression is None and name is not None:
        compression = _names_of(api.current_session()).codecs.get(name)
    try:
        return dtype, codec_text(compression, dtype)
    except CodecError as error:
        raise CodecError(f"{what}: {error}") from None


def _start(declared: Declaration, tensor: torch.Tensor, priority: int) -> int:
    session, spec = api.current_session(), declared.tensors[0]
    ticket = None
    if tensor.numel():
        buffer = TensorsBuffer([spec.shape], staging_dtype(declared.codec, spec.dtype))
        buffer.bind([tensor])
        if priority:
            without_effect.tell_priority(session, spec.name, priority)
        ticket = session.submit_named(declared, buffer, priority=priority)
    handle = _handles.next()
    names = _names_of(session)
    with names.lock:
        names.under_way[handle] = _UnderWay(ticket, tensor)
    return handle


def _declaration(session: Session, name: str, shape: tuple[int, ...], dtype: str, codec: str, average: bool) -> Declaration:
    names, spec = _names_of(session), TensorSpec(name, shape, dtype)
    known = names.declared.get(name)
    if known is not None and known.tensors[0] == spec and known.codec == codec and known.mean == bool(average):
        return known
    wanted = declaration(session, f"push_pull.{name}", "adhoc", (spec,), codec, bool(average))
    with names.lock:
        known = names.declared.get(name)
        if known is None:
            build_layout(wanted, layout_id=0, servers=1, workers=session.size)  # raises what a job could not carry
            known = names.declared[name] = wanted
    if known != wanted:
        raise UsageError(f"push_pull of {name!r}: was {_described(known)} before, is {_described(wanted)} now; use another name")
    return known


def _described(declared: Declaration) -> str:
    spec = declared.tensors[0]
    return f"the {'mean' if declared.mean else 'sum'} of {spec.dtype}{list(spec.shape)} with codec {declared.codec}"


def _unnamed(tensor: torch.Tensor, average: bool, codec: str) -> str:
    signature = f"{dtype_name(tensor, 'push_pull')}{list(shape_of(tensor))}.{'mean' if average else 'sum'}.{codec}"
    names = _names_of(api.current_session())
    with names.lock:
        turn = names.unnamed[signature] % UNNAMED_RING
        names.unnamed[signature] += 1
    return f"noname.{signature}.{turn}"


def unnamed_calls(session: Session) -> dict[str, int]:
    """How many unnamed calls there were of each kind: by that the next ones are named, on all ranks alike."""
    names = _names_of(session)
    with names.lock:
        return dict(names.unnamed)


def follow_unnamed(session: Session, calls: Mapping[str, int]) -> None:
    """Go on from another rank's ``unnamed_calls``, in whose place, or beside whom, this process trains on."""
    names = _names_of(session)
    with names.lock:
        names.unnamed.clear()
        names.unnamed.update(calls)


def _names_of(session: Session) -> _Names:
    found = _names.get(session)
    return _names.setdefault(session, _Names()) if found is None else found


def _carry_over(before: Session, now: Session) -> None:
    """What ``declare`` was told goes on after ``resume``."""
    _names_of(now).codecs.update(_names_of(before).codecs)


api.carry_over(_carry_over)


def _find(handle: int) -> _UnderWay:
    found = _names_of(api.current_session()).under_way.get(handle)
    if found is None:
        raise UsageError(
            f"push_pull handle {handle!r} is unknown; each handle can be polled until it is synchronized, in the session that gave it"
        )
    return found
