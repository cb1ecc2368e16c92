"""A worker that joins one job after the other and checks sums. Run by tests under torchrun and over ssh.

Arguments: how many jobs it joins, one after the other; how many steps it makes in each; and the rank that fails in the last job of the first attempt, if any.
"""

from __future__ import annotations

import os
import sys
import time

import torch

import psgc.torch as psgc


def main() -> None:
    jobs, steps, *failing = map(int, sys.argv[1:])
    for job in range(jobs):
        psgc.init()
        for step in range(1, steps + 1):
            total = psgc.push_pull(torch.full((1000,), psgc.rank() + float(step)), name=f"x{job}", average=False)
            assert total.eq(sum(rank + step for rank in range(psgc.size()))).all(), total
            if step == 1:
                print(f"joined job {job} as rank {psgc.rank()} of {psgc.size()}\n", end="", flush=True)
            if steps > 10:
                time.sleep(0.05)
        if job == jobs - 1 and psgc.rank() in failing and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            raise ValueError("bad batch")
        psgc.barrier()
        psgc.shutdown()
    print(f"done in attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}\n", end="", flush=True)


if __name__ == "__main__":
    main()
