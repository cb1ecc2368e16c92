"""Train a small network that goes on when a worker dies.  PSGC_ON_WORKER_LOSS=wait (or shrink) psgc run --workers 2 -- python examples/train_elastic.py"""

from __future__ import annotations

import argparse
import os

import torch
from torch import nn

import psgc.torch as psgc


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=32, help="samples a rank and step")
    parser.add_argument("--checkpoint", default="", help="file to save to after every 100 steps and the last")
    parser.add_argument("--resume", default="", help="such a file, the same on every rank, to go on from")
    options = parser.parse_args()

    psgc.init()
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = psgc.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3), model.named_parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    first, taking_part = 0, [0]
    if options.resume:
        saved = torch.load(options.resume)
        first = saved["steps"]
        for of, name in ((model, "model"), (optimizer, "optimizer"), (schedule, "schedule")):
            of.load_state_dict(saved[name])

    @psgc.on_membership
    def told(members: psgc.Members) -> None:
        taking_part[:] = members.ranks  # the lowest saves: under shrink rank 0 may be missing

    # Parameters, the optimizer's state, the schedule and the step come from rank 0 at first, and from a living rank in a process that takes a dead one's place.
    elastic = psgc.Elastic(model=model, optimizer=optimizer, scheduler=schedule, seed=1)
    for step in elastic.steps(options.steps, first):
        inputs = torch.randn(options.batch, 32)  # by the seed, the rank and the step: another process of this rank draws the same
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        mean = psgc.push_pull(
            loss.detach(), name="loss"
        )  # what is synchronised belongs into the loop, and before the update what depends on parameters
        optimizer.step()
        schedule.step()
        if options.checkpoint and psgc.rank() == taking_part[0] and ((step + 1) % 100 == 0 or step + 1 == options.steps):
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
            with psgc.saving():
                torch.save({"steps": step + 1, **states}, options.checkpoint + ".part")
                os.replace(options.checkpoint + ".part", options.checkpoint)  # whole, or not there
        if psgc.rank() == 0 and step % 10 == 0:
            print(f"step {step}: loss {mean.item():.4f}", flush=True)
    if psgc.rank() == 0:
        print(f"weights {sum(p.double().sum().item() for p in model.parameters()):.9f}", flush=True)


if __name__ == "__main__":
    main()
