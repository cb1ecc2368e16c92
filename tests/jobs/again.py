"""Joins one job after another: --jobs times init, training, shutdown in one process. Says how much the process has open before, at half time and after.
With --kill rank 0 kills the servers in each job but the last, once everyone has its last result.

Run by tests.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import threading
import time
import weakref
from pathlib import Path

import torch

import psgc.torch as psgc
from psgc.torch.session import api

ENDING_S = 100.0
sessions: list[weakref.ref[object]] = []  # of the jobs so far


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--told-at", type=int, nargs="*", default=[])
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--fewer-on-rank", type=int, default=-1)  # this rank joins one job less
    options = parser.parse_args()
    rank = -1
    for job in range(options.jobs):
        if job == options.jobs - 1 and rank == options.fewer_on_rank:
            sys.exit(0)
        rank = train(options.codec, job, kills=options.kill and job + 1 < options.jobs)
        if job + 1 in options.told_at:
            print(f"rank {rank} after {job + 1} jobs: {opened()}", flush=True)
    print(f"rank {rank}: {options.jobs} jobs", flush=True)


def train(codec: str, job: int, kills: bool) -> int:
    """One job: a mean, and two steps of a model that all ranks must have alike. Returns the rank. Of the jobs before nothing is left once it has begun."""
    psgc.init()
    assert not any(session() for session in sessions), "a session that was left holds descriptors"
    sessions.append(weakref.ref(api.current_session()))
    rank, size = psgc.rank(), psgc.size()
    mean = psgc.push_pull(torch.full((5000,), float(rank + job)), name="ranks")
    assert torch.equal(mean, torch.full((5000,), (size - 1) / 2 + job)), mean
    model = model_of(job, rank)
    optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression=codec)
    psgc.broadcast_parameters(model.state_dict())
    assert torch.equal(model.weight, model_of(job, 0).weight), "another job's beginning"
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.rand(8, 600)).square().sum().backward()
        optimizer.step()
    weight = model.weight.detach().double()
    assert torch.equal(psgc.push_pull(weight, average=False, name="weights"), size * weight)
    if kills:
        psgc.barrier()
        if rank == 0:
            kill_servers()
    psgc.shutdown()
    return rank


def model_of(job: int, rank: int) -> torch.nn.Linear:
    torch.manual_seed(100 * job + rank)
    return torch.nn.Linear(600, 60)


def kill_servers() -> None:
    launcher = os.getppid()
    for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if Path(f"/proc/{pid}/cmdline").read_bytes().endswith(b"role\0server\0"):
            os.kill(int(pid), signal.SIGKILL)


def opened() -> str:
    """Descriptors, threads, shared segments that are mapped, and resident memory in MB."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    segments = sum("memfd:" in line or "/dev/shm" in line for line in maps.splitlines())
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    deadline = time.monotonic() + ENDING_S
    while (threads := len(os.listdir("/proc/self/task"))) > threading.active_count() and time.monotonic() < deadline:
        time.sleep(0.01)  # a thread that was joined may still be ending
    return f"fds={len(os.listdir('/proc/self/fd'))} threads={threads} python={threading.active_count()} segments={segments} rss={resident >> 20}"


if __name__ == "__main__":
    main()
