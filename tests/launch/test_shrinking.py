"""A worker's process that is killed in the middle of a real job is missing until another takes its place: the others go on (PSGC_ON_WORKER_LOSS=shrink)."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.launch.killing import Pace
from tests.launch.lost_machine import TwoMachines
from tests.launch.test_worker_loss import JOB as TRAINING
from tests.launch.test_worker_loss import SAYS, TRAINS, workers_of

ROOT = Path(__file__).parent.parent.parent
JOB = str(ROOT / "tests" / "jobs" / "shrinking.py")
SHRINK = {"PSGC_ON_WORKER_LOSS": "shrink"}
STEP = re.compile(r"rank (\d+) step (\d+) mean (\S+) moved (\S+) pid (\d+)")
MEMBERS = re.compile(r"rank (\d+) members (\d+) \((.*?),?\) \((\d+), (\d+)\)")


def start(
    launched: Any, gate: Path, *, workers: int = 4, servers: int = 2, steps: int = 100_000, dies: int = 5, scale: bool = False, **env: str
) -> Any:
    command = (sys.executable, JOB, str(steps), str(dies), str(gate), str(int(scale)))
    return launched.psgc("run", "--no-prefix", "--workers", str(workers), "--servers", str(servers), "--", *command, **SHRINK, **env)


@pytest.mark.parametrize(("transport", "scale"), [("shm", False), ("tcp", True)])
def test_four_ranks_are_three_and_then_four_again(launched: Any, tmp_path: Path, transport: str, scale: bool) -> None:
    """Each mean is that of the ranks that are there, and the same on all of them; data and learning rates follow at one step on all ranks."""
    gate, short = tmp_path / "gate", 0
    popen = start(launched, gate, scale=scale, PSGC_TRANSPORT=transport)
    means: dict[int, set[str]] = defaultdict(set)  # by step
    rates: dict[int, set[float]] = defaultdict(set)
    members: dict[tuple[int, str], set[str]] = defaultdict(set)  # by step and ranks, who was told
    found = set()
    for line in popen.stdout:
        if match := STEP.match(line):
            means[int(match[2])].add(match[3])
            rates[int(match[2])].add(round(float(match[4]) / float(match[3]), 2))
            short += match[3] == "2.33333"
            if short == 40:
                gate.touch()
        elif match := MEMBERS.match(line):
            members[int(match[2]), match[3]].add(match[1])
        elif " found " in line:
            found.add(line.split(" found ")[1])
    status, _, err = launched.end(popen)
    assert status == 0, err
    assert "died: the others go on without it, 1 of 4 ranks are missing now (PSGC_ON_WORKER_LOSS=shrink)" in err
    assert len(found) == 1 and all(len(of) == 1 for of in means.values()), "all ranks have the same"
    in_order = [next(iter(means[step])) for step in sorted(means)]
    gone, back = in_order.index("2.33333"), len(in_order) - in_order[::-1].index("2.33333")
    assert gone in (5, 6), "the step under way is with the rank or without it"
    assert set(in_order[:gone]) == {"3.75"} and set(in_order[gone:back]) == {"2.33333"} and set(in_order[back:]) == {"3.75"}
    told = {who: step for step, who in members if step}
    assert members[0, "0, 1, 2, 3"] == {"0", "1", "2", "3"} == members[told["0, 1, 2, 3"], "0, 1, 2, 3"]
    less = min(step for step, who in members if who == "0, 1, 2")
    assert members[less, "0, 1, 2"] == {"0", "1", "2"} and gone <= less <= gone + 2
    more = told["0, 1, 2, 3"]
    assert back <= more <= back + 2, "each name decides for itself which step is the first with the rank, or without it"
    moved = set.union(*(rates[step] for step in range(less, more)))
    assert moved - {0.0} == {0.75 if scale else 1.0}, "who comes back after its first step's update leaves that out"
    assert set.union(*(rates[step] for step in rates if not less <= step < more)) == {1.0}


def test_a_rank_that_does_not_come_back_is_missing_to_the_end(launched: Any, tmp_path: Path) -> None:
    """Its next process is not there yet when the others have ended: it is no fault, and it is ended, too."""
    popen = start(launched, tmp_path / "gate", workers=3, steps=80)
    status, out, err = launched.end(popen)
    assert status == 0, err
    lines = [match for line in out.splitlines() if (match := STEP.match(line))]
    assert {match[3] for match in lines if int(match[2]) > 10} == {"1.5"}
    assert out.count(" found ") == 2
    assert "rank 2 was killed by SIGKILL" in err and "another process takes its place" in err


def test_a_rank_whose_processes_die_again_and_again_is_given_up(launched: Any, tmp_path: Path) -> None:
    script, over = tmp_path / "dies.py", tmp_path / "over"
    script.write_text(
        TRAINS + "import time\nfor step in psgc.Elastic(model=model, optimizer=optimizer).steps(1_000_000):\n"
        "    if step > 2 and psgc.rank() == 1:\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    optimizer.zero_grad()\n    model(torch.ones(3)).sum().backward()\n    optimizer.step()\n    time.sleep(0.03)\n"
        f"    if step > 2 and os.path.exists({str(over)!r}):\n        break\nprint('ended')\n"
    )
    popen = launched.psgc("run", "--no-prefix", "--", sys.executable, str(script), **SHRINK)
    before = ""
    while "so it is not started again" not in before:
        before += (line := popen.stderr.readline())
        assert line, before
    over.touch()
    status, out, after = launched.end(popen)
    err = before + after
    assert status == 0, err
    assert out == "ended\n"
    assert re.search(r"worker 1 has ended \d+ times in \d+ s and completed no step in between, so it is not started again$", err, re.M), err
    assert re.search(r"psgc run: rank 1 was killed by SIGKILL \(pid \d+\); the others go on without it$", err, re.M), err


def test_who_comes_back_when_all_steps_are_taken_is_waited_for(launched: Any, tmp_path: Path) -> None:
    """It takes no step any more, but evaluates and saves as the others do, for longer than they."""
    script, back, pid = tmp_path / "dies.py", str(tmp_path / "back"), str(tmp_path / "pid")
    script.write_text(
        TRAINS + "import time\nelastic = psgc.Elastic(model=model, optimizer=optimizer)\nfor step in elastic.steps(4):\n"
        "    optimizer.zero_grad()\n    model(torch.ones(3)).sum().backward()\n    optimizer.step()\n"
        "    if step == 3 and psgc.rank() == 1 and not elastic.replaced:\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "if psgc.rank() == 0:\n"
        f"    while not os.path.exists({back!r}):\n        time.sleep(0.05)\n"
        f"    open({pid + '~'!r}, 'w').write(str(os.getpid()))\n    os.rename({pid + '~'!r}, {pid!r})\n"
        "else:\n"
        f"    open({back!r}, 'w').close()\n"
        f"    while not os.path.exists({pid!r}) or os.path.exists('/proc/' + open({pid!r}).read()):\n        time.sleep(0.05)\n"
        "    time.sleep(9)\n"  # longer than who is left is waited for
        "print('saved', elastic.replaced)\n"
    )
    status, out, err = launched.end(launched.psgc("run", "--no-prefix", "--", sys.executable, str(script), **SHRINK))
    assert status == 0, err
    assert sorted(out.splitlines()) == ["saved False", "saved True"], err
    assert "rank 1 goes on at step 4 with the state of another rank" in err


def test_while_rank_0_is_missing_the_next_one_saves_as_the_docs_say(launched: Any, tmp_path: Path) -> None:
    job = str(ROOT / "tests" / "jobs" / "elastic_saves.py")
    status, out, err = launched.end(launched.psgc("run", "--no-prefix", "--", sys.executable, job, str(tmp_path), "12", "dies", **SHRINK))
    assert status == 0, err
    found = {path.name for path in tmp_path.iterdir()}
    assert found - {"checkpoint-6.pt"} == {"checkpoint-3.pt", "checkpoint-9.pt", "checkpoint-12.pt"}, (
        "the others may not know yet at step 6"
    )
    assert out.count("weights ") == 1


def test_when_all_have_died_the_job_has_failed(launched: Any, tmp_path: Path) -> None:
    popen = start(launched, tmp_path / "gate", workers=2, servers=1, dies=-1)
    launched.read_until(popen, "rank 1 step 3")
    for pid in workers_of(popen):
        os.kill(pid, signal.SIGKILL)
    status, _, err = launched.end(popen)
    assert status != 0
    assert "died, and no other worker is left whose state the job could go on from" in err


def test_a_trainings_loss_is_that_of_an_undisturbed_one_within_noise(launched: Any) -> None:
    """Batches of the ranks that are missing are missing; and all ranks have the same parameters at the end."""
    losses = []
    for kills in (0, 2):
        with Pace() as pace:
            command = (sys.executable, TRAINING, "120", "int8", "0.01")
            popen = launched.psgc("run", "--no-prefix", "--workers", "4", "--", *command, **SHRINK, **pace.env)
            said: dict[int, set[str]] = defaultdict(set)
            found, killed = [], set[int]()
            for line in popen.stdout:
                if match := SAYS.match(line):
                    step, pid = int(match[2]), int(match[4])
                    said[step].add(match[3])
                    if len(killed) < kills and step >= 10 * (1 + 3 * len(killed)) and match[1] == str(1 + len(killed)):
                        os.kill(pid, signal.SIGKILL)
                        killed.add(pid)
                    pace.heard(step + 1)
                elif " found " in line:
                    found.append(line.split(" found ")[1].split()[0])
            status, _, err = launched.end(popen)
        assert status == 0 and len(killed) == kills, err
        assert len(set(found)) == 1 and len(found) >= 4 - kills
        assert len(said) == 120 and all(len(of) == 1 for of in said.values()), "each step has one mean"
        losses.append([float(next(iter(said[step]))) for step in range(120)])
    plain, shrunk = (sum(of[-20:]) / 20 for of in losses)
    assert plain < losses[0][0] / 3 and shrunk < 1.5 * plain, (plain, shrunk)


def test_a_machine_that_is_lost_is_missing(launched: Any, tmp_path: Path) -> None:
    with Pace() as pace:
        machines = TwoMachines(launched, pace, (sys.executable, JOB, "150", "-1", str(tmp_path / "gate"), "0"), SHRINK)
        status, out, err = launched.end(machines.lose_the_second())
    assert status == 0, err
    assert re.findall(r"^rank 0 step 149 mean (\S+)", out, re.M) == ["1"]
    assert "worker 1" in err and "died: the others go on without it, 1 of 2 ranks are missing now" in err
    assert [launched.end(service)[0] for service in machines.services] == [0, 0]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("psgc.DistributedDataParallel(model)", "DistributedDataParallel: under PSGC_ON_WORKER_LOSS=shrink the others could not go on without a worker that "
         "dies; DistributedOptimizer can, with psgc.torch.Elastic"),
        ("psgc.push_pull(torch.ones(70000), name='x', compression='onebit/relay')", "codec onebit/relay of 'push_pull.x' has workers divide by the number of"),
    ],
)  # fmt: skip
def test_what_cannot_go_on_without_a_rank_is_refused_in_a_line(launched: Any, tmp_path: Path, call: str, words: str) -> None:
    script = tmp_path / "calls.py"
    script.write_text(f"import torch\nimport psgc.torch as psgc\npsgc.init()\nmodel = torch.nn.Linear(3, 1)\n{call}\n")
    status, _, err = launched.end(launched.psgc("run", "--", sys.executable, str(script), **SHRINK))
    assert status == 1
    assert words in err.strip().splitlines()[-1], err


def test_jobs_without_servers_are_refused_before_anything_starts(launched: Any) -> None:
    status, _, err = launched.end(launched.psgc("run", "--servers", "0", "--", sys.executable, JOB, "3", "-1", "x", "0", **SHRINK))
    assert status == 2 and len(err.strip().splitlines()) == 1
    assert "PSGC_ON_WORKER_LOSS=shrink and DMLC_NUM_SERVER=0" in err
