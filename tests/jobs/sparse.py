"""A worker with an embedding whose gradients are sparse: each step's mean is held against the dense ones, and bytes against the rows. Run by tests."""

from __future__ import annotations

import torch
from torch import nn

import psgc.torch as psgc

ROWS, COLUMNS, STEPS = 20_000, 16, 6


def used(rank: int, step: int, of: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, ROWS, (0 if (rank + step) % of == 0 else 50,), generator=draw)


def scaled(out: torch.Tensor, rank: int) -> torch.Tensor:
    return (out * torch.sin(torch.arange(out.numel()) + rank).view(out.shape)).sum()


def main() -> None:
    psgc.init()
    rank, size = psgc.rank(), psgc.size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(ROWS, COLUMNS, sparse=True), nn.Linear(COLUMNS, 64))
    dense = nn.Embedding(ROWS, COLUMNS)
    optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), sparse=model)
    session, bytes_ = psgc.current_session(), []
    for step in range(STEPS):
        optimizer.zero_grad()
        before = session.statistics()["gradient_bytes"]
        (scaled(model[0](used(rank, step, size)), rank) + model[1](torch.ones(1, COLUMNS)).sum()).backward()
        wanted = []
        for each in range(size):
            dense.weight.grad = None
            scaled(dense(used(each, step, size)), each).backward()
            wanted.append(dense.weight.grad)
        total = wanted[0]
        for more in wanted[1:]:
            total = total + more
        grad = model[0].weight.grad
        assert grad.is_coalesced() and torch.equal(grad.to_dense(), total / size), step
        assert grad._nnz() <= 50 * size
        optimizer.step()
        psgc.barrier()
        bytes_.append(session.statistics()["gradient_bytes"] - before)
    whole = 4 * ROWS * COLUMNS
    print(f"sums right, {max(bytes_)} bytes a step of a table of {whole}", flush=True)
    assert max(bytes_) < whole / 20
    digest = model[0].weight.detach().double().sum().item()
    print(f"digest {digest!r}", flush=True)
    psgc.shutdown()


main()
