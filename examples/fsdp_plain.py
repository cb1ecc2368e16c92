"""FSDP2 within nodes and psgc between them, here as two nodes of two ranks on one machine:
psgc run --workers 4 --servers 1 --codec int8 -- python examples/fsdp_plain.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import psgc.torch as psgc

OF_A_NODE = 2  # ranks


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def train(steps: int = 20, width: int = 128) -> list[float]:
    """This rank's losses."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // OF_A_NODE, OF_A_NODE), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, width), *(Block(width) for _ in range(4)), nn.Linear(width, 10))
    for block in model[1:-1]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    psgc.fsdp_hook(model)  # the one line: between nodes psgc averages
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = torch.Generator().manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(16, 64, generator=data)
        loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    losses = train()
    print(f"rank {dist.get_rank()}: loss {losses[0]:.4f}, then {losses[-1]:.4f}")
    dist.destroy_process_group()
