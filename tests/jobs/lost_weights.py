"""A worker whose servers hold tensors: it says each step, and at the end what it found, to the bit. Run by tests that kill servers meanwhile.

rounds: outer steps with momentum, of changes that a codec compresses; counts: integers that add up whenever they come; outer: DiLoCo with the outer step on
servers. None of them depends on which rank was quicker.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Iterator

import torch
from pace import wait_for_readers
from torch import nn

import psgc.torch as psgc


def rounds(steps: int) -> Iterator[list[torch.Tensor]]:
    draw = torch.Generator().manual_seed(psgc.rank())
    shapes = {"large": (300_000,), "matrix": (70, 30), "one": ()}
    held = psgc.HeldTensors({name: torch.ones(shape) for name, shape in shapes.items()}, "rounds", "nesterov:lr=0.7,momentum=0.9", "onebit")
    for _ in range(steps):
        yield list(held.push_pull({name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}).values())


def counts(steps: int) -> Iterator[list[torch.Tensor]]:
    """Each answer has all own changes in it; the last values have everybody's."""
    held = psgc.HeldTensors({"counts": torch.zeros(200_000, dtype=torch.int64)}, "counts")
    own = 1 + psgc.rank()
    for _ in range(steps):
        before = held.values["counts"].clone()
        assert (held.push_pull({"counts": torch.full((200_000,), own)})["counts"] >= before + own).all()
        yield []
    psgc.barrier()
    found = held.pull()["counts"]
    assert (found == steps * sum(range(1, psgc.size() + 1))).all(), (found[0], steps)
    yield [found]


def outer(steps: int) -> Iterator[list[torch.Tensor]]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 1))
    inner = torch.optim.SGD(model.parameters(), lr=0.002)
    diloco = psgc.DiLoCo(model, inner, every=2, codec="int8", on="servers")
    draw = torch.Generator().manual_seed(100 + psgc.rank())
    for _ in range(steps):
        inputs = torch.randn(16, 32, generator=draw)
        inner.zero_grad()
        (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
        inner.step()
        yield [parameter.detach() for parameter in model.parameters()]
    diloco.finish()
    yield [parameter.detach() for parameter in model.parameters()]


def main() -> None:
    kind, steps, pause_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    torch.set_num_threads(1)
    psgc.init()
    found = hashlib.sha256()
    for step, tensors in enumerate({"rounds": rounds, "counts": counts, "outer": outer}[kind](steps)):
        wait_for_readers(step + 1)
        for tensor in tensors:
            if not tensor.isfinite().all():
                sys.exit(f"step {step} has NaN or infinity: nothing that comes after it shows anything")
            found.update(tensor.numpy().tobytes())
        print(f"step {step}", flush=True)
        time.sleep(pause_s)
    print(f"rank {psgc.rank()} found {found.hexdigest()}", flush=True)
    psgc.shutdown()


if __name__ == "__main__":
    main()
