"""The saved form of what codecs keep: plain types and tensors, as torch.save and torch.load(weights_only=True) take them.

    {"format": 2, "rank", "size", "loss_scale", "rates": [...],
     "part"?: {dimension: [place, size]}, "job_rank"?,                          of a group of a mesh, in which rank and size are: which one, and the job's rank
     "skips": {"applied", "used", "thrown", "credit", "used_credit"},           counts of steps and of results without one, the same on all ranks; before,
                                                                                {"applied", "left", "credit"}: ``gradients/skips.py``
     "memories": {kind: {name: {"residual"?, "velocity"?, "factors"?}}},        this rank's own, flat, by tensor
     "servers":  {kind: {name: residual}},                                      the servers', of the buckets this rank answers for
     "layouts":  {kind: [{"declaration": {...}, "planned", "workers", "exact": {place: {"rescale", "bytes", "velocity"?}}}]},
     "apart":    {name: {"parameter", "exp_avg", "moved"}}}                     ZeroOneAdam between two meetings: what differs between ranks

Owns this form, the one before it (format 1: no "servers", no "layouts"), and how the states of all ranks of one job become those of
another: what the ranks together hold, as the mean they average, stays the same.

    loaded    from S ranks by rank r of W: W/S times the sum of those ranks' that fall to r (s mod W = r); where W > S the ranks that
              share one (r mod S = s) split it evenly. Of asynchronous training, whose changes add up, the same without W/S. The servers' residuals, which
              are of the mean itself, are taken as they are, by one rank.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch

from psgc.errors import PsgcError, UsageError
from psgc.layout import Declaration
from psgc.torch.state.residuals import Kept, KeptLayout, Memories
from psgc.worker.residuals.residual import F32, ExactResidual, TensorMemory
from psgc.worker.session import Session

logger = logging.getLogger(__name__)
FORMAT: Final = 2
FORMATS: Final = (1, 2)
GRADIENTS: Final = "gradients"  # the kind of residuals that every optimizer has
MOMENTA: Final = "momenta"
CHANGES: Final = "changes"  # the kind of residuals of asynchronous training, which are of changes of weights
State = Mapping[str, Any]


def state_of(
    session: Session, kinds: Mapping[str, Kept], loss_scale: float = 1.0, rates: Sequence[float] = (), skips: Mapping[str, int] | None = None
) -> dict[str, Any]:  # fmt: skip
    """The saved form of what this rank keeps of each kind. loss_scale, rates: in whose units residuals are. skips: counts of steps, and of results without."""
    part = {"part": {name: list(place) for name, place in session.part.items()}, "job_rank": session.whole.rank} if session.part else {}
    return part | {
        "format": FORMAT, "rank": session.rank, "size": session.size, "loss_scale": loss_scale, "rates": list(rates), "skips": dict(skips or {}),
        "memories": {kind: {name: _packed(memory) for name, memory in kept.tensors.items()} for kind, kept in kinds.items()},
        "servers": {kind: {name: torch.from_numpy(values) for name, values in kept.servers.items()} for kind, kept in kinds.items()},
        "layouts": {kind: [_packed_layout(layout) for layout in kept.layouts] for kind, kept in kinds.items()},
    }  # fmt: skip


def _packed(memory: TensorMemory) -> dict[str, torch.Tensor]:
    return {field: torch.from_numpy(values) for field, values in memory._asdict().items() if values is not None}


def _packed_layout(kept: KeptLayout) -> dict[str, Any]:
    exact = {place: _packed_exact(each) for place, each in kept.exact.items()}
    return {"declaration": kept.declaration.to_json(), "planned": kept.planned, "workers": kept.workers, "exact": exact}


def _packed_exact(exact: ExactResidual) -> dict[str, Any]:
    velocity = {} if exact.velocity is None else {"velocity": torch.from_numpy(exact.velocity)}
    return {"rescale": exact.rescale, "bytes": torch.from_numpy(exact.bytes), **velocity}


def check_states(
    states: State | Sequence[State], rank: int, size: int, part: Mapping[str, Sequence[int]] = MappingProxyType({}), by: str = ""
) -> list[State]:
    """The states in rank order. part: of the mesh, that of this rank's group. by: the call, for errors, if it takes this rank's own alone. Raises UsageError
    unless they are one job's, of this part, and all that this rank needs are there."""
    given = [states] if isinstance(states, Mapping) else list(states)
    call = by or "load_residual_state_dict"
    if not given or any(not isinstance(state, Mapping) or state.get("format") not in FORMATS for state in given):
        wanted = "state_dict() returned on this rank" if by else "residual_state_dict() returned, of this rank or a list of all ranks'"
        raise UsageError(f"{call}: expected what {wanted}")
    if other := next((state for state in given if not same_part(part_of(state), part)), None):
        raise UsageError(
            f"{call}: the state is of {described_part(part_of(other))}, and this rank is of {described_part(part)}; pass what ranks of this "
            f"part of the model have saved, in files by dist.get_rank()"
        )
    saved_size = given[0]["size"]
    if by and (saved_size, given[0]["rank"]) != (size, rank):
        raise UsageError(
            f"{call}: this is rank {rank} of {size}, and the state is rank {given[0]['rank']}'s of {saved_size}; every rank loads what it has saved itself, in "
            f"a job of as many ranks"
        )
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


def part_of(state: State) -> Mapping[str, Sequence[int]]:
    """The part of the model of the ranks among which the state was saved; empty: all of it."""
    found: Mapping[str, Sequence[int]] = state.get("part", {})
    return found


def same_part(one: Mapping[str, Sequence[int]], other: Mapping[str, Sequence[int]]) -> bool:
    return {name: list(place) for name, place in one.items()} == {name: list(place) for name, place in other.items()}


