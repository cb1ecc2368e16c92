"""A worker that pushes many tensors, each under a name of its own, and counts descriptors. Run by tests; loads no torch."""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time

import numpy as np
from array_buffer import ArrayBuffer

from psgc.config import Config
from psgc.layout import Declaration, TensorSpec
from psgc.worker.cluster import ClusterSession

AT_ONCE = 100


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--names", type=int, default=1200)
    parser.add_argument("--numel", type=int, default=1000)
    options = parser.parse_args()
    session = ClusterSession.open(Config.from_env())
    push(session, range(1), options.numel)
    before, began = len(os.listdir("/proc/self/fd")), time.monotonic()
    for _ in range(2):
        for first in range(1, options.names, AT_ONCE):
            push(session, range(first, min(first + AT_ONCE, options.names)), options.numel)
    more = len(os.listdir("/proc/self/fd")) - before
    print(f"limit {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}, {more} more descriptors", flush=True)
    print(f"{time.monotonic() - began:.1f} s", file=sys.stderr)
    session.close()
    return 0


def push(session: ClusterSession, numbers: range, numel: int) -> None:
    buffers = [ArrayBuffer(np.zeros(numel, np.float32)) for _ in numbers]
    tickets = []
    for number, buffer in zip(numbers, buffers, strict=True):
        buffer.array[:] = number + session.rank
        declaration = Declaration(f"name {number}", "adhoc", (TensorSpec("x", (numel,), "float32"),), "none", False)
        tickets.append(session.submit_named(declaration, buffer))
    session.wait(tickets)
    ranks = sum(range(session.size))
    for number, buffer in zip(numbers, buffers, strict=True):
        assert (buffer.array == number * session.size + ranks).all(), (number, buffer.array)


if __name__ == "__main__":
    sys.exit(main())
