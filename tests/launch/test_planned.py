"""A plan means the same to a job, whoever starts it: its file, ``auto`` with a level, and the settings of nodes' inside that come with it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from psgc.config import Config
from psgc.errors import UsageError
from psgc.launch.doctor.facts import collect
from psgc.launch.job.planned import inside_of, plan_here, plan_told
from psgc.launch.topology import Topology
from psgc.plan.planfile.reading import load_plan
from tests.launch.plan_files import plan_file

NAMES = ("PSGC_PLAN", "BYTEPS_REDUCE_ROOTS", "BYTEPS_PCIE_SWITCH_SIZE")
SEEN = f"import os; os.chdir('/'); print('seen', *(os.environ.get(name) or '-' for name in {NAMES}))"
LAUNCHERS = ("run", "run --hostfile", "psgc-launch", "psgc-launch, alone")
NODE = {
    "DMLC_ROLE": "worker",
    "DMLC_NUM_WORKER": "3",
    "DMLC_WORKER_ID": "1",
    "DMLC_NUM_SERVER": "1",
    "DMLC_PS_ROOT_URI": "127.0.0.1",
    "DMLC_PS_ROOT_PORT": "9",
}


def seen_by_a_worker(launched: Any, launcher: str, hosts: Path, plan: str, **env: str) -> tuple[int, list[str], str]:
    """Exit status, what a worker's environment has of NAMES, and stderr. plan: given as the launcher is given one."""
    command = (sys.executable, "-c", SEEN)
    if launcher.startswith("psgc-launch"):
        own = {**NODE, "DMLC_NUM_WORKER": "1", "DMLC_WORKER_ID": "0"} if launcher.endswith("alone") else NODE
        popen = launched.psgc_launch(*command, PSGC_PLAN=plan, **own, **env)
    else:
        hosts.write_text("localhost\n")
        more = ("--ssh", "/no/ssh", "--start-timeout", "200", "--hostfile", str(hosts)) if "hostfile" in launcher else ()
        popen = launched.psgc("run", "--no-prefix", *more, "--workers", "1", "--plan", plan, "--", *command, **env)
    status, out, err = launched.end(popen)
    lines = [line.partition("seen ")[2].split() for line in out.splitlines() if "seen " in line]
    if lines and "hostfile" in launcher and "never joined the job" in err:
        status = 0  # there a worker that only looks at its environment is an error
    return status, lines[0] if lines else [], err


@pytest.mark.timeout(600)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_plans_settings_of_nodes_inside_reach_workers_by_every_launcher(launched: Any, tmp_path: Path, launcher: str) -> None:
    plan = plan_file(tmp_path / "plan.json", reduce_roots=(1, 3))
    status, seen, err = seen_by_a_worker(launched, launcher, tmp_path / "hosts", os.path.relpath(plan))
    wanted = plan if launcher.startswith("run") else os.path.relpath(plan)
    assert (status, seen) == (0, [wanted, "1,3", "-"]), err
    plan_file(tmp_path / "plan.json", pcie_switch_size=2)
    status, seen, err = seen_by_a_worker(launched, launcher, tmp_path / "hosts", plan, BYTEPS_PCIE_SWITCH_SIZE="4")
    assert (status, seen) == (0, [plan, "-", "4"]), f"the environment counts first: {err}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_auto_with_a_level_reaches_workers_as_it_is_by_every_launcher(launched: Any, tmp_path: Path, launcher: str) -> None:
    status, seen, err = seen_by_a_worker(launched, launcher, tmp_path / "hosts", "auto:quality=exact")
    assert (status, seen) == (0, ["auto:quality=exact", "-", "-"]), err


@pytest.mark.timeout(600)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_plan_that_cannot_run_is_one_line_before_any_worker_starts(launched: Any, tmp_path: Path, launcher: str) -> None:
    plan = plan_file(tmp_path / "plan.json", codec="int8")
    status, seen, err = seen_by_a_worker(launched, launcher, tmp_path / "hosts", plan)
    assert (status, seen, len(err.splitlines())) == (2, [], 1), err
    assert "buckets[0] (of 'w'): codec int8, but flat.push flat.pull encodes nothing" in err


@pytest.mark.timeout(600)
@pytest.mark.parametrize("launcher", LAUNCHERS[:2])
def test_wrong_plans_are_one_line_before_anything_starts(launched: Any, tmp_path: Path, launcher: str) -> None:
    for plan, said in (("auto:quality=best", "auto takes one parameter, quality=exact, safe or fast"), ("/no/plan.json", "/no/plan.json")):
        status, seen, err = seen_by_a_worker(launched, launcher, tmp_path / "hosts", plan)
        assert (status, seen, len(err.splitlines())) == (2, [], 1), err
        assert said in err


def test_what_a_plan_is_told_as() -> None:
    assert plan_told("") == "" and plan_told(" auto ") == "auto" and plan_told("auto:quality=fast") == "auto:quality=fast"
    assert (
        plan_told("p.json") == os.path.abspath("p.json")
        and plan_told("p.json", "/far") == "/far/p.json"
        and plan_told("/p", "/far") == "/p"
    )
    with pytest.raises(UsageError, match="auto takes one parameter"):
        plan_told("auto:quality=none")


def test_only_the_machine_of_rank_0_needs_the_file(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent.json")
    assert plan_here(absent, needed=False) is plan_here("auto:quality=exact", needed=True) is plan_here("", needed=True) is None
    with pytest.raises(UsageError, match="absent"):
        plan_here(absent, needed=True)
    plan = plan_file(tmp_path / "plan.json", reduce_roots=(0,))
    assert plan_here(plan, needed=False) == load_plan(plan)
    assert inside_of(load_plan(plan), {"BYTEPS_REDUCE_ROOTS": " "}) == {"BYTEPS_REDUCE_ROOTS": "0"} and inside_of(None, {}) == {}


@pytest.mark.parametrize(("plan", "kind"), [("auto", "auto"), ("auto:quality=exact", "auto"), ("plan.json", "file"), ("", "")])
def test_the_doctor_tells_plans_from_auto_with_or_without_a_level(plan: str, kind: str) -> None:
    env = {**NODE, "PSGC_PLAN": plan}
    found = collect(Config.from_env(env), ("worker",), env, Topology(), ())
    assert (found.plan, found.plan_bytes) == (kind, 0)
