"""A worker of a real job that trains LoRA's A and B beside frozen weights; prints how far they went. Run by test_lora.py.

Each case is ``optimizer+codec``. B is zero at first, so that A's first gradient is.
"""

from __future__ import annotations

import hashlib
import sys

import torch
from torch import nn

import psgc.torch as psgc

STEPS, WIDTH, RANK = 120, 64, 8


class LoraLinear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(RANK, inputs) / inputs**0.5), nn.Parameter(torch.zeros(outputs, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


def train(optimizer: str, codec: str) -> str:
    """Distances that A and B of both layers went, and a digest of the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(LoraLinear(WIDTH, 2 * WIDTH), nn.GELU(), LoraLinear(2 * WIDTH, WIDTH))
    teacher = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)).requires_grad_(False)
    for student, taught in ((model[0], teacher[0]), (model[2], teacher[2])):
        taught.load_state_dict(student.base.state_dict())
        taught.weight += torch.randn(taught.out_features, 4) @ torch.randn(4, taught.in_features) / WIDTH
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    start = {name: parameter.detach().clone() for name, parameter in named.items()}
    plain = {"sgd": torch.optim.SGD(named.values(), lr=0.5, momentum=0.9), "adamw": torch.optim.AdamW(named.values(), lr=3e-3)}
    trained = psgc.DistributedOptimizer(plain[optimizer], named.items(), compression=codec)
    generator = torch.Generator().manual_seed(1 + psgc.rank())
    for _ in range(STEPS):
        x = torch.randn(16, WIDTH, generator=generator)
        trained.zero_grad()
        (model(x) - teacher(x)).square().mean().backward()
        trained.step()
    moved = [f"{float((parameter.detach() - start[name]).norm()):.5f}" for name, parameter in named.items()]
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in named.values()])
    return " ".join([*moved, hashlib.sha256(weights.numpy().tobytes()).hexdigest()])


def main() -> None:
    torch.set_num_threads(1)
    psgc.init()
    for case in sys.argv[1:]:
        print(case, train(*case.split("+")), flush=True)
    psgc.barrier()
    psgc.shutdown()


if __name__ == "__main__":
    main()
