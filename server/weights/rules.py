"""The arithmetic of update rules: weights, the sum of deltas, and the weights that follow. Numbers only.

A rule reads ``old`` and writes ``new``, which are never the same memory: whoever reads the old weights still sees them whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psgc.layout.update_rule import UpdateRule

Array = NDArray[Any]


def apply_rule(
    rule: UpdateRule, old: Array, total: Array, count: int, momentum: Array | None, new: Array, next_momentum: Array | None = None
) -> None:
    """Write to ``new`` what follows from ``old`` and the sum of ``count`` deltas.

    old, new: [n] of the weights' dtype. total: [n] of the accumulator's (float32, float64 or int64); overwritten. momentum: [n] float, of ``nesterov`` only.
    next_momentum: [n], where the momentum goes that follows; by default in the place of the old one.

    nesterov: g = -total / count; m = momentum * m + g; new = old - lr * (g + momentum * m), as torch.optim.SGD with nesterov=True does
    it; m begins as zeros.
    """
    if rule.name == "add":
        if total.dtype == new.dtype:
            np.add(old, total, out=new)
        else:  # integers, added in int64
            np.copyto(new, old + total, casting="unsafe")
        return
    total /= total.dtype.type(count)
    if rule.name == "average":
        np.add(old, total, out=new)
        return
    assert momentum is not None
    kind, after = total.dtype.type, momentum if next_momentum is None else next_momentum
    np.multiply(momentum, kind(rule.momentum), out=after)
    after -= total
    total -= kind(rule.momentum) * after  # minus the step's direction
    total *= kind(rule.lr)
    np.add(old, total, out=new)


Pair = tuple[Array, Array]


@dataclass(slots=True)
class RuleState:
    """What a rule keeps of one key between updates, and the update itself. dtype: the accumulator's. pushes: how many were applied.

    momenta, gatherings: [numel] twice, where an update must leave what the last one has kept, because a process that takes the place of this one may begin
    it again; then each update writes the one of the two that the last has not. Otherwise both are made when they are needed, and written in place.

    delayed (Liu et al. 2024, with c = 0), of a delta d with weight w, d being minus the published gradient:
        gathered += w d;  new = old + lr w d / learners
        and with every learners-th push: m = momentum m + gathered / learners;  new += lr momentum m;  gathered = 0
    """

    rule: UpdateRule
    numel: int
    dtype: Any
    pushes: int = 0
    momentum: Array | None = None
    gathered: Array | None = None
    momenta: Pair | None = None
    gatherings: Pair | None = None
    _weight: float = 1.0
    _before: tuple[Array | None, Array | None] = (None, None)  # momentum and gathered as the last update has left them

    def take_up(self, pushes: int) -> None:
        """Go on after so many updates, of which ``momenta`` and ``gatherings`` hold what they have kept."""
        self.pushes = pushes
        self.momentum = None if self.momenta is None else self.momenta[self._turn & 1]
        self.gathered = None if self.gatherings is None else self.gatherings[pushes & 1]

    def begin(self, staleness: int = 0) -> None:
        """An update of all elements begins. staleness: how many updates the delta's base lacks."""
        self._weight = self.rule.weight(staleness)
        if self.momentum is None and self.rule.name in ("nesterov", "delayed"):
            self.momentum = np.zeros(self.numel, self.dtype)
        if self.gathered is None and self.rule.name == "delayed":
            self.gathered = np.zeros(self.numel, self.dtype)
        self._before = self.momentum, self.gathered
        self.pushes += 1
        if self.momenta is not None:
            self.take_up(self.pushes)

    @property
    def _turn(self) -> int:
        """How many updates have changed the momentum."""
        return self.pushes // self.rule.learners if self.rule.name == "delayed" else self.pushes

    def apply(self, lo: int, hi: int, old: Array, total: Array, count: int, new: Array) -> None:
        """The update's elements [lo, hi); old, total, count, new: as of ``apply_rule``, for these elements."""
        kept, following = (
            [None if whole is None else whole[lo:hi] for whole in pair] for pair in (self._before, (self.momentum, self.gathered))
        )
        (momentum, before), (after, gathered) = kept, following
        if before is None:
            apply_rule(self.rule, old, total, count, momentum, new, after)
            return
        assert momentum is not None
        assert after is not None
        assert gathered is not None
        kind, rule = total.dtype.type, self.rule
        total *= kind(self._weight / rule.learners)
        np.add(before, total, out=gathered)
        if self.pushes % rule.learners == 0:
            np.multiply(momentum, kind(rule.momentum), out=after)
            after += gathered
            gathered.fill(0)
            total += kind(rule.momentum) * after
        total *= kind(rule.lr)
        np.add(old, total, out=new)


__all__ = ["RuleState", "apply_rule"]
