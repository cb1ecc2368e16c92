"""What error feedback and momentum keep of an optimizer's tensors: saved by rank and tensor, loaded into whatever buckets and ranks there are.

Owns the saved form, and how the states of all ranks of one job become those of another: what the ranks together hold, as the mean they
average, stays the same. Servers' residuals, left over from the mean itself, are not saved: they are one step's rounding.

    saved     {"format": 1, "rank", "size", "loss_scale", "rates": [...], "memories": {kind: {name: {"residual", "velocity"?}}}}
    loaded    from S ranks by rank r of W: W/S times the sum of those ranks' that fall to r (s mod W = r); where W > S the ranks that
              share one (r mod S = s) split it evenly
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from psgc.errors import UsageError
from psgc.layout import Layout
from psgc.worker.residual import TensorMemory
from psgc.worker.session import Session

FORMAT: Final = 1
Memories = dict[str, TensorMemory]


class Residuals:
    """Of the layouts of one optimizer that share a set of tensor names."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._layouts: list[Layout] = []
        self._pending: Memories = {}  # for tensors that are in no layout yet

    def add(self, layout: Layout) -> None:
        """The layout is new; tensors of it that something is remembered of go on from there."""
        self._layouts.append(layout)
        names = {tensor.name for tensor in layout.tensors}
        mine = {name: memory for name, memory in self._pending.items() if name in names}
        if mine:
            _check_sizes(layout, mine)
            self._session.remember(layout, mine)
            self._pending = {name: memory for name, memory in self._pending.items() if name not in names}

    def collect(self, dropped: bool) -> Memories:
        """What is kept now. dropped: the trainer did not apply the last step's result."""
        memories = dict(self._pending)
        for layout in self._layouts:
            memories |= self._session.remembered(layout, dropped)
        return memories

    def restore(self, memories: Memories) -> None:
        """Go on from these; of tensors that are not in them nothing is remembered."""
        self._pending = dict(memories)
        layouts, self._layouts = self._layouts, []
        for layout in layouts:
            self._session.remember(layout, {})
            self.add(layout)

    def replace(self) -> None:
        """The layouts are given up for one that follows; what they remember waits for it."""
        self._pending, self._layouts = self.collect(dropped=False), []


def _check_sizes(layout: Layout, memories: Memories) -> None:
    for tensor in layout.tensors:
        memory = memories.get(tensor.name)
        if memory is not None and memory.residual.size != tensor.numel:
            raise UsageError(
                f"the saved residual of {tensor.name!r} has {memory.residual.size} elements, the tensor {tensor.numel}; "
                f"is it another model's? leave load_residual_state_dict() out to begin with empty residuals"
            )


def pack(memories: Memories) -> dict[str, dict[str, torch.Tensor]]:
    """The saved form of one kind."""
    packed = {}
    for name, memory in memories.items():
        packed[name] = {"residual": torch.from_numpy(memory.residual)}
        if memory.velocity is not None:
            packed[name]["velocity"] = torch.from_numpy(memory.velocity)
    return packed


def check_states(states: Mapping[str, Any] | Sequence[Mapping[str, Any]], rank: int, size: int) -> list[Mapping[str, Any]]:
    """The states in rank order. Raises UsageError unless they are one job's, and all that this rank needs are there."""
    given = [states] if isinstance(states, Mapping) else list(states)
    if not given or any(not isinstance(state, Mapping) or state.get("format") != FORMAT for state in given):
        raise UsageError("load_residual_state_dict: expected what residual_state_dict() returned, of this rank or a list of all ranks'")
    saved_size = given[0]["size"]
    if any(state["size"] != saved_size for state in given):
        raise UsageError("load_residual_state_dict: the states come from jobs of different sizes; pass those of one job")
    ranks = [state["rank"] for state in given]
    if saved_size == size and ranks == [rank]:
        return given
    if sorted(ranks) != list(range(saved_size)):
        missing = ", ".join(map(str, sorted(set(range(saved_size)) - set(ranks)))) or "none"
        raise UsageError(
            f"load_residual_state_dict: this is rank {rank} of {size}, the states are of ranks {', '.join(map(str, ranks))} of {saved_size} "
            f"(missing: {missing}); pass this rank's own, or a list of all ranks'"
        )
    return sorted(given, key=lambda state: int(state["rank"]))


def share_of(states: Sequence[Mapping[str, Any]], kind: str, rank: int, size: int) -> Memories:
    """What rank ``rank`` of ``size`` takes of the states of a job's ranks."""
    saved = int(states[0]["size"])
    if len(states) == 1 and saved == size:
        return _unpack(states[0], kind)
    mine = states[rank::size] if saved >= size else [states[rank % saved]]
    sharers = 1 if saved >= size else len(range(rank % saved, size, saved))
    factor = np.float32(size / saved / sharers)
    total: Memories = {}
    for state in mine:
        for name, memory in _unpack(state, kind).items():
            before = total.get(name)
            total[name] = memory if before is None else _sum(before, memory)
    return {name: TensorMemory(m.residual * factor, None if m.velocity is None else m.velocity * factor) for name, m in total.items()}


def _sum(a: TensorMemory, b: TensorMemory) -> TensorMemory:
    velocity = a.velocity if b.velocity is None else b.velocity if a.velocity is None else a.velocity + b.velocity
    return TensorMemory(a.residual + b.residual, velocity)


def _unpack(state: Mapping[str, Any], kind: str) -> Memories:
    memories = {}
    for name, parts in state["memories"].get(kind, {}).items():
        arrays = {key: value.detach().cpu().to(torch.float32).reshape(-1).numpy() for key, value in parts.items()}
        memories[name] = TensorMemory(arrays["residual"], arrays.get("velocity"))
    return memories


def units_of(state: Mapping[str, Any]) -> tuple[float, tuple[float, ...]]:
    """Loss scale and learning rates of the last step before saving, in whose units residuals are."""
    loss_scale, rates = float(state["loss_scale"]), tuple(map(float, state["rates"]))
    return (loss_scale if math.isfinite(loss_scale) and loss_scale > 0 else 1.0), rates
