"""A worker that saves through torch.distributed.checkpoint what its codecs keep, and goes on from there. Run by tests.

checkpoints.py FOLDER save|load WAY...     trains as resume.py does, saves in the middle (every other way while it trains on), or begins from what was saved
checkpoints.py FOLDER leave|take CODEC     leave: 4 steps, then everything is saved; take: it is loaded, by any number of workers. Each rank then also
                                           writes its state by itself, for the test to add up
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import moved
import resume
import torch
from torch import distributed
from torch.distributed import checkpoint as dcp

import psgc.torch as psgc

STEPS = 10


def whole_job(folder: Path, how: str, way: str, number: int) -> None:
    training = resume.Training(way, STEPS)
    checkpoints, under_way, first = psgc.Checkpoints(folder), None, 0
    model = training.model
    if how == "load":
        latest = checkpoints.latest()
        assert latest is not None
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=latest)
        portable = torch.load(folder / "portable.pt")
        portable["model"] = state["model"]
        for name, what in training._portable():
            what.load_state_dict(portable[name])
        psgc.load_state_dict(training.optimizer, latest)
        first = training.half
    for step in range(first, STEPS):
        if step == training.half and how == "save":
            state = {"model": model.state_dict(), "psgc": psgc.state_dict(training.optimizer)}
            if psgc.rank() == 0:
                folder.mkdir(parents=True, exist_ok=True)
                torch.save({name: what.state_dict() for name, what in training._portable()}, folder / "portable.pt")
            if number % 2:
                under_way = checkpoints.async_save(step, state)
            else:
                checkpoints.save(step, state)
        training.step(step)
    if under_way is not None:
        assert under_way.result() == checkpoints.latest()
    print(f"weights {how} {way} {hashlib.sha256(training.weights().numpy().tobytes()).hexdigest()}", flush=True)


def left_over(folder: Path, how: str, codec: str) -> None:
    optimizer: Any = moved.optimizer_of(codec)
    if how == "leave":
        for seed in range(4):
            moved.step(optimizer, 1.0, 10 * seed + psgc.rank())
        psgc.Checkpoints(folder / codec).save(4, {"psgc": psgc.state_dict(optimizer)})
    else:
        latest = psgc.Checkpoints(folder / codec).latest()
        assert latest is not None
        psgc.load_state_dict(optimizer, latest)
    torch.save(optimizer.residual_state_dict(), folder / f"{codec}-{how}-{psgc.rank()}.pt")


def main() -> None:
    torch.set_num_threads(1)
    psgc.init()
    folder, how = Path(sys.argv[1]), sys.argv[2]
    meeting = folder / f"gloo-{how}-{os.environ['PSGC_JOB']}"
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=psgc.rank(), world_size=psgc.size())
    for number, way in enumerate(sys.argv[3:]):
        if how in ("save", "load"):
            whole_job(folder / str(number), how, way, number)
        else:
            left_over(folder, how, way)
    distributed.barrier()  # who has no more to do leaves while another still connects
    distributed.destroy_process_group()
    psgc.shutdown()


if __name__ == "__main__":
    main()
