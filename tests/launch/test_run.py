"""``psgc run``: one command's processes live and die together, and the last line says why."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from psgc.plan.inputs.cluster import Cluster, Link
from tests.plan.commands import psgc

STEPS = (sys.executable, str(Path(__file__).parent.parent / "jobs" / "steps.py"), "--steps")


def test_a_whole_job_runs_and_every_line_says_whose_it_is(launched: Any) -> None:
    status, out, err = launched.end(launched.psgc("run", "--workers", "3", "--servers", "2", "--nodes", "2", "--", *STEPS, "3"))
    assert status == 0, err
    for rank in range(3):
        assert f"[worker {rank}] step 3: nan 0 of 5000, first 3.0" in out


def test_without_prefix_lines_come_as_they_are(launched: Any) -> None:
    status, out, err = launched.end(launched.psgc("run", "--no-prefix", "--", *STEPS, "1"))
    assert (status, out.splitlines()[0]) == (0, "step 1: nan 0 of 5000, first 1.0"), err


def test_workers_are_spread_over_the_nodes_and_told_who_they_are(launched: Any) -> None:
    names = ("DMLC_ROLE", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "DMLC_WORKER_ID", "BYTEPS_LOCAL_RANK", "BYTEPS_LOCAL_SIZE", "PSGC_CODEC")
    code = f"import os, json; print(json.dumps([os.environ.get(n) for n in {names}]))"
    arguments = ("run", "--no-prefix", "--workers", "5", "--nodes", "2", "--codec", "none", "--", sys.executable, "-c", code)
    stale = {"DMLC_WORKER_ID": "7", "BYTEPS_LOCAL_RANK": "3", "DMLC_ROLE": "server", "DMLC_NUM_WORKER": "9"}
    status, out, err = launched.end(launched.psgc(*arguments, **stale))
    assert status == 0, err
    told = sorted(json.loads(line) for line in out.splitlines())
    where = [("0", "0", "3"), ("0", "1", "3"), ("0", "2", "3"), ("1", "0", "2"), ("1", "1", "2")]
    assert told == [["worker", "2", "1", *place, "none"] for place in where]


def test_a_command_that_does_not_use_psgc_ends_all_the_same(launched: Any) -> None:
    status, out, err = launched.end(launched.psgc("run", "--", "echo", "hello", PSGC_SILENCE_S="60"))
    assert (status, sorted(out.splitlines())) == (0, ["[worker 0] hello", "[worker 1] hello"])
    assert err == "psgc run: no worker has joined the job, so nothing was synchronised: does the command use psgc? (psgc.torch.init())\n"


PACED = str(Path(__file__).parent.parent / "jobs" / "paced.py")


@pytest.mark.parametrize(("shared", "local_size", "megabytes_one_way"), [((), 1, 1), (("--nodes", "1"), 2, 2)])
def test_simulated_links_carry_no_more_than_they_are_told_and_nodes_share_theirs(
    launched: Any, shared: tuple[str, ...], local_size: int, megabytes_one_way: int
) -> None:
    job = ("run", "--no-prefix", "--servers", "2", "--link-mbit", "20", *shared, "--", sys.executable, PACED)
    status, out, err = launched.end(launched.psgc(*job))
    assert status == 0, err
    assert re.search(
        r"^psgc run: each .* has a link of 20 Mbit/s, each way, simulated: .*torch\.distributed's collectives are not$", err, re.MULTILINE
    )
    told = [json.loads(line) for line in out.splitlines()]
    for size, transport, seconds in told:
        assert (size, transport) == (local_size, "tcp")
        assert seconds > 0.9 * 3 * megabytes_one_way * 8 / 20, "three steps; there and back may overlap"
    assert len(told) == 2


AMONG_WORKERS = """
import time, torch, psgc.torch as psgc
psgc.init()
psgc.push_pull(torch.zeros(250_000), name="x")
began = time.monotonic()
psgc.barrier()
for step in range(3):
    assert (psgc.push_pull(torch.full((250_000,), float(psgc.rank() + step)), name="x") == step + 0.5).all()
