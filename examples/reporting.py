"""What both trainings report: progress lines for people (and the demo's bar), one JSON file at the end."""

from __future__ import annotations

import json
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import psgc.torch as psgc


class Report:
    """One run's record. The bytes and the pace are of the steps after the first, which settles the layout."""

    def __init__(self, task: str, codec: str, steps: int, out: str | None) -> None:
        self.task, self.codec, self.steps, self.out = task, codec, steps, out
        self.losses: list[float] = []
        self._ends: list[float] = []
        self._bytes = 0
        self._began = 0.0

    def step(self, number: int, loss: torch.Tensor) -> None:
        """Note a step's loss on this rank."""
        self.losses.append(float(loss.detach()))
        self._ends.append(time.perf_counter())
        if number == 1:
            self._bytes, self._began = psgc.current_session().statistics()["wire_bytes"], time.perf_counter()
        if psgc.rank() == 0 and (number % 5 == 0 or number == self.steps):
            print(f"step {number}/{self.steps} loss {self.losses[-1]:.4f}", flush=True)

    def finish(self, val_loss: float, val_accuracy: float | None = None) -> None:
        """Rank 0 writes what was measured. The training loss is the mean over ranks and the last tenth of the steps."""
        later = self.steps - 1
        wire = (psgc.current_session().statistics()["wire_bytes"] - self._bytes) / later if later else 0.0
        pace = later / (time.perf_counter() - self._began) if later else 0.0
        durations = [later - earlier for earlier, later in pairwise(self._ends)]
        last = self.losses[-max(1, self.steps // 10) :]
        train = float(psgc.push_pull(torch.tensor(sum(last) / len(last), dtype=torch.float64), name="final_train_loss"))
        record: dict[str, Any] = {
            "task": self.task, "codec": self.codec, "steps": self.steps, "final_train_loss": train, "final_val_loss": val_loss,
            "val_accuracy": val_accuracy, "wire_bytes_per_step_per_worker": round(wire), "steps_per_s": round(pace, 3),
            "median_step_s": round(statistics.median(durations), 4) if durations else None, "losses": self.losses,
        }  # fmt: skip
        if psgc.rank() == 0:
            accuracy = "" if val_accuracy is None else f", accuracy {val_accuracy:.2%}"
            print(f"{self.task} {self.codec}: train {train:.4f}, validation {val_loss:.4f}{accuracy}, {wire:,.0f} bytes a step", flush=True)
            if self.out:
                Path(self.out).write_text(json.dumps(record))
