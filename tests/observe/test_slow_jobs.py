"""Real jobs with one slow member: ``psgc top`` names it, and where it is slow, while the job runs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import JOBS
from tests.observe.test_top import be_outside
from tests.plan.commands import psgc

IN_A_ROW = 3  # answers that say the same: what a busy machine does to a few steps is over by then


def until_named(member: str, where: str, alone: bool = False) -> dict[str, Any]:
    """The job's document, once the slowest member is this one, and the first that is awaited, in several answers in a row. alone: nobody else is awaited."""
    until, times, found = time.monotonic() + 150, 0, {}
    while times < IN_A_ROW:
        assert time.monotonic() < until, json.dumps(found, indent=1)
        done = psgc("top", "--json")
        found = json.loads(done.stdout) if done.returncode == 0 else {}
        slowest = (found.get("slow") or [{}])[0]
        awaited = found.get("awaited", [])[: None if alone else 1]
        times = times + 1 if (slowest.get("member"), slowest.get("where"), awaited) == (member, where, [member]) else 0
        time.sleep(0.3)
    return found


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("arguments", "env", "where"),
    [
        (["--computes", "1"], {}, "compute"),
        (["--encodes", "1"], {}, "encode"),
        ([], {"PSGC_LINK_MBIT": "8", "PSGC_TRANSPORT": "tcp"}, "link"),
    ],
    ids=["compute", "encode", "link"],
)
def test_a_slow_rank_is_named_with_where_it_is_slow(
    make_job: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], env: dict[str, str], where: str
) -> None:
    job = make_job()
    job.scheduler()
    job.server()
    for node in range(2):
        job.worker(node, str(tmp_path / "enough"), *arguments, job="slow_somewhere.py", **(env if node else {}))
    be_outside(monkeypatch, job)
    assert until_named("rank 1", where)["slowest_rank"] == 1
    (tmp_path / "enough").touch()
    assert set(job.end().values()) == {0}, job.text()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("where", ["server", pytest.param("link", marks=pytest.mark.long)])
def test_a_slow_server_is_named_and_whether_it_is_its_sums_or_its_link(
    make_job: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    job = make_job(servers=2, env={"PSGC_TRANSPORT": "tcp"})
    job.scheduler()
    job.server(0)
    if where == "server":
        job.start("server 1", [sys.executable, str(JOBS / "slow_server.py")], DMLC_SERVER_ID="1")
    else:
        job.server(1, PSGC_LINK_MBIT="8")
    for node in range(2):
        job.worker(node, str(tmp_path / "enough"), job="slow_somewhere.py")
    be_outside(monkeypatch, job)
    until_named("server 1", where, alone=True)
    (tmp_path / "enough").touch()
    assert set(job.end().values()) == {0}, job.text()
