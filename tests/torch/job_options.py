"""A worker of a real job that aggregates one bucket by each option, without loss, and holds every result against the exact mean. Run by test_options.py.

OPTIONS_EVERY: every how many of the 4341 options are run; OPTIONS_CODEC: what encodes; OPTIONS_LATE: a rank that comes 4 s late.
"""

from __future__ import annotations

import functools
import os
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

import psgc.torch as psgc
from psgc.layout import BucketSpec, Declaration, TensorSpec
from psgc.plan.model.options import all_options
from psgc.torch.collectives.groups import job_groups
from psgc.torch.session.api import current_session

STEPS = 2


class Buffer:
    """A bucket's memory."""

    waits = False

    def __init__(self, values: NDArray[np.float32]) -> None:
        self.array, self.skipped = values, True

    def load(self) -> NDArray[Any]:
        return self.array

    def store(self, skipped: bool) -> None:
        self.skipped = skipped


def gradient(rank: int, bucket: int, step: int) -> NDArray[np.float32]:
    """Whole numbers, whose sums are exact in any order, of an odd number of elements."""
    random = np.random.default_rng([rank, bucket, step])
    return random.integers(-99, 99, 1 + 2 * (bucket % 23)).astype(np.float32)


def main() -> None:
    psgc.init()
    session = current_session()
    session.groups_of = functools.partial(job_groups, session)
    options = all_options()[:: int(os.environ.get("OPTIONS_EVERY", "1"))]
    codec = os.environ.get("OPTIONS_CODEC", "none")
    tensors = tuple(TensorSpec(f"t{n}", gradient(0, n, 0).shape, "float32") for n in range(len(options)))
    buckets = tuple(BucketSpec((n,), codec, -n, 1, option=option) for n, option in enumerate(options))
    layout = session.declare(Declaration("options", "plan", tensors, "none", True, used=tuple(range(len(tensors))), buckets=buckets))
    began = time.monotonic()
    if os.environ.get("OPTIONS_LATE") == str(session.rank):
        time.sleep(4)
    for step in range(STEPS):
        buffers = [Buffer(gradient(session.rank, n, step)) for n in range(len(options))]
        session.wait([session.submit(layout, n, buffer) for n, buffer in enumerate(buffers)])
        for n, (option, buffer) in enumerate(zip(options, buffers, strict=True)):
            mean = sum(gradient(rank, n, step) for rank in range(session.size)) / np.float32(session.size)
            assert not buffer.skipped, option
            assert (buffer.array == mean).all(), f"{option}: {buffer.array}, expected {mean}"
    print(f"checked {len(options)} options, nodes of {session.node_sizes}, in {time.monotonic() - began:.0f} s", flush=True)
    psgc.barrier()
    psgc.shutdown()


if __name__ == "__main__":
    main()
