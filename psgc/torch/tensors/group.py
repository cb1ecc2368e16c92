"""push_pull of several tensors at once: fused, as gradients are, so that many small ones take few messages.

Owns the groups' names, and BytePS's counter of grouped calls.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final
from weakref import WeakKeyDictionary

import torch

from psgc.errors import UsageError
from psgc.layout import Declaration
from psgc.torch.session import api
from psgc.torch.session.uncompiled import uncompiled
from psgc.torch.tensors.buffers import contiguous_copy, resolved
from psgc.torch.tensors.codec_text import CodecGiven, codec_text
from psgc.torch.tensors.declaring import declaration, spec_of
from psgc.torch.tensors.push_pull import push_pull_async_inplace
from psgc.torch.tensors.sent import TensorExchange
from psgc.worker.session import Session

UNNAMED: Final = "group"
_exchanges: WeakKeyDictionary[Session, dict[str, tuple[Declaration, TensorExchange]]] = WeakKeyDictionary()


@uncompiled
def push_pull_group(
    tensors: Sequence[torch.Tensor], average: bool = True, name: str | None = None, compression: CodecGiven = None
) -> list[torch.Tensor]:
    """The sums (or means) of these tensors over all ranks, as new tensors; waits for them.

    tensors:  of any shapes and dtypes, in the same order on every rank. Those of one dtype travel together, in pieces of up to PSGC_FUSE_BYTES.
    name:     the same on all ranks for the same tensors; different groups need names of their own. The first call of a name waits for all ranks to make it,
              so ranks must make the first calls in one order.
    compression: as of ``push_pull``, for all of them.
    Raises UsageError for a name used before for other tensors; CodecError; LayoutMismatch where ranks differ, naming the first tensor.
    """
    session = api.current_session()
    session.check()
    if not isinstance(name, str | None):
        raise UsageError(f"push_pull_group of {name!r}: the name is a {type(name).__name__}, expected text, the same on all ranks, or None")
    tensors = [resolved(tensor) if isinstance(tensor, torch.Tensor) else tensor for tensor in tensors]
    wanted = _declaration(session, tensors, average, name, compression)
    outputs = [contiguous_copy(tensor) for tensor in tensors]
    if any(spec.numel for spec in wanted.tensors):
        _exchange(session, wanted).run(outputs)
    return outputs


def _declaration(
    session: Session, tensors: Sequence[torch.Tensor], average: bool, name: str | None, compression: CodecGiven
) -> Declaration:  # fmt: skip
    what, name = f"push_pull_group of {name!r}", name or UNNAMED
    specs = tuple(spec_of(tensor, f"{name}.{index}", f"{what}, tensor {index}") for index, tensor in enumerate(tensors))
    codecs = {codec_text(compression, spec.dtype) for spec in specs} or {"none"}
    return declaration(session, f"push_pull_group.{name}", "adhoc", specs, min(codecs), bool(average))


def _exchange(session: Session, wanted: Declaration) -> TensorExchange:
    known = _exchanges.setdefault(session, {})
    found = known.get(wanted.name)
    if found is not None and found[0] != wanted:
        raise UsageError(
            f"{wanted.name!r} was of {len(found[0].tensors)} other tensors before, or of another sum or codec; give each group its own name"
        )
    if found is None:
        found = known[wanted.name] = wanted, TensorExchange(session, wanted)
    return found[1]


class _Counter:
    """BytePS's count of grouped calls: it begins again after as many as there are gradients."""

    def __init__(self) -> None:
        self.lock, self.grads, self.count = threading.Lock(), 0, 0

    def next(self) -> int:
        with self.lock:
            self.count += 1
            now = self.count
            if self.count >= self.grads:
                self.count = 0
            return now


_counters: WeakKeyDictionary[Session, _Counter] = WeakKeyDictionary()


def set_num_grads(number: int) -> None:
    """How many calls of ``push_pull_group_sync_inplace`` make one round of gradients (BytePS's ``byteps_torch_set_num_grads``)."""
    if not isinstance(number, int) or number < 1:
        raise UsageError(f"set_num_grads({number!r}): expected a whole number of at least 1")
    counter = _counters.setdefault(api.current_session(), _Counter())
    with counter.lock:
        counter.grads, counter.count = number, 0


@uncompiled
def push_pull_group_sync_inplace(
    tensor: torch.Tensor, average: bool = True, name: str | None = None, version: int = 0, priority: int = 0
) -> tuple[int, int]:
    """BytePS's: starts the push_pull of one gradient of a group in place, and returns its handle with the number of this call in the round, which has as many
    as ``set_num_grads`` said. When that number is reached, all gradients are under way: call ``synchronize`` on every handle."""
    counter = _counters.setdefault(api.current_session(), _Counter())
    if not counter.grads:
        raise UsageError("push_pull_group_sync_inplace: call set_num_grads(number of gradients) before")
    return push_pull_async_inplace(tensor, average, name, version, priority), counter.next()
