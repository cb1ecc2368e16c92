"""Jobs of real processes over ps-lite, of psgc's roles and byteps's in any mix."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ports import free_port

ROOT = Path(__file__).parents[2]
HANG_S = 250  # a process that has not ended by then hangs; a loaded machine takes a third of that for the longest job
PSGC_SCHEDULER, PSGC_SERVER = ([sys.executable, "-m", "psgc.launch.job.role", role] for role in ("scheduler", "server"))
STOCK_SCHEDULER = STOCK_SERVER = [sys.executable, "-m", "tests.pslite.stock"]


def run_job(
    scheduler: list[str], servers: list[list[str]], workers: list[list[str]], more: dict[str, str] | None = None
) -> tuple[list[str], list[int], str]:
    """Run a job of these commands to its end: the workers' output, the exit status of each process (scheduler, servers, workers), and what all wrote to
    stderr."""
    base = {
        **os.environ, "DMLC_NUM_WORKER": str(len(workers)), "DMLC_NUM_SERVER": str(len(servers)), "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(free_port()), "DMLC_NODE_HOST": "127.0.0.1", "PSGC_WIRE": "pslite", "PYTHONPATH": str(ROOT), **(more or {}),
    }  # fmt: skip
    commands = [("scheduler", scheduler), *[("server", command) for command in servers], *[("worker", command) for command in workers]]
    processes = []
    for index, (role, command) in enumerate(commands):
        own = {"DMLC_ROLE": role} | ({"DMLC_WORKER_ID": str(index - 1 - len(servers))} if role == "worker" else {})
        processes.append(
            subprocess.Popen(command, cwd=ROOT, env={**base, **own}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        )
    until = time.monotonic() + HANG_S
    try:
        outputs = [process.communicate(timeout=max(0.1, until - time.monotonic())) for process in reversed(processes)][::-1]
    except subprocess.TimeoutExpired as hanging:
        for process in processes:
            process.kill()
        pytest.fail(f"{hanging.cmd} hangs; all wrote to stderr:\n{''.join(process.communicate()[1] for process in processes)}")
    finally:
        for process in processes:
            process.kill()
    return (
        [out for out, _ in outputs[1 + len(servers) :]],
        [process.returncode for process in processes],
        "".join(err for _, err in outputs),
    )
