"""What servers do with the changes of tensors that they hold, in a job of one process, which has none.

Owns what the update rule keeps of each tensor there. Nothing is encoded: what a codec has kept in a larger job goes with the first change.
"""

from __future__ import annotations

import numpy as np
import torch

from psgc.layout.update_rule import UpdateRule
from psgc.server.weights.rules import RuleState
from psgc.worker.residuals.residual import LayoutMemory, TensorMemory


class HeldAlone:
    """memory: as of ``HeldTensors``."""

    def __init__(self, rule: UpdateRule, memory: LayoutMemory | None) -> None:
        given = LayoutMemory() if memory is None else memory
        self._rule, self._memory = rule, LayoutMemory(dict(given.tensors), dict(given.servers))
        self._states: dict[str, RuleState] = {}

    def apply(self, name: str, value: torch.Tensor, change: torch.Tensor) -> None:
        """A push: update ``value`` in place by ``change``, of the same shape and dtype, both contiguous on the host; ``change`` is overwritten."""
        values, total = value.numpy().reshape(-1), change.numpy().reshape(-1)
        left = self._memory.tensors.pop(name, TensorMemory()).residual
        if left is not None:
            total += left
        total = total.astype(values.dtype if values.dtype.kind == "f" else np.int64, copy=False)
        state = self._states.get(name)
        if state is None:
            state = self._states[name] = RuleState(self._rule, values.size, total.dtype, momentum=self._momentum(name, total.dtype))
        new = np.empty_like(values)
        state.begin()
        state.apply(0, values.size, values, total, 1, new)
        values[:] = new

    def _momentum(self, name: str, dtype: np.dtype[np.generic]) -> np.ndarray[tuple[int], np.dtype[np.generic]] | None:
        kept = self._memory.servers.pop(name, None) if self._rule.keeps_momentum else None
        return None if kept is None else kept.astype(dtype)

    def remembered(self, steps: int) -> LayoutMemory:
        """As of ``HeldTensors``. steps: that the tensors have taken, including those of earlier jobs."""
        momenta = {
            name: state.momentum.copy()
            for name, state in self._states.items()
            if self._rule.keeps_momentum and state.momentum is not None and state.momentum.dtype == np.float32
        }
        return LayoutMemory(dict(self._memory.tensors), {**self._memory.servers, **momenta}, steps=steps)
