"""Slurm and Kubernetes tell a process what DMLC_* would: a line that is the same on every machine starts the job."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from psgc.errors import ConfigError
from psgc.launch.job.clusters import completed, hosts_of
from psgc.launch.job.node_addresses import address_of, node_addr
from tests.ports import free_port

STEPS = str(Path(__file__).parent.parent / "jobs" / "steps.py")
SLURM = {"SLURM_JOB_ID": "3", "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_NODES": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NODEID": "2",
         "SLURM_STEP_NODELIST": "gpu[01-03,7]"}  # fmt: skip
POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}


def test_lists_of_hosts_are_read_as_slurm_writes_them() -> None:
    assert hosts_of("gpu[01-03,7],login2") == ["gpu01", "gpu02", "gpu03", "gpu7", "login2"]
    assert hosts_of("rack[1-2]node[09-10]-ib") == ["rack1node09-ib", "rack1node10-ib", "rack2node09-ib", "rack2node10-ib"]
    assert (hosts_of("one"), hosts_of("")) == (["one"], [])


def test_slurm_gives_every_node_its_part() -> None:
    found = completed(SLURM, "gpu03")
    assert found.settings == {
        "DMLC_ROLE": "server,worker", "DMLC_NUM_WORKER": "4", "DMLC_WORKER_ID": "2", "DMLC_NUM_SERVER": "4", "DMLC_PS_ROOT_URI": "gpu01",
        "DMLC_PS_ROOT_PORT": "20193", "PSGC_JOB": "194",
    }  # fmt: skip
    first = completed({**SLURM, "SLURM_NODEID": "0", "PSGC_LOCAL_SERVERS": "2"}, "gpu01").settings
    assert (first["DMLC_ROLE"], first["DMLC_NUM_SERVER"]) == ("scheduler,server,worker", "8")
    assert completed({**SLURM, "PSGC_INTERFACES": "eth0,eth1"}, "gpu03").settings["DMLC_NUM_SERVER"] == "8", "a server for each interface"
    own = completed({**SLURM, "SLURM_NODEID": "0", "DMLC_PS_ROOT_URI": "10.0.0.9", "DMLC_NUM_SERVER": "3"}, "gpu01").settings
    assert own["DMLC_ROLE"] == "server,worker" and not {"DMLC_PS_ROOT_URI", "DMLC_NUM_SERVER"} & own.keys()
    assert not completed({**SLURM, "DMLC_NUM_WORKER": "2"}, "gpu01").settings, "the user's own settings count first"
    assert not completed({name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}, "gpu01").settings, (
        "a batch script is no step"
    )
    with pytest.raises(ConfigError, match=r"8 tasks on 4 node\(s\): start one psgc-launch on each node, `srun --ntasks-per-node=1"):
        completed({**SLURM, "SLURM_STEP_NUM_TASKS": "8"}, "gpu01")


@pytest.mark.parametrize(("env", "name"), [
    ({**SLURM, "PSGC_LOCAL_SERVERS": "two"}, "PSGC_LOCAL_SERVERS"),
    ({**SLURM, "SLURM_NODEID": "-1"}, "SLURM_NODEID"),
    ({**POD, "MASTER_ADDR": "job-master-0", "WORLD_SIZE": "4 pods", "RANK": "0"}, "WORLD_SIZE"),
    ({**POD, "MASTER_ADDR": "job-master-0", "WORLD_SIZE": "4", "RANK": "0", "MASTER_PORT": "http"}, "MASTER_PORT"),
])  # fmt: skip
def test_what_is_no_number_is_named_in_a_line(env: dict[str, str], name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}='{env[name]}': expected a number, 0 or more"):
        completed(env, "host-0")


def test_what_slurm_starts_again_is_another_job_at_the_same_address() -> None:
    """Members of the run before it that live on cannot join it."""
    first, again = (completed({**SLURM, **more}, "n4").settings for more in ({}, {"SLURM_RESTART_COUNT": "1"}))
    assert first.pop("PSGC_JOB") != again.pop("PSGC_JOB") and first == again


@pytest.mark.parametrize(("total", "roles"), [
    (2, ["scheduler,server,worker", "server,worker", "worker", "worker"]), (0, ["scheduler,worker", "worker", "worker", "worker"]),
])  # fmt: skip
def test_nodes_share_the_servers_that_are_asked_for_in_all(total: int, roles: list[str]) -> None:
    found = [completed({**SLURM, "SLURM_NODEID": str(node), "DMLC_NUM_SERVER": str(total)}, f"gpu0{node}").settings for node in range(4)]
    assert [settings["DMLC_ROLE"] for settings in found] == roles
    assert sum(int(settings.get("PSGC_LOCAL_SERVERS", "0")) for settings in found) == total
    five = [completed({**SLURM, "SLURM_NODEID": str(node), "DMLC_NUM_SERVER": "6"}, f"gpu0{node}").settings for node in range(4)]
    assert [(one["DMLC_SERVER_ID"], one["PSGC_LOCAL_SERVERS"]) for one in five] == [("0", "2"), ("2", "2"), ("4", "1"), ("5", "1")]


SHOWN = """NodeName=n1 Arch=x86_64 CoresPerSocket=1
   CPUAlloc=0 CPUEfctv=1 CPUTot=1 CPULoad=0.99
   NodeAddr=10.3.0.7 NodeHostName=ip-10-3-0-7 Port=17001 Version=22.05.8
