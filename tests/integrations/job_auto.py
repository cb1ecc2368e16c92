"""A worker of a job that trains an example of examples/ddp_*.py as it would be without psgc, then under ``auto``. Run by test_auto_libraries.py:
job_auto.py EXAMPLE OPTIONS. Prints both trainings' first and last losses, the choices in order, and a digest of the weights.

auto takes its times from a table (tests/torch/auto_table.py), so that it switches, whatever the machine; everything else is real.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import psgc.torch as psgc
from psgc.torch.ddp.gradients import DdpGradients
from tests.torch.auto_table import TIMES, choice_of, used

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))
table = used()
seen: list[str] = []


def timed_begin(self: DdpGradients) -> None:
    begin(self)
    table.passes(TIMES[choice_of(self.exchange)])
    seen.append(choice_of(self.exchange))


begin = DdpGradients._begin
DdpGradients._begin = timed_begin  # type: ignore[method-assign]


def main() -> None:
    name, options = sys.argv[1:]
    torch.set_num_threads(1)
    psgc.init()
    example = importlib.import_module(name)
    if name == "ddp_plain":
        dist.init_process_group("gloo")
    losses = []
    for by in ("stock", "auto"):
        gc.collect()
        if by == "auto":
            psgc.ddp_hook("auto").install()
        model, found = example.train(**json.loads(options))
        losses.append((sum(found[:5]) / 5, sum(found[-10:]) / 10))
    flat: Any = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    said = {"losses": losses, "choices": [each for each, _ in groupby(seen)], "digest": hashlib.sha256(flat.numpy().tobytes()).hexdigest()}
    print(json.dumps(said), flush=True)
    psgc.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
