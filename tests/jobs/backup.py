"""A worker that pauses at random, while steps do not wait for every rank (PSGC_BACKUP_WORKERS). Run by tests; arguments: steps, a codec, seconds of a pause.

Gradients are whole numbers that follow from rank and step; the last step's are zeros, so that what came late before is in its sum. Of the last parameter, an
expert's, one rank has a gradient, in some steps none. Says each step, whether sums
by push_pull are those of their own step, and at the end the parameters' digest and whether they are what all gradients together make of them."""

from __future__ import annotations

import hashlib
import random
import sys
import time

import torch
from pace import wait_for_readers
from torch import nn

import psgc.torch as psgc

SHAPES = ((40, 300), (300,), (7, 5000), (100, 700))
EXPERT = len(SHAPES) - 1


def gradient(rank: int, step: int, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(-64, 64, shape, generator=generator).float()


def has(rank: int, size: int, step: int, number: int, steps: int) -> bool:
    """Whether the rank has a gradient of the parameter."""
    return number != EXPERT or step == steps or (step % 5 > 0 and rank == step // 2 % size)


def main() -> None:
    steps, codec, pause_s = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    torch.set_num_threads(1)
    psgc.init()
    rank, size = psgc.rank(), psgc.size()
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    names = [(f"p{number}", parameter) for number, parameter in enumerate(parameters)]
    optimizer = psgc.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), names, compression=codec)
    luck, wrong = random.Random(rank), 0
    for step in range(1, steps + 1):
        wait_for_readers(step)
        if luck.random() < 0.3:
            time.sleep(pause_s * luck.random())
        optimizer.zero_grad()
        of_step = [(parameter, gradient(rank, step, shape) * (step < steps)) for parameter, shape in zip(parameters, SHAPES, strict=True)]
        there = [(parameter * values).sum() for n, (parameter, values) in enumerate(of_step) if has(rank, size, step, n, steps)]
        torch.stack(there).sum().backward()
        optimizer.step()
        if step % 7 == 0:
            total = psgc.push_pull(torch.full((3,), float(step + rank)), average=False, name="metric")
            wrong += not torch.equal(total, torch.full((3,), float(size * step + sum(range(size)))))
        if step == steps // 2:
            optimizer.residual_state_dict()  # every rank asks between the same two steps, and waits for no step that it has not begun
        print(f"step {step}", flush=True)
    psgc.barrier()
    all_of = [(r, s) for r in range(size) for s in range(1, steps)]
    wanted = [
        -sum((gradient(r, s, shape) for r, s in all_of if has(r, size, s, n, steps)), torch.zeros(shape)) / size
        for n, shape in enumerate(SHAPES)
    ]
    furthest = max(float((p.detach() - w).abs().max()) for p, w in zip(parameters, wanted, strict=True))
    digest = hashlib.sha256(b"".join(parameter.detach().numpy().tobytes() for parameter in parameters)).hexdigest()
    print(f"rank {rank} found {digest} off by {furthest:g} wrong {wrong}", flush=True)
    psgc.shutdown()


if __name__ == "__main__":
    main()
