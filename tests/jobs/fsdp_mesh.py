"""A worker of four that trains a model which is cut by tensor parallelism beside FSDP2, along the dimension of a mesh that psgc carries and natively; without a
mesh it is told why such models, and stages of a pipeline, are refused. Run by tests.

Prints a line for each run: its name, a digest of this rank's pieces, and the last loss; or what it was told.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import psgc.torch as psgc
from tests.refusing import told

STEPS = 5


def model_on(root: DeviceMesh, over: DeviceMesh, seed: int = 0) -> nn.Sequential:
    """Cut over "tp" where the root has more than one rank of it, and sharded over a part of the root."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 6))
    if "tp" in (root.mesh_dim_names or ()) and root["tp"].size() > 1:
        parallelize_module(model, root["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model[0], mesh=over)
    return fully_shard(model, mesh=over)


def train(model: nn.Module, draw: torch.Generator, steps: int = STEPS) -> str:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for _ in range(steps):
        x = torch.randn(16, 12, generator=draw)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), x[:, :6].argmax(1))
        loss.backward()
        optimizer.step()
    pieces: list[Any] = list(model.parameters())
    digest = hashlib.sha256(b"".join(piece.to_local().detach().numpy().tobytes() for piece in pieces)).hexdigest()[:12]
    return f"{digest} {float(loss.detach()):.6f}"


def diloco(model: nn.Module) -> None:
    psgc.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.3), every=100)


def joined(root: DeviceMesh, name: str) -> None:
    """Natively and by psgc, over the mesh of shards and over that of both dimensions. Ranks that hold parts of one replica have its batches."""
    group = root["dp_replicate", "dp_shard"]
    place = root.get_local_rank("dp_replicate") * root["dp_shard"].size() + root.get_local_rank("dp_shard")
    print(f"{name} native {train(model_on(root, group), torch.Generator().manual_seed(place))}", flush=True)
    for how, over, codec in (("shard", root["dp_shard"], "none"), ("whole", group, "none"), ("whole", group, "int8")):
        model = model_on(root, over)
        psgc.fsdp_hook(model, codec)
        print(f"{name} {codec}-{how} {train(model, torch.Generator().manual_seed(place))}", flush=True)
    model, *others = (model_on(root, root["dp_shard"]) for _ in range(3))
    hook, resumed, shrunk = (psgc.fsdp_hook(each, "onebit") for each in (model, *others))
    train(model, torch.Generator().manual_seed(place), 2)
    states: list[Any] = [None] * 4
    dist.all_gather_object(states, hook.residual_state_dict())
    own = states[dist.get_rank()]
    resumed.load_residual_state_dict(own)
    group_states = [states[rank] for rank in sorted(dist.get_process_group_ranks(root.get_group("dp_replicate")))]
    # of a job with twice as many replicas, in which each had a double
    doubled = [of | {"rank": rank, "size": 4, "mesh": [[0, 1, 2, 3]]} for rank, of in enumerate(group_states * 2)]
    shrunk.load_residual_state_dict(doubled)
    for how, of in (("state", resumed), ("shrunk", shrunk)):
        kept = of.residual_state_dict()["memories"]["gradients"]
        wanted = {key: values["residual"] for key, values in own["memories"]["gradients"].items() if "residual" in values}
        print(f"{name} {how} {all(torch.equal(each, kept[key]['residual']) for key, each in wanted.items())} {len(wanted)}", flush=True)
    told(f"diloco of {name} over both", lambda: diloco(model_on(root, group)))
    told(f"diloco of {name}", lambda: diloco(model_on(root, root["dp_shard"])))
    told("another's", lambda: resumed.load_residual_state_dict(states[dist.get_rank() ^ 1]))


def refused() -> None:
    """In a job without a mesh."""
    of = {
        names: init_device_mesh("cpu", shape, mesh_dim_names=names)
        for names, shape in (
            (("dp_replicate", "dp_shard", "tp"), (2, 1, 2)),
            (("dp_shard", "tp"), (2, 2)),
            (("pipeline_parallel", "dp_shard"), (2, 2)),
            (("pp", "dp_replicate", "dp_shard"), (2, 2, 1)),
            (("pp", "data_replicate", "data_shard", "tp"), (1, 2, 2, 1)),
        )
    }
    cut, beside, stages, staged, one_more = of.values()
    told("tp", lambda: psgc.fsdp_hook(model_on(cut, cut["dp_shard"])))
    told("tp of hsdp", lambda: psgc.fsdp_hook(model_on(cut, cut["dp_replicate", "dp_shard"])))
    told("tp without replicas", lambda: psgc.fsdp_hook(model_on(beside, beside["dp_shard"])))
    told("stages", lambda: psgc.fsdp_hook(model_on(stages, stages["dp_shard"])))
    told("replicated stages", lambda: psgc.fsdp_hook(model_on(staged, staged["dp_shard"])))
    told("stages of hsdp", lambda: psgc.fsdp_hook(model_on(staged, staged["dp_replicate", "dp_shard"])))
    told("dimensions of one rank", lambda: psgc.fsdp_hook(model_on(one_more, one_more["data_shard"])))
    told("hsdp beside those", lambda: psgc.fsdp_hook(model_on(one_more, one_more["data_replicate", "data_shard"])))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--refused", action="store_true")
    given = parser.parse_args()
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    dist.init_process_group("gloo", rank=int(os.environ["DMLC_WORKER_ID"]), world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "inner"))
    if given.refused:
        psgc.init()
        refused()
    else:
        psgc.init(mesh=mesh, dim="dp_replicate")
        for name, shape in (("tp", (2, 1, 2)), ("shards", (2, 2, 1))):
            joined(init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard", "tp")), name)
        told("sharded along it", lambda: psgc.fsdp_hook(model_on(mesh, mesh["dp_replicate"])))
        other = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("inner", "one", "dp_replicate"))
        told("other replicas", lambda: psgc.fsdp_hook(model_on(other, other["dp_replicate", "one"])))
    psgc.barrier()
    dist.destroy_process_group()
    psgc.shutdown()


main()
