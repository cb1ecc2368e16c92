"""Derives DMLC_* from the environment of Slurm or Kubernetes, so that each machine runs the same line, ``psgc-launch python train.py``.

Pure: environment in, settings out. What the user has set counts first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from psgc.errors import ConfigError
from psgc.launch.job.ranks import FREE_PORTS, NAMES
from psgc.launch.topology.interfaces import named
from psgc.processes.addresses import is_loopback

JOINT: Final = "server,worker"
RUN_SHIFT: Final = 40  # Slurm's numbers of jobs have 32 bits, and six are a step's


@dataclass(frozen=True, slots=True)
class Found:
    """settings: the variables to add; source: where they come from, for a note; "" if there is no source. replaced: variables that number the cluster's nodes
    where torch's number workers, and so are none of the user's settings."""

    settings: dict[str, str]
    source: str = ""
    replaced: tuple[str, ...] = ()

    def within(self, env: Mapping[str, str]) -> dict[str, str]:
        """The environment of the machine's processes."""
        return {name: text for name, text in env.items() if name not in self.replaced} | self.settings


def completed(env: Mapping[str, str], hostname: str) -> Found:
    """The DMLC_* variables that ``env`` lacks, from Slurm's or Kubernetes'. Raises ConfigError for a step that starts several tasks a
    node, and for numbers that are none."""
    found = Found({})
    if not _set(env, "DMLC_NUM_WORKER"):
        if _set(env, "SLURM_STEP_ID", "SLURM_STEPID"):
            found = _slurm(env)
        elif _set(env, "VC_WORKER_HOSTS") and _set(env, "VC_SCHEDULER_HOSTS"):
            found = _volcano(env)
        elif _set(env, "KUBERNETES_SERVICE_HOST") and all(_set(env, name) for name in ("MASTER_ADDR", "WORLD_SIZE", "RANK")):
            found = _pytorch_job(env, hostname)
    elif _set(env, "KUBERNETES_SERVICE_HOST") and not _set(env, "DMLC_WORKER_ID") and _role(env) in ("worker", "joint", JOINT):
        found = _numbered_pod(env, hostname)
    return replace(found, settings={name: value for name, value in found.settings.items() if not _set(env, name)})


