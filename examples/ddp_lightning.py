"""Lightning over psgc: psgc run --workers 2 --servers 1 --codec int8 -- python examples/ddp_lightning.py"""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch import nn

import psgc.torch as psgc


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 8))
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        (x,) = batch
        loss = nn.functional.cross_entropy(self.layers(x), x[:, :8].argmax(1))
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def train(steps: int = 8, accumulate: int = 1, clip: float | None = 0.5, workers: int = 2) -> tuple[nn.Module, list[float]]:
    """The trained model, and this rank's losses."""
    lightning.seed_everything(0)
    model = Classifier()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(512, 32)), batch_size=16, shuffle=True)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=workers, strategy="ddp", max_steps=steps, gradient_clip_val=clip, accumulate_grad_batches=accumulate,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, loader)
    return model, model.losses


if __name__ == "__main__":
    psgc.ddp_hook().install()  # the one line: before Lightning wraps the model
    print(f"rank {psgc.rank()}: losses {[round(loss, 4) for loss in train(workers=psgc.local_size())[1]]}")
