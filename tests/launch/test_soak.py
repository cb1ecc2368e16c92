"""Nothing grows while servers and schedulers die again and again: descriptors, threads, shared segments and memory of every process that stays, and of those
that follow."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.launch.killing import Victims, children

JOBS = Path(__file__).parent.parent / "jobs"
STEPS, EVERY, DEATHS = "100000", 1000, 94
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


def at_rest(popen: subprocess.Popen[str], complaints: list[str], processes: int) -> dict[int, Taken]:
    """What each of the job's processes has, over 2,000 steps and until all are there: the least descriptors, threads and segments, and the last memory. While a
    scheduler is started again steps go on, and attempts to reach it hold descriptors."""
    samples: dict[int, list[Taken]] = {}
    lines, living = 0, []
    while lines < 4 * EVERY or len(living) < processes:
        step(popen, complaints)
        lines += 1
        if lines % (EVERY // 5) == 0:
            living = [popen.pid, *children(popen)]
            for pid in living:
                samples.setdefault(pid, []).append(taken(pid))
    return {
        pid: Taken(*(min(column) for column in zip(*samples[pid], strict=True)))._replace(resident=samples[pid][-1].resident)
        for pid in living
    }


def started(launched: Any, command: Sequence[str]) -> tuple[subprocess.Popen[str], list[str]]:
    """A launcher, and what it and the job complain of, which grows: a pipe that nobody reads would stop them."""
    popen: subprocess.Popen[str] = launched.psgc(*command)
    complaints: list[str] = []
    assert popen.stderr is not None
    threading.Thread(target=complaints.extend, args=(popen.stderr,), daemon=True).start()
    return popen, complaints


def step(popen: subprocess.Popen[str], complaints: list[str]) -> None:
    """Read on until a worker says a step."""
    assert popen.stdout is not None
    for line in popen.stdout:
        if line.startswith("step"):
            return
    popen.wait()
    raise AssertionError("".join(complaints[-40:]))


def ended(popen: subprocess.Popen[str], complaints: list[str]) -> list[str]:
    """What the ranks found, once the job has ended as it should."""
    assert popen.stdout is not None
    with popen:
        found = sorted(line for line in popen.stdout if "found" in line)
        status = popen.wait()
    assert status == 0, "".join(complaints[-20:])
    return found


@pytest.mark.long
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("job", [["lost_server.py", STEPS, "onebit", "optimizer", "0"], ["lost_weights.py", "rounds", STEPS, "0"]])
def test_nothing_grows_and_every_loss_stays_while_services_die_again_and_again(launched: Any, job: list[str]) -> None:
    script, *arguments = job
    command = ("run", "--no-prefix", "--workers", "2", "--servers", "2", "--", sys.executable, str(JOBS / script), *arguments)
    popen, complaints = started(launched, command)
    step(popen, complaints)
    victims, rng, found = Victims(popen, 2, 2, roles=("server", "scheduler")), random.Random(1), []
    staying, processes = [popen.pid, *sorted(victims.others)], 1 + len(children(popen))
    for kills in range(1, DEATHS + 1):
        for _ in range(2 * EVERY):  # of both workers; more than four deaths a minute without a step between end the job
            step(popen, complaints)
        if kills in (8, DEATHS):
            now = at_rest(popen, complaints, processes)
            found.append(({pid: now[pid] for pid in staying}, [one for pid, one in now.items() if pid not in staying]))
        victims.kill_one(rng)
    out = ended(popen, complaints)
    (early, early_followers), (late, late_followers) = found
    print(f"{job[0]}, after 8 and after {DEATHS} deaths:\n{early}\n{late}\n{early_followers}\n{late_followers}")
    for pid, before in early.items():
        same(before, late[pid], f"process {pid}")
    for before, after in zip(sorted(early_followers), sorted(late_followers), strict=True):
        same(before, after, "a process that follows")
    expected = ended(*started(launched, command))
    assert len(expected) == 2 and out == expected


def same(before: Taken, after: Taken, whose: str) -> None:
    assert after.descriptors <= before.descriptors + 2, f"{whose}: {before} and later {after}"
    assert after.threads <= before.threads, f"{whose}: {before} and later {after}"
    assert after.segments <= before.segments, f"{whose}: {before} and later {after}"
    assert after.resident - before.resident < ALLOWED_BYTES, f"{whose}: {before} and later {after}"
