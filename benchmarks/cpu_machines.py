"""The time of an exchange on n GPU machines with k CPU machines beside them, beside the formula's of Jiang et al. 2020.  Needs root (``testbed.py``).

    python benchmarks/cpu_machines.py --nodes 3 --apart 3 [--gbps 0.1] [--megabytes 10] [--rounds 5]

Hosts are network namespaces. Each of n hosts has a worker and a server, each of k others a server. Workers average one tensor, uncompressed, again and again;
prints one JSON line: the median of the slowest worker, and the formula's 2 n (n - 1) M / ((n^2 + k n - 2 k) B), B being what TCP gets of the link.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parent))

from testbed import Testbed, psgc_job, run_members

from psgc.plan.inputs.cluster import TCP_SHARE
from psgc.reproduce.byteps import optimum_s

WARM_UP: Final = 2


def work(numel: int, rounds: int, folder: Path) -> None:
    """One worker: writes how long each exchange took."""
    import torch

    import psgc.torch as psgc

    torch.set_num_threads(1)
    psgc.init()
    tensor, took = torch.ones(numel), []
    for _ in range(WARM_UP + rounds):
        psgc.barrier()
        begun = time.monotonic()
        mean = psgc.push_pull(tensor, name="t", average=True)
        took.append(time.monotonic() - begun)
        if not bool((mean == 1).all()):
            raise SystemExit("cpu_machines: the mean of ones is not one")
    (folder / f"{psgc.rank()}.json").write_text(json.dumps(took[WARM_UP:]))
    psgc.shutdown()


def measured(nodes: int, apart: int, gbps: float, numel: int, rounds: int) -> float:
    """Seconds of an exchange: the median of the rounds, each of its slowest worker."""
    with tempfile.TemporaryDirectory(prefix="psgc-apart-") as folder, Testbed(apart + nodes, gbps) as bed:
        own = [sys.executable, str(Path(__file__).resolve()), "--work", folder, "--numel", str(numel), "--rounds", str(rounds)]
        members = psgc_job(bed, own, servers=apart + nodes, server_hosts=apart, extra={"PSGC_LOG_LEVEL": "error"})
        # a server on every host, those of the others first
        placed = [replace(each, host=int(each.name.split()[1])) if each.name.startswith("server ") else each for each in members]
        if run_members(bed, placed):
            raise SystemExit("cpu_machines: the job failed; what it said is above")
        times = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(nodes)]
    return statistics.median(map(max, zip(*times, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=3, help="machines with a worker and a server")
    parser.add_argument("--apart", type=int, default=3, help="machines with a server alone")
    parser.add_argument("--gbps", type=float, default=0.1)
    parser.add_argument("--megabytes", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--numel", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work is not None:
        work(given.numel, given.rounds, given.work)
        return
    numel = round(given.megabytes * 1e6 / 4)
    seconds = measured(given.nodes, given.apart, given.gbps, numel, given.rounds)
    formula = optimum_s(given.nodes, given.apart, 4.0 * numel, given.gbps * TCP_SHARE * 1e9 / 8)
    print(json.dumps({"nodes": given.nodes, "apart": given.apart, "measured_s": seconds, "formula_s": formula}))


if __name__ == "__main__":
    main()
