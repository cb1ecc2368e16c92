"""A worker that averages 1 MB three times, and says over what and how long that took. Run by tests; loads no torch."""

from __future__ import annotations

import json
import time

import numpy as np
from array_buffer import ArrayBuffer

from psgc.config import Config
from psgc.layout import Declaration, TensorSpec
from psgc.worker.cluster import ClusterSession

NUMEL, STEPS = 250_000, 3


def main() -> None:
    config = Config.from_env()
    session = ClusterSession.open(config)
    parts = [Declaration(f"half {half}", "adhoc", (TensorSpec("x", (NUMEL // 2,), "float32"),), "none", True) for half in range(2)]
    buffers = [ArrayBuffer(np.zeros(NUMEL // 2, np.float32)) for _ in parts]

    def step(number: int) -> None:
        for buffer in buffers:
            buffer.array[:] = number + session.rank
        session.wait([session.submit_named(declaration, buffer) for declaration, buffer in zip(parts, buffers, strict=True)])
        mean = number + (session.size - 1) / 2
        assert all((buffer.array == mean).all() for buffer in buffers)

    step(0)
    began = time.monotonic()  # of no rank has a step begun by then
    session.barrier()
    for number in range(1, STEPS + 1):
        step(number)
    seconds = time.monotonic() - began
    print(json.dumps([session.local_size, config.transport, seconds]), flush=True)
    session.close()


if __name__ == "__main__":
    main()
