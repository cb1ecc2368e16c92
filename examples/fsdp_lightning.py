"""Lightning's ModelParallelStrategy: FSDP2 within nodes and psgc between them, here as two nodes of two ranks on one machine:
psgc run --workers 4 --servers 1 --codec int8 -- python examples/fsdp_lightning.py
"""

from __future__ import annotations

from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import psgc.torch as psgc

OF_A_NODE = 2  # ranks


class Classifier(lightning.LightningModule):
    def __init__(self, hooked: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 8))
        self.losses: list[float] = []
        self._hooked = hooked

    def configure_model(self) -> None:
        """Lightning calls it when the ranks have met."""
        mesh = init_device_mesh(self.device.type, (dist.get_world_size() // OF_A_NODE, OF_A_NODE), mesh_dim_names=("replicate", "shard"))
        for layer in self.layers[::2]:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.layers, mesh=mesh)

    def on_train_start(self) -> None:
        if self._hooked:
            psgc.fsdp_hook(self.layers)  # the one line: when Lightning has moved the model to its device

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        (x,) = batch
        loss = nn.functional.cross_entropy(self.layers(x), x[:, :8].argmax(1))
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def train(
    steps: int = 8, accumulate: int = 1, clip: float | None = 0.5, workers: int = 4, hooked: bool = True
) -> tuple[nn.Module, list[float]]:
    """The trained model, and this rank's losses. hooked: by psgc between the nodes, else by FSDP itself."""
    lightning.seed_everything(0)
    model = Classifier(hooked)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(512, 32)), batch_size=16, shuffle=True)
    trainer = lightning.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu", devices=workers,
        strategy=ModelParallelStrategy(data_parallel_size=workers, tensor_parallel_size=1), max_steps=steps, gradient_clip_val=clip,
        accumulate_grad_batches=accumulate, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, loader)
    return model, model.losses


if __name__ == "__main__":
    psgc.init()
    print(f"rank {psgc.rank()}: losses {[round(loss, 4) for loss in train(workers=psgc.size())[1]]}")
