"""Train a small CNN on handwritten digits.  psgc run --workers 2 -- python examples/train_digits.py --codec onebit"""

from __future__ import annotations

import argparse

import torch
from optimizers import OPTIMIZERS, SCHEDULES, end_training, make_optimizer, make_schedule
from reporting import Report
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F  # noqa: N812

import psgc.torch as psgc

VALIDATION = 360  # of 1797 images


def load() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(train images [n, 1, 8, 8] in 0..1, train labels, validation images, validation labels)."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out, rest = order[:VALIDATION], order[VALIDATION:]
    return images[rest], labels[rest], images[held_out], labels[held_out]


def build() -> nn.Sequential:
    """About 150,000 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=32, help="images a rank and step")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--schedule", choices=SCHEDULES, default="linear", help="of the learning rate")
    parser.add_argument("--codec", default=None, help="push/pull codec; default PSGC_CODEC, else none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="where rank 0 writes its JSON record")
    options = parser.parse_args()

    psgc.init()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(options.seed)
    model = build()
    psgc.broadcast_parameters(model.state_dict(), root_rank=0)
    codec = options.codec or psgc.current_session().config.codec
    optimizer = make_optimizer(options.optimizer, model, options.lr, codec, options.steps)
    schedule = make_schedule(options.schedule, optimizer, options.lr, options.steps)
    images, labels, val_images, val_labels = load()
    generator = torch.Generator().manual_seed(options.seed * 1000 + psgc.rank())
    report = Report("digits", codec, options.steps, options.out)
    for step in range(1, options.steps + 1):
        rows = torch.randint(len(labels), (options.batch,), generator=generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[rows]), labels[rows])
        loss.backward()
        optimizer.step()
        schedule.step()
        report.step(step, loss)
    end_training(optimizer)
    with torch.no_grad():
        logits = model(val_images)
    accuracy = float((logits.argmax(1) == val_labels).float().mean())
    report.finish(float(F.cross_entropy(logits, val_labels)), accuracy)
    psgc.shutdown()


if __name__ == "__main__":
    main()
