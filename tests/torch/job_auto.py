"""A worker of a real job whose gradients ``auto`` chooses for. Run by test_auto_job.py.

job_auto.py CASE...  trains a model in each case, "optimizer" or "ddp", with "-quick" where no choice is quicker than another, and "-slower" where all of them
                     become ten times as slow. Prints the choices in order, and a digest of the weights.

auto takes its times from a table (auto_table.py), so that what is found does not depend on the machine. Everything else is real.
"""

from __future__ import annotations

import hashlib
import sys
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import psgc.torch as psgc
from tests.torch.auto_table import TIMES, Table, choice_of, used

STEPS, CHANGE = 40, 60


def train(case: str, table: Table) -> None:
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128))
    if case.startswith("ddp"):
        hook, model = psgc.ddp_hook(), DistributedDataParallel(net, bucket_cap_mb=0.05)
        model.register_comm_hook(None, hook)
        optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.01)
    else:
        model = net
        optimizer = psgc.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.01), net.named_parameters())
    torch.manual_seed(1 + psgc.rank())
    seen = []
    for step in range(CHANGE + 30 if case.endswith("slower") else STEPS):
        exchanges = [each.exchange for each in hook._models.all] if case.startswith("ddp") else [optimizer._psgc_gradients.exchange]
        ms = TIMES[choice_of(exchanges[0])] if exchanges else TIMES["none"]
        ms = 1e-3 if case.endswith("quick") else 10 * ms if case.endswith("slower") and step >= CHANGE else ms
        table.passes(ms)
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        seen.append(choice_of(hook._models.all[0].exchange if case.startswith("ddp") else exchanges[0]))
    weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest()
    print(f"case {case}: {' '.join(name for name, _ in groupby(seen))}; weights {weights}", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    psgc.init()
    table = used()
    cases = sys.argv[1:]
    if any(case.startswith("ddp") for case in cases):
        dist.init_process_group("gloo", rank=psgc.rank(), world_size=psgc.size())
    for case in cases:
        train(case, table)
    psgc.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()
    psgc.shutdown()


if __name__ == "__main__":
    main()
