"""Resuming in new processes, for every codec: is it the run that was not interrupted, bit for bit? A table for docs/optimizers.md.

python benchmarks/resume.py [--workers 2] [--servers 2]    about two minutes, once kernels are compiled

tests/jobs/resume.py trains a small model for 24 steps in each configuration, and saves after step 12; another job loads that state and continues.
The last column is the error without residual_state_dict(): the distance of the weights from the uninterrupted run's, over the distance
that the weights moved after saving. Weights are fp32; a difference of one bit anywhere is "no".
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import torch

SCRIPT: Final = Path(__file__).resolve().parents[1] / "tests" / "jobs" / "resume.py"
ENV: Final = {"PSGC_FUSE_BYTES": "40000", "PSGC_MIN_COMPRESS_BYTES": "0", "OMP_NUM_THREADS": "1"}  # several buckets, all of them compressed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=2)
    options = parser.parse_args()
    ways = _script().ways()
    with tempfile.TemporaryDirectory() as folder:
        _job(options, folder, "save", ways)
        _job(options, folder, "load,forget", ways)
        print("| codec | goes on bit for bit | without what codecs keep |\n| --- | --- | --- |")
        for way in ways:
            print(f"| `{way}` | {' | '.join(_cells(Path(folder) / way.replace('/', ' to ')))} |")


def _script() -> Any:
    """The job's script, as a module."""
    spec = importlib.util.spec_from_file_location("resume_job", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _job(options: argparse.Namespace, folder: str, hows: str, ways: list[str]) -> None:
    command = [
        sys.executable, "-m", "psgc.launch", "run", "--workers", str(options.workers), "--servers", str(options.servers), "--",
        sys.executable, str(SCRIPT), folder, hows, *ways,
    ]  # fmt: skip
    subprocess.run(command, env={**os.environ, **ENV}, stdout=subprocess.DEVNULL, check=True)


def _cells(folder: Path) -> tuple[str, str]:
    """Whether the resumed weights are the uninterrupted run's, and how far those without residuals are from them."""
    whole, resumed, forgetful = (torch.load(folder / f"{how}.pt") for how in ("save", "load", "forget"))
    before = torch.cat([values.reshape(-1) for values in torch.load(folder / "portable.pt")["model"].values()])
    lost = float((forgetful - whole).norm() / (whole - before).norm())
    return "yes" if torch.equal(resumed.view(torch.int32), whole.view(torch.int32)) else "no", "nothing" if lost == 0 else f"{lost:.2g}"


if __name__ == "__main__":
    main()
