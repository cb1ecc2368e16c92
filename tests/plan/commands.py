"""Runs commands as a user types them, in this process, because a separate process would take seconds to import."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

from psgc.launch.cli import main

PLANNING = ("plan", "advise", "whatif")


@contextmanager
def quick_search(verb: str = "") -> Iterator[None]:
    """Without annealing, which takes most of a search's time: what commands print is asked for here, not how short a plan is."""
    if verb not in PLANNING:
        yield
        return
    from psgc.plan.methods import search

    before, search.ANNEALING = search.ANNEALING, search.QUICK
    try:
        yield
    finally:
        search.ANNEALING = before


def psgc(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What the command printed, and its exit status."""
    out, err, before, status = io.StringIO(), io.StringIO(), sys.argv, 0
    sys.argv = ["psgc", *arguments]
    try:
        with redirect_stdout(out), redirect_stderr(err), quick_search(*arguments[:1]):
            main()
    except SystemExit as ended:
        status = int(ended.code or 0)
    finally:
        sys.argv = before
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())
