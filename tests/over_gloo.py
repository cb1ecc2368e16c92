"""Runs commands whose processes use torch's gloo, which now and then aborts a process that has come to its end."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from typing import Final

# A thread of gloo's still holds tensors while the interpreter ends (github.com/pytorch/pytorch/pull/179291). On a busy machine one run in ten.
ABORTED: Final = "terminate called without an active exception"
ATTEMPTS: Final = 3


def run_over_gloo(
    command: Sequence[str], env: Mapping[str, str], cwd: str | None = None, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """The command's end; begun anew where torch has aborted one of its processes at the very end."""
    for _ in range(ATTEMPTS):
        done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False)
        if not (done.returncode and ABORTED in done.stderr):
            break
    return done
