"""What codecs keep goes through torch.distributed.checkpoint and back: bit for bit among as many workers, without loss in the sum among more or fewer."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.timeout(600)
MakeJob = Callable[..., Any]
WAYS = ["topk", "onebit/none", "powersgd", "scaled onebit", "OneBitAdam", "ZeroOneAdam"]
CODECS = ["onebit", "topk", "int8"]
ENV = {"PSGC_FUSE_BYTES": "40000", "PSGC_MIN_COMPRESS_BYTES": "0"}


def run(job: Any, folder: Path, how: str, *ways: str) -> list[str]:
    """What each worker has printed of its weights."""
    workers = job.whole(str(folder), how, *ways, job="checkpoints.py", **ENV)
    assert set(job.end().values()) == {0}, job.text()
    said = {tuple(re.findall(r"^weights \w+ (.*)$", worker.text, re.MULTILINE)) for worker in workers}
    assert len(said) == 1, job.text()
    return list(said.pop())


def test_training_goes_on_bit_for_bit_from_a_checkpoint_of_torchs_written_at_once_or_beside_it(make_job: MakeJob, tmp_path: Path) -> None:
    saved = run(make_job(servers=2, hang_s=300.0), tmp_path, "save", *WAYS)
    assert len(saved) == len(WAYS)
    assert run(make_job(servers=1, hang_s=300.0), tmp_path, "load", *WAYS) == saved


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (3, 2)])
def test_among_more_or_fewer_workers_what_was_not_sent_is_as_much_as_before(
    make_job: MakeJob, tmp_path: Path, workers: int, servers: int
) -> None:
    run(make_job(servers=2), tmp_path, "leave", *CODECS)
    run(make_job(nodes=workers, servers=servers), tmp_path, "take", *CODECS)
    for codec in CODECS:
        before, after = (
            total([torch.load(tmp_path / f"{codec}-{how}-{rank}.pt") for rank in range(n)]) for how, n in (("leave", 2), ("take", workers))
        )
        assert before.keys() == after.keys()
        for name, sum_ in before.items():
            assert sum_.abs().max() > 0
            torch.testing.assert_close(after[name], sum_, rtol=0, atol=1e-6 * float(sum_.abs().max()))
            if workers == 1:  # a half of a sum of two is the same float32, whoever takes it
                assert torch.equal(after[name], sum_), name


@pytest.mark.parametrize("policy", ["wait", "shrink"])
def test_where_workers_can_be_replaced_one_rank_saves_as_the_docs_say_and_another_job_goes_on(
    make_job: MakeJob, tmp_path: Path, policy: str
) -> None:
    env = {"PSGC_ON_WORKER_LOSS": policy}

    def weights(*arguments: str) -> str:
        texts = make_job(servers=1, hang_s=300.0).said(str(tmp_path), *arguments, job="elastic_saves.py", **env)
        found = {re.findall(r"^weights (.*)$", text, re.MULTILINE)[0] for text in texts}
        assert len(found) == 1
        for text in texts:
            assert f"Checkpoints: under PSGC_ON_WORKER_LOSS={policy}" in text
            assert "have the lowest rank that takes part (psgc.on_membership) save the model and the optimizer by torch.save" in text
        return str(found.pop())

    whole = weights("6")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3.pt", "checkpoint-6.pt"]
    (tmp_path / "checkpoint-6.pt").unlink()
    assert weights("6", str(tmp_path / "checkpoint-3.pt")) == whole != weights("3")


def total(states: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """What ranks hold together, in units of the mean, and what servers hold."""
    assert all(state["size"] == len(states) for state in states)
    sums: dict[str, torch.Tensor] = {}
    for state in states:
        for name, memory in state["memories"]["gradients"].items():
            sums[name] = sums.get(name, torch.zeros(())) + memory["residual"]
        for name, residual in state["servers"]["gradients"].items():
            sums[f"server {name}"] = sums.get(f"server {name}", torch.zeros(())) + residual
    return {name: each if name.startswith("server") else each / len(states) for name, each in sums.items()}
