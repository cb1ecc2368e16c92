"""push_pull of single tensors by name: start, poll, wait. Owns handles, names and the autograd rule; knows nothing of optimizers.

Every rank must call with the same names; between different names the order does not matter.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final, cast
from weakref import WeakKeyDictionary

import torch

from psgc.errors import CodecError, UsageError
from psgc.layout import Declaration, TensorSpec, build_layout
from psgc.torch.session import api
from psgc.torch.tensors.buffers import TensorsBuffer, dtype_name, staging_dtype
from psgc.torch.tensors.codec_text import codec_text
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
    unnamed: Counter[str] = field(default_factory=Counter)
    under_way: dict[int, _UnderWay] = field(default_factory=dict)


_names: WeakKeyDictionary[Session, _Names] = WeakKeyDictionary()
_next_handle = itertools.count(1)


def push_pull_async(
    tensor: torch.Tensor, average: bool = True, name: str | None = None, version: int = 0, priority: int = 0,
    compression: str | None = None,
) -> int:  # fmt: skip
    """Start the sum (or mean) of ``tensor`` over all ranks into a new tensor; returns a handle for ``poll`` and ``synchronize``.

    tensor:       any shape, strides and device; the input is copied, so it may change at once. No elements: done at once.
    average:      True: the mean (integers floor-divide); False: the sum. Computed by the servers, in fp32 for 16- and 32-bit floats.
    name:         the same on all ranks for the same tensor, always of one shape. None: named by its shape, dtype and the order of
                  such calls, so then all ranks must make their unnamed calls of one shape in the same order.
    version, priority: accepted for BytePS's sake; without effect.
    compression:  codec text such as ``"int8"`` or ``"onebit/int8"``; None: uncompressed. Lossy codecs take float32, bfloat16, float16.
    Raises:       UsageError for a dtype that psgc does not carry, or a name used before for another shape; CodecError.
    """
    declaration = _declared(tensor, average, name, compression)
    return _start(declaration, tensor.detach().clone(memory_format=torch.contiguous_format).resolve_neg())


def push_pull_async_inplace(
    tensor: torch.Tensor, average: bool = True, name: str | None = None, version: int = 0, priority: int = 0,
    compression: str | None = None,
) -> int:  # fmt: skip
    """Like ``push_pull_async``, with the result in ``tensor`` itself; leave it alone until ``synchronize``."""
    if any(stride == 0 and length > 1 for stride, length in zip(tensor.stride(), tensor.shape, strict=True)):
        raise UsageError(f"push_pull of {name!r} in place: elements of an expanded tensor share memory; call contiguous() first")
    return _start(_declared(tensor, average, name, compression), tensor)


def push_pull(tensor: torch.Tensor, average: bool = True, name: str | None = None, compression: str | None = None) -> torch.Tensor:
    """The sum (or mean) of ``tensor`` over all ranks; see ``push_pull_async``. Differentiable: the gradient of a push_pull is the
    push_pull of the gradient, under the name with ``.backward`` after it."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        resolved = name or _unnamed(tensor, average, _carried(tensor, name, compression)[1])
        return cast("torch.Tensor", _PushPull.apply(tensor, average, resolved, compression))  # type: ignore[no-untyped-call]
    return synchronize(push_pull_async(tensor, average, name, compression=compression))


def push_pull_inplace(tensor: torch.Tensor, average: bool = True, name: str | None = None, compression: str | None = None) -> torch.Tensor:
    """Like ``push_pull``, with the result in ``tensor`` itself; not differentiable."""
    return synchronize(push_pull_async_inplace(tensor, average, name, compression=compression))


def poll(handle: int) -> bool:
    """Whether ``synchronize(handle)`` would return at once. Raises UsageError for a handle that is unknown or synchronized."""
    ticket = _find(handle).ticket
    return ticket is None or ticket.done


