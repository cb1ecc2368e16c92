"""Keeps track of the models that torch's DistributedDataParallel has wrapped in this process, and calls a function for each new one.

Owns the two methods of DistributedDataParallel that it replaces, once: its constructor, and what restores a copy.
Knows nothing of psgc's sessions and gradients.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

_construct, _restore = DistributedDataParallel.__init__, DistributedDataParallel.__setstate__


@dataclass
class _Known:
    """This module's state, one a process. reduced: see the function; made: the number of wrappers seen so far; then: called with each new one."""

    wrappers: list[weakref.ref[DistributedDataParallel]] = field(default_factory=list)  # oldest first
    reduced: weakref.WeakKeyDictionary[DistributedDataParallel, dict[str, torch.Tensor]] = field(default_factory=weakref.WeakKeyDictionary)
    watching: bool = False
    made: int = 0
    then: Callable[[DistributedDataParallel], None] | None = None


_known = _Known()


def watch() -> None:
    """Keep track of all wrappers, also of existing ones. Further calls do nothing."""
    if not _known.watching:
        _known.watching = True
        _find()
        DistributedDataParallel.__init__ = constructed  # type: ignore[method-assign]
        DistributedDataParallel.__setstate__ = restored  # type: ignore[method-assign]


def do_with_new(then: Callable[[DistributedDataParallel], None] | None) -> None:
    """Call ``then`` with every wrapper once it has been constructed, in place of what was called before. None: nothing is."""
    watch()
    _known.then = then


@functools.wraps(_construct)
def constructed(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
    _construct(self, *args, **kwargs)
    _add(self)
    if _known.then is not None:
        _known.then(self)


@functools.wraps(_restore)
def restored(self: DistributedDataParallel, state: Any) -> None:
    """Of a copy, and one that was saved: it averages by itself, without a hook, as DDP has it."""
    _restore(self, state)  # type: ignore[no-untyped-call]
    _add(self)


def made() -> int:
    """How many wrappers have been made so far; unchanged as long as no model is wrapped."""
    return _known.made


def all_wrappers() -> list[DistributedDataParallel]:
    """All wrappers that still exist, oldest first."""
    return [wrapper for reference in _known.wrappers if (wrapper := reference()) is not None]


def wrapper_of(parameters: Iterable[torch.Tensor]) -> DistributedDataParallel | None:
    """The newest wrapper that reduces these parameters' gradients."""
    watch()
    wanted = {id(parameter) for parameter in parameters}
    holders = [wrapper for wrapper in all_wrappers() if wanted <= {id(p) for p in reduced(wrapper).values()}]
    return holders[-1] if holders else None


def reduced(wrapper: DistributedDataParallel) -> dict[str, torch.Tensor]:
    """Parameters whose gradients the wrapper reduces, by their names in the wrapped module, in the wrapper's order. DDP fixes them when it is made:
    those that required a gradient then, whatever has been toggled since. Of wrappers that were found later, those that did when they were found."""
    return _known.reduced[wrapper]


def _find() -> None:
    """Find wrappers made before ``watch``. They need a process group; without one there is nothing to search."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        for thing in gc.get_objects():
            if issubclass(type(thing), DistributedDataParallel):
                _add(thing)


def _add(wrapper: DistributedDataParallel) -> None:
    _known.wrappers = [reference for reference in _known.wrappers if reference() is not None]
    _known.wrappers.append(weakref.ref(wrapper))
    ignored = wrapper.parameters_to_ignore
    _known.reduced[wrapper] = {name: p for name, p in wrapper.module.named_parameters() if p.requires_grad and name not in ignored}
    _known.made += 1
