"""A worker of a real job that trains small models twice by each of psgc's front ends: as they are, and with the whole step in a function that torch.compile
has compiled. Prints a line for each: its name, and whether both ended with the same bits. Run by test_compiled_steps.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import psgc.torch as psgc

STEPS = 4
Step = Callable[[torch.Tensor], Any]


def made(norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7) if norm else nn.Tanh(), nn.Linear(7, 2))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    return loss


def plain_step(model: Any, optimizer: Any) -> Step:
    def step(x: torch.Tensor) -> None:
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return step


def by_optimizer(**options: Any) -> tuple[nn.Module, Step]:
    model = made()
    return model, plain_step(model, psgc.DistributedOptimizer(sgd(model), model.named_parameters(), **options))


def accumulated() -> tuple[nn.Module, Step]:
    model = made()
    optimizer = psgc.DistributedOptimizer(sgd(model), model.named_parameters())

    def step(x: torch.Tensor) -> None:
        with optimizer.no_sync():
            loss_of(model, -x).backward()
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def scaled() -> tuple[nn.Module, Step]:
    model, scaler = made(), torch.amp.GradScaler("cpu", init_scale=16.0)
    optimizer = psgc.DistributedOptimizer(sgd(model), model.named_parameters())

    def step(x: torch.Tensor) -> None:
        scaler.scale(loss_of(model, x)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return model, step


def wrapped() -> tuple[nn.Module, Step]:
    """With buffers, which each forward broadcasts."""
    model = psgc.DistributedDataParallel(made(norm=True))
    return model, plain_step(model, sgd(model))


def hooked() -> tuple[nn.Module, Step]:
    model = DistributedDataParallel(made())
    model.register_comm_hook(None, psgc.ddp_hook("int8"))
    return model, plain_step(model, sgd(model))


def sharded() -> tuple[nn.Module, Step]:
    model = made()
    fully_shard(model, mesh=init_device_mesh("cpu", (psgc.size(), 1), mesh_dim_names=("replicate", "shard")))
    psgc.fsdp_hook(model, "int8")
    return model, plain_step(model, sgd(model))


def across() -> tuple[nn.Module, Step]:
    model = made()
    optimizer = psgc.CrossBarrier(model, sgd(model), model.named_parameters(), num_steps=STEPS)

    def step(x: torch.Tensor) -> None:
        loss_of(model, x).backward()
        optimizer.step()

    return model, step


def normed() -> tuple[nn.Module, Step]:
    model = psgc.SyncBatchNorm.convert_sync_batchnorm(made(norm=True))
    return model, plain_step(model, psgc.DistributedOptimizer(sgd(model), model.named_parameters()))


def one_bit() -> tuple[nn.Module, Step]:
    model = made()
    return model, plain_step(model, psgc.OneBitAdam(model.named_parameters(), lr=0.01, warmup_steps=2))


def decoupled_momentum() -> tuple[nn.Module, Step]:
    model = made()
    return model, plain_step(model, psgc.DeMo(model.named_parameters(), lr=0.01))


def tensors() -> tuple[nn.Module, Step]:
    model = made()
    optimizer = sgd(model)

    def step(x: torch.Tensor) -> None:
        handle = psgc.push_pull_async(x, name="x")
        psgc.push_pull(model(x), name="y").square().mean().backward()
        for name, parameter in model.named_parameters():
            psgc.push_pull_inplace(parameter.grad, name=name)
        mean = psgc.synchronize(handle)
        assert mean is not None
        loss_of(model, mean).backward()
        optimizer.step()
        optimizer.zero_grad()
        psgc.barrier()

    return model, step


FRONTS: dict[str, Callable[[], tuple[nn.Module, Step]]] = {
    "optimizer": by_optimizer, "late": lambda: by_optimizer(late_synchronization=True), "overlapped": lambda: by_optimizer(overlapped_step=True),
    "accumulated": accumulated, "scaled": scaled, "wrapped": wrapped, "hooked": hooked, "sharded": sharded, "across": across, "normed": normed,
    "one-bit": one_bit, "demo": decoupled_momentum, "tensors": tensors,
}  # fmt: skip


def trained(front: str, compiled: bool) -> list[torch.Tensor]:
    torch.compiler.reset()
    model, step = FRONTS[front]()
    if compiled:
        step = torch.compile(step, backend="eager")
    draw = torch.Generator().manual_seed(5 + psgc.rank())
    for _ in range(STEPS):
        step(torch.randn(4, 5, generator=draw))
    return [getattr(parameter, "full_tensor", lambda kept=parameter: kept)().detach().clone() for parameter in model.parameters()]


def main() -> None:
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    psgc.init()
    dist.init_process_group("gloo", rank=psgc.rank(), world_size=psgc.size())
    start = made()[0].weight.detach()
    for front in FRONTS:
        plain, compiled = trained(front, compiled=False), trained(front, compiled=True)
        same = all(map(torch.equal, plain, compiled)) and not torch.equal(plain[0], start)
        print(f"{front}: {'the same' if same else 'others'}", flush=True)
    dist.destroy_process_group()
    psgc.shutdown()


if __name__ == "__main__":
    main()
