"""A worker of byteps 0.2.5.post15: the sums of constants of tests/jobs/pslite.py, then each compressor's bytes. Prints one line of JSON.

argv: steps, registrations to try (separated by commas, "" for none), and "barrier" as in tests/jobs/pslite.py.
"""

import json
import os
import sys

import numpy as np

from psgc.layout.byteps_hash import djb2
from tests.pslite.stock import StockCompressor, StockWorker

steps, apart = int(sys.argv[1]), "barrier" in sys.argv
worker = StockWorker()
rank, size, servers = int(os.environ["DMLC_WORKER_ID"]), int(os.environ["DMLC_NUM_WORKER"]), int(os.environ["DMLC_NUM_SERVER"])


def server_of(key: int) -> int:
    return djb2(key) % servers


worker.push(server_of(0), 0, bytes(100_000))
wrong = 0
for step in range(steps):
    worker.push(server_of(0), 0, np.full(25_000, step + 1000 * rank, np.float32).tobytes())
    total = np.frombuffer(worker.pull(server_of(0), 0, 100_000), np.float32)
    wrong += int((total != sum(step + 1000 * other for other in range(size))).any())
    if apart:
        worker.barrier(4)
different = []
for number, text in enumerate(filter(None, sys.argv[2].split(",")), 1):
    key, numel = number << 16, 4099
    worker.push(server_of(key), key, bytes(4 * numel))
    worker.push(server_of(key), key, text.encode(), 3)
    mine, its_own = [StockCompressor(text, numel) for _ in range(size)], StockCompressor(text, numel)
    for step in range(4):
        values = [np.random.default_rng(100 * step + other).normal(size=numel).astype(np.float32) for other in range(size)]
        payloads = [compressor.encode(value) for compressor, value in zip(mine, values, strict=True)]
        total = np.zeros(numel, np.float32)
        for payload in payloads:
            total += its_own.decode(payload)
        worker.push(server_of(key), key, payloads[rank])
        pulled = worker.pull(server_of(key), key, 4 * numel)
        if pulled != its_own.encode(total):
            different.append([text, step])
        if apart:
            worker.barrier(4)
print(json.dumps({"rank": rank, "wrong": wrong, "different": different}))
sys.stdout.flush()
worker.finish()
os._exit(0)  # its threads outlive it
