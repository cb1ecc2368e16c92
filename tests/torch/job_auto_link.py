"""A worker of a real job under ``auto`` whose link is slow and then fast. Run by test_auto_job.py; PSGC_LINK_MBIT is the slow link's rate.

Each step computes for COMPUTE_S, asleep. The link becomes fast when auto has chosen; then the job goes on until auto has tried to do without compression, or
for MOST steps: it tries that after RECHECK windows instead of 100, if it has not noticed by then that the step is shorter. Prints what it tried, after how
many steps, and a digest of the weights.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any

import torch
from torch import nn

import psgc.torch as psgc
from psgc.plan.live import steering
from psgc.transport.pacing import PacedLink
from tests.torch.job_auto import choice_of

COMPUTE_S, MOST, FASTER, RECHECK = 0.06, 150, 100, 6


made_link = PacedLink.of
links: list[PacedLink] = []


def noted_link(mbit: float, fd: int = -1) -> PacedLink:
    links.append(made_link(mbit, fd))
    return links[-1]


def main() -> None:
    torch.set_num_threads(1)
    PacedLink.of = noted_link  # type: ignore[method-assign,assignment]
    steering.LEAST_RECHECK, steering.RECHECK_SHARE = RECHECK, 1.0  # type: ignore[misc]
    psgc.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 128))
    optimizer: Any = psgc.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model.named_parameters(), compression="auto")
    exchange = optimizer._psgc_exchange
    auto = exchange.observer
    torch.manual_seed(1 + psgc.rank())

    def step() -> None:
        time.sleep(COMPUTE_S)
        optimizer.zero_grad()
        model(torch.randn(4, 256)).square().mean().backward()
        optimizer.step()

    while not auto._steering.over:
        step()
    found, slow_steps = choice_of(exchange), auto.steps
    assert links
    psgc.barrier()
    for pace in (pace for link in links for pace in (link.out, link.into)):
        pace._ns_per_byte /= FASTER
        pace.quantum *= FASTER
    while not ("none" in auto._names[1:] and auto._steering.over) and auto.steps < slow_steps + MOST:
        step()
    weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    print(
        f"slow: {found} after {slow_steps}; fast: tried {' '.join(auto._names)} after {auto.steps - slow_steps}; weights {weights}",
        flush=True,
    )
    psgc.barrier()
    psgc.shutdown()


if __name__ == "__main__":
    main()
