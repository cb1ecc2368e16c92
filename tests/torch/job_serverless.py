"""A worker of a job without servers that uses each of psgc.torch's functions, in orders that differ between ranks. Run by test_serverless_job.py."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

import psgc.torch as psgc


def check_functions() -> None:
    """Named tensors, broadcasts and barriers, whatever order each rank has."""
    rank, size = psgc.rank(), psgc.size()
    names = [f"metric {number}" for number in range(12)]
    mine = names if rank % 2 else names[::-1]
    handles = {name: psgc.push_pull_async(torch.full((3,), float(rank + names.index(name))), average=False, name=name) for name in mine}
    for name in names:
        wanted = sum(other + names.index(name) for other in range(size))
        assert torch.equal(psgc.synchronize(handles[name]), torch.full((3,), float(wanted))), name
    assert psgc.broadcast_object({"epoch": 3, "text": "x" * 9000} if rank == 1 else None, root_rank=1)["epoch"] == 3
    counts = psgc.push_pull(torch.tensor([200 + rank, -rank], dtype=torch.int16), name="counts")
    assert counts.tolist() == [(200 * size + sum(range(size))) // size, -sum(range(size)) // size]
    x = torch.ones(4, requires_grad=True)
    psgc.push_pull(x * (rank + 1), name="differentiable").sum().backward()
    assert torch.equal(x.grad, torch.full((4,), float(rank + 1)))
    left_out = psgc.push_pull(torch.linspace(-1, 1, 5000) * (rank + 1), name="encoded", compression="int8")
    assert (left_out - torch.linspace(-1, 1, 5000) * (1 + size) / 2).abs().max() < 0.05
    psgc.barrier()


def adam_state_is_the_roots() -> None:
    model = nn.Linear(5, 5)
    adam = torch.optim.Adam(model.parameters(), lr=1e-3 * (1 + psgc.rank()))
    if psgc.rank() == 0:
        model(torch.ones(1, 5)).sum().backward()
        adam.step()
    psgc.broadcast_optimizer_state(adam, root_rank=0)
    assert adam.param_groups[0]["lr"] == 1e-3
    assert len(adam.state) == 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = nn.Linear(32, 300), nn.Linear(300, 70), nn.Linear(300, 70)

    def forward(self, x: torch.Tensor, branch: str) -> torch.Tensor:
        x = self.stem(x).relu()
        return self.left(x) + self.right(x) if branch == "both" else getattr(self, branch)(x)


def train(codec: str, late: bool) -> str:
    """Accumulation, a skipped step, a branch that one rank or no rank uses, metrics in between, a late parameter; digest of the weights."""
    torch.manual_seed(psgc.rank())
    model, more = Net(), nn.Linear(70, 40)
    psgc.broadcast_parameters(model.state_dict())
    psgc.broadcast_parameters(more.state_dict(), prefix="more.")
    optimizer: Any = psgc.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), model.named_parameters(), compression=codec, late_synchronization=late
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(8):
        branch = "both" if step % 4 < 2 else "left" if step % 4 == 2 or psgc.rank() else "right"
        overflow = float("inf") if (step, psgc.rank()) == (3, 1) else 1.0
        if step == 5:
            optimizer.add_param_group({"params": list(more.parameters())})
        optimizer.zero_grad()
        for number in range(2):
            out = model(torch.randn(4, 32) * overflow, branch)
            loss = (more(out) if step >= 5 else out).square().mean()
            if number == 0:
                with optimizer.no_sync():
                    scaler.scale(loss).backward()
            else:
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            mean = psgc.push_pull(model(torch.ones(2, 32), "both").square().mean(), name="validation")
            assert torch.isfinite(mean)
    flat = torch.cat([p.detach().reshape(-1) for p in (*model.parameters(), *more.parameters())])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def main() -> None:
    torch.set_num_threads(1)
    psgc.init()
    check_functions()
    adam_state_is_the_roots()
    for codec, late in (("none", False), ("int8", True), ("topk:k=0.05", False)):
        digest = train(codec, late)
        assert psgc.broadcast_object(digest) == digest, f"rank {psgc.rank()} has other weights than rank 0 under {codec}"
        print(codec, digest, flush=True)
    psgc.shutdown()


if __name__ == "__main__":
    main()
