"""A worker of asynchronous training, and of tensors that servers hold. Run by tests; the arguments say what it does, one thing after the other."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F  # noqa: N812

import psgc.torch as psgc
from psgc.errors import UsageError

STALENESS = 2


def digits(steps: int = 60, lr: float = 0.5) -> None:
    """Regularized logistic regression, whose least loss is unique, on this rank's share of the images; and what synchronous training makes of it.
    Asynchronous changes add up, so each rank takes its share of the learning rate."""
    data = load_digits()
    images, labels = torch.from_numpy(data.data).float() / 16, torch.from_numpy(data.target).long()
    rank, size = psgc.rank(), psgc.size()
    torch.manual_seed(rank)
    model = nn.Linear(64, 10)
    psgc.broadcast_parameters(model.state_dict(), root_rank=0)

    def loss_of(net: nn.Linear, rows: slice = slice(None)) -> torch.Tensor:
        penalty = sum(parameter.square().sum() for parameter in net.parameters())
        return F.cross_entropy(net(images[rows]), labels[rows]) + 0.01 * penalty

    def train(net: nn.Linear, optimizer: torch.optim.Optimizer, ranks: list[int]) -> None:
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
        for _ in range(steps):
            optimizer.zero_grad()
            (sum(loss_of(net, slice(each, None, size)) for each in ranks) / len(ranks)).backward()
            optimizer.step()
            schedule.step()

    synchronous = nn.Linear(64, 10)
    synchronous.load_state_dict(model.state_dict())
    train(synchronous, torch.optim.SGD(synchronous.parameters(), lr=lr), list(range(size)))  # on the mean of all ranks' gradients
    sgd = torch.optim.SGD(model.parameters(), lr=lr / size)
    optimizer = psgc.DistributedOptimizer(sgd, model.named_parameters(), compression="topk:k=0.1")
    train(model, optimizer, [rank])
    psgc.barrier()
    optimizer.pull()
    print(f"synchronous={loss_of(synchronous).item()!r} asynchronous={loss_of(model).item()!r}", flush=True)


def sums() -> None:
    """Changes that are integers add up bit for bit, whatever the order; rounds are what torch's SGD makes of the mean change."""
    rank, size = psgc.rank(), psgc.size()
    start = torch.arange(70_000)
    tensors = {"i": start.clone(), "f": start.float(), "scalar": torch.tensor(5.0), "empty": torch.zeros(0)}
    held = psgc.HeldTensors(tensors if rank == 0 else {key: torch.zeros_like(value) for key, value in tensors.items()}, "sums")
    psgc.barrier()  # a rank that is late would have the other's first change in its values already
    assert torch.equal(held.values["i"], start) and held.values["scalar"] == 5.0, "rank 0's are the initial values, on every rank"
    for step in range(4 + 3 * rank):  # as many as it likes
        before = held.values["i"][1].item()
        held.push_pull({"i": torch.full((70_000,), 1 + rank), "f": torch.full((70_000,), 3.0), "scalar": torch.tensor(float(step))})
        assert held.values["i"][1] >= before + 1 + rank, "the answer has this rank's own change in it"
    psgc.barrier()
    held.pull()
    pushes = [4 + 3 * other for other in range(size)]
    assert torch.equal(held.values["i"], start + sum(n * (1 + other) for other, n in enumerate(pushes)))
    assert torch.equal(held.values["f"], start.float() + 3 * sum(pushes))
    assert held.values["scalar"] == 5.0 + sum(n * (n - 1) / 2 for n in pushes)

    outer = psgc.HeldTensors({"w": torch.ones(5000)}, "outer", rule="nesterov:lr=0.5,momentum=0.9")
    weight = torch.ones(5000, requires_grad=True)
    reference = torch.optim.SGD([weight], lr=0.5, momentum=0.9, nesterov=True)
    for step in range(3):
        outer.push_pull({"w": torch.full((5000,), float(rank + step))})
        weight.grad = torch.full((5000,), -(step + (size - 1) / 2))
        reference.step()
        assert torch.allclose(outer.values["w"], weight, rtol=1e-5), "all ranks have each round's values"
    psgc.barrier()
    print("summed", flush=True)


