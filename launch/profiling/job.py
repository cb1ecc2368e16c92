"""Runs a user's job until it has written its profile. ``psgc.torch.gradients.profiler``, in the job's processes, does the measuring."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from psgc.errors import JobFailed
from psgc.plan.inputs.profile import Profile, load_profile

POLL_S: Final = 0.1
LEAVING_S: Final = 20.0  # how long a script may take to end by itself after its profile was written
PATIENCE_S: Final = 30.0  # the launcher needs less than this to end its job


def profile_job(command: Sequence[str], workers: int, servers: int, iterations: int) -> Profile:
    """Run ``command`` as ``psgc run`` would, until rank 0's profile is there. The job's output goes to stderr.

    Raises JobFailed where it ends without one.
    """
    with tempfile.TemporaryDirectory(prefix="psgc-profile-") as folder:
        path = Path(folder) / "profile.json"
        env = {**os.environ, "PSGC_PROFILE": str(path), "PSGC_PROFILE_ITERATIONS": str(iterations), "PSGC_PROFILE_ONLY": "1"}
        run = [sys.executable, "-m", "psgc.launch", "run", "--workers", str(workers), "--servers", str(servers), "--", *command]
        launcher = subprocess.Popen(run, env=env, stdout=sys.stderr)
        try:
            status = _wait_for(path, launcher)
            if status is None:
                print("psgc profile: gradients are measured; ending the job", file=sys.stderr)
                _leave(launcher)
        finally:
            _end(launcher)
        if not path.exists():
            raise JobFailed(_why(status, iterations))
        return replace(load_profile(str(path)), model=_name_of(command))


def _wait_for(path: Path, launcher: subprocess.Popen[bytes]) -> int | None:
    """Wait until the file exists (then None) or the job has ended (then its status)."""
    while not path.exists():
        try:
            return launcher.wait(POLL_S)
        except subprocess.TimeoutExpired:
            continue
    return None


def _leave(launcher: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        launcher.wait(LEAVING_S)


def _end(launcher: subprocess.Popen[bytes]) -> None:
    if launcher.poll() is None:
        launcher.terminate()
    try:
        launcher.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()


def _why(status: int | None, iterations: int) -> str:
    if status:
        return f"profile: the job failed with status {status} before its profile was written; its output is above"
    return (
        f"profile: the job ended before its profile was written: that takes about {iterations + 6} steps of a psgc.torch.DistributedOptimizer; "
        f"let it run longer, or give fewer --iterations"
    )


def _name_of(command: Sequence[str]) -> str:
    """The script's name, else the program's."""
    return next((Path(word).stem for word in command if word.endswith(".py")), Path(command[0]).name)
