"""A psgc job that trains a model drawn from a seed.  python benchmarks/drawn_model.py SEED INDEX [--steps N] [--describe]

The families are those of which predictions used to fail: an embedding, many small tensors, convolutions, an LSTM, a mixture of experts; and a plain network and
a transformer's block. Sizes are drawn for two cores: a step computes for some tens of milliseconds. Data are noise, since only times count.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import torch
from torch import nn

FAMILIES = ("embedding", "small tensors", "convolutions", "lstm", "experts", "plain", "transformer")


class Experts(nn.Module):
    """Each row goes to the expert with the largest gate; in a step some experts may have no row."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        gates = self.gate(rows).softmax(dim=1)
        weight, chosen = gates.max(dim=1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            own = (chosen == number).nonzero()[:, 0]
            if len(own):
                out = out.index_add(0, own, expert(rows[own]) * weight[own, None])
        return out


class LastOutput(nn.Module):
    def __init__(self, inputs: int, width: int, layers: int) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(inputs, width, layers, batch_first=True), nn.Linear(width, 10)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(rows)[0][:, -1])


def drawn(seed: int, index: int) -> tuple[str, nn.Module, Any]:
    """The model's description, the model, and a function that makes a batch. The families come in turn, in an order that the seed draws."""
    order = random.Random(seed).sample(FAMILIES, len(FAMILIES))
    family, rng = order[index % len(order)], random.Random(seed * 1_000_003 + index)
    if family == "embedding":
        words, width = rng.randrange(10, 60) * 1_000, rng.choice((16, 32, 64))
        model: nn.Module = nn.Sequential(nn.EmbeddingBag(words, width), nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, 10))
        return f"embedding {words} x {width}", model, lambda: torch.randint(words, (64, 20))
    if family == "small tensors":
        layers, width = rng.randrange(100, 300), rng.choice((16, 32, 64))
        model = nn.Sequential(*(module for _ in range(layers) for module in (nn.Linear(width, width), nn.Tanh())), nn.Linear(width, 10))
        return f"{2 * layers} small tensors of {width}", model, lambda: torch.randn(32, width)
    if family == "convolutions":
        channels, layers = rng.choice((32, 64, 96)), rng.randrange(3, 8)
        body = [nn.Conv2d(3, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        body += [module for _ in range(layers) for module in (nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU())]
        model = nn.Sequential(*body, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * channels, 10))
        return f"{layers} convolutions of {channels}", model, lambda: torch.randn(4, 3, 32, 32)
    if family == "lstm":
        width, layers = rng.choice((128, 192, 256)), rng.randrange(1, 4)
        return f"lstm of {width}, {layers} layers", LastOutput(64, width, layers), lambda: torch.randn(8, 24, 64)
    if family == "experts":
        width, experts = rng.choice((64, 128)), rng.randrange(8, 33)
        model = nn.Sequential(nn.Linear(64, width), Experts(width, experts), nn.Linear(width, 10))
        return f"{experts} experts of {width}", model, lambda: torch.randn(256, 64)
    if family == "plain":
        width, layers = rng.choice((256, 512, 768)), rng.randrange(2, 6)
        model = nn.Sequential(
            nn.Linear(128, width), *(m for _ in range(layers) for m in (nn.ReLU(), nn.Linear(width, width))), nn.Linear(width, 10)
        )
        return f"plain, {layers} layers of {width}", model, lambda: torch.randn(64, 128)
    width, layers = rng.choice((128, 192, 256)), rng.randrange(2, 5)
    block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(block, layers, enable_nested_tensor=False), nn.Flatten(), nn.Linear(32 * width, 10))
    return f"transformer, {layers} layers of {width}", model, lambda: torch.randn(4, 32, width)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int)
    parser.add_argument("index", type=int)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--describe", action="store_true", help="print what is drawn and how many parameters it has, and do nothing else")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    described, model, batch = drawn(options.seed, options.index)
    if options.describe:
        print(f"{described}: {sum(p.numel() for p in model.parameters()):,} in {len(list(model.parameters()))}")
        return
    import psgc.torch as psgc

    psgc.init()
    psgc.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model.named_parameters())
    loss_of = nn.CrossEntropyLoss()
    for _ in range(options.steps):
        rows = batch()
        optimizer.zero_grad()
        loss_of(model(rows), torch.randint(10, (len(rows),))).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
