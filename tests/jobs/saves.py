"""Rank 0 writes a checkpoint of 32 MB, of which the most only when it is told to, and says when it has begun; the others wait for it. Run by tests; loads no
torch."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import numpy as np

import psgc
from psgc.config import Config
from psgc.errors import JobFailed
from psgc.worker.cluster import ClusterSession

CHUNKS, CHUNK_BYTES = 32, 1 << 20


def chunk(number: int) -> bytes:
    return np.random.default_rng(number).bytes(CHUNK_BYTES)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("--until", type=Path, required=True, help="writes the rest once this file is there and the job has failed")
    parser.add_argument("--limit", default="", help="PSGC_SAVE_TIMEOUT_S of this process alone: its launcher waits for longer")
    options = parser.parse_args()
    if options.limit:
        os.environ["PSGC_SAVE_TIMEOUT_S"] = options.limit
    session = ClusterSession.open(Config.from_env())
    try:
        if session.rank:
            print(f"rank {session.rank} is {os.getpid()}", flush=True)
        session.barrier()
        if session.rank == 0:
            with psgc.saving(), psgc.saving(), options.path.open("wb") as file:  # a library's own inside the script's
                for number in range(CHUNKS):
                    file.write(chunk(number))
                    file.flush()
                    if number == 0:
                        print("writing", flush=True)
                        while not (session.failed and options.until.exists()):
                            time.sleep(0.05)
            print("written, and the job had failed meanwhile", flush=True)
        session.barrier()
    except JobFailed:
        return 1
    session.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
