"""Runs commands as a user types them, in this process, because a separate process would take seconds to import."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout

from psgc.launch.cli import main


def psgc(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What the command printed, and its exit status."""
    out, err, before, status = io.StringIO(), io.StringIO(), sys.argv, 0
    sys.argv = ["psgc", *arguments]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as ended:
        status = int(ended.code or 0)
    finally:
        sys.argv = before
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())
