"""A worker that saves a checkpoint when it gets SIGTERM or SIGUSR1, and goes on from it when it is started again.

Arguments: folder; seconds that a checkpoint takes; the step after which the job is done; what it does once saved: ``end`` (with status 0), or ``stay``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

import psgc
import psgc.torch


def main() -> None:
    folder, seconds, last, then = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    heard: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: heard.append(number))
    psgc.torch.init()
    rank, checkpoint = psgc.torch.rank(), folder / "checkpoint"
    step = int(checkpoint.read_text()) if checkpoint.exists() else 0
    told = {name: os.environ.get(name, "") for name in ("PSGC_RESTART", "SLURM_RESTART_COUNT")}
    print(f"rank {rank} begins at step {min(step, 1)} {told}", flush=True)
    while step < last:
        step += 1
        total = psgc.torch.push_pull(torch.tensor([float(rank), float(bool(heard))]), name="x", average=False)
        assert total[0] == sum(range(psgc.torch.size())), total
        if total[1]:
            while not heard:  # another rank was told sooner
                time.sleep(0.01)
            print(f"rank {rank} heard {sorted({signal.Signals(number).name for number in heard})}", flush=True)
            save(checkpoint, step, seconds, rank)
            if then == "end":
                return
            time.sleep(1000)
        time.sleep(0.05)
    print(f"rank {rank} is done", flush=True)


def save(checkpoint: Path, step: int, seconds: float, rank: int) -> None:
    """Rank 0 writes it slowly; nobody goes on before it is whole."""
    if rank == 0:
        with psgc.saving():
            print("writing", flush=True)
            time.sleep(seconds)
            checkpoint.write_text(str(step))
            print("written", flush=True)
    psgc.torch.barrier()


if __name__ == "__main__":
    main()
