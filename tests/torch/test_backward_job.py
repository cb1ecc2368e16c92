"""p.grad when backward returns, over a real scheduler, servers and workers, beside stock DDP over gloo."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cases import for_each
from tests.preloaded import run_preloaded

pytestmark = pytest.mark.timeout(300)  # the job is the first test's set-up
DYING = """
import pathlib
import sys
import time
import torch
import psgc.torch as psgc
from psgc.errors import JobFailed
psgc.init()
model = torch.nn.Linear(300, 300)
optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
begins = pathlib.Path(sys.argv[1])
for step in range(4):
    optimizer.zero_grad()
    loss = model(torch.ones(1, 300)).sum()
    if (psgc.rank(), step) == (1, 2):
        while not begins.exists():
            time.sleep(0.01)
        raise ValueError("no more data")
    try:
        if step == 2:
            begins.touch()
        loss.backward()
    except JobFailed as error:
        print("in backward:", step, error, flush=True)
        raise
    optimizer.step()
"""
CODECS = ("none", "int8", "onebit", "topk:k=0.01/none", "powersgd:rank=2")
CASES = ("clipped", "reentrant", "twice", "gan")


@pytest.fixture(scope="module")
def ranks(make_shared_job: Callable[..., Any]) -> list[dict[str, Any]]:
    """What each rank said."""
    env = {"PSGC_MIN_COMPRESS_BYTES": "0", "PSGC_PART_BYTES": "65536", "PSGC_FUSE_BYTES": "50000"}
    texts = make_shared_job(servers=2, env=env).said(*CODECS, job=str(Path(__file__).parent / "job_backward.py"))
    return [json.loads(line) for text in texts for line in text.splitlines() if line.startswith("{")]


@for_each(case=CASES, codec=CODECS)
def test_all_ranks_see_the_same_gradients_bit_by_bit_whenever_backward_returns(ranks: list[dict[str, Any]], case: str, codec: str) -> None:
    first, second = (of_rank["cases"][case][codec][1] for of_rank in ranks)
    assert first == second


@for_each(case=CASES)
def test_uncompressed_the_losses_are_stock_ddps(ranks: list[dict[str, Any]], case: str) -> None:
    for of_rank in ranks:
        stock, mine = (of_rank["cases"][case][how][0] for how in ("ddp", "none"))
        assert mine == pytest.approx(stock, rel=1e-5)
        assert len(set(mine)) == len(mine) and mine[-1] != mine[0]


@for_each(case=CASES)
def test_codecs_make_a_difference(ranks: list[dict[str, Any]], case: str) -> None:
    assert len({ranks[0]["cases"][case][codec][1] for codec in CODECS}) == len(CODECS)


def test_two_backwards_a_step_lose_nothing_of_what_error_feedback_keeps(ranks: list[dict[str, Any]]) -> None:
    assert all(of_rank["away"] < 1e-5 for of_rank in ranks)


def test_a_rank_that_dies_before_its_backward_ends_the_others_in_theirs(tmp_path: Path) -> None:
    command = ("-m", "psgc.launch", "run", "--no-prefix", "--workers", "2", "--", sys.executable, "-c", DYING, str(tmp_path / "begins"))
    done = run_preloaded(*command, env={**os.environ, "PSGC_ABORT_GRACE_S": "100"}, timeout=300)
    assert done.returncode != 0
    told = [line for line in done.stdout.splitlines() if line.startswith("in backward: 2 ")]
    assert len(told) == 1 and "rank 1 ended with ValueError: no more data" in told[0], done.stdout + done.stderr
