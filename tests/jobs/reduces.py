"""A worker of four that averages tensors among groups of ranks, and holds what comes against the arithmetic. Run by tests."""

from __future__ import annotations

import torch

import psgc.torch as psgc
from psgc.errors import PsgcError

PAIRS = [(0, 2), (1, 3)]


def told(groups: list[tuple[int, ...]], name: str, tensor: torch.Tensor) -> str:
    try:
        psgc.reduce([tensor], groups, name)
    except PsgcError as error:
        return str(error)
    return "nothing"


def main() -> None:
    psgc.init()
    rank = psgc.rank()
    mine = next(group for group in PAIRS if rank in group)
    for step in range(4):
        large, small = torch.arange(30_000.0) * (rank + 1) + step, torch.full((3,), 10 * rank + step)
        psgc.reduce([large, small.clone()], PAIRS, "gradients")
        sums = small.clone()
        psgc.reduce([sums], PAIRS, "counts", average=False)
        means = [torch.arange(30_000.0) * (member + 1) + step for member in mine]
        assert torch.equal(large, (means[0] + means[1]) / 2), step
        assert torch.equal(sums, torch.full((3,), 10 * sum(mine) + 2 * step)), step
    lossy = torch.linspace(-1, 1, 50_000) * (rank + 1)
    psgc.reduce([lossy], PAIRS, "lossy", compression="int8")
    exact = torch.linspace(-1, 1, 50_000) * (sum(mine) + 2) / 2
    assert 0 < float((lossy - exact).abs().max()) < 0.05
    alone = torch.ones(5) * rank
    psgc.reduce([alone], [(1, 2)], "some")
    assert torch.equal(alone, torch.full((5,), 1.5 if rank in (1, 2) else float(rank))), "who is in no group keeps its tensors"
    print("overlap:", told([(0, 1), (1, 2)], "overlap", alone), flush=True)
    print("absent:", told([(0, 4)], "absent", alone), flush=True)
    print("again:", told([(0, 1), (2, 3)], "gradients", alone), flush=True)
    psgc.shutdown()


main()
