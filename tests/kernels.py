"""Compiles the kernels that the tests need, each of them once: ``compile_all`` before several processes run tests.

All of those would otherwise compile the same kernels at the same time, when they collect. Codecs of one name share kernels, so that one
process compiles them; whichever process is free takes the next name.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

from psgc.launch.job.warming import PLANNER, warm
from tests.codecs.lawful import CODECS

ROOT = Path(__file__).parent.parent
SCHEMES = "the schemes"
RECORD = 1000  # bytes of a family in the queue


def families() -> list[list[str]]:
    """What one process compiles, by how long it takes: the longest first."""

    def name(text: str) -> tuple[str, bool]:
        return text.partition(":")[0], "natural" in text or "rotate" in text

    codecs = [list(texts) for _, texts in groupby(sorted(CODECS, key=name), name)]
    return [[PLANNER], *sorted(codecs, key=len, reverse=True), [SCHEMES]]


def compile_all(meanwhile: Callable[[], object] = lambda: None) -> None:
    """By as many processes as there are cores. meanwhile: done here. Raises AssertionError if a kernel does not compile."""
    read, write = os.pipe()
    with os.fdopen(write, "wb") as queue:
        for family in families():
            queue.write("\n".join(family).encode().ljust(RECORD))
    with os.fdopen(read, "rb") as queue:
        cores = os.cpu_count() or 1
        processes = [subprocess.Popen([sys.executable, "-m", "tests.kernels"], stdin=queue, cwd=ROOT) for _ in range(cores)]
    meanwhile()
    statuses = [process.wait() for process in processes]
    assert not any(statuses), "a kernel does not compile"


def main() -> None:
    from psgc.codecs import registered_schemes

    while record := os.read(0, RECORD):
        family = record.decode().strip().split("\n")
        warm(registered_schemes() if family == [SCHEMES] else family, quiet=True)


if __name__ == "__main__":
    main()
