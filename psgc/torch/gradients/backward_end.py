"""Detects the end of a backward. The only file that uses torch's private functions for it: ``queue_callback`` and the current node.

Autograd calls a queued callback when a graph is done, before ``backward()`` returns; DDP and FSDP deliver gradients that way, too. This
file adds two things. A backward may run another one inside it (a reentrant checkpoint runs one for each segment), whose callbacks come before the
outer one has finished its gradients: they are postponed to the end of the outermost backward. And all waiters of one backward are called together.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from threading import Lock, local
from typing import Any, Final, TypeVar

import torch

from psgc.torch.session.uncompiled import uncompiled

logger = logging.getLogger(__name__)
Waiter = TypeVar("Waiter")
# Whether this torch has both functions. If not, or if they fail, gradients are delivered by step(), as under late synchronization.
AVAILABLE: Final = hasattr(torch.autograd.Variable._execution_engine, "queue_callback") and hasattr(torch._C, "_current_autograd_node")


_unsaid = Lock()  # taken for good when it is said


def warn_once(reason: str) -> None:
    """Warn, once, that the end of a backward cannot be detected, and what follows from it."""
    if _unsaid.acquire(blocking=False):
        logger.warning(
            "torch %s does not report the end of backward (%s): means are in p.grad after step() or optimizer.synchronize(), as with "
            "late_synchronization", torch.__version__, reason,
        )  # fmt: skip


class BackwardEnd:
    """The awaited end of one backward. came: the backward is over. lost: the backward raised, so its callback will never come."""

    def __init__(self) -> None:
        self.came = False
        self._carrier: weakref.ref[Any] = weakref.ref(self)

    @property
    def lost(self) -> bool:
        # Autograd alone holds the carrier, and lets go of it with the graph.
        return not self.came and self._carrier() is None

    @property
    def ahead(self) -> bool:
        return not self.came and self._carrier() is not None

    def carried_by(self, carrier: object) -> None:
        self._carrier = weakref.ref(carrier)


def await_end(waiter: Waiter, finish: Callable[[list[Waiter]], None]) -> BackwardEnd:
    """From a hook: when the outermost backward that is under way is over, but has not returned, ``finish`` is called with all waiters of that
    backward, in the thread that completes it; ``backward()`` then raises what ``finish`` raises. Raises torch's error if the callback cannot be queued.
    """
    end = BackwardEnd()
    callback = _Callback(end, waiter, finish)
    _queue(callback)
    end.carried_by(callback)
    return end


class _Callback:
    """The callback of one waiter, queued with one graph."""

    __slots__ = ("__weakref__", "end", "finish", "waiter")

    def __init__(self, end: BackwardEnd, waiter: Any, finish: Callable[[list[Any]], None]) -> None:
        self.end, self.waiter, self.finish = end, waiter, finish

    @uncompiled
    def __call__(self) -> None:
        outer: Any = torch._C._current_autograd_node()
        if outer is None:
            _gather(self)
        else:
            _put_off(self, outer)


def _put_off(callback: _Callback, node: Any) -> None:
    """Queue the callback again with the outer graph, whose ``node`` runs the inner backward: the next node of that graph queues it."""
    handles: list[Any] = []

    @uncompiled
    def queue_again(_gradients: object) -> None:
        if handles:
            _queue(callback)
        while handles:
            handles.pop().remove()

    handles += [following.register_prehook(queue_again) for following, _ in node.next_functions if following is not None]


class _Group:
    """The waiters of one backward whose callbacks have come."""

    __slots__ = ("__weakref__", "callbacks")

    def __init__(self) -> None:
        self.callbacks: list[_Callback] = []

    @uncompiled
    def __call__(self) -> None:
        callbacks, self.callbacks = self.callbacks, []
        for callback in callbacks:
            callback.end.came = True
        callbacks[0].finish([callback.waiter for callback in callbacks])


_thread = local()  # group: a weak reference, for if another callback of the queue raises, the group is never called


def _gather(callback: _Callback) -> None:
    group = _thread.group() if hasattr(_thread, "group") else None
    if group is None or not group.callbacks:
        group = _Group()
        _queue(group)
        _thread.group = weakref.ref(group)
    group.callbacks.append(callback)
    callback.end.carried_by(group)


def _queue(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)
