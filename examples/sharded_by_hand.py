"""A loop that shards optimizer states by itself within a node (as ZeRO-1 does), and psgc between nodes, here two nodes of two ranks on one machine:
psgc run --workers 4 --servers 1 -- python examples/sharded_by_hand.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import psgc.torch as psgc

OF_A_NODE = 2  # ranks


def train(steps: int = 20, width: int = 128) -> list[float]:
    """This rank's losses."""
    rank, world = dist.get_rank(), dist.get_world_size()
    nodes = [tuple(range(first, first + OF_A_NODE)) for first in range(0, world, OF_A_NODE)]
    same_shard = [tuple(range(shard, world, OF_A_NODE)) for shard in range(OF_A_NODE)]
    node = [dist.new_group(ranks) for ranks in nodes][rank // OF_A_NODE]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 10))
    numel = sum(parameter.numel() for parameter in model.parameters())
    size = -(-numel // OF_A_NODE)
    shard = slice(rank % OF_A_NODE * size, (rank % OF_A_NODE + 1) * size)
    weights = nn.functional.pad(
        torch.cat([parameter.detach().flatten() for parameter in model.parameters()]), (0, OF_A_NODE * size - numel)
    )
    own = nn.Parameter(weights[shard].clone())  # of which this rank has the optimizer's state
    optimizer = torch.optim.AdamW([own], lr=3e-3)
    data = torch.Generator().manual_seed(1 + rank)
    losses = []
    for _ in range(steps):
        model.zero_grad()
        x = torch.randn(16, 64, generator=data)
        loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))
        loss.backward()
        flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
        flat = nn.functional.pad(flat, (0, OF_A_NODE * size - numel))
        own.grad = torch.empty(size)
        dist.reduce_scatter_tensor(own.grad, flat, group=node)  # within the node: the sum of this rank's shard
        own.grad /= OF_A_NODE
        psgc.reduce([own.grad], same_shard, "gradients", compression="int8")  # between nodes: the mean over those that hold the same shard
        optimizer.step()
        dist.all_gather_into_tensor(weights, own.detach(), group=node)
        with torch.no_grad():
            offset = 0
            for parameter in model.parameters():
                parameter.copy_(weights[offset : offset + parameter.numel()].view_as(parameter))
                offset += parameter.numel()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    psgc.init()
    dist.init_process_group("gloo")
    losses = train()
    print(f"rank {dist.get_rank()}: loss {losses[0]:.4f}, then {losses[-1]:.4f}")
    psgc.barrier()
    dist.destroy_process_group()
