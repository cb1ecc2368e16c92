"""A job whose workers torchrun starts, as docs/integrations.md says."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Job
from tests.ports import free_port

ROOT = Path(__file__).parent.parent.parent
pytestmark = [pytest.mark.integrations, pytest.mark.timeout(300)]


def lines_of_the_page() -> str:
    page = (ROOT / "docs" / "integrations.md").read_text()
    return page.partition("## torchrun")[2].partition("```sh\n")[2].partition("```")[0]


def test_the_pages_lines_run_a_job(make_job: Callable[..., Job]) -> None:
    lines = lines_of_the_page()
    binaries = Path(sys.executable).parent
    for old, new in {
        "9000": str(free_port()), "psgc-launch": f"{sys.executable} -c 'from psgc.launch.job.bpslaunch import main; main()'",
        "torchrun --nproc-per-node 2 train.py": f"{binaries}/torchrun --master-port {free_port()} --nproc-per-node 2 examples/ddp_plain.py; wait",
    }.items():  # fmt: skip
        assert old in lines
        lines = lines.replace(old, new)
    job = make_job()
    shell = job.start("shell", ["bash", "-c", f"cd {ROOT}; unset DMLC_NUM_WORKER BYTEPS_FORCE_DISTRIBUTED; {lines}"], PSGC_CODEC="int8")
    assert shell.end() == 0, shell.text
    assert shell.text.count("losses [") == 2, shell.text
    assert "psgc.run: ddp0" in shell.text


def test_without_a_scheduler_each_of_torchruns_workers_says_so() -> None:
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--master-port", str(free_port()), "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, str(ROOT / "examples" / "ddp_plain.py")], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode != 0
    assert "psgc: " in done.stderr
    assert "losses [" not in done.stdout