def synchronize(handle: int) -> torch.Tensor:
    """Wait for a push_pull and return its result; the handle is used up. Raises UsageError for a handle that is unknown."""
    under_way = _find(handle)
    session = api.current_session()
    if under_way.ticket is not None:
        session.wait([under_way.ticket])
    names = _names_of(session)
    with names.lock:
        names.under_way.pop(handle, None)
    torch.autograd.graph.increment_version(under_way.output)  # it was written behind autograd's back
    return under_way.output


def declare(name: str) -> int:
    """Accepted for BytePS's sake; returns 0. psgc needs no declarations ahead: the order of names does not matter."""
    api.current_session().check()
    return 0


class _PushPull(torch.autograd.Function):
    """push_pull as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, average: bool, name: str, compression: str | None) -> torch.Tensor:
        ctx.average, ctx.name, ctx.compression = average, name, compression
        return synchronize(push_pull_async(tensor, average, name, compression=compression))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return push_pull(grads[0], ctx.average, f"{ctx.name}.backward", ctx.compression), None, None, None


def _declared(tensor: torch.Tensor, average: bool, name: str | None, compression: str | None) -> Declaration:
    """The declaration of this tensor. Checks everything about the tensor, before anything is copied."""
    session = api.current_session()
    dtype, codec = _carried(tensor, name, compression)
    return _declaration(session, name or _unnamed(tensor, average, codec), tuple(tensor.shape), dtype, codec, average)


def _carried(tensor: torch.Tensor, name: str | None, compression: str | None) -> tuple[str, str]:
    """The tensor's dtype, and the codec that carries it, in canonical text."""
    what = f"push_pull of {name!r}" if name else f"unnamed push_pull of shape {list(tensor.shape)}"
    dtype = dtype_name(tensor, what)
    try:
        return dtype, codec_text(compression, dtype)
    except CodecError as error:
        raise CodecError(f"{what}: {error}") from None


def _start(declaration: Declaration, tensor: torch.Tensor) -> int:
    session, spec = api.current_session(), declaration.tensors[0]
    ticket = None
    if tensor.numel():
        buffer = TensorsBuffer([spec.shape], staging_dtype(declaration.codec, spec.dtype))
        buffer.bind([tensor])
        ticket = session.submit_named(declaration, buffer)
    handle = next(_next_handle)
    names = _names_of(session)
    with names.lock:
        names.under_way[handle] = _UnderWay(ticket, tensor)
    return handle


def _declaration(session: Session, name: str, shape: tuple[int, ...], dtype: str, codec: str, average: bool) -> Declaration:
    names, config = _names_of(session), session.config
    declaration = Declaration(
        name=f"push_pull.{name}", kind="adhoc", tensors=(TensorSpec(name, shape, dtype),), codec=codec, mean=average,
        part_bytes=config.part_bytes, fuse_bytes=config.fuse_bytes, min_compress_bytes=config.min_compress_bytes,
    )  # fmt: skip
    with names.lock:
        known = names.declared.get(name)
        if known is None:
            build_layout(declaration, layout_id=0, servers=1, workers=session.size)  # raises what a job could not carry
            known = names.declared[name] = declaration
    if known != declaration:
        raise UsageError(f"push_pull of {name!r}: was {_described(known)} before, is {_described(declaration)} now; use another name")
    return known


def _described(declaration: Declaration) -> str:
    spec = declaration.tensors[0]
    return f"the {'mean' if declaration.mean else 'sum'} of {spec.dtype}{list(spec.shape)} with codec {declaration.codec}"


def _unnamed(tensor: torch.Tensor, average: bool, codec: str) -> str:
    signature = f"{dtype_name(tensor, 'push_pull')}{list(tensor.shape)}.{'mean' if average else 'sum'}.{codec}"
    names = _names_of(api.current_session())
    with names.lock:
        turn = names.unnamed[signature] % UNNAMED_RING
        names.unnamed[signature] += 1
    return f"noname.{signature}.{turn}"


def _names_of(session: Session) -> _Names:
    return _names.setdefault(session, _Names())


def _find(handle: int) -> _UnderWay:
    found = _names_of(api.current_session()).under_way.get(handle)
    if found is None:
        raise UsageError(f"push_pull handle {handle!r} is unknown; each handle can be synchronized once, in the session that gave it")
    return found
