"""A worker that trains; its job's last rank begins each step some time after all others have taken it: it is the late one, however quick they are. Run by
tests; arguments: steps; a folder, where ranks say so, and whose file `enough` is waited for at the end: servers look at who is late now and then."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import nn

import psgc.torch as psgc


def main() -> None:
    torch.set_num_threads(1)
    psgc.init()
    model = nn.Sequential(*(nn.Linear(20, 20) for _ in range(2)))
    optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    taken = [Path(sys.argv[2]) / f"rank{rank}" for rank in range(psgc.size())]  # of each, a file of as many bytes as it has taken steps
    taken[psgc.rank()].touch()
    psgc.barrier()
    for step in range(1, int(sys.argv[1]) + 1):
        if psgc.rank() == psgc.size() - 1 and step > 2:  # the first ones need every rank
            while any(path.stat().st_size < step for path in taken[:-1]):
                time.sleep(0.002)
            time.sleep(0.1)  # in which the others come to the next
        optimizer.zero_grad()
        model(torch.ones(4, 20)).square().mean().backward()
        optimizer.step()
        with taken[psgc.rank()].open("ab") as file:
            file.write(b".")
    while not (Path(sys.argv[2]) / "enough").exists():
        time.sleep(0.02)
    psgc.shutdown()


if __name__ == "__main__":
    main()
