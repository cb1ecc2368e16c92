"""A folder of checkpoints: a save that is interrupted never replaces a whole one."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

import psgc.torch as psgc
from psgc.errors import UsageError
from psgc.torch.session import api
from psgc.torch.state.checkpointing import _places, _with_tensors, _without_tensors, load_state_dict
from psgc.torch.state.folder import Checkpoints
from psgc.torch.state.saved import check_states
from tests.preloaded import run_preloaded

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
DIES = """
import os, signal, sys, torch
from torch.distributed.checkpoint import FileSystemWriter
from psgc.torch.state.folder import Checkpoints

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

folder, where, how, step = sys.argv[1:]
checkpoints = Checkpoints(folder)
if where == "at the rename":
    import pathlib
    pathlib.Path.rename = os.rename = os.replace = die
elif where:
    setattr(FileSystemWriter, where, die)
state = {"values": torch.full((50_000,), float(step))}
if how == "async":
    checkpoints.async_save(int(step), state).result()
else:
    checkpoints.save(int(step), state)
"""


def values(path: Path | None) -> float:
    assert path is not None
    state = {"values": torch.zeros(50_000)}
    dcp.load(state, checkpoint_id=path)
    assert (state["values"] == state["values"][0]).all()
    return state["values"][0].item()


def save(folder: Path, where: str, how: str, step: int) -> int:
    return run_preloaded("-c", DIES, str(folder), where, how, str(step), env=os.environ, timeout=300).returncode


@pytest.mark.parametrize("how", ["at once", "async"])
def test_wherever_a_save_is_killed_the_one_before_is_the_latest_and_the_next_is_whole(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "run"
    assert save(folder, "", how, 1) == 0
    for where in ("prepare_local_plan", "write_data", "finish", "at the rename"):
        assert save(folder, where, how, 2) == -signal.SIGKILL, where
        assert values(Checkpoints(folder).latest()) == 1, where
    assert save(folder, "", how, 2) == 0, "in the folder in which the others were interrupted"
    assert values(Checkpoints(folder).latest()) == 2
    assert Checkpoints(folder).steps() == [1, 2]


def test_the_newest_whole_ones_stay(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest() is None
    (tmp_path / "step-000000000004").mkdir()  # interrupted
    (tmp_path / "step-000000000900").mkdir()
    (tmp_path / "of another's").mkdir()
    for step in (3, 5, 7, 12):
        assert checkpoints.save(step, {"values": torch.full((50_000,), float(step))}) == tmp_path / f"step-{step:012d}"
        assert values(checkpoints.latest()) == step
    assert checkpoints.steps() == [7, 12]
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["of another's", "step-000000000007", "step-000000000012", "step-000000000900"], "what may be under way stays"


def test_a_run_that_goes_back_keeps_what_it_has_just_written_and_goes_on_from_that(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (50, 90, 100):
        checkpoints.save(step, {"values": torch.full((50_000,), float(step))})
    again = Checkpoints(tmp_path, keep=2)  # another process, which goes back
    assert values(again.save(60, {"values": torch.full((50_000,), 60.5)})) == 60.5
    assert again.steps() == [60, 100]
    assert again.latest() == tmp_path / "step-000000000060"
    assert values(again.async_save(100, {"values": torch.full((50_000,), 100.5)}).result()) == 100.5, "a step of the run that was given up"
    assert again.steps() == [60, 100]
    again.save(70, {"values": torch.full((50_000,), 70.5)})
    assert Checkpoints(tmp_path).steps() == [70, 100]
    assert values(Checkpoints(tmp_path).latest()) == 70.5


def test_the_order_of_saves_is_kept_by_a_copy_and_folders_without_one_come_first(tmp_path: Path) -> None:
    for step in (90, 100):
        dcp.save({"values": torch.full((50_000,), float(step))}, checkpoint_id=tmp_path / "run" / f"step-{step:012d}")
    checkpoints = Checkpoints(tmp_path / "run", keep=3)
    assert checkpoints.latest() == tmp_path / "run" / "step-000000000100"
    checkpoints.save(60, {"values": torch.full((50_000,), 60.0)})
    checkpoints.save(55, {"values": torch.full((50_000,), 55.0)})
    assert checkpoints.steps() == [55, 60, 100]
    shutil.copytree(tmp_path / "run", tmp_path / "copy", copy_function=shutil.copyfile)
    for path, age in zip(sorted((tmp_path / "copy").iterdir()), (1, 2, 3), strict=True):
        os.utime(path / ".metadata", (age, age))
    assert Checkpoints(tmp_path / "copy").latest() == tmp_path / "copy" / "step-000000000055"


def test_what_an_interrupted_save_of_a_run_that_was_given_up_left_is_removed(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(90, {"values": torch.zeros(50_000)})
    assert save(tmp_path, "finish", "at once", 100) == -signal.SIGKILL
    Checkpoints(tmp_path).save(60, {"values": torch.zeros(50_000)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000000060", "step-000000000090"]


def test_a_save_waits_for_one_that_is_still_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints, saved, first = Checkpoints(tmp_path), threading.Event(), []
    write = dcp.FileSystemWriter.write_data

    def slow(*arguments: Any) -> Any:
        if not first:
            first.append(saved.wait(2))  # long enough for one that does not wait
        return write(*arguments)

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", slow)
    under_way = checkpoints.async_save(100, {"values": torch.full((50_000,), 100.0)})
    assert not under_way.cancel()
    assert values(checkpoints.save(110, {"values": torch.full((50_000,), 110.0)})) == 110
    saved.set()
    assert values(under_way.result()) == 100
    assert checkpoints.steps() == [100, 110]
    assert first == [False]


def test_the_latest_is_not_written_over_and_a_save_that_fails_says_so(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, {"values": torch.zeros(50_000)})
    for write in (checkpoints.save, checkpoints.async_save):
        with pytest.raises(UsageError, match="is the latest there"):
            write(3, {"values": torch.ones(50_000)})
    assert values(checkpoints.latest()) == 0
    with pytest.raises(UsageError, match="keep=0"):
        Checkpoints(tmp_path, keep=0)


def test_tensors_stay_tensors_and_the_rest_is_json() -> None:
    state: dict[str, Any] = {
        "rank": 0, "rates": [0.1, 1e-300], "memories": {"gradients": {"tensor": {"residual": torch.arange(3.0)}, "0": {}}},
        "layouts": [{"exact": {"0.1": {"bytes": torch.zeros(0, dtype=torch.uint8), "rescale": 0.1}}}], "none": None,
    }  # fmt: skip
    tensors: list[torch.Tensor] = []
    packed = _without_tensors(state, tensors)
    assert list(_places(packed)) == [0, 1]
    state["memories"]["gradients"]["tensor"]["residual"].zero_()
    found = _with_tensors(packed, {str(number): tensor for number, tensor in enumerate(tensors)})
    assert found["memories"]["gradients"]["tensor"]["residual"].tolist() == [0, 1, 2], "copies, which training does not change"
    assert found["layouts"][0]["exact"]["0.1"]["bytes"].dtype == torch.uint8
    assert (found["rates"], found["rank"], found["none"], found["memories"]["gradients"]["0"]) == ([0.1, 1e-300], 0, None, {})


class Taker:
    """A rank of a job, or of a group of it, and its optimizer, which keeps what it is given."""

    def __init__(self, rank: int, size: int, part: dict[str, list[int]]) -> None:
        self.rank, self.size, self.part = rank, size, part
        self.taken: Any = None

    def residual_state_dict(self) -> dict[str, Any]:
        raise AssertionError

    def load_residual_state_dict(self, states: Any) -> None:
        self.taken = states


def test_groups_of_a_mesh_have_entries_of_their_own_and_take_those_of_their_part_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries: dict[str, Any] = {}
    for job_rank in range(4):  # replicas 0 and 1 of two pieces
        replica, piece = divmod(job_rank, 2)
        memories = {"gradients": {"w": {"residual": torch.full((3 + piece,), float(job_rank))}}}
        state = {
            "format": 2, "rank": replica, "size": 2, "part": {"tp": [piece, 2]}, "job_rank": job_rank, "memories": memories, "servers": {}, "layouts": {},
        }  # fmt: skip
        entries |= psgc.state_dict(SimpleNamespace(residual_state_dict=lambda state=state: state))  # type: ignore[arg-type]
    assert set(entries) == {"rank0", "rank1", "rank2", "rank3"}
    path = Checkpoints(tmp_path).save(1, {"psgc": entries})

    def taken(rank: int, size: int, part: dict[str, list[int]]) -> Any:
        taker = Taker(rank, size, part)
        monkeypatch.setattr(api, "current_session", lambda: taker)
        load_state_dict(taker, path)
        return taker.taken

    for piece in range(2):
        part = {"tp": [piece, 2]}
        for replica in range(2):
            own = taken(replica, 2, part)
            assert own["memories"]["gradients"]["w"]["residual"].tolist() == [2.0 * replica + piece] * (3 + piece)
            assert check_states(own, replica, 2, part) == [own]
            with pytest.raises(
                UsageError, match=f"of a mesh's part tp={piece} of 2, and this rank is of a mesh's part tp={1 - piece} of 2"
            ):
                check_states(own, replica, 2, {"tp": [1 - piece, 2]})
        alone = taken(0, 1, part)
        assert [state["memories"]["gradients"]["w"]["residual"].tolist() for state in alone] == [[r + piece] * (3 + piece) for r in (0, 2)]
    for other, told in (({}, "a whole job"), ({"tp": [0, 4]}, "a mesh's part tp=0 of 4")):
        with pytest.raises(
            UsageError, match=f"ranks of a mesh's part tp=0 of 2 and a mesh's part tp=1 of 2 kept, and this rank is of {told}"
        ):
            taken(0, 2, other)


def test_a_folder_without_a_whole_checkpoint_and_one_without_psgcs_entries_are_refused(tmp_path: Path) -> None:
    optimizer: Any = None
    psgc.init()
    try:
        with pytest.raises(UsageError, match="no whole checkpoint is there"):
            load_state_dict(optimizer, tmp_path)
        path = Checkpoints(tmp_path).save(1, {"model": {"w": torch.zeros(2)}})
        with pytest.raises(UsageError, match="has nothing of psgc's under 'psgc'; it has model"):
            load_state_dict(optimizer, path)
    finally:
        psgc.shutdown()
