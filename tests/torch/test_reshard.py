"""What codecs have kept of a sharded model, on another mesh: the mean of all that is kept stays what it was."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import checkpoint as dcp

from psgc.errors import UsageError
from psgc.torch.fsdp.reshard import Parameter, needed, resharded
from psgc.torch.session import api
from psgc.torch.state import checkpointing

SHAPES = {"up": (7, 3), "bias": (5,), "one": (1, 4)}
MESHES = {
    "2 x 2": [[0, 2], [1, 3]], "4 nodes": [[0, 1, 2, 3]], "1 x 2": [[0], [1]], "2 x 3": [[0, 3], [1, 4], [2, 5]], "3 x 2": [[0, 2, 4], [1, 3, 5]],
}  # fmt: skip


def piece_of(shape: tuple[int, ...], shards: int) -> tuple[int, ...]:
    return (-(-shape[0] // shards), *shape[1:])


def states_of(mesh: list[list[int]]) -> list[dict[str, Any]]:
    draw = np.random.default_rng(1)
    states: list[dict[str, Any]] = [{"memories": {"g": {}}, "servers": {"g": {}}} for _ in range(sum(map(len, mesh)))]
    for name, shape in SHAPES.items():
        for shard, ranks in enumerate(mesh):
            piece = piece_of(shape, len(mesh))
            used = max(0, min(shape[0] - shard * piece[0], piece[0])) * math.prod(shape[1:])
            for place, rank in enumerate(ranks):
                values = np.zeros(math.prod(piece), np.float32)
                values[:used] = draw.normal(size=used)  # nothing is kept of what a slice is filled up with
                states[rank]["memories"]["g"][f"{name}@{shard}"] = {
                    "residual": torch.from_numpy(values),
                    "velocity": torch.from_numpy(2 * values),
                    "factors": torch.ones(4),
                }
                if place == shard % len(ranks):
                    states[rank]["servers"]["g"][f"{name}@{shard}"] = torch.from_numpy(values / 3)
    return states


def mean_of(states: list[dict[str, Any]], mesh: list[list[int]], field: str) -> dict[str, Any]:
    found = {}
    for name, shape in SHAPES.items():
        pieces = []
        for shard, ranks in enumerate(mesh):
            key = f"{name}@{shard}"
            own = [states[rank]["memories"]["g"][key][field] for rank in ranks if key in states[rank]["memories"]["g"]]
            there = [state["servers"]["g"][key] for state in states if key in state["servers"]["g"]] if field == "residual" else []
            pieces.append(torch.stack(own).sum(0) / len(ranks) + sum(there, torch.zeros(())))
        found[name] = torch.cat(pieces)[: math.prod(shape)]
    return found


@pytest.mark.parametrize("after", MESHES)
@pytest.mark.parametrize("before", MESHES)
def test_the_mean_stays_and_each_rank_gets_its_own_slices(before: str, after: str) -> None:
    old, new = MESHES[before], MESHES[after]
    states = states_of(old)
    parameters = {name: Parameter(shape, piece_of(shape, len(new))) for name, shape in SHAPES.items()}
    made = []
    for rank in range(sum(map(len, new))):
        kept = resharded(states, "g", old, new, rank, parameters)
        shard = next(number for number, ranks in enumerate(new) if rank in ranks)
        assert set(kept.tensors) == {f"{name}@{shard}" for name in SHAPES}
        assert all(memory.factors is None for memory in kept.tensors.values()), "PowerSGD's Q is of slices that are gone"
        fields = {
            name: {"residual": torch.from_numpy(memory.residual), "velocity": torch.from_numpy(memory.velocity)}
            for name, memory in kept.tensors.items()
        }
        made.append(
            {"memories": {"g": fields}, "servers": {"g": {name: torch.from_numpy(values) for name, values in kept.servers.items()}}}
        )
    for field in ("residual", "velocity"):
        wanted, found = mean_of(states, old, field), mean_of(made, new, field)
        assert all(torch.allclose(found[name], wanted[name], atol=1e-6) for name in SHAPES)


class OfMesh:
    """A hook on a mesh."""

    def __init__(self, rank: int, mesh: list[list[int]]) -> None:
        self.rank, self.mesh, self.size = rank, mesh, sum(map(len, mesh))
        self.read: Any = None
        self.part: dict[str, list[int]] = {}

    def needed_of_mesh(self, mesh: list[list[int]]) -> tuple[set[int], set[int]] | None:
        return None if mesh == self.mesh else needed(mesh, self.mesh, self.rank)

    def residual_state_dict(self) -> dict[str, Any]:
        raise AssertionError

    def load_residual_state_dict(self, states: Any) -> None:
        self.read = states


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("before", ["2 x 2", "2 x 3", "3 x 2"])
def test_from_a_folder_each_rank_reads_all_that_its_slices_are_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    old = MESHES[before]
    states = states_of(old)
    entries: dict[str, Any] = {}
    for rank, state in enumerate(states):
        state |= {"mesh": old, "rank": rank, "size": len(states), "layouts": {}}
        entries |= checkpointing.state_dict(SimpleNamespace(residual_state_dict=lambda state=state: state))  # type: ignore[arg-type]
    dcp.save({"psgc": entries}, checkpoint_id=tmp_path, no_dist=True)
    for after, new in MESHES.items():
        parameters = {name: Parameter(shape, piece_of(shape, len(new))) for name, shape in SHAPES.items()}
        for rank in range(sum(map(len, new))):
            hook = OfMesh(rank, new)
            monkeypatch.setattr(api, "current_session", lambda hook=hook: hook)
            checkpointing.load_state_dict(hook, tmp_path)
            if after == before:
                assert hook.read["rank"] == rank
                continue
            found, wanted = (resharded(given, "g", old, new, rank, parameters) for given in (hook.read, states))
            assert found.tensors.keys() == wanted.tensors.keys()
            assert found.servers.keys() == wanted.servers.keys()
            for name, memory in wanted.tensors.items():
                assert np.array_equal(found.tensors[name].residual, memory.residual)
                assert np.array_equal(found.tensors[name].velocity, memory.velocity)
            assert all(np.array_equal(found.servers[name], values) for name, values in wanted.servers.items())
            read = sum(bool(state["memories"]) for state in hook.read)
            assert read == len(needed(old, new, rank)[0]), "and no more"


def test_another_models_state_is_told_in_a_line() -> None:
    parameters = {"up": Parameter((70, 3), (35, 3))}
    with pytest.raises(UsageError, match="the saved residual of 'up' has 24 elements, the parameter 210; is it another model's"):
        resharded(states_of(MESHES["2 x 2"]), "g", MESHES["2 x 2"], MESHES["4 nodes"], 0, parameters)
