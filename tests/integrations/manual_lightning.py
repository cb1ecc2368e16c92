"""Lightning's manual optimization: two optimizers, each toggled, so that parameters do not require a gradient before the first backward."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch import nn


class Halves(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.last = nn.Linear(32, 128), nn.Linear(128, 8)
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> None:
        (x,) = batch
        optimizer = self.optimizers()[index % 2]
        self.toggle_optimizer(optimizer)
        loss = nn.functional.cross_entropy(self.last(self.first(x).tanh()), x[:, :8].argmax(1))
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)
        self.losses.append(loss.item())

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(half.parameters(), lr=0.1) for half in (self.first, self.last)]


def train(steps: int = 8, workers: int = 2) -> tuple[nn.Module, list[float]]:
    """The trained model, and this rank's losses."""
    lightning.seed_everything(0)
    model = Halves()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(512, 32)), batch_size=16, shuffle=True)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=workers, strategy="ddp_find_unused_parameters_true", max_steps=steps, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, loader)
    return model, model.losses
