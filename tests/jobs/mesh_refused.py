"""A worker of four that asks for dimensions of meshes that psgc does not take, and prints what each is told. Run by tests."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import psgc.torch as psgc
from psgc.torch.session import api
from psgc.torch.session.mesh import of_dimension
from tests.refusing import told


def with_group(group: Any) -> None:
    model = DistributedDataParallel(nn.Linear(2, 2), process_group=group)
    model.register_comm_hook(None, psgc.ddp_hook())
    model(torch.ones(1, 2)).sum().backward()


def sharded(mesh: DeviceMesh) -> None:
    """Of a tensor that is cut along the other dimension."""
    whole = torch.arange(8.0).reshape(4, 2)
    piece = distribute_tensor(whole, mesh, [Shard(0)])
    optimizer = torch.optim.AdamW([nn.Parameter(piece.clone())], lr=0.1)
    optimizer.param_groups[0]["params"][0].grad = piece.clone()
    optimizer.step()
    told("broadcast", lambda: psgc.broadcast_parameters({"weight": piece}))
    told("state", lambda: psgc.broadcast_optimizer_state(optimizer))
    told("push_pull", lambda: psgc.push_pull(piece, name="weight"))
    told("push_pull_inplace", lambda: psgc.push_pull_inplace(piece, name="weight"))
    told("group", lambda: psgc.push_pull_group([piece], name="weights"))
    told("reduce", lambda: psgc.reduce([piece], [(0, 1)], "weight"))
    told("held", lambda: psgc.HeldTensors({"weight": piece}, "weights"))
    with torch.no_grad():
        piece.to_local().add_(psgc.rank())
    psgc.broadcast_parameters({"weight": piece.to_local()})
    assert torch.equal(piece.full_tensor(), whole), "the first of each group's"


def main() -> None:
    rank = int(os.environ["DMLC_WORKER_ID"])
    dist.init_process_group("gloo", rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    halves = [DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",)), DeviceMesh("cpu", [2, 3], mesh_dim_names=("dp",))]
    psgc.init()
    told("late", lambda: psgc.init(mesh=mesh, dim="replicate"))
    session = psgc.current_session()
    told("no mesh", lambda: of_dimension(session, "mesh", None))  # type: ignore[arg-type]
    told("no dim", lambda: of_dimension(session, mesh, None))
    told("misspelt", lambda: of_dimension(session, mesh, "replicat"))
    told("part", lambda: of_dimension(session, halves[rank // 2], "dp"))
    api._session, api._ours = of_dimension(session, mesh, "replicate"), True  # as init(mesh=mesh, dim="replicate") does
    model = nn.Linear(2, 2)
    told("auto", lambda: psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), compression="auto"))
    told("suspend", psgc.suspend)
    told("another group", lambda: with_group(mesh.get_group("shard")))
    sharded(mesh["shard"])
    psgc.barrier()
    psgc.shutdown()
    dist.destroy_process_group()


main()