def _slurm(env: Mapping[str, str]) -> Found:
    nodes = _number(env, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES") or 1
    tasks = _number(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") or nodes
    if tasks > nodes:
        raise ConfigError(
            f"Slurm's step has {tasks} tasks on {nodes} node(s): start one psgc-launch on each node, `srun --ntasks-per-node=1 psgc-launch ...`; it "
            f"starts the node's workers (BYTEPS_LOCAL_SIZE, or one for each GPU)"
        )
    job, step = _first(env, "SLURM_JOB_ID", "SLURM_JOBID"), _first(env, "SLURM_STEP_ID", "SLURM_STEPID")
    hosts = hosts_of(_first(env, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"))
    if nodes > 1 and not hosts:
        raise ConfigError("Slurm's SLURM_STEP_NODELIST names no node; set DMLC_PS_ROOT_URI to the first node's address on every node")
    number = (int(job) if job.isdigit() else 0) * 64 + (int(step) if step.isdigit() else 0)
    requeued = _first(env, "SLURM_RESTART_COUNT")  # what a run before it has left behind belongs to another job
    port = FREE_PORTS.start + number % (len(FREE_PORTS) - 1)
    return Found(
        {
            **_together(env, nodes, _number(env, "SLURM_NODEID") or 0, hosts[0] if hosts else "", port),
            "PSGC_JOB": str(number + 1 + (int(requeued) << RUN_SHIFT if requeued.isdigit() else 0)),
        },
        "Slurm",
    )


def _pytorch_job(env: Mapping[str, str], hostname: str) -> Found:
    """Pods of Kubeflow's PyTorchJob: one for each node, and none is started by torchrun. RANK counts pods; WORLD_SIZE counts workers where the job has a
    number as nprocPerNode."""
    if _set(env, "LOCAL_RANK"):
        return Found({})
    each = _plain(env, "PET_NPROC_PER_NODE")
    nodes, node = _plain(env, "PET_NNODES") or _pods(env, each), _number(env, "RANK") or 0
    # The first pod may be told that the master is at localhost; its own name is what the others are told.
    host = hostname if node == 0 and is_loopback(env["MASTER_ADDR"].strip()) else env["MASTER_ADDR"].strip()
    settings = _together(env, nodes, node, host, (_number(env, "MASTER_PORT") or 23456) + 1)
    return Found({**settings, **({"BYTEPS_LOCAL_SIZE": str(each)} if each else {})}, "Kubernetes (PyTorchJob)", NAMES)


def _pods(env: Mapping[str, str], each: int) -> int:
    """The pods of a PyTorchJob by WORLD_SIZE. each: workers of a pod; 0: WORLD_SIZE counts pods. Raises ConfigError."""
    count = _number(env, "WORLD_SIZE") or 0
    if each and count % each:
        raise ConfigError(f"WORLD_SIZE={env['WORLD_SIZE']!r}: expected a multiple of PET_NPROC_PER_NODE={each}")
    return count // (each or 1)


def _volcano(env: Mapping[str, str]) -> Found:
    """Volcano's tasks named scheduler, server and worker, with its plug-ins `env` and `svc`."""
    settings = {
        "DMLC_NUM_WORKER": str(len(env["VC_WORKER_HOSTS"].split(","))), "DMLC_PS_ROOT_URI": env["VC_SCHEDULER_HOSTS"].split(",")[0].strip(),
        "DMLC_NUM_SERVER": str(len([host for host in env.get("VC_SERVER_HOSTS", "").split(",") if host.strip()])),
        "DMLC_PS_ROOT_PORT": "9000", **_index(env, ""),
    }  # fmt: skip
    return Found(settings, "Kubernetes (Volcano)")


def _numbered_pod(env: Mapping[str, str], hostname: str) -> Found:
    """A worker that was told of its job, but not of its number."""
    settings = _index(env, hostname)
    fits = settings and env["DMLC_NUM_WORKER"].strip().isdigit() and int(settings["DMLC_WORKER_ID"]) < int(env["DMLC_NUM_WORKER"])
    return Found(settings, "Kubernetes") if fits else Found({})


def _index(env: Mapping[str, str], hostname: str) -> dict[str, str]:
    """DMLC_WORKER_ID: the index of a Volcano task, an MXJob's task or an indexed Job's pod, else the ordinal of a StatefulSet's pod."""
    index = _first(env, "VC_TASK_INDEX", "VK_TASK_INDEX", "JOB_COMPLETION_INDEX")
    if not index and _set(env, "MX_CONFIG"):
        try:
            index = str(int(json.loads(env["MX_CONFIG"])["task"]["index"]))
        except (ValueError, KeyError, TypeError):
            index = ""
    if not index and (ordinal := re.fullmatch(r".+-(\d+)", hostname.partition(".")[0])):
        index = ordinal[1]
    return {"DMLC_WORKER_ID": index} if index.isdigit() else {}


def _together(env: Mapping[str, str], nodes: int, node: int, host: str, port: int) -> dict[str, str]:
    """Every node runs its workers and servers, and node 0 the scheduler, unless the user has put it elsewhere."""
    here = node == 0 and not _set(env, "DMLC_PS_ROOT_URI")
    servers = _shared_servers(env, nodes, node)
    joint = JOINT if servers.get("PSGC_LOCAL_SERVERS") != "0" else "worker"
    return {
        "DMLC_ROLE": f"scheduler,{joint}" if here else joint, "DMLC_NUM_WORKER": str(nodes), "DMLC_WORKER_ID": str(node),
        "DMLC_NUM_SERVER": str(nodes * (max(1, named(env)) if (own := _number(env, "PSGC_LOCAL_SERVERS")) is None else own)), "DMLC_PS_ROOT_PORT": str(port),
        **({"DMLC_PS_ROOT_URI": host} if host else {}), **({} if joint == "worker" else servers),
    }  # fmt: skip


def _shared_servers(env: Mapping[str, str], nodes: int, node: int) -> dict[str, str]:
    """This node's share of DMLC_NUM_SERVER, where that is all that the user has said of servers."""
    total = _first(env, "DMLC_NUM_SERVER")
    if not total.isdigit() or _set(env, "PSGC_LOCAL_SERVERS", "DMLC_SERVER_ID", "PSGC_INTERFACES", "DMLC_ROLE"):
        return {}
    share, more = divmod(int(total), nodes)
    return {"PSGC_LOCAL_SERVERS": str(share + (node < more)), "DMLC_SERVER_ID": str(node * share + min(node, more))}


def hosts_of(text: str) -> list[str]:
    """The hosts of Slurm's list, as in ``gpu[01-03,7],login2``, in its order."""
    hosts = []
    for item in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*", text):
        names = [""]
        for plain, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", item):
            ends = [plain] if plain else [number for span in ranges.split(",") for number in _numbers(span)]
            names = [name + end for name in names for end in ends]
        hosts += names
    return hosts


def _numbers(span: str) -> list[str]:
    first, _, last = span.partition("-")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]


def _role(env: Mapping[str, str]) -> str:
    return env.get("DMLC_ROLE", "").strip().lower()


def _set(env: Mapping[str, str], *names: str) -> bool:
    return bool(_first(env, *names))


def _number(env: Mapping[str, str], *names: str) -> int | None:
    """The first of these that is set; None if none is. Raises ConfigError for what is no number."""
    name = next((name for name in names if _set(env, name)), "")
    if name and not env[name].strip().isdigit():
        raise ConfigError(f"{name}={env[name]!r}: expected a number, 0 or more")
    return int(env[name]) if name else None


def _plain(env: Mapping[str, str], name: str) -> int:
    """A number of torchrun's, more than 0; 0 for its other forms, as in ``1:4`` and ``auto``."""
    text = _first(env, name)
    return int(text) if text.isdecimal() else 0


def _first(env: Mapping[str, str], *names: str) -> str:
    return next((env[name].strip() for name in names if env.get(name, "").strip()), "")
