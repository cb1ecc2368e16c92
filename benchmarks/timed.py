"""Runs a training script as it is, and notes when each optimizer step ends.  python benchmarks/timed.py OUT SCRIPT [ARGS...]

When the script has ended the process of rank 0 writes the times to OUT, a JSON list of seconds. Knows nothing of what the script trains.
"""

from __future__ import annotations

import json
import runpy
import sys
import time
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

import psgc.torch as psgc


def main() -> None:
    out, script, *arguments = sys.argv[1:]
    ends: list[float] = []
    rank = 0

    def note(*_: object) -> None:
        nonlocal rank
        ends.append(time.monotonic())
        rank = psgc.rank()  # asked while the script is a member of the job

    register_optimizer_step_post_hook(note)
    sys.argv[:] = [script, *arguments]
    sys.path[0] = str(Path(script).parent)  # as if Python had been given the script
    runpy.run_path(script, run_name="__main__")
    if rank == 0:
        Path(out).write_text(json.dumps(ends))


if __name__ == "__main__":
    main()
