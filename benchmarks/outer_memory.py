"""Memory of a learner under DiLoCo, by where the outer step is taken: what it holds beyond its own parameters and their gradients.

    python benchmarks/outer_memory.py [--numel 25000000] [--codecs none,int4]

prints bytes a parameter: after three exchanges of every system, of a model of 10 tensors under plain SGD, 2 workers, one server, all on this host (proportional
set size, so that what processes share counts for each in equal parts).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

WORKER = """
import json, os, sys
from pathlib import Path
import torch
import psgc.torch as psgc
numel, codec, on = int(sys.argv[1]) // 10, sys.argv[2], sys.argv[3]
def pss():
    rows = dict(line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return int(rows["Pss"].split()[0]) * 1024
def train(size):
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(size)) for _ in range(10)])
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    for parameter in model: parameter.grad = torch.ones_like(parameter)
    psgc.barrier()
    before = pss()
    outside = psgc.DiLoCo(model, inner, every=1, codec=codec, on=on)
    for _ in range(3): inner.step()
    psgc.barrier()
    return outside, (pss() - before) / (10 * size)
psgc.init()
warm, _ = train(70000)  # what kernels and psgc itself take
held, beyond = train(numel)
if psgc.rank() == 0: print(json.dumps(beyond), flush=True)
psgc.barrier()
psgc.shutdown()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=25_000_000)
    parser.add_argument("--codecs", default="none,int4")
    options = parser.parse_args()
    print(
        f"{'codec':10} {'workers':>8} {'servers':>8}   bytes a parameter of a worker, by where outer steps are taken; {options.numel:,} parameters"
    )
    for codec in options.codecs.split(","):
        found = []
        for on in ("workers", "servers"):
            command = [sys.executable, "-m", "psgc.launch", "run", "--no-prefix", "--workers", "2", "--",
                       sys.executable, "-c", WORKER, str(options.numel), codec, on]  # fmt: skip
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found.append(json.loads(done.stdout.strip().splitlines()[-1]))
        print(f"{codec:10} {found[0]:8.2f} {found[1]:8.2f}", flush=True)


if __name__ == "__main__":
    main()