def described_part(part: Mapping[str, Sequence[int]]) -> str:
    """As messages have it."""
    return "a mesh's part " + ", ".join(f"{name}={place} of {size}" for name, (place, size) in part.items()) if part else "a whole job"


def check_kind(states: Sequence[State], kind: str) -> None:
    """Raise UsageError for states of asynchronous training where those of gradients are wanted, and for gradients' where those of changes are."""
    kinds = {name for state in states for name, memories in state["memories"].items() if memories}
    if kinds and (CHANGES in kinds) != (kind == CHANGES):
        raise UsageError(
            f"load_residual_state_dict: the state is of {'asynchronous' if CHANGES in kinds else 'synchronous'} training, whose residuals are of "
            f"{'changes of weights' if CHANGES in kinds else 'gradients'}; begin without one, or set PSGC_ASYNC as it was"
        )


def share_of(states: Sequence[State], kind: str, rank: int, size: int, mean: bool = True) -> Kept:
    """The share of all ranks' states that rank ``rank`` of ``size`` restores. mean: of what ranks push the mean is taken, else the sum."""
    saved = int(states[0]["size"])
    layouts = _layouts(states[0], kind)
    if saved == size:
        own = states[0] if len(states) == 1 else states[rank]
        return Kept(_memories(own, kind), _servers(own, kind), _layouts(own, kind))
    mine = states[rank::size] if saved >= size else [states[rank % saved]]
    sharers = 1 if saved >= size else len(range(rank % saved, size, saved))
    factor = np.float32((size / saved if mean else 1.0) / sharers)
    total: Memories = {}
    for state in mine:
        for name, memory in _memories(state, kind).items():
            total[name] = memory if name not in total else _sum(total[name], memory)
    scaled = {
        name: m._replace(residual=_times(m.residual, factor), velocity=_times(m.velocity, factor)) for name, m in total.items()
    }  # fmt: skip
    servers = {name: values for state in states[rank::size] for name, values in _servers(state, kind).items()}
    return Kept(scaled, servers, [replace(layout, exact={}) for layout in layouts])


def _times(values: F32 | None, factor: np.float32) -> F32 | None:
    return None if values is None else values * factor


def _sum(a: TensorMemory, b: TensorMemory) -> TensorMemory:
    """Of two ranks; factors are the same on both."""
    return TensorMemory(_plus(a.residual, b.residual), _plus(a.velocity, b.velocity), a.factors if a.factors is not None else b.factors)


def _plus(a: F32 | None, b: F32 | None) -> F32 | None:
    return b if a is None else a if b is None else a + b


def _memories(state: State, kind: str) -> Memories:
    saved = state["memories"].get(kind, {})
    return {name: TensorMemory(**{field: array_of(values) for field, values in fields.items()}) for name, fields in saved.items()}


def _servers(state: State, kind: str) -> dict[str, F32]:
    return {name: array_of(values) for name, values in state.get("servers", {}).get(kind, {}).items()}


def array_of(values: torch.Tensor) -> F32:
    """A saved tensor's values, flat. Raises UsageError for NaN and infinity."""
    array: F32 = values.detach().cpu().to(torch.float32).reshape(-1).numpy()
    if not np.isfinite(array).all():
        raise UsageError("a saved residual holds NaN or infinity, and would poison every step; is the file whole?")
    return array


def _layouts(state: State, kind: str) -> list[KeptLayout]:
    """Those that this version of psgc understands."""
    layouts = []
    for saved in state.get("layouts", {}).get(kind, []):
        try:
            declaration = Declaration.from_json(json.loads(json.dumps(saved["declaration"])))
        except PsgcError as error:
            logger.warning("a saved layout is of another version of psgc: residuals go on by tensor, not bit for bit (%s)", error)
            continue
        exact = {
            place: ExactResidual(float(each["rescale"]), each["bytes"].numpy(), array_of(each["velocity"]) if "velocity" in each else None)
            for place, each in saved["exact"].items()
        }
        layouts.append(KeptLayout(declaration, bool(saved["planned"]), int(saved["workers"]), exact))
    return layouts


def units_of(state: State) -> tuple[float, tuple[float, ...]]:
    """Loss scale and learning rates of the last step before saving, in whose units residuals are."""
    loss_scale, rates = float(state["loss_scale"]), tuple(map(float, state["rates"]))
    return (loss_scale if math.isfinite(loss_scale) and loss_scale > 0 else 1.0), rates


def skips_of(state: State) -> dict[str, int]:
    """Counts of steps, and of results without one; none in a state of an earlier version."""
    return {name: int(count) for name, count in state.get("skips", {}).items()}


def share_apart(
    states: State | Sequence[State],
    rank: int,
    size: int,
    wanted: Mapping[str, Mapping[str, torch.Tensor]],
    part: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> dict[str, dict[str, torch.Tensor]]:
    """What of ``wanted`` (by parameter and field) this rank takes up that ranks had each for themselves: its own, or all ranks' mean where
    their number is another now. Raises UsageError where state_dict() and the states are of different steps."""
    checked = check_states(states, rank, size, part)
    if checked[0]["format"] == 1:
        return {}
    given = [state.get("apart", {}) for state in checked]
    if any(apart.keys() != wanted.keys() for apart in given if apart or wanted):
        raise UsageError(
            "load_residual_state_dict: parameters had taken local steps in one of state_dict() and the residuals' state, but not in the "
            "other; save both between the same two steps, and load the model's and the optimizer's state first"
        )
    own = given if len(given) == 1 else given[rank : rank + 1] if len(given) == size else given
    return {
        name: {
            field: torch.stack([apart[name][field] for apart in own]).mean(0) if len(own) > 1 else own[0][name][field] for field in fields
        }
        for name, fields in wanted.items()
    }
