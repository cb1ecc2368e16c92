"""A job whose workers torchrun starts, as docs/clusters.md and docs/integrations.md say."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Job
from tests.ports import free_port

ROOT = Path(__file__).parent.parent.parent
BINARIES = Path(sys.executable).parent
pytestmark = [pytest.mark.integrations, pytest.mark.timeout(300)]


def lines_with_own_servers() -> str:
    page = (ROOT / "docs" / "clusters.md").read_text()
    return page.partition("start scheduler and servers yourself")[2].partition("```sh\n")[2].partition("```")[0]


def test_the_pages_lines_run_a_job_with_a_scheduler_and_servers_of_ones_own(make_job: Callable[..., Job]) -> None:
    lines = lines_with_own_servers()
    for old, new in {
        "9000": str(free_port()), "psgc-launch": f"{sys.executable} -c 'from psgc.launch.job.bpslaunch import main; main()'",
        "torchrun --nproc-per-node 2 train.py": f"{BINARIES}/torchrun --master-port {free_port()} --nproc-per-node 2 examples/ddp_plain.py; wait",
    }.items():  # fmt: skip
        assert old in lines
        lines = lines.replace(old, new)
    job = make_job()
    shell = job.start("shell", ["bash", "-c", f"cd {ROOT}; unset DMLC_NUM_WORKER BYTEPS_FORCE_DISTRIBUTED; {lines}"], PSGC_CODEC="int8")
    assert shell.end() == 0, shell.text
    assert shell.text.count("losses [") == 2, shell.text
    assert "psgc.run: ddp0" in shell.text


def test_torchrun_alone_trains_a_model_under_ddp() -> None:
    """As the page says: nothing else is started."""
    torchrun = [str(BINARIES / "torchrun"), "--master-port", str(free_port()), "--nproc-per-node", "2"]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DMLC_", "BYTEPS_", "PSGC_"))}
    command = [*torchrun, str(ROOT / "examples" / "ddp_plain.py")]
    done = subprocess.run(command, env={**env, "PSGC_CODEC": "int8"}, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("losses [") == 2 and "psgc.run: ddp0" in done.stderr, (done.stdout, done.stderr)
