"""A worker of a job that trains an example of examples/ddp_*.py as it would be without psgc, then under ``auto``. Run by test_auto_libraries.py:
job_auto.py EXAMPLE OPTIONS. Prints both trainings' first and last losses, the choices in order, and a digest of the weights.

What a step takes is what the choice takes by TIMES, so that it switches, whatever the machine; everything else is real.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import sys
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import psgc.torch as psgc
from psgc.torch.ddp.exchange import DdpExchange
from psgc.torch.gradients import auto
from tests.torch.job_auto import TIMES, choice_of

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))
now_ns = [0]
seen: list[str] = []


def timed_begin(self: DdpExchange) -> None:
    begin(self)
    now_ns[0] += int(1e6 * TIMES[choice_of(self)])
    seen.append(choice_of(self))


begin = DdpExchange._begin
DdpExchange._begin = timed_begin  # type: ignore[method-assign]


def main() -> None:
    name, options = sys.argv[1:]
    torch.set_num_threads(1)
    psgc.init()
    auto.time = SimpleNamespace(perf_counter_ns=lambda: now_ns[0])  # type: ignore[attr-defined]
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
