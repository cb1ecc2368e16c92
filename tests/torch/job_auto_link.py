"""A worker of a real job under ``auto`` whose link is slow and then fast, by a table of times. Run by test_auto_job.py.

The link becomes fast when auto has chosen; then the job goes on until auto has chosen again. Prints the choices by each link in order, after
how many steps auto had chosen first, and a digest of the weights.
"""

from __future__ import annotations

import hashlib
from itertools import groupby
from typing import Any

import torch
from torch import nn

import psgc.torch as psgc
from tests.torch.auto_table import choice_of, used
from tests.torch.small_models import batch, seeded

SLOW = {"none": 480.0, "bf16": 270.0, "int8": 165.0, "int4": 113.0, "plan": 120.0}  # milliseconds a step, of which 60 are not the link's
FAST = {"none": 64.0, "bf16": 66.0, "int8": 70.0, "int4": 71.0, "plan": 72.0}
MOST = 150  # steps by the fast link


def main() -> None:
    torch.set_num_threads(1)
    table = used()
    psgc.init()
    model = seeded(lambda: nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 128)))
    optimizer: Any = psgc.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model.named_parameters(), compression="auto")
    exchange = optimizer._psgc_gradients.exchange
    auto = exchange.observer

    def step(times: dict[str, float]) -> str:
        table.passes(times[choice_of(exchange)])
        optimizer.zero_grad()
        model(batch(psgc.rank(), auto.steps, 256)).square().mean().backward()
        optimizer.step()
        return choice_of(exchange)

    by_slow, by_fast = list[str](), list[str]()
    while not auto._steering.over:
        by_slow.append(step(SLOW))
    chosen = auto.steps
    by_slow.append(step(SLOW))  # by what is kept
    while len(by_fast) < MOST and not (auto._steering.over and "none" in auto.candidates.names[1:]):
        by_fast.append(step(FAST))
    by_fast.append(step(FAST))  # by what is kept
    weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    slow, fast = (" ".join(name for name, _ in groupby(seen)) for seen in (by_slow, by_fast))
    print(f"slow: {slow} after {chosen}; fast: {fast}; weights {weights}", flush=True)
    psgc.barrier()
    psgc.shutdown()


if __name__ == "__main__":
    main()