def models() -> None:
    """What models have: buffers, frozen and bfloat16 parameters, groups, parameters added later, steps that a scaler drops, steps of uneven number."""
    rank = psgc.rank()
    torch.manual_seed(7)  # all ranks draw the same model
    model = nn.Sequential(nn.Linear(6, 300), nn.BatchNorm1d(300), nn.Linear(300, 3, dtype=torch.bfloat16))
    head = nn.Linear(3, 1)
    model[0].bias.requires_grad_(False)
    frozen = model[0].bias.detach().clone()
    parameters = [{"params": model[0].parameters(), "lr": 0.01}, {"params": [*model[1].parameters(), *model[2].parameters()]}]
    optimizer = psgc.DistributedOptimizer(torch.optim.AdamW(parameters, lr=0.001), model.named_parameters(), compression="onebit")
    torch.manual_seed(rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(5 + rank):
        optimizer.zero_grad()
        inputs = torch.randn(8, 6)
        hidden = model[1](model[0](inputs))
        loss = model[2](hidden.bfloat16()).float()
        loss = (head(loss) if step >= 3 else loss).square().mean()
        if step == 1 and rank == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step == 2:
            optimizer.add_param_group({"params": list(head.parameters()), "lr": 0.01})
        kept = {name: value.clone() for name, value in model.state_dict().items()}  # an evaluation, by other weights
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        model.load_state_dict(kept)
    psgc.barrier()
    optimizer.pull()
    assert torch.equal(model[0].bias, frozen)
    mine = torch.cat([parameter.detach().float().flatten() for module in (model, head) for parameter in module.parameters()])
    assert mine.isfinite().all()
    theirs = psgc.push_pull(mine, average=True, name="end")
    assert torch.equal(mine, theirs), "after pull() all ranks have the servers' weights"
    averages = psgc.push_pull(model[1].running_mean.clone(), average=True, name="buffers")
    assert not torch.equal(averages, model[1].running_mean), "buffers are each rank's own"
    with torch.no_grad():
        model[1].weight.add_(1)
    refused = ""
    try:
        optimizer.step()
    except UsageError as error:
        refused = str(error)
    assert "'1.weight' was changed between two steps" in refused, refused
    print("trained", flush=True)


def bound(leaving: bool = False) -> None:
    """Rank 0 runs ahead of rank 1 by the bound and no further. Where rank 1 then leaves early, it holds nobody up."""
    rank = psgc.rank()
    weight = nn.Parameter(torch.zeros(10))
    optimizer = psgc.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)])
    begun = psgc.HeldTensors({"steps": torch.zeros(2, dtype=torch.int64)}, "begun")
    me, other = torch.zeros(2, dtype=torch.int64), 1 - rank
    me[rank] = 1

    def step() -> None:
        steps = begun.push_pull({"steps": me})["steps"]
        assert steps[rank] - steps[other] <= STALENESS + 1 or steps[other] == 4, steps
        weight.grad = -torch.ones(10)
        optimizer.step()

    if rank == 1:
        step()  # the first declares, and so waits for all
        while begun.pull()["steps"][0] < 1 + STALENESS + 1:
            time.sleep(0.01)
        time.sleep(0.5)
        assert begun.pull()["steps"][0] == 1 + STALENESS + 1, "rank 0 is in the step whose answer the bound withholds"
        for _ in range(3):
            step()
    else:
        for _ in range(20 if leaving else 6):
            step()
        if leaving:
            print(f"weight={weight[0].item()}")
    print("bounded", flush=True)


def leaving() -> None:
    bound(leaving=True)


def endless() -> None:
    weight = nn.Parameter(torch.zeros(10))
    optimizer = psgc.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)])
    while True:
        weight.grad = torch.ones(10)
        optimizer.step()
        print("stepped", flush=True)
        time.sleep(0.01)


def optimizer_of(weight: nn.Parameter, bias: nn.Parameter) -> Any:
    """Weights move by what their gradient says, of which a step sends a hundredth."""
    return psgc.DistributedOptimizer(torch.optim.SGD([weight, bias], lr=1.0), [("w", weight), ("b", bias)], compression="topk:k=0.01")


def save(folder: str) -> None:
    """Ranks of uneven numbers of steps save their weights and what their codecs have kept. All values are whole numbers, so that sums are exact."""
    rank = psgc.rank()
    weight, bias = nn.Parameter(torch.arange(5000.0)), nn.Parameter(torch.zeros(3))
    optimizer = optimizer_of(weight, bias)
    chance = torch.Generator().manual_seed(rank)
    moved = torch.zeros(5000)
    for _ in range(3 + rank):
        weight.grad = -torch.randint(-9, 10, (5000,), generator=chance).float()
        bias.grad = torch.ones(3)
        moved -= weight.grad
        optimizer.step()
    psgc.barrier()
    optimizer.pull()
    state = optimizer.residual_state_dict()
    left = psgc.push_pull(state["memories"]["changes"]["w"]["residual"], average=False, name="left")
    assert left.count_nonzero() > 1000, "most of it was not sent yet"
    assert torch.equal(weight + left, torch.arange(5000.0) + psgc.push_pull(moved, average=False, name="moved"))
    torch.save({"w": weight.detach(), "b": bias.detach(), "codecs": state}, f"{folder}/{rank}.pt")
    print("saved", flush=True)


def resume(folder: str) -> None:
    """As many ranks as before load their own state, another number all of them: what the others had not sent is sent by them, once."""
    rank = psgc.rank()
    states = [torch.load(file, weights_only=True) for file in sorted(Path(folder).iterdir())]
    before = states[0]["w"]
    weight, bias = nn.Parameter(before.clone()), nn.Parameter(states[0]["b"])
    optimizer = optimizer_of(weight, bias)
    codecs = [state["codecs"] for state in states]
    optimizer.load_residual_state_dict(codecs[rank] if len(codecs) == psgc.size() else codecs)
    for _ in range(2):
        weight.grad, bias.grad = torch.zeros(5000), torch.zeros(3)
        optimizer.step()
    psgc.barrier()
    optimizer.pull()
    state = optimizer.residual_state_dict()
    left = psgc.push_pull(state["memories"]["changes"]["w"]["residual"], average=False, name="left")
    assert torch.equal(weight + left, before + sum(each["memories"]["changes"]["w"]["residual"] for each in codecs))
    assert (weight != before).sum() > 50, "it is sent in steps that change nothing themselves"
    assert state["steps"] > codecs[0]["steps"], "random streams and warm-ups go on"
    refused = ""
    try:
        optimizer.load_residual_state_dict(codecs)
    except UsageError as error:
        refused = str(error)
    assert "load before it" in refused, refused
    print("resumed", flush=True)


def headless() -> None:
    """Rank 0 brings no initial values: it leaves without a step."""
    if psgc.rank():
        weight = nn.Parameter(torch.zeros(10))
        optimizer = psgc.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)])
        weight.grad = torch.ones(10)
        optimizer.step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    psgc.init()
    for argument in sys.argv[1:]:
        name, *values = argument.split("=", 1)
        {each.__name__: each for each in (digits, sums, models, bound, leaving, endless, headless, save, resume)}[name](*values)  # type: ignore[operator]
    psgc.shutdown()
