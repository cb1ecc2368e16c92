"""Runs a training script as it is, and notes when each optimizer step ends.  python benchmarks/timed.py OUT SCRIPT [ARGS...]

When the script has ended the process of rank 0 writes the times to OUT, a JSON list of seconds; and to the file that TIMED_BYTES names, if it is set, how many
bytes its host had sent by then over all links but loopback, a line a step. While it runs it keeps the number of steps in the file that
TIMED_STEPS names. Knows nothing of what the script trains.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

import psgc.torch as psgc


def sent_bytes() -> int:
    """By the host's network interfaces so far, as the kernel counts them."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[8]) for line in lines if line.split(":")[0].strip() != "lo")


def main() -> None:
    out, script, *arguments = sys.argv[1:]
    ends: list[float] = []
    sent: list[int] = []
    rank = 0

    def note(*_: object) -> None:
        nonlocal rank
        ends.append(time.monotonic())
        sent.append(sent_bytes())
        rank = psgc.rank()  # asked while the script is a member of the job
        if rank == 0 and (steps := os.environ.get("TIMED_STEPS")):
            Path(steps).write_text(str(len(ends)))

    register_optimizer_step_post_hook(note)
    sys.argv[:] = [script, *arguments]
    sys.path[0] = str(Path(script).parent)  # as if Python had been given the script
    runpy.run_path(script, run_name="__main__")
    if rank == 0:
        Path(out).write_text(json.dumps(ends))
        if counted := os.environ.get("TIMED_BYTES"):
            Path(counted).write_text("".join(f"{count}\n" for count in sent))


if __name__ == "__main__":
    main()
