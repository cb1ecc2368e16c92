"""docs/design.md has one table of the limits of time: all of them, with the defaults that hold."""

from __future__ import annotations

import os
import re
import select
import threading
from pathlib import Path

from psgc.config import Config
from psgc.launch.job.remote import Lines
from psgc.variables import VARIABLES


def test_the_table_of_limits_has_every_setting_in_seconds_and_its_default() -> None:
    page = (Path(__file__).parent.parent / "docs" / "design.md").read_text()
    rows = {name: float(default) for name, default in re.findall(r"^\| (PSGC_\w+) \| ([\d.]+) \|", page, re.M)}
    settings = {v.name: getattr(Config(), v.field) for v in VARIABLES if v.name.endswith("_S")}
    assert rows == settings


def test_a_limit_that_is_never_to_be_over_can_be_waited_for() -> None:
    """By the calls that count in milliseconds, too."""
    read, write = os.pipe()
    poll, there = select.poll(), threading.Event()
    poll.register(write, select.POLLOUT)
    there.set()
    for variable in VARIABLES:
        if variable.name.endswith("_S"):
            limit_s = getattr(Config.from_env({variable.name: "1e12"}), variable.field)
            os.write(write, b"a line\n")
            assert Lines(read).next(limit_s) == b"a line"
            assert poll.poll(1e3 * limit_s) and there.wait(limit_s)
    os.close(read)
    os.close(write)


# Dates and other machines' clocks, by which nobody waits for anything.
DATED = {
    "psgc/observe/worker_trace.py", "psgc/torch/gradients/profiler.py", "psgc/torch/session/speed.py", "launch/doctor/meeting.py",
    "launch/observing/bundle.py", "launch/profiling/measure.py", "launch/verbs/verify.py",
}  # fmt: skip
WALL = re.compile(r"\btime\.time\(\)|from time import .*\btime(_ns)?\b|datetime\.now\(|utcnow|CLOCK_REALTIME")


def test_no_wait_goes_by_a_clock_that_can_be_set() -> None:
    root = Path(__file__).parent.parent
    sources = [
        path for folder in ("psgc", "server", "worker", "launch", "cuda") for path in sorted((root / folder).resolve().rglob("*.py"))
    ]
    found = {str(path.relative_to(root)) for path in sources if WALL.search(path.read_text())}
    assert found == DATED
