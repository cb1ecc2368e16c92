"""A worker of four, 2 x 2: psgc carries one dimension of a mesh, in whose groups different models train. Run by tests."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import psgc.torch as psgc
from psgc.errors import UsageError

STEPS = 5


def net(column: int) -> nn.Module:
    """Groups have models of their own, of other sizes and names."""
    torch.manual_seed(column)
    return nn.Sequential(nn.Linear(20 + column, 40), nn.Linear(40, 3 + column)) if column else nn.Linear(20, 30_000)


def batch(rank: int, step: int, width: int) -> torch.Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model: nn.Module, rank: int, step: int, width: int) -> torch.Tensor:
    return model(batch(rank, step, width)).square().mean()


def reference(column: int, ranks: list[int]) -> list[torch.Tensor]:
    """The group's training, alone in this process."""
    model = net(column)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS + column):
        grads = []
        for rank in ranks:
            model.zero_grad()
            loss_of(model, rank, step, 20 + column).backward()
            grads.append([parameter.grad.clone() for parameter in model.parameters()])
        for parameter, first, second in zip(model.parameters(), *grads, strict=True):
            parameter.grad = (first + second) / 2
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, column: int) -> list[torch.Tensor]:
    for step in range(STEPS + column):  # groups need not take as many steps
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step, 20 + column).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def through_a_folder(column: int) -> None:
    """What codecs keep goes through one folder of the whole job's and comes back to each rank as it was."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    assert folder[0] is not None
    model = net(column)
    optimizer: Any = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression="onebit")
    trained(model, optimizer, column)
    kept = optimizer.residual_state_dict()
    checkpoints = psgc.Checkpoints(folder[0])
    checkpoints.save(1, {"psgc": psgc.state_dict(optimizer)})
    again = net(column)
    other: Any = psgc.DistributedOptimizer(torch.optim.SGD(again.parameters(), lr=0.1), again.named_parameters(), compression="onebit")
    latest = checkpoints.latest()
    assert latest is not None
    psgc.load_state_dict(other, latest)
    found = other.residual_state_dict()
    memories = kept["memories"]["gradients"]
    assert memories and found["memories"]["gradients"].keys() == memories.keys()
    for name, fields in memories.items():
        assert fields["residual"].abs().max() > 0
        assert torch.equal(found["memories"]["gradients"][name]["residual"], fields["residual"])
    others: list[Any] = [None] * 4
    dist.all_gather_object(others, kept)
    for state in (others[rank] for rank in range(4) if others[rank]["part"] != kept["part"]):
        try:
            other.load_residual_state_dict(state)
        except UsageError as error:
            assert "the state is of a mesh's part" in str(error), error  # noqa: PT017
        else:
            raise AssertionError("another part's state was taken")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


def main() -> None:
    given = argparse.ArgumentParser()
    given.add_argument("--dim", default="replicate")
    dim = given.parse_args().dim
    dist.init_process_group("gloo", rank=int(os.environ["DMLC_WORKER_ID"]), world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    psgc.init(mesh=mesh, dim=dim)
    rank, ranks = dist.get_rank(), mesh[dim].mesh.tolist()
    column = rank - ranks[0] if dim == "none" else (rank % 2 if dim == "replicate" else rank // 2)
    assert (psgc.rank(), psgc.size()) == (ranks.index(rank), 2)
    exact = reference(column, ranks)

    model = net(column)
    if psgc.rank():
        nn.init.zeros_(next(model.parameters()))
    psgc.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    assert all(torch.equal(own, its) for own, its in zip(trained(model, optimizer, column), exact, strict=True)), "the optimizer"
    state = optimizer.residual_state_dict()
    optimizer.load_residual_state_dict(state)

    wrapped = DistributedDataParallel(net(column), process_group=mesh.get_group(dim))
    wrapped.register_comm_hook(None, psgc.ddp_hook())
    found = trained(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1), column)
    assert all(torch.equal(own, its) for own, its in zip(found, exact, strict=True)), "DDP"

    lossy = net(column)
    optimizer = psgc.DistributedOptimizer(torch.optim.SGD(lossy.parameters(), lr=0.1), lossy.named_parameters(), compression="int8")
    found = trained(lossy, optimizer, column)
    assert all(torch.allclose(own, its, atol=0.05) for own, its in zip(found, exact, strict=True)), "int8"
    optimizer.load_residual_state_dict(optimizer.residual_state_dict())
    lossy(batch(rank, 0, 20 + column)).square().mean().backward()

    through_a_folder(column)

    assert torch.equal(psgc.push_pull(torch.tensor([float(rank)]), average=False, name="sum"), torch.tensor([float(sum(ranks))]))
    assert psgc.broadcast_object({"of": column} if psgc.rank() == 1 else None, root_rank=1) == {"of": column}
    psgc.barrier()
    print("all right in", ranks, flush=True)
    psgc.shutdown()
    dist.destroy_process_group()


main()
