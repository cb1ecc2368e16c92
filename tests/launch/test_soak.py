"""Nothing grows while servers die again and again: descriptors, threads, shared segments and memory of every process that stays, and of those that follow."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.launch.killing import Victims, children

JOBS = Path(__file__).parent.parent / "jobs"
ALLOWED_BYTES = 8 << 20  # allocators keep a little more as they please


class Taken(NamedTuple):
    descriptors: int
    threads: int
    segments: int
    resident: int


def taken(pid: int) -> Taken:
    root = Path(f"/proc/{pid}")
    maps = {line.split()[-1] + line.split()[4] for line in (root / "maps").read_text().splitlines() if "memfd:" in line}
    resident = int((root / "statm").read_text().split()[1]) * 4096
    return Taken(len(list((root / "fd").iterdir())), len(list((root / "task").iterdir())), len(maps), resident)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "job", [["lost_server.py", "1000000", "onebit", "optimizer", "0.002"], ["lost_weights.py", "rounds", "1000000", "0.002"]]
)
def test_nothing_grows_while_servers_die_again_and_again(launched: Any, job: list[str]) -> None:
    script, *arguments = job
    options = ("--no-prefix", "--workers", "2", "--servers", "2")
    popen = launched.psgc("run", *options, "--", sys.executable, str(JOBS / script), *arguments)
    launched.read_until(popen, "step")
    victims, rng, found = Victims(popen, 2, 2), random.Random(1), []
    staying = [popen.pid, *sorted(victims.others)]
    for kills in range(1, 41):
        for _ in range(400):  # of both workers; more than four deaths a minute without a step between end the job
            launched.read_until(popen, "step")
        if kills in (8, 40):
            followers = [taken(pid) for pid in children(popen) if pid not in victims.others]
            found.append(({pid: taken(pid) for pid in staying}, followers))
        victims.kill_one(rng)
    popen.terminate()
    launched.end(popen)
    (early, early_followers), (late, late_followers) = found
    for pid, before in early.items():
        same(before, late[pid], f"process {pid}")
    for before, after in zip(sorted(early_followers), sorted(late_followers), strict=True):
        same(before, after, "a server that follows")


def same(before: Taken, after: Taken, whose: str) -> None:
    assert after.descriptors <= before.descriptors + 2, f"{whose}: {before} and later {after}"
    assert after.threads <= before.threads, f"{whose}: {before} and later {after}"
    assert after.segments <= before.segments, f"{whose}: {before} and later {after}"
    assert after.resident - before.resident < ALLOWED_BYTES, f"{whose}: {before} and later {after}"
