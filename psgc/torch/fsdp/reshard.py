"""What codecs have kept of a sharded model, taken up on another mesh: other shards, other replicas. Pure.

A rank's residual of a slice has the weight 1 / R in the mean over the slice's R replicas, a server's residual the weight 1. So the slices of each old replica
are put together to whole parameters and cut anew, and new replica r of R' gets R' / R times the sum of those old ones that fall to it (old r mod R' = r; where
R' > R, those that share one split it evenly). What the servers kept goes to the first new replica. The mean of all that is kept stays what it was.
PowerSGD's Q is of the old slices, and begins anew.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from psgc.errors import UsageError
from psgc.torch.state import saved
from psgc.torch.state.residuals import Kept
from psgc.worker.residuals.residual import F32, TensorMemory

Mesh = Sequence[Sequence[int]]  # by shard, the ranks that hold it


@dataclass(frozen=True, slots=True)
class Parameter:
    """shape: of the whole parameter; piece: of a rank's slice now, filled up to be equal on all ranks. Slices are of the first dimension."""

    shape: tuple[int, ...]
    piece: tuple[int, ...]

    def whole(self, pieces: Sequence[F32], name: str) -> F32:
        """The whole parameter's values. pieces: of all shards of another mesh, in order."""
        row = math.prod(self.shape[1:])
        values: F32 = np.concatenate([piece.reshape(-1) for piece in pieces])[: math.prod(self.shape)]
        if values.size != math.prod(self.shape) or any(piece.size % max(row, 1) for piece in pieces):
            raise UsageError(
                f"the saved residual of {name!r} has {values.size} elements, the parameter {math.prod(self.shape)}; is it another model's? leave "
                f"load_residual_state_dict() out to begin with empty residuals"
            )
        return values

    def cut(self, values: F32, shard: int) -> F32:
        """A shard of today's mesh."""
        size = math.prod(self.piece)
        piece = values[shard * size : (shard + 1) * size]
        return np.concatenate([piece, np.zeros(size - piece.size, np.float32)])


def needed(before: Mesh, now: Mesh, rank: int) -> tuple[set[int], set[int]]:
    """The old ranks of which ``resharded`` reads on ``rank`` what they kept themselves, and those of which it reads what servers kept."""
    mine, replica = _mine(before, now, rank)
    return {ranks[old] for old in mine for ranks in before}, set() if replica else {old for ranks in before for old in ranks}


def resharded(states: Sequence[saved.State], kind: str, before: Mesh, now: Mesh, rank: int, parameters: Mapping[str, Parameter]) -> Kept:
    """What ``rank`` goes on from. states: of all ranks, in order; before, now: the meshes. Raises UsageError for what does not fit."""
    of_shard, replicas, were = _shard_of(now, rank), len(now[0]), len(before[0])
    mine, replica = _mine(before, now, rank)
    sharers = 1 if were >= replicas else len(range(replica % were, replicas, were))
    factor = np.float32(replicas / were / sharers)
    memories, servers = [state["memories"].get(kind, {}) for state in states], _servers(states, kind)
    kept = Kept()
    for name, parameter in parameters.items():
        fields: dict[str, F32] = {}
        for field in ("residual", "velocity"):
            wholes = [
                _whole(parameter, name, [memories[ranks[old]].get(f"{name}@{shard}", {}).get(field) for shard, ranks in enumerate(before)])
                for old in mine
            ]
            if there := [whole for whole in wholes if whole is not None]:
                fields[field] = parameter.cut(np.asarray(sum(there[1:], there[0]) * factor, np.float32), of_shard)
        if fields:
            kept.tensors[f"{name}@{of_shard}"] = TensorMemory(**fields)
        whole = _whole(parameter, name, [servers.get(f"{name}@{shard}") for shard in range(len(before))])
        if whole is not None and replica == 0:
            kept.servers[f"{name}@{of_shard}"] = parameter.cut(whole, of_shard)
    return kept


def _shard_of(mesh: Mesh, rank: int) -> int:
    return next(shard for shard, ranks in enumerate(mesh) if rank in ranks)


def _mine(before: Mesh, now: Mesh, rank: int) -> tuple[Sequence[int], int]:
    """The old replicas that fall to the new one of ``rank``, and the number of that."""
    ranks = now[_shard_of(now, rank)]
    replica, replicas, were = ranks.index(rank), len(ranks), len(before[0])
    return (range(replica, were, replicas) if were >= replicas else [replica % were]), replica


def _servers(states: Sequence[saved.State], kind: str) -> dict[str, Any]:
    return {name: values for state in states for name, values in state.get("servers", {}).get(kind, {}).items()}


def _whole(parameter: Parameter, name: str, pieces: Sequence[Any]) -> F32 | None:
    """None where no rank has kept any."""
    there = [None if piece is None else saved.array_of(piece) for piece in pieces]
    size = next((piece.size for piece in there if piece is not None), 0)
    if not size:
        return None
    return parameter.whole([np.zeros(size, np.float32) if piece is None else piece for piece in there], name)
