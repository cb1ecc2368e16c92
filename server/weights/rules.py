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


def apply_rule(rule: UpdateRule, old: Array, total: Array, count: int, momentum: Array | None, new: Array) -> None:
    """Write to ``new`` what follows from ``old`` and the sum of ``count`` deltas.

    old, new: [n] of the weights' dtype. total: [n] of the accumulator's (float32, float64 or int64); overwritten. momentum: [n] float, of ``nesterov`` only;
    updated.

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
    kind = total.dtype.type
    momentum *= kind(rule.momentum)
    momentum -= total
    total -= kind(rule.momentum) * momentum  # minus the step's direction
    total *= kind(rule.lr)
    np.add(old, total, out=new)


@dataclass(slots=True)
class RuleState:
    """What a rule keeps of one key between updates, and the update itself. dtype: the accumulator's. pushes: how many were applied.

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
    _weight: float = 1.0

    def begin(self, staleness: int = 0) -> None:
        """An update of all elements begins. staleness: how many updates the delta's base lacks."""
        self.pushes += 1
        self._weight = self.rule.weight(staleness)
        if self.momentum is None and self.rule.name in ("nesterov", "delayed"):
            self.momentum = np.zeros(self.numel, self.dtype)
        if self.gathered is None and self.rule.name == "delayed":
            self.gathered = np.zeros(self.numel, self.dtype)

    def apply(self, lo: int, hi: int, old: Array, total: Array, count: int, new: Array) -> None:
        """The update's elements [lo, hi); old, total, count, new: as of ``apply_rule``, for these elements."""
        momentum = None if self.momentum is None else self.momentum[lo:hi]
        if self.gathered is None:
            apply_rule(self.rule, old, total, count, momentum, new)
            return
        assert momentum is not None
        kind, rule, gathered = total.dtype.type, self.rule, self.gathered[lo:hi]
        total *= kind(self._weight / rule.learners)
        gathered += total
        if self.pushes % rule.learners == 0:
            momentum *= kind(rule.momentum)
            momentum += gathered
            gathered.fill(0)
            total += kind(rule.momentum) * momentum
        total *= kind(rule.lr)
        np.add(old, total, out=new)


__all__ = ["RuleState", "apply_rule"]
