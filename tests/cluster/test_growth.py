"""Nothing grows: ten thousand steps leave scheduler, server and workers as large as two thousand did."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ALLOWED_BYTES = 4 << 20  # allocators keep a little more as they please; a leak of 1 KB a step would be twice this


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def read_until(process: Any, words: str) -> None:
    for line in process.popen.stdout:
        process.text = line
        if words in line:
            return
    pytest.fail(f"{process.name} ended without saying {words!r}; last: {process.text}")


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("transport", "codec"), [("tcp", "none"), ("shm", "onebit")])
def test_nothing_grows_over_ten_thousand_steps(make_job: Callable[..., Any], transport: str, codec: str) -> None:
    job = make_job(nodes=2, env={"PSGC_TRANSPORT": transport})
    workers = job.whole("--steps", "10000", "--pause-s", "0", "--codec", codec, job="steps.py")
    threading.Thread(target=workers[1].popen.stdout.read, daemon=True).start()  # a full pipe would stop it
    sizes = []
    for step in ("step 2000:", "step 9990:"):
        read_until(workers[0], step)
        sizes.append({p.name: resident(p.popen.pid) for p in job.processes})
    for name, before in sizes[0].items():
        assert sizes[1][name] - before < ALLOWED_BYTES, f"{name} grew from {before:,} to {sizes[1][name]:,} bytes"
