"""A worker that leaves residuals behind, or takes up those that other workers, servers and codecs have left, in one step without gradients.

moved.py FOLDER leave|take FROM>TO...      leave: 4 steps under the codec FROM, then the state of each rank is written.
                                           take: one step under TO; rank 0 writes what it did to the weights, each rank what is left then.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

import psgc.torch as psgc

SHAPES = ((300, 150), (40,), (70000,))


def optimizer_of(codec: str) -> Any:
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES])
    return psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), compression=codec)


def step(optimizer: Any, size: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = size * torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def main() -> None:
    torch.set_num_threads(1)
    psgc.init()
    for number, pair in enumerate(sys.argv[3:]):
        folder = Path(sys.argv[1]) / str(number)
        folder.mkdir(exist_ok=True)
        before, after = pair.split(">")
        if sys.argv[2] == "leave":
            optimizer = optimizer_of(before)
            for seed in range(4):
                step(optimizer, 1.0, 10 * seed + psgc.rank())
            torch.save(optimizer.residual_state_dict(), folder / f"left-{psgc.rank()}.pt")
            continue
        optimizer = optimizer_of(after)
        optimizer.load_residual_state_dict([torch.load(path) for path in sorted(folder.glob("left-*.pt"))])
        step(optimizer, 0.0, 0)
        torch.save(optimizer.residual_state_dict(), folder / f"kept-{psgc.rank()}.pt")
        if psgc.rank() == 0:
            moved = torch.cat([-parameter.detach().reshape(-1) for parameter in optimizer.param_groups[0]["params"]])
            torch.save(moved, folder / "moved.pt")
    psgc.shutdown()


if __name__ == "__main__":
    main()
