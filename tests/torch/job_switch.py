"""A worker of a real job that switches between plans and codecs while it trains. Run by test_switch.py.

Arguments: conserve SWITCH..., train SWITCH..., or memory PID SWITCH..., with a server's pid; a switch is a codec's text, a plan's file, or "dropped",
which throws a step away before the next one.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

import psgc.torch as psgc
from psgc.worker.executor.lanes import Lane

STEPS = 3  # by each plan
NUMEL = {"a": 5000, "b": 4097, "c": 63, "d": 1}


def gradient(rank: int, step: int, name: str) -> torch.Tensor:
    """Even whole numbers: the mean of two ranks', and what a sparsifier leaves of it, are exact."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + ord(name))
    return 2.0 * torch.randint(-50, 50, (NUMEL[name],), generator=generator)


def conserve(switches: list[str]) -> None:
    """What was applied and what is kept are together what all ranks have computed, after each switch."""
    weights = {name: nn.Parameter(torch.zeros(numel)) for name, numel in NUMEL.items()}
    optimizer: Any = psgc.DistributedOptimizer(torch.optim.SGD(weights.values(), lr=1.0), weights.items())
    mine = {name: torch.zeros(numel) for name, numel in NUMEL.items()}
    step, dropped = 0, False
    for switch in switches:
        if switch == "dropped":
            dropped = True
            continue
        optimizer.switch_plan(switch)
        for _ in range(STEPS):
            sum((weights[name] * gradient(psgc.rank(), step, name)).sum() for name in NUMEL).backward()
            optimizer.step()
            optimizer.zero_grad()
            for name, computed in mine.items():
                computed.add_(gradient(psgc.rank(), step, name))
            step += 1
        exchange = optimizer._psgc_gradients.exchange
        kept = exchange.residuals.collect(exchange.last.was_put_back)
        if dropped:  # after the last comparison, one more step, which is put back before the next switch: it goes into the residual
            dropped = False
            sum((weights[name] * gradient(psgc.rank(), step, name)).sum() for name in NUMEL).backward()
            optimizer.put_back()
            for name, computed in mine.items():
                computed.add_(gradient(psgc.rank(), step, name))
            step += 1
            kept = exchange.residuals.collect(exchange.last.was_put_back)
        held = 0.0
        for name, numel in NUMEL.items():
            own, server = kept.tensors.get(name), kept.servers.get(name)
            left = torch.zeros(numel) if own is None or own.residual is None else torch.from_numpy(own.residual)
            of_server = torch.zeros(numel) if server is None else torch.from_numpy(server)
            wanted = psgc.push_pull(mine[name].clone(), name=f"wanted {name} {step}")
            found = psgc.push_pull(left.clone(), name=f"left {name} {step}") - weights[name].detach()
            found = found + psgc.push_pull(of_server, average=False, name=f"servers {name} {step}")
            assert torch.equal(found, wanted), f"after {switch}, tensor {name}: {(found - wanted).abs().max()} is lost"
            held += float(left.abs().sum() + of_server.abs().sum())
        print(f"conserved step={step} held={held > 0}", flush=True)
    until = time.monotonic() + 100
    while [thread for thread in threading.enumerate() if isinstance(thread, Lane)]:
        assert time.monotonic() < until, "the threads of layouts among workers live on, although the last one is over servers"
        time.sleep(0.01)


def memory(arguments: list[str]) -> None:
    """Train; after each step, before any rank begins the next one, rank 0 looks at its own shared memory and at the server's."""
    pid, *switches = arguments
    train(switches, server=int(pid))


def shared_bytes(pid: int, name: str) -> int:
    """What the process's shared memory of this name takes."""
    total = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            if name in os.readlink(entry):
                total += 512 * entry.stat().st_blocks
    return total


def train(switches: list[str], server: int | None = None) -> None:
    """Prints each step's loss, and a digest of the weights at the end. server: prints its memory as well."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 100))
    optimizer: Any = psgc.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1e-3), model.named_parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    torch.manual_seed(1 + psgc.rank())
    step = 0
    for switch in switches:
        if switch != "-":
            optimizer.switch_plan(switch)
        for number in range(STEPS):
            loss = model(torch.randn(8, 64)).square().mean()
            print(f"loss {step} {loss.item():.9g}", flush=True)
            if number == STEPS - 1 and psgc.rank() == 0:
                loss = loss * float("inf")  # the loss scaler skips the step just before the switch, on all ranks
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            step += 1
            if server is not None:
                psgc.barrier()
                if psgc.rank() == 0:
                    print(f"memory store={shared_bytes(server, 'psgc-store')} push={shared_bytes(os.getpid(), 'psgc-push')}", flush=True)
                psgc.barrier()
    print(
        f"weights {hashlib.sha256(torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy().tobytes()).hexdigest()}",
        flush=True,
    )


def main() -> None:
    torch.set_num_threads(1)
    psgc.init()
    {"conserve": conserve, "train": train, "memory": memory}[sys.argv[1]](sys.argv[2:])
    psgc.barrier()
    psgc.shutdown()


if __name__ == "__main__":
    main()
