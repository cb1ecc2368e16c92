"""Whole jobs with their gradients on a recorded device: the CPU path's weights bit for bit, and no use of memory that nothing orders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CASES = ("none+plain", "int8+branches", "onebit+amp", "shared+amp", "topk:k=0.01,momentum=dgc+branches")
ALONE = (
    "powersgd:rank=2+branches", "powersgd:rank=4+amp", "dithering+branches", "randomk:k=0.1+amp", "plan powersgd:rank=2", "plan shared", "plan int8",
    "ddp int8", "ddp onebit", "ddp powersgd:rank=2",
)  # fmt: skip
PLANS = tuple(f"plan {seed}" for seed in range(6))  # over servers and among workers, encoded and decoded on either device


@pytest.mark.timeout(300)
def test_jobs_on_a_device_end_with_the_weights_of_jobs_on_the_cpu(make_shared_job: Callable[..., Any]) -> None:
    env = {
        "PSGC_COLLECTIVES": "auto",
        "PSGC_MIN_COMPRESS_BYTES": "0",
        "PSGC_PART_BYTES": "65536",
        "PSGC_FUSE_BYTES": "100000",
        "PYTHONPATH": _paths(),
    }
    for said in make_shared_job(servers=1, env=env).said(*CASES, *PLANS, job=str(Path(__file__).parent.parent / "torch" / "job_device.py")):
        for case in (*CASES, *PLANS):
            assert f"{case} same" in said, said
        assert "computed on a device: False True" in said, "what the training thread waits for there is told from encoding on the host"
        assert "uses 1000 races 0 []" in said and "groups on devices: False True, weights same, races []" in said, said


@pytest.mark.timeout(300)
def test_the_same_job_draws_the_same_numbers_on_a_device_and_on_the_cpu(make_job: Callable[..., Any]) -> None:
    """Among them PowerSGD's first matrices; and what DistributedDataParallel hands over is encoded on the device, without a plan and by one."""
    env = {"PSGC_MIN_COMPRESS_BYTES": "0", "PSGC_PART_BYTES": "65536", "PSGC_FUSE_BYTES": "100000", "PYTHONPATH": _paths()}
    path = str(Path(__file__).parent.parent / "torch" / "job_device_alone.py")
    cpu, device = (make_job(servers=1, env=env).said(where, *ALONE, job=path) for where in ("cpu", "device"))
    for of_cpu, of_device in zip(cpu, device, strict=True):
        wanted, found = (
            dict(line.rsplit(": ", 1) for line in said.splitlines() if line.startswith("case ")) for said in (of_cpu, of_device)
        )
        assert wanted == found and len(found) == len(ALONE), (wanted, found)
        for case in ALONE:
            encoded = not any(
                name in case for name in ("powersgd", "shared")
            )  # whose state is on the device, without launches for many parts
            assert f"on the device, {case}: used True, encoded {encoded}, races []" in of_device, of_device


@pytest.mark.long
def test_a_device_without_memory_ends_every_rank_with_a_line_that_names_it_and_the_tensor(make_job: Callable[..., Any]) -> None:
    job = make_job(servers=1, env={"PSGC_MIN_COMPRESS_BYTES": "0", "PYTHONPATH": _paths()})
    workers = job.whole(job=str(Path(__file__).parent.parent / "torch" / "job_device_fault.py"))
    job.end()
    assert [worker.popen.returncode for worker in workers] == [1, 1], job.text()
    for worker in workers:
        assert (
            "gradient of '0." in worker.text and "cpu is out of memory (CUDA out of memory. Tried to allocate 2.00 MiB)" in worker.text
        ), job.text()


def _paths() -> str:
    import os

    root = Path(__file__).parent.parent.parent
    return os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