"""


def test_a_node_whose_name_is_no_hosts_name_is_reached_at_the_address_that_slurm_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\n[ \"$*\" = 'show node n1.invalid' ] && cat <<'END'\n{SHOWN}END\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert node_addr(SHOWN) == "10.3.0.7" == address_of("n1.invalid")
    assert (address_of("localhost"), address_of("other.invalid"), node_addr("")) == ("localhost", "other.invalid", "")


def test_pods_of_a_pytorch_job_are_nodes() -> None:
    job = {**POD, "MASTER_ADDR": "train-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "3", "RANK": "1"}
    found = completed(job, "train-worker-0")
    assert found.settings == {
        "DMLC_ROLE": "server,worker", "DMLC_NUM_WORKER": "3", "DMLC_WORKER_ID": "1", "DMLC_NUM_SERVER": "3", "DMLC_PS_ROOT_PORT": "23457",
        "DMLC_PS_ROOT_URI": "train-master-0",
    }  # fmt: skip
    master = completed({**job, "MASTER_ADDR": "localhost", "RANK": "0"}, "train-master-0").settings
    assert (master["DMLC_PS_ROOT_URI"], master["DMLC_ROLE"]) == ("train-master-0", "scheduler,server,worker")
    assert {"WORLD_SIZE", "RANK", "MASTER_PORT"} & found.within(job).keys() == {"MASTER_PORT"}, "they number pods, not workers"
    assert not completed({**job, "LOCAL_RANK": "0"}, "train-worker-0").settings, "torchrun has started it"
    assert not completed({name: value for name, value in job.items() if name not in POD}, "here").settings


@pytest.mark.parametrize(("more", "nodes", "workers"), [
    ({"WORLD_SIZE": "32", "PET_NPROC_PER_NODE": "8", "PET_NNODES": "4"}, 4, "8"),
    ({"WORLD_SIZE": "32", "PET_NPROC_PER_NODE": "8", "PET_NNODES": "1:4"}, 4, "8"),  # elastic
    ({"WORLD_SIZE": "4", "PET_NPROC_PER_NODE": "auto", "PET_NNODES": "4"}, 4, None),
    ({"WORLD_SIZE": "4", "PET_NPROC_PER_NODE": "gpu", "PET_NNODES": "1:4"}, 4, None),
])  # fmt: skip
def test_a_pytorch_job_of_several_workers_a_pod_has_as_many_nodes_as_pods(more: dict[str, str], nodes: int, workers: str | None) -> None:
    job = {**POD, "MASTER_ADDR": "train-master-0", "MASTER_PORT": "23456", "RANK": "3", **more}
    found = completed(job, "train-worker-2").settings
    assert (found["DMLC_NUM_WORKER"], found["DMLC_NUM_SERVER"], found["DMLC_WORKER_ID"]) == (str(nodes), str(nodes), "3")
    assert found.get("BYTEPS_LOCAL_SIZE") == workers
    assert "BYTEPS_LOCAL_SIZE" not in completed({**job, "BYTEPS_LOCAL_SIZE": "2"}, "train-worker-2").settings


def test_a_world_that_pods_do_not_divide_is_named_in_a_line() -> None:
    job = {**POD, "MASTER_ADDR": "train-master-0", "RANK": "0", "WORLD_SIZE": "9", "PET_NPROC_PER_NODE": "8"}
    with pytest.raises(ConfigError, match="WORLD_SIZE='9': expected a multiple of PET_NPROC_PER_NODE=8"):
        completed(job, "train-master-0")


@pytest.mark.parametrize(("env", "hostname", "index"), [
    ({"VC_TASK_INDEX": "1"}, "any", "1"),
    ({"JOB_COMPLETION_INDEX": "2"}, "any", "2"),
    ({"MX_CONFIG": '{"task": {"type": "worker", "index": 1}}'}, "any", "1"),
    ({"MX_CONFIG": "{}"}, "trainer-2.trainers.default", "2"),
    ({}, "trainer-7d9f8-24567", None),  # a Deployment's pod: no ordinal
    ({}, "trainer", None),
])  # fmt: skip
def test_a_pod_without_a_number_gets_its_own(env: dict[str, str], hostname: str, index: str | None) -> None:
    job = {**POD, "DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "3"}
    assert completed({**job, **env}, hostname).settings.get("DMLC_WORKER_ID") == index
    assert not completed({**job, **env, "DMLC_WORKER_ID": "0"}, hostname).settings
    assert not completed({**job, **env, "DMLC_ROLE": "server"}, hostname).settings


def test_volcano_names_the_hosts_of_its_tasks() -> None:
    found = completed(
        {"VC_WORKER_HOSTS": "w-0.j,w-1.j", "VC_SERVER_HOSTS": "s-0.j", "VC_SCHEDULER_HOSTS": "c-0.j", "VC_TASK_INDEX": "1"}, "w-1"
    )
    assert found.settings == {
        "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_URI": "c-0.j", "DMLC_PS_ROOT_PORT": "9000", "DMLC_WORKER_ID": "1",
    }  # fmt: skip


@pytest.mark.parametrize("restarts", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_slurm_job_of_joint_roles_and_several_servers_a_host_trains_again_after_a_fault_too(launched: Any, restarts: int) -> None:
    slurm = {
        "DMLC_PS_ROOT_PORT": str(free_port()),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_NNODES": "2",
        "SLURM_NODELIST": "localhost,localhost",
    }
    env = {**slurm, "DMLC_NUM_SERVER": "3", "PSGC_RESTARTS": str(restarts), "PSGC_SILENCE_S": "60", "SLURM_STEP_NUM_TASKS": ""}
    code = "import os, runpy, sys\nif os.environ.get('PSGC_RESTART', '') + os.environ['DMLC_WORKER_ID'] == '01': sys.exit(3)\n"
    code += f"sys.path.insert(0, {os.path.dirname(STEPS)!r})\nrunpy.run_path({STEPS!r}, run_name='__main__')"
    members = [
        launched.psgc_launch(sys.executable, "-c", code, "--steps", "2", **env, SLURM_NODEID=str(node), PSGC_LOCAL_SERVERS=str(2 - node))
        for node in range(2)
    ]
    ends = [launched.end(popen) for popen in members]
    assert [status for status, _, _ in ends] == [0, 0], ends
    for _, out, err in ends:
        assert "[worker 0] step 2: nan 0 of 5000, first 2.0" in out
        assert "psgc-launch: from Slurm: DMLC_NUM_WORKER=2" in err
        assert ("; restart 1 of 1 (PSGC_RESTARTS)" in err) == bool(restarts)
    if restarts:
        assert "the job failed with status 3; restart 1 of 1 (PSGC_RESTARTS)" in ends[1][2]
