"""Jobs that continue where others stopped: bit for bit with the same codecs and workers, and without loss with others."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from psgc.codecs import registered_codecs, registered_schemes
from tests.cases import for_each
from tests.jobs import resume

pytestmark = pytest.mark.timeout(600)  # two jobs of every codec, on a machine that does other work, too
MakeJob = Callable[..., Any]
ROOT = Path(__file__).parents[2]
WAYS = resume.ways()
STEPS = "10"
ENV = {"PSGC_FUSE_BYTES": "40000", "PSGC_MIN_COMPRESS_BYTES": "0"}  # several buckets, all of them compressed


def digests(job: Any, folder: Path, hows: str, ways: list[str]) -> dict[tuple[str, str], str]:
    """By how and way the digest of the weights that all workers of this job ended with."""
    workers = job.whole(str(folder), hows, STEPS, *ways, job="resume.py", **ENV)
    assert set(job.end().values()) == {0}, job.text()
    (said,) = {tuple(re.findall(r"^weights (\w+) (\d+) (\w{64})$", worker.text, re.MULTILINE)) for worker in workers}
    assert len(said) == len(hows.split(",")) * len(ways), job.text()
    return {(how, ways[int(number)]): digest for how, number, digest in said}


@pytest.fixture(scope="module")
def resumed(make_shared_job: MakeJob, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], str]:
    """Of the job that went on after saving, and of one in new processes with fewer servers that took up what was saved."""
    folder = tmp_path_factory.mktemp("resumed")
    saving = digests(make_shared_job(servers=2, hang_s=300.0), folder, "save", WAYS)
    return saving | digests(make_shared_job(servers=1, hang_s=300.0), folder, "load", WAYS)


@for_each(way=WAYS)
def test_a_resumed_job_is_the_uninterrupted_one_bit_for_bit(resumed: dict[tuple[str, str], str], way: str) -> None:
    assert resumed["load", way] == resumed["save", way]


def test_every_codec_is_resumed_both_ways_and_one_way() -> None:
    for name in (*registered_codecs(), *registered_schemes()):
        assert name in WAYS
        assert name in registered_schemes() or name == "none" or f"{name}/none" in WAYS


def test_the_page_has_a_row_for_every_way_and_each_goes_on_bit_for_bit() -> None:
    section = (ROOT / "docs" / "optimizers.md").read_text().split("<!-- begin resume -->")[1].split("<!-- end resume -->")[0]
    rows = re.findall(r"^\| `([^`]+)` \| (\w+) \|", section, re.MULTILINE)
    assert rows == [(way, "yes") for way in WAYS]


def test_going_back_in_the_same_processes_is_exact_and_what_codecs_keep_is_part_of_the_state(make_job: MakeJob, tmp_path: Path) -> None:
    ways = ["topk", "onebit/none", "powersgd", "dithering", "scaled onebit", "OneBitAdam", "ZeroOneAdam"]
    weights = digests(make_job(), tmp_path, "save,rollback,forget", ways)
    for way in ways:
        assert weights["rollback", way] == weights["save", way], way
        assert weights["forget", way] != weights["save", way], way


MOVES = [
    "topk>topk", "topk>onebit/none", "topk/none>onebit", "onebit>powersgd", "onebit>none", "int8>bf16", "topk>int8:ef=0", "none/topk>none",
    "int4:residual=int8>topk",
]  # fmt: skip


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (3, 2), pytest.param(2, 1, marks=pytest.mark.long)])
def test_whatever_the_workers_servers_and_codecs_nothing_is_lost_in_the_sum(
    make_job: MakeJob, left_behind: Path, workers: int, servers: int
) -> None:
    """What 2 ranks and 2 servers had left over is, after a step without gradients, what moved the weights and what is left over then."""
    job = make_job(nodes=workers, servers=servers)
    job.whole(str(left_behind), "take", *MOVES, job="moved.py", **ENV)
    assert set(job.end().values()) == {0}, job.text()
    for number, move in enumerate(MOVES):
        folder = left_behind / str(number)
        before, after = (total([torch.load(folder / f"{what}-{r}.pt") for r in range(n)]) for what, n in (("left", 2), ("kept", workers)))
        moved = torch.load(folder / "moved.pt")
        assert before.abs().max() > 0, move
        lossy = 2e-2 if move.endswith(("bf16", "ef=0")) else 1e-5  # these codecs round, and keep nothing of that
        torch.testing.assert_close(
            moved + after, before, rtol=0, atol=lossy * float(before.abs().max()), msg=lambda text, m=move: f"{m}: {text}"
        )


@pytest.fixture(scope="module")
def left_behind(make_shared_job: MakeJob, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moved")
    job = make_shared_job(servers=2)
    job.whole(str(folder), "leave", *MOVES, job="moved.py", **ENV)
    assert set(job.end().values()) == {0}, job.text()
    return folder


def total(states: list[dict[str, Any]]) -> torch.Tensor:
    """What ranks and servers hold together, as the mean over the ranks that it is of."""
    sums = {str(i): torch.zeros(torch.Size(shape).numel()) for i, shape in enumerate(((300, 150), (40,), (70000,)))}
    for state in states:
        assert state["size"] == len(states)
        for name, memory in state["memories"]["gradients"].items():
            sums[name] += memory.get("residual", torch.zeros(1)) / len(states)
        for name, residual in state["servers"]["gradients"].items():
            sums[name] += residual
    return torch.cat(list(sums.values()))


@pytest.mark.long
def test_without_servers_a_job_goes_on_bit_for_bit_too_with_every_codec_that_runs_there(make_job: MakeJob, tmp_path: Path) -> None:
    """In the same processes, and in new ones."""
    ways = [way for way in WAYS if not resume.needs_servers(way)]
    assert len(ways) > 30
    weights = digests(make_job(servers=0, hang_s=300.0), tmp_path, "save,rollback", ways)
    weights |= digests(make_job(servers=0, hang_s=300.0), tmp_path, "load", ways)
    for way in ways:
        assert weights["save", way] == weights["rollback", way] == weights["load", way], way
