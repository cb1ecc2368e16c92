"""Train one of Espresso's six models on synthetic data, by DDP alone or by DDP over psgc. run_baseline.sh and run_psgc.sh beside it start it.

    examples/espresso/run_baseline.sh vgg16
    examples/espresso/run_psgc.sh vgg16 --steps 20
    WORKERS=4 CODEC=int8 LINK_MBIT=1000 examples/espresso/run_psgc.sh gpt2 --full

Prints the loss every few steps, and at the end the median step and what travelled. Synthetic data shows how fast a step is, and nothing about quality.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from models import TASKS
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(model: str, full: bool, steps: int, seed: int = 0) -> dict[str, Any]:
    """Steps of SGD; what was measured on this rank. Times begin after the first step, which settles who sends what."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)

    def wrap(module: nn.Module) -> Any:
        return DistributedDataParallel(module)

    task = TASKS[model](full, wrap)
    optimizers = [torch.optim.SGD(parameters, lr=1e-4 if model == "ugatit" else 0.01) for _, parameters in task.phases]
    draw = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    losses, times = [], []
    for step in range(1, steps + 1):
        began, total = time.perf_counter(), 0.0
        for (loss_of, _), optimizer in zip(task.phases, optimizers, strict=True):
            optimizer.zero_grad()
            loss = loss_of(draw)
            loss.backward()
            optimizer.step()
            total += loss.item()
        times.append(time.perf_counter() - began)
        losses.append(total)
        if dist.get_rank() == 0 and (step == 1 or step % 5 == 0):
            print(f"step {step}/{steps} loss {total:.4f}", flush=True)
    weights = torch.stack([parameter.detach().double().abs().sum() for parameter in task.parameters()]).sum()
    return {
        "model": model, "parameters": sum(parameter.numel() for parameter in task.parameters()), "losses": losses,
        "median_step_s": round(statistics.median(times[1:] or times), 4), "weights": float(weights),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=TASKS)
    parser.add_argument("--full", action="store_true", help="the paper's size; a small one by default")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--psgc", action="store_true", help="gradients travel by psgc; else as DDP sends them")
    parser.add_argument("--json", action="store_true", help="each rank prints what it measured as one JSON line")
    options = parser.parse_args()
    if options.psgc:
        import psgc.torch as psgc

        psgc.ddp_hook().install()  # the one line
    dist.init_process_group("gloo")
    found = train(options.model, options.full, options.steps, options.seed)
    if options.psgc:
        found["wire_bytes"] = psgc.current_session().statistics()["wire_bytes"]
    if options.json:
        sys.stdout.write(
            json.dumps({"rank": dist.get_rank(), **found}) + "\n"
        )  # at once: torchrun's other process writes to the same pipe, unbuffered
        sys.stdout.flush()
    elif dist.get_rank() == 0:
        sent = f", {found['wire_bytes'] / options.steps:,.0f} bytes a step and worker" if options.psgc else ""
        how = "psgc" if options.psgc else "DDP"
        print(f"{options.model}, {found['parameters']:,} parameters, {how}: median step {found['median_step_s']} s{sent}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
