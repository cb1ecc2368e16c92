"""A worker of four that asks for dimensions of meshes that psgc does not take, and prints what each is told. Run by tests."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import psgc.torch as psgc
from psgc.torch.session import api
from psgc.torch.session.mesh import of_dimension
from tests.refusing import told


def with_group(group: Any) -> None:
    model = DistributedDataParallel(nn.Linear(2, 2), process_group=group)
    model.register_comm_hook(None, psgc.ddp_hook())
    model(torch.ones(1, 2)).sum().backward()


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
    psgc.barrier()
    psgc.shutdown()
    dist.destroy_process_group()


main()
