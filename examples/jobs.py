"""One training as a job of its own under ``psgc run``: how the demo and the quality study start the examples."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

WORKERS, SERVERS = 2, 1


class TrainingFailed(Exception):
    """The job ended with an error; the text is its last words."""


def train(
    script: str, flags: Mapping[str, object], record: Path, progressed: Callable[[int, str], None], link_mbit: float | None = None
) -> dict[str, Any]:
    """Run an example to its end; the record that it writes to ``record``.

    flags: without dashes. progressed: told the step and the loss, as text, every few steps. link_mbit: of each process's simulated link,
    1e6 bit/s each way; None: shared memory. Raises TrainingFailed.
    """
    link = [] if link_mbit is None else ["--link-mbit", f"{link_mbit:g}"]
    given = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    command = [
        sys.executable, "-m", "psgc.launch", "run", "--workers", str(WORKERS), "--servers", str(SERVERS), *link, "--",
        sys.executable, str(Path(__file__).parent / script), *given, "--out", str(record),
    ]  # fmt: skip
    said: deque[str] = deque(maxlen=30)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        assert job.stdout is not None
        for line in job.stdout:
            said.append(line.rstrip())
            if match := re.search(r"step (\d+)/\d+ loss ([\d.]+)", line):
                progressed(int(match[1]), match[2])
    if job.returncode:
        raise TrainingFailed("\n".join([*said, f"{script} {' '.join(given)} failed with status {job.returncode}"]))
    result: dict[str, Any] = json.loads(record.read_text())
    return result
