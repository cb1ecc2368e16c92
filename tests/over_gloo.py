"""Runs Python's commands whose processes use torch's gloo, which now and then aborts a process that has come to its end."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from typing import Final

from tests.preloaded import run_preloaded

# A thread of gloo's still holds tensors while the interpreter ends (github.com/pytorch/pytorch/pull/179291). On a busy machine one run in ten.
ABORTED: Final = "terminate called without an active exception"
ATTEMPTS: Final = 3


def run_over_gloo(
    command: Sequence[str], env: Mapping[str, str], cwd: str | None = None, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """The end of ``python COMMAND...``; begun anew where torch has aborted one of its processes at the very end."""
    for _ in range(ATTEMPTS):
        done = run_preloaded(*command, env=env, cwd=cwd, timeout=timeout)
        if not (done.returncode and ABORTED in done.stderr):
            break
    return done
