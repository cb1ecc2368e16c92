"""What a group's collectives cost beside torch.distributed's own over gloo, in turns in one job; each answer is checked before anything is timed.

    psgc run --workers 2 -- python benchmarks/groups.py [--bytes 25000000] [--rounds 20]

Prints medians in ms, and the median of each round's ratio to torch.distributed's all_reduce of that round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import distributed as dist

import psgc.torch as psgc
from psgc.torch.collectives.groups import job_groups
from psgc.torch.session.api import current_session


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=25_000_000, dest="size")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    psgc.init()
    rank, ranks = psgc.rank(), psgc.size()
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    group = job_groups(current_session()).group(tuple(range(ranks)))
    array = np.empty(arguments.size // 4, np.float32)
    tensor = torch.from_numpy(array)
    cuts = [array.size * index // ranks for index in range(ranks + 1)]

    def by_slices() -> None:
        group.reduce_scatter(array, "float32", cuts)
        group.all_gather(array, "float32", cuts)

    def gather() -> None:
        group.all_gather(array, "float32", cuts)

    def scatter() -> None:
        group.reduce_scatter(array, "float32", cuts)

    sums: dict[str, Callable[[], object]] = {
        "torch.distributed all_reduce": lambda: dist.all_reduce(tensor),
        "Group.all_reduce": lambda: group.all_reduce(array, "float32"),
        "Group.reduce_scatter and all_gather": by_slices,
    }
    for name, run in sums.items():
        array[:] = rank + 1
        run()
        if not (array == ranks * (ranks + 1) / 2).all():
            raise SystemExit(f"{name} gives a wrong sum")
    everything = sums | {"Group.reduce_scatter": scatter, "Group.all_gather": gather}
    times: dict[str, list[float]] = {name: [] for name in everything}
    for _ in range(arguments.rounds):
        for name, run in everything.items():
            array[:] = 0  # no sum grows without bound
            dist.barrier()
            start = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - start))
    base = times["torch.distributed all_reduce"]
    for name, values in times.items() if rank == 0 else ():
        ratio = statistics.median(value / other for value, other in zip(values, base, strict=True))
        print(f"{name:36} median {statistics.median(values):8.3f} ms, best {min(values):8.3f} ms, ratio {ratio:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
