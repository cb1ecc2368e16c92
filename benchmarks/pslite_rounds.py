"""Rounds over ps-lite without a pause on BytePS's server: one key a tensor, two keys in turn, and one key with a barrier of the workers after each round.

python -m benchmarks.pslite_rounds [--workers 2] [--servers stock] [--numel 20] [--tensors 1] [--rounds 40] [--cycles 15]

Prints ms a round and wrong sums of each. The three take turns within one job, so that a machine's changes of speed meet all of them. byteps 0.2.5.post15
is built as for its tests (tests/pslite/stock.py).
"""

from __future__ import annotations

import argparse
import json
import sys

from tests.pslite.processes import PSGC_SCHEDULER, PSGC_SERVER, STOCK_SCHEDULER, STOCK_SERVER, run_job

MEANS = ("one key", "two keys", "one key and a barrier")
WORKER = """
import json, sys, time
import torch
import psgc.torch as psgc
import psgc.worker.pslite.session as session
numel, tensors, rounds, cycles = map(int, sys.argv[1:5])
means = sys.argv[5:]
keys_of, now = session.keys_of, ""
session.keys_of = lambda place, two: keys_of(place, two if now == "two keys" else frozenset())
psgc.init()
wrong, times, step = dict.fromkeys(means, 0), {each: [] for each in means}, 0
for cycle in range(cycles + 1):  # the first one, which makes the keys, is not counted
    for now in means[cycle % len(means):] + means[:cycle % len(means)]:
        psgc.barrier()
        for _ in range(rounds):
            step += 1
            mine = [torch.full((numel,), float(step + 10_000 * psgc.rank())) for _ in range(tensors)]
            began = time.perf_counter()
            handles = [psgc.push_pull_async(each, average=False, name=f"{now} {i}") for i, each in enumerate(mine)]
            sums = [psgc.synchronize(handle) for handle in handles]
            if now.endswith("barrier"):
                psgc.barrier()
            if cycle:
                times[now].append(1e3 * (time.perf_counter() - began))
            wrong[now] += sum(int((one != sum(step + 10_000 * rank for rank in range(psgc.size()))).any()) for one in sums)
psgc.barrier()
print(json.dumps({"wrong": wrong, "times": times}))
psgc.shutdown()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", choices=("stock", "psgc"), default="stock")
    for name, default in (("numel", 20), ("tensors", 1), ("rounds", 40), ("cycles", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    scheduler, server = (STOCK_SCHEDULER, STOCK_SERVER) if options.servers == "stock" else (PSGC_SCHEDULER, PSGC_SERVER)
    numbers = [str(value) for value in (options.numel, options.tensors, options.rounds, options.cycles)]
    outputs, statuses, errors = run_job(scheduler, [server], [[sys.executable, "-c", WORKER, *numbers, *MEANS]] * options.workers)
    if any(statuses):
        sys.exit(errors)
    told = [json.loads(out.splitlines()[-1]) for out in outputs]
    print(f"{options.workers} workers, a {options.servers} server, {options.tensors} tensors of {options.numel} elements")
    for each in MEANS:
        times = sorted(time for one in told for time in one["times"][each])
        low, median, high = (times[int(share * (len(times) - 1))] for share in (0.1, 0.5, 0.9))
        print(f"{each:22} {median:8.2f} ms a round (10 % {low:.2f}, 90 % {high:.2f}), {sum(one['wrong'][each] for one in told)} wrong sums")


if __name__ == "__main__":
    main()
