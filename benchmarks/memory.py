"""Memory of a worker and a server, per codec, for one model: what they hold beyond the gradients themselves.

python benchmarks/memory.py [--numel 25000000] [--codecs none,int8] prints bytes per parameter.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from psgc.codecs import registered_codecs

WORKER = """
import json, os, sys
from pathlib import Path
import numpy as np
from psgc.config import Config
from psgc.layout import Declaration, TensorSpec
from psgc.worker.cluster import ClusterSession
numel, codec = int(sys.argv[1]), sys.argv[2]
class Buffer:
    def load(self): return self.array
    waits = False
    def store(self, skipped): pass
def pss(pid):
    rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return int(rows["Pss"].split()[0]) * 1024
def server():
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\\0")
                same = f"PSGC_JOB={os.environ['PSGC_JOB']}".encode() in (entry / "environ").read_bytes()
            except OSError: continue
            if same and b"psgc.launch.job.role" in words and b"server" in words: return int(entry.name)
session = ClusterSession.open(Config.from_env())
def step(name, n):
    buffer = Buffer(); buffer.array = np.ones(n, np.float32)
    declaration = Declaration(name, "adhoc", (TensorSpec(name, (n,), "float32"),), codec, True)
    for _ in range(3): session.wait([session.submit_named(declaration, buffer)])
step("warm", 70000); session.barrier()
before = pss(os.getpid()), pss(server()); session.barrier()
step("model", numel); session.barrier()
after = pss(os.getpid()), pss(server()); session.barrier()
if session.rank == 0: print(json.dumps([(a - b) / numel for a, b in zip(after, before)]), flush=True)
session.close()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, default=25_000_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--codecs", default=",".join(registered_codecs()))
    options = parser.parse_args()
    print(
        f"{'codec':10} {'worker':>8} {'server':>8}   bytes a parameter, {options.numel:,} parameters, {options.workers} workers, shared memory"
    )
    for codec in options.codecs.split(","):
        command = [sys.executable, "-m", "psgc.launch", "run", "--no-prefix", "--workers", str(options.workers), "--",
                   sys.executable, "-c", WORKER, str(options.numel), codec]  # fmt: skip
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        worker, server = json.loads(done.stdout.strip().splitlines()[-1])
        print(f"{codec:10} {worker:8.2f} {server:8.2f}", flush=True)


if __name__ == "__main__":
    main()
