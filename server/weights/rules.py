"""The arithmetic of update rules: weights, the sum of deltas, and the weights that follow. Numbers only.

A rule reads ``old`` and writes ``new``, which are never the same memory: whoever reads the old weights still sees them whole.
"""

from __future__ import annotations

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


__all__ = ["apply_rule"]
