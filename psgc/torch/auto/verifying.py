"""Measures the steps of what a job travels by beside those of its plain codec, of bf16 and of none, in turns, for ``psgc verify``; then the job ends.

Built of what ``auto`` measures by: windows of steps, a table in which ranks tell each other theirs, and switches that all ranks make after the same step. It
decides nothing. Rank 0 writes what was measured to the file that PSGC_VERIFY names.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Final

import torch

from psgc.errors import ConfigError
from psgc.plan.live.rotation import Rotation
from psgc.plan.live.steering import WINDOW
from psgc.plan.model.plan import UNCOMPRESSED, Plan, PlannedBucket
from psgc.plan.planfile.runtime import plan_of
from psgc.torch.auto import measuring
from psgc.torch.auto.candidates import Compute
from psgc.torch.auto.step_times import StepTimes
from psgc.torch.auto.stepping import Stepping
from psgc.torch.gradients.exchange import GradientExchange
from psgc.torch.plans.choice import Choice
from psgc.torch.tensors.rank_table import RankTable

HALF: Final = "bf16"
THE_PLAN: Final = "plan"


class Verifier(Stepping):
    """Observes an exchange until every candidate has had its windows. sample: any of the parameters. Raises ConfigError where PSGC_VERIFY is no place for a
    file."""

    def __init__(self, exchange: GradientExchange[Any], sample: torch.Tensor) -> None:
        session = exchange.session
        self._path = Path(session.config.verify)
        if session.rank == 0 and not os.access(self._path.parent, os.W_OK | os.X_OK):
            raise ConfigError(f"PSGC_VERIFY={self._path}: cannot write in {self._path.parent}; name a file in a folder that is there")
        super().__init__(exchange, StepTimes(measuring.in_use(), sample))
        self._on_gpu = sample.is_cuda and exchange.on_gpu
        self._table = RankTable(session, f"psgc.verify {exchange.name}", 3)  # microseconds of a step, its backward and its forward
        self._names: list[str] = []
        self._choices: list[Choice] = []
        self._rotation = Rotation(1, 1)
        self._found: list[dict[str, Any]] = []

    def _decide(self) -> None:
        if not self._choices:
            self._begin()
        if self._table.sent:
            self._take_table()
        if self._times.window == WINDOW:
            step_ms = self._times.end_window()
            compute = Compute.of(self._exchange.session.rank, self._times.iterations())
            self._table.send(1e3 * step_ms, compute.backward_us, compute.forward_us)
            self._times.record_anew(True)
        elif not self._times.window:
            self._times.record_anew(True)

    def _begin(self) -> None:
        """The candidates: what the job has now, its codec without a plan, bf16 and none. All ranks find the same, by the layouts that they have declared."""
        exchange = self._exchange
        choice, buckets = exchange.choice, self._buckets()
        encoded = [bucket for bucket in buckets if bucket.codec != UNCOMPRESSED]
        codec = max(encoded, key=lambda bucket: bucket.numel).codec if encoded else UNCOMPRESSED
        own = THE_PLAN if choice.plan is not None or choice.awaited else choice.codec
        self._names = list(dict.fromkeys([own, codec, HALF, UNCOMPRESSED]))
        self._choices = [choice, *(Choice(name) for name in self._names[1:])]
        self._rotation = Rotation(len(self._names), exchange.session.config.verify_rounds)
        self._found = [{"name": name, "windows": []} for name in self._names]

    def _buckets(self) -> list[PlannedBucket]:
        return [bucket for layout in self._exchange.layouts for bucket in plan_of(layout, on_gpu=self._on_gpu).buckets]

    def _take_table(self) -> None:
        """A window of all ranks: note it, and give the next candidate its turn."""
        rows, rotation = self._table.rows(), self._rotation
        slowest = max(rows, key=lambda row: row[1] + row[2])
        found = self._found[rotation.present]
        found["windows"].append({
            "step_us": float(rows[:, 0].max()), "backward_us": float(slowest[1]), "forward_us": float(slowest[2]),
            "layouts": [layout.name for layout in self._exchange.layouts],
        })  # fmt: skip
        found.setdefault("plan", Plan(self._exchange.name, "", tuple(self._buckets())).to_json())
        before, now = rotation.present, rotation.next()
        if rotation.over:
            self._end()
        elif now != before:
            self._exchange.switch(self._choices[now])
            self._times.settle()

    def _end(self) -> None:
        """Write what was measured, and leave the job: every rank after the same step, so that none is missed by another."""
        if self._exchange.session.rank == 0:
            document = {"version": 1, "window": WINDOW, "compute_threads": measuring.in_use().compute_threads(), "candidates": self._found}
            draft = self._path.with_name(self._path.name + ".part")
            draft.write_text(json.dumps(document))
            os.replace(draft, self._path)
        sys.exit(0)
