"""A worker whose gradient is 2 to the power of its rank. It says the mean of each step and who takes part, and ends 20 steps after everyone is there again. In
the place of a dead one it waits for a file first. Run by tests that kill workers meanwhile."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from pace import wait_for_readers

import psgc.torch as psgc


def main() -> None:
    """Arguments: steps; the step at which the last rank's first process dies, -1: never; a file without which another does not begin; 1 to scale rates."""
    steps, dies, gate, scale = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4] == "1"
    while int(os.environ.get("PSGC_INCARNATION", "1")) > 1 and not gate.exists():
        time.sleep(0.02)
    psgc.init()
    rank, last = psgc.rank(), psgc.size() - 1
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    known: list[tuple[int, int]] = []  # steps, and how many ranks take part from then on

    @psgc.on_membership
    def told(members: psgc.Members) -> None:
        known.append((members.step, len(members.ranks)))
        print(f"rank {rank} members {members.step} {members.ranks} {members.shard}", flush=True)

    elastic = psgc.Elastic(model=model, optimizer=optimizer, scale_lr=scale)
    for step in elastic.steps(steps):
        wait_for_readers(step + 1)
        before = model.weight.item()
        optimizer.zero_grad()
        (model.weight * 2.0**rank).sum().backward()
        if rank == last and step == dies and not elastic.replaced:
            os.kill(os.getpid(), signal.SIGKILL)
        assert model.weight.grad is not None
        mean = model.weight.grad.item()
        optimizer.step()
        print(f"rank {rank} step {step} mean {mean:.6g} moved {before - model.weight.item():.3f} pid {os.getpid()}", flush=True)
        if len(known) > 1 and known[-1][1] == psgc.size() and step == known[-1][0] + 20:
            break
        time.sleep(0.02)
    print(f"rank {rank} found {model.weight.item():.9g}", flush=True)
    psgc.shutdown()


if __name__ == "__main__":
    main()