print(time.monotonic() - began, flush=True)
psgc.shutdown()
"""


def test_simulated_links_carry_no_more_than_they_are_told_between_workers_without_servers(launched: Any) -> None:
    job = ("run", "--no-prefix", "--servers", "0", "--link-mbit", "20", "--", sys.executable, "-c", AMONG_WORKERS)
    status, out, err = launched.end(launched.psgc(*job))
    assert status == 0, err
    assert [float(seconds) > 0.9 * 3 * 8 / 20 for seconds in out.split()] == [True, True], "a slice and a sum of 0.5 MB each, three times"


def test_an_encrypted_job_needs_no_servers(launched: Any) -> None:
    pytest.importorskip("cryptography", reason="the extra `encrypt` is not installed")
    job = ("run", "--no-prefix", "--servers", "0", "--nodes", "2", "--", sys.executable, "-c", AMONG_WORKERS)
    status, out, err = launched.end(launched.psgc(*job, PSGC_ENCRYPT="1"))
    assert (status, len(out.split())) == (0, 2), err


def test_what_a_simulated_link_does_not_pace_is_in_the_help(launched: Any) -> None:
    status, out, _ = launched.end(launched.psgc("run", "--help", COLUMNS="400"))
    assert status == 0
    assert "Not paced: torch.distributed's collectives, and psgc's control messages." in " ".join(out.split())


ENDS = str(Path(__file__).parent.parent / "jobs" / "ends.py")


@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        ("import", 1, r"rank 1 ended with ModuleNotFoundError: No module named 'no_such_module' \(tests/jobs/ends\.py:\d+\)"),
        ("absent", 1, r"rank 1 ended with status 0 and never joined the job, which the other ranks wait for: .*init\(\)"),
        ("exit", 3, r"rank 1 ended with status 3"),
        ("leave", 1, r"rank\(s\) 1 left the job, but barrier 1 awaits them: every rank must make the same calls"),
    ],
)
def test_the_last_line_says_once_who_failed_and_where_and_the_status_is_kept(launched: Any, how: str, status: int, said: str) -> None:
    patient = {
        "PSGC_SILENCE_S": "60",
        "PSGC_REGISTER_TIMEOUT_S": "10000",
        "PSGC_ABORT_GRACE_S": "100",
    }  # the first to fail may be the last to end
    popen = launched.psgc("run", "--", sys.executable, ENDS, how, **patient)
    ended, out, err = launched.end(popen)
    *before, last = err.splitlines()
    assert re.fullmatch(f"psgc run: {said}", last), err
    assert (ended, out) == (status, "")
    assert all(line.startswith("[worker 1]") for line in before), f"consequences on others are not told: {err}"


FAULTS = str(Path(__file__).parent.parent / "jobs" / "faults.py")


def test_the_last_line_says_how_a_trained_worker_ended_after_a_summary_that_is_not_the_reason(launched: Any) -> None:
    ended, _, err = launched.end(launched.psgc("run", "--", sys.executable, FAULTS, "exit", PSGC_SILENCE_S="60"))
    assert (ended, err.splitlines()[-1]) == (3, "psgc run: rank 0 ended with status 3")
    assert "psgc.run: " in err


@pytest.mark.parametrize("how", ["wait", "deaf"])
def test_ctrl_c_is_two_lines_where_it_was_and_that_it_was(launched: Any, how: str) -> None:
    """Also where Python does not get to interrupt rank 0."""
    popen = launched.psgc("run", "--no-prefix", "--", sys.executable, FAULTS, how, PSGC_LOG_LEVEL="error")
    for _ in range(2):
        launched.read_until(popen, "trained")
    popen.send_signal(signal.SIGINT)
    status, _, err = launched.end(popen)
    assert status == 128 + signal.SIGINT
    assert re.fullmatch(r"KeyboardInterrupt \(tests/jobs/faults\.py:\d+\)\npsgc run: ended by SIGINT\n", err), err


@pytest.mark.parametrize(
    ("arguments", "env", "said"),
    [
        (("run", "--", "no-such-command"), {}, "no-such-command"),
        (("run",), {}, "no command given"),
        (("run", "--codec", "onebitt", "--", "true"), {}, "unknown codec 'onebitt'; choose one of none"),
        (("run", "--codec", "topk:k=0", "--", "true"), {}, "topk"),
        (("run", "--", "true"), {"PSGC_CODEC": "onebitt"}, "unknown codec 'onebitt'"),
        (("run", "--link-mbit", "0", "--", "true"), {}, "--link-mbit 0: expected a rate from 0.001 to 100000"),
        (("run", "--link-mbit", "nan", "--", "true"), {}, "--link-mbit nan: expected a rate"),
        (("run", "--link-mbit", "9", "--", "true"), {"PSGC_TRANSPORT": "shm"}, "PSGC_TRANSPORT=shm asks for shared memory"),
        (("run", "--", "true"), {"PSGC_PART_BYTES": "many"}, "PSGC_PART_BYTES='many'"),
        (("run", "--", "true"), {"PSGC_TRACE": "/proc/no/folder"}, "the folder of timelines /proc/no/folder cannot be made"),
        (("run", "--plan", "nowhere.json", "--", "true"), {}, "plan nowhere.json: No such file or directory"),
        (("run", "--plan", "p", "--codec", "int8", "--", "true"), {}, "--codec int8 and --plan p: a plan names each bucket's codec"),
        (("run", "--layout-out", "nowhere/out", "--", "true"), {}, "--layout-out nowhere/out: no such directory"),
        (("run", "--layout-out", "/", "--", "true"), {}, "--layout-out /: is a directory"),
        (("run", "--nodes", "3", "--", "true"), {}, "every node needs a worker"),
        (("run", "--servers", "-1", "--", "true"), {}, "--servers -1 --nodes 1: at least 1 worker on 1 node, and 0 servers or more"),
        (("run", "--servers", "0", "--codec", "shared", "--", "true"), {}, "codec shared needs servers, and this job has none; start one"),
        (("bench", "pushpull", "--bytes", "3"), {}, "multiple of 4"),
        (("bench", "pushpull", "--transport", "rdma"), {}, "expected one of auto, "),
        (("bench", "kernels", "--codec", "onebitt"), {}, "unknown codec 'onebitt'"),
        (("bench", "kernels", "--device", "abacus"), {}, "abacus: expected cpu or cuda"),
    ],
)
@pytest.mark.usefixtures("clean_environment")
def test_wrong_usage_is_one_line_and_status_2(
    arguments: tuple[str, ...], env: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    done = psgc(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert (len(done.stderr.strip().splitlines()), done.stdout) == (1, "")


def plan_file(path: Path, *option: str, codec: str = "none") -> str:
    bucket = {"tensors": ["w"], "numel": 5, "parts": 1, "priority": 0, "codec": codec, "option": option}
    path.write_text(json.dumps({"version": 1, "model": "m", "cluster": "", "buckets": [bucket], "prediction": {}}))
    return str(path)


@pytest.mark.usefixtures("clean_environment")
def test_a_plan_that_cannot_be_carried_is_refused_before_anything_starts(tmp_path: Path) -> None:
    plan = plan_file(tmp_path / "plan.json", "comp@gpu", "flat.push.c", "flat.pull.c", "decomp@gpu", codec="onebit:residual=int8")
    done = psgc("run", "--plan", plan, "--", *STEPS, "1")
    assert (done.returncode, done.stdout) == (2, "")
    wanted = r"psgc: .*buckets\[0\] \(of 'w'\): action 'comp@gpu', but codec onebit:residual=int8 has no GPU side; .*\n"
    assert re.fullmatch(wanted, done.stderr)


@pytest.mark.usefixtures("clean_environment")
def test_a_plan_and_a_codec_from_the_environment_exclude_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSGC_CODEC", "int8")
    done = psgc("run", "--plan", plan_file(tmp_path / "plan.json", "flat.push", "flat.pull"), "--", *STEPS, "1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "names each bucket's codec, but PSGC_CODEC=int8 is set, too" in done.stderr


def test_workers_are_told_the_plans_and_the_layouts_file_wherever_they_go(launched: Any, tmp_path: Path) -> None:
    plan = os.path.relpath(plan_file(tmp_path / "plan.json", "flat.push", "flat.pull"))
    document = json.loads(Path(plan).read_text())
    cluster = Cluster("c", 1, 4, Link(10, 1), Link(1, 1), 1, reduce_roots=(1, 3))
    Path(plan).write_text(json.dumps({**document, "version": 2, "cluster": cluster.to_json()}))
    code = "import os; os.chdir('/'); print(*(os.environ[name] for name in ('PSGC_PLAN', 'PSGC_LAYOUT_OUT', 'BYTEPS_REDUCE_ROOTS')))"
    arguments = ("--workers", "1", "--plan", plan, "--layout-out", "layout.json", "--", sys.executable, "-c", code)
    status, out, err = launched.end(launched.psgc("run", "--no-prefix", *arguments))
    assert (status, out.split()) == (0, [str(tmp_path / "plan.json"), str(Path.cwd() / "layout.json"), "1,3"]), err


def test_a_worker_killed_in_mid_step_is_named_by_its_signal(launched: Any) -> None:
    status, _, err = launched.end(launched.psgc("run", "--", *STEPS, "1000", "--die-at", "4"))
    assert status == 128 + signal.SIGKILL
    assert re.search(r"psgc run: rank \d was killed by SIGKILL \(pid \d+\)$", err.strip()), err


@pytest.mark.parametrize("member", ["scheduler", "server"])
def test_a_scheduler_or_server_that_is_killed_ends_the_job_and_is_named(launched: Any, member: str) -> None:
    popen = launched.job(PSGC_ON_SERVER_LOSS="stop", PSGC_ON_SCHEDULER_LOSS="stop")
    _guardian, *members = map(int, Path(f"/proc/{popen.pid}/task/{popen.pid}/children").read_text().split())  # as they were started
    victim = members[("scheduler", "server").index(member)]
    os.kill(victim, signal.SIGKILL)
    status, _, err = launched.end(popen)
    assert status == 128 + signal.SIGKILL
    assert re.search(rf"psgc run: {member}( 0)? was killed by SIGKILL \(pid {victim}\)$", err.strip()), err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_everything(launched: Any, number: signal.Signals) -> None:
    popen = launched.job()
    popen.send_signal(number)
    status, _, err = launched.end(popen)
    assert status == 128 + number
    assert err.strip().splitlines()[-1] == f"psgc run: ended by {number.name}"


def test_nothing_outlives_a_killed_launcher(launched: Any) -> None:
    popen = launched.job("--nodes", "2", "--servers", "2")
    popen.kill()
    assert launched.end(popen)[0] == -signal.SIGKILL  # the fixture checks that nothing is left


def test_what_is_awaited_is_said_by_one_process_of_a_job_and_ever_more_rarely(launched: Any) -> None:
    trains = str(STEPS[1]).replace("steps.py", "trains.py")
    env = {"PSGC_STEP_TIMEOUT_S": "40", "PSGC_SILENCE_S": "1"}
    status, _, err = launched.end(launched.psgc("run", "--workers", "3", "--", sys.executable, trains, "--stall-rank", "1", **env))
    assert status == 1
    said = [line for line in err.splitlines() if "has awaited rank(s) 1 for" in line and "more than the limit" not in line]
    assert all(line.startswith("[scheduler] ") for line in said), said
    assert 3 <= len(said) <= 6, "after 1, 2, 4, 8 and 16 seconds more; fewer of those in which the scheduler had no core"
    assert "waiting for server" not in err, "the server has said so itself"


@pytest.mark.parametrize("name", ["python", "python3"])
def test_a_python_of_another_environment_than_psgcs_is_told_of(launched: Any, tmp_path: Path, name: str) -> None:
    other = tmp_path / "bin" / name
    other.parent.mkdir()
    other.write_text("#!/bin/sh\necho none of psgc\n")
    other.chmod(0o755)
    path = f"{other.parent}{os.pathsep}{os.environ['PATH']}"
    status, out, err = launched.end(launched.psgc("run", "--workers", "1", "--", name, "train.py", PATH=path))
    assert (status, out) == (0, "[worker 0] none of psgc\n")
    assert f"psgc run: {name} is {other}, but psgc is installed for {sys.executable}: if the script cannot import psgc, activate" in err


def test_a_script_without_its_python_is_told_so() -> None:
    done = psgc("run", "--", "no-such-train.py")
    assert (done.returncode, done.stderr) == (
        2, "psgc run: command 'no-such-train.py' is not found or not executable; write python no-such-train.py\n",
    )  # fmt: skip
