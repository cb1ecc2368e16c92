"""Who counts an inner optimizer's steps, to exchange them: one at a time, since two would both move the parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final, Protocol

import torch

from psgc.errors import UsageError
from psgc.torch.session import api
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

    def _psgc_count_no_more(self) -> None: ...


_counters: Final[weakref.WeakSet[Any]] = weakref.WeakSet()  # that count some optimizer's steps


class Steps:
    """Calls ``then`` after each step of an optimizer, once: where its class's step() calls its parent's, torch calls the hooks of both."""

    def __init__(self, inner: torch.optim.Optimizer, then: Callable[[], None]) -> None:
        self._then, self._within = then, 0  # how many step() are running, each within the last
        self._hooks = inner.register_step_pre_hook(self._begun), inner.register_step_post_hook(self._ended)

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    @uncompiled
    def _begun(self, optimizer: torch.optim.Optimizer, _arguments: Any, _keywords: Any) -> None:
        hooked = sum(hasattr(vars(kind).get("step"), "hooked") for kind in type(optimizer).__mro__)
        if self._within >= hooked:  # one that raised has begun, and not ended
            self._within = 0
        self._within += 1

    @uncompiled
    def _ended(self, _optimizer: torch.optim.Optimizer, _arguments: Any, _keywords: Any) -> None:
        if self._within:
            self._within -= 1
            if not self._within:
                self._then()


def counter_of(inner: torch.optim.Optimizer) -> Any:
    """Who counts its steps, or None."""
    return getattr(inner, "_psgc_counter", None)


def refuse_another(inner: torch.optim.Optimizer, moves: frozenset[int], by: str) -> None:
    """Raise UsageError where somebody counts the optimizer's steps, or another's of some of the same parameters, who has some to exchange. moves: as of
    ``Counter``; by: who would, in messages."""
    other = counter_of(inner)
    if other is not None and not other._psgc_settled:
        raise UsageError(
            f"{by}: {other._psgc_counts_as} counts this optimizer's steps, and has some to exchange; call its finish(), or leave its block, before another "
            f"takes its place"
        )
    refuse_beside(None, moves, by)


def refuse_beside(counter: Counter | None, moves: frozenset[int], by: str) -> None:
    """Raise UsageError where somebody other than ``counter`` has steps to exchange of some of the parameters: both would move them."""
    session = api.current_session() if api.is_initialized() else None
    for other in _counters:
        if other is not counter and other._psgc_session is session and not other._psgc_settled and not moves.isdisjoint(other._psgc_moves):
            raise UsageError(
                f"{by}: {other._psgc_counts_as} has steps of another optimizer to exchange, of some of the same parameters, which both would move; one alone "
                f"exchanges a model: give it the optimizer whose steps count, and let the other step before it"
            )


def count(inner: torch.optim.Optimizer, counter: Counter) -> None:
    """In place of another, which is settled. Raises as ``refuse_another``."""
    refuse_another(inner, counter._psgc_moves, type(counter).__name__)
    other = counter_of(inner)
    if other is not None:
        other._psgc_count_no_more()
    inner._psgc_counter = counter  # type: ignore[attr-defined]
    _counters.add(counter)


def forget(inner: torch.optim.Optimizer, counter: Counter) -> None:
    _counters.discard(counter)
    if counter_of(inner) is counter:
        del inner._psgc_counter  # type: ignore[attr-defined]
