"""Hugging Face Accelerate over psgc: psgc run --workers 2 --servers 1 --codec int8 -- python examples/ddp_accelerate.py"""

from __future__ import annotations

from itertools import chain, repeat

import torch
from accelerate import Accelerator
from torch import nn

import psgc.torch as psgc


def train(steps: int = 8, accumulate: int = 2, clip: float = 0.5) -> tuple[nn.Module, list[float]]:
    """The trained model, and this rank's losses, one for each pass."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    data = torch.utils.data.TensorDataset(torch.randn(2048, 32))
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=16, shuffle=True))
    losses: list[float] = []
    for (x,) in chain.from_iterable(repeat(loader)):
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), x[:, :8].argmax(1))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) == steps * accumulate:
            break
    return accelerator.unwrap_model(model), losses


if __name__ == "__main__":
    psgc.ddp_hook().install()  # the one line: before Accelerate wraps the model
    print(f"rank {psgc.rank()}: losses {[round(loss, 4) for loss in train()[1]]}")
