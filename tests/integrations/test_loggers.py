"""psgc's figures in what the real libraries log."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import psgc.torch as psgc
from psgc.torch.session import metrics as module
from psgc.wire.reports import Report

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def a_member(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "current_session", lambda: SimpleNamespace(report=lambda: Report(10_000, 5, 40, 25_000)))


def test_a_trainers_writers_get_them_with_the_loss(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    written: list[dict[str, Any]] = []

    class Writer(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            written.append(dict(logs))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.layer(x).square().mean()}

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, logging_steps=1, report_to=[], use_cpu=True, save_strategy="no"
    )
    trainer = transformers.Trainer(model=Model(), args=arguments, train_dataset=[{"x": torch.ones(4)}] * 32, callbacks=[Writer()])
    psgc.log_with_trainer(trainer)
    trainer.train()
    assert [logs["psgc/steps"] for logs in written if "loss" in logs] == [40, 40]


def test_lightnings_loggers_get_them(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.loggers import CSVLogger

    class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    logger = CSVLogger(tmp_path)
    trainer = lightning.Trainer(
        max_steps=4, accelerator="cpu", logger=logger, callbacks=[psgc.lightning_callback(every=2)], enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(32, 4), batch_size=4))
    logger.save()
    rows = Path(logger.log_dir, "metrics.csv").read_text().splitlines()
    assert "psgc/steps" in rows[0]
    assert len(rows) == 3
