"""A worker of a real job under a plan.  Run by test_planned_job.py, with PSGC_PLAN set.

job_placed.py ddp          trains a model under stock DistributedDataParallel and its twin under psgc's hook, which leaves the
                           plan for a step; prints the digests of both.
job_placed.py FOLDER save  trains 3 steps, saves what a checkpoint holds, trains 3 more; prints the digest of the weights.
job_placed.py FOLDER load  takes up what was saved, and trains the last 3 steps.
"""

from __future__ import annotations

import copy
import hashlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import psgc.torch as psgc


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 100))


def train(model: Any, optimizer: Any, first: int, last: int) -> None:
    """Steps ``first`` to ``last``; other batches on every rank."""
    for number in range(first, last):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(1000 * number + psgc.rank())
        model(torch.randn(8, 64, generator=generator)).square().mean().backward()
        optimizer.step()


def digest(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def beside_ddp() -> str:
    """The digests of the weights under stock DDP and under psgc."""
    dist.init_process_group("gloo", rank=psgc.rank(), world_size=psgc.size())
    stock, mine = DistributedDataParallel(build()), DistributedDataParallel(copy.deepcopy(build()))
    hook = psgc.ddp_hook()
    mine.register_comm_hook(None, hook)
    for model in (stock, mine):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        train(model, optimizer, 0, 2)
        if model is mine:
            hook.switch_plan("none")
        train(model, optimizer, 2, 3)
        if model is mine:
            hook.switch_plan(psgc.current_session().config.plan)
        train(model, optimizer, 3, 4)
    psgc.barrier()
    dist.destroy_process_group()
    return f"{digest(stock.module)} {digest(mine.module)}"


def resumed(folder: Path, verb: str) -> str:
    """The digest of the weights after 6 steps."""
    model, path = build(), folder / f"{psgc.rank()}.pt"
    own: Any = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    if verb == "save":
        train(model, own, 0, 3)
        torch.save({"model": model.state_dict(), "residuals": own.residual_state_dict()}, path)
    else:
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        own.load_residual_state_dict(saved["residuals"])
    train(model, own, 3, 6)
    return digest(model)


def main() -> None:
    torch.set_num_threads(1)
    psgc.init()
    said = beside_ddp() if sys.argv[1] == "ddp" else resumed(Path(sys.argv[1]), sys.argv[2])
    print(f"weights {said}", flush=True)
    psgc.shutdown()


if __name__ == "__main__":
    main()
