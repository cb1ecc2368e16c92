"""Who counts an inner optimizer's steps, to exchange them: one at a time, since two would both move the parameters."""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Callable
from typing import Any, Final, Protocol

import torch

from psgc.errors import UsageError
from psgc.torch.session.uncompiled import uncompiled
from psgc.worker.session import Session


class Counter(Protocol):
    @property
    def _psgc_counts_as(self) -> str:
        """What it is, in messages."""

    @property
    def _psgc_settled(self) -> bool:
        """Whether it has nothing left to exchange."""

    @property
    def _psgc_moves(self) -> frozenset[int]:
        """By id, the parameters that it exchanges."""

    @property
    def _psgc_session(self) -> Session:
        """In which it exchanges them."""

    _psgc_since: int  # when it began to count, by ``_clock``
    _psgc_last: int  # when its optimizer took its last step

    def _psgc_count_no_more(self) -> None: ...


_counters: Final[weakref.WeakSet[Any]] = weakref.WeakSet()  # that count some optimizer's steps
_clock: Final = itertools.count(1)  # of counters that are made, and of steps
_WRAPPER: Final = torch.optim.Optimizer.profile_hook_step(
    lambda self: None
).__code__  # in which torch has a class's step() run, and calls hooks


class Steps:
    """Calls ``then`` after each step of an optimizer, once: where its class's step() calls its parent's, torch calls the hooks of both."""

    def __init__(self, inner: torch.optim.Optimizer, then: Callable[[], None]) -> None:
        self._then, self._hook = then, inner.register_step_post_hook(self._ended)

    def remove(self) -> None:
        self._hook.remove()

    @uncompiled
    def _ended(self, optimizer: torch.optim.Optimizer, _arguments: Any, _keywords: Any) -> None:
        if _running(optimizer) <= 1:  # the outermost; of one that torch.compile runs, the stack does not tell
            self._then()


def _running(optimizer: torch.optim.Optimizer) -> int:
    """How many of its step() are running, each within the last. One that has raised is on the stack no more."""
    frame, found = inspect.currentframe(), 0
    while frame is not None:
        found += frame.f_code is _WRAPPER and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return found


def counter_of(inner: torch.optim.Optimizer) -> Any:
    """Who counts its steps, or None."""
    return getattr(inner, "_psgc_counter", None)


def refuse_another(inner: torch.optim.Optimizer, by: str) -> None:
    """Raise UsageError where somebody counts the optimizer's steps who has some to exchange. by: who would, in messages."""
    other = counter_of(inner)
    if other is not None and not other._psgc_settled:
        raise UsageError(
            f"{by}: {other._psgc_counts_as} counts this optimizer's steps, and has some to exchange; call its finish(), or leave its block, before another "
            f"takes its place"
        )


def count(inner: torch.optim.Optimizer, counter: Counter) -> None:
    """In place of another, which is settled. Raises as ``refuse_another``."""
    refuse_another(inner, type(counter).__name__)
    other = counter_of(inner)
    if other is not None:
        other._psgc_count_no_more()
    inner._psgc_counter = counter  # type: ignore[attr-defined]
    counter._psgc_since = counter._psgc_last = next(_clock)
    _counters.add(counter)


def counted(counter: Counter) -> None:
    """A step of its optimizer has been taken. Raises UsageError where another optimizer's, too, since ``counter`` is there, and some of the same parameters
    wait to be exchanged after them: both would move these. One that was given up, and steps no more, is in nobody's way."""
    counter._psgc_last = next(_clock)
    for other in _counters:
        if (
            other._psgc_last > counter._psgc_since
            and other is not counter
            and other._psgc_session is counter._psgc_session
            and not other._psgc_settled
            and not counter._psgc_moves.isdisjoint(other._psgc_moves)
        ):
            raise UsageError(
                f"{type(counter).__name__}: {other._psgc_counts_as} has steps of another optimizer to exchange, of some of the same parameters, which "
                f"both would move; call its finish(), or leave its block, before. Where both optimizers train, one alone exchanges the model: give it the "
                f"one whose steps count, and let the other step before it"
            )


def forget(inner: torch.optim.Optimizer, counter: Counter) -> None:
    _counters.discard(counter)
    if counter_of(inner) is counter:
        del inner._psgc_counter  # type: ignore[attr-defined]
