"""A trainer continues from a job of 2 workers in a job of 3 and then alone, without a restart, over real processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.ports import free_port

JOB = Path(__file__).parent.parent / "jobs" / "elastic.py"


@contextmanager
def started(commands: list[tuple[list[str], dict[str, str]]]) -> Iterator[list[subprocess.Popen[str]]]:
    processes = [
        subprocess.Popen(command, env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command, env in commands
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def expected(sizes: tuple[int, ...]) -> list[str]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for phase, size in enumerate(sizes):
        for step in range(3 * phase, 3 * phase + 3):
            optimizer.zero_grad()
            for rank in range(size):
                x = torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + rank))
                (model(x).square().mean() / size).backward()
            optimizer.step()
        found.append(f"{sum(p.double().sum().item() for p in model.parameters()):.5f}")
    return found


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_trainer_goes_on_among_two_then_three_then_one() -> None:
    ports = [free_port(), free_port()]
    common = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_NUM_SERVER": "1", "PSGC_MIN_COMPRESS_BYTES": "0"}
    jobs = [{**common, "DMLC_NUM_WORKER": str(size), "DMLC_PS_ROOT_PORT": str(port)} for size, port in zip((2, 3), ports, strict=True)]
    launch = [sys.executable, "-c", "from psgc.launch.job.bpslaunch import main; main()"]
    commands = [(launch, {**job, "DMLC_ROLE": role}) for job in jobs for role in ("scheduler", "server")]
    arguments = [*map(str, ports), "none"]
    workers = [
        ([sys.executable, str(JOB), str(rank), *arguments], {**jobs[0], "DMLC_ROLE": "worker", "DMLC_WORKER_ID": str(rank)})
        for rank in range(3)
    ]
    with started(commands + workers) as processes:
        texts = [process.communicate(timeout=300)[0] for process in processes[len(commands) :]]
        assert [process.returncode for process in processes[len(commands) :]] == [0, 0, 0], "\n".join(texts)
        assert [process.wait(timeout=300) for process in processes[: len(commands)]] == [0] * 4
    found = [dict(re.findall(r"^size (\d) weights (\S+)$", text, re.MULTILINE)) for text in texts]
    assert [list(each) for each in found] == [["2", "3", "1"], ["2", "3"], ["3"]], "\n".join(texts)
    assert found[0]["3"] == found[1]["3"] == found[2]["3"] and found[0]["2"] == found[1]["2"]
    for got, want in zip(found[0].values(), expected((2, 3, 1)), strict=True):
        assert float(got) == pytest.approx(float(want), abs=2e-5)
