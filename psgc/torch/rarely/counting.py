"""Who counts an inner optimizer's steps, to exchange them: one at a time, since two would both move the parameters."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from psgc.errors import UsageError


class Counter(Protocol):
    @property
    def _psgc_counts_as(self) -> str:
        """What it is, in messages."""

    @property
    def _psgc_settled(self) -> bool:
        """Whether it has nothing left to exchange."""

    def _psgc_count_no_more(self) -> None: ...


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


def forget(inner: torch.optim.Optimizer, counter: Counter) -> None:
    if counter_of(inner) is counter:
        del inner._psgc_counter  # type: ignore[attr-defined]
