"""``psgc-launch CMD...``: one machine's part of a job, as bpslaunch is used: the role and the topology come from the environment."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping

from psgc.launch.role import run_role
from psgc.launch.supervisor import Supervisor

REQUIRED = ("DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT")
USAGE = """usage: psgc-launch CMD...

Starts this machine's part of a job. The role comes from DMLC_ROLE (worker, server or scheduler), the rest from
DMLC_NUM_WORKER, DMLC_NUM_SERVER, DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT and, on workers, DMLC_WORKER_ID; see docs/env.md.

example, on node 1 of 2:
  DMLC_ROLE=worker DMLC_NUM_WORKER=2 DMLC_WORKER_ID=1 DMLC_NUM_SERVER=1 \\
  DMLC_PS_ROOT_URI=10.0.0.1 DMLC_PS_ROOT_PORT=9000 psgc-launch python train.py"""


def main() -> None:
    """Entry point of ``psgc-launch``."""
    if sys.argv[1:2] in (["-h"], ["--help"]):
        print(USAGE)
        sys.exit(0)
    sys.exit(launch(sys.argv[1:], os.environ))


def launch(command: list[str], env: Mapping[str, str]) -> int:
    """Run this machine's role to its end. Wrong usage is one line on stderr and status 2."""
    role = env.get("DMLC_ROLE", "").strip().lower()
    if role not in ("worker", "server", "scheduler"):
        return _refuse(f"DMLC_ROLE={env.get('DMLC_ROLE', '')!r}: expected worker, server or scheduler")
    alone = role == "worker" and env.get("DMLC_NUM_WORKER") == "1" and env.get("BYTEPS_FORCE_DISTRIBUTED", "0") == "0"
    required = () if alone else REQUIRED + (("DMLC_WORKER_ID",) if role == "worker" else ())
    missing = [name for name in required if not env.get(name, "").strip()]
    if missing:
        return _refuse(f"{role}: missing {', '.join(missing)}; set them to the same job on every machine (docs/env.md)")
    full = {**env, "DMLC_ROLE": role}
    if role == "scheduler":
        os.environ["DMLC_ROLE"] = role
        return run_role("scheduler")
    supervisor = Supervisor("psgc-launch")
    if role == "server":
        supervisor.start("server", [sys.executable, "-m", "psgc.launch.role", "server"], full, service=True, keep_memory=True)
        return supervisor.run()
    if not command or shutil.which(command[0]) is None:
        return _refuse(
            f"worker: {f'command {command[0]!r} is not found' if command else 'no command given'}; example: psgc-launch python train.py"
        )
    size = local_size(env)
    for local_rank in range(size):
        supervisor.start(f"worker {local_rank}", command, {**full, "BYTEPS_LOCAL_RANK": str(local_rank), "BYTEPS_LOCAL_SIZE": str(size)})
    return supervisor.run()


def local_size(env: Mapping[str, str]) -> int:
    """Worker processes on this node: as told, else one for each visible device, else one."""
    if env.get("BYTEPS_LOCAL_SIZE", "").isdigit():
        return max(1, int(env["BYTEPS_LOCAL_SIZE"]))
    for name in ("NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        devices = [d for d in env.get(name, "").split(",") if d.strip() and d.strip() not in ("all", "none", "void")]
        if devices:
            return len(devices)
    return 1


def _refuse(text: str) -> int:
    print(f"psgc-launch: {text}", file=sys.stderr)
    return 2
