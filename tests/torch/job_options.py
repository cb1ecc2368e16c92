"""A worker of a real job that aggregates one bucket by each option, without loss, and holds every result against the exact mean. Run by test_options.py.

Then larger buckets by each option over servers behind sums within nodes, with codecs that lose something, too: what is missing of the mean stays in bounds.

OPTIONS_EVERY: every how many of the 4341 options are run; OPTIONS_CODEC: what encodes; OPTIONS_LATE: a rank that comes once another has said that it waits for
it, and so made the file OPTIONS_AWAITED.
OPTIONS_LOSSY: codecs, apart by blanks: the options that encode are run with each of them instead, on gradients that stay the same.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import psgc.torch as psgc
from psgc.layout import BucketSpec, Declaration, Layout, TensorSpec
from psgc.plan.model.options import all_options, encodes, server_options
from psgc.torch.collectives.groups import job_groups
from psgc.torch.session.api import current_session
from psgc.worker.session import Session

STEPS = 2
NUMEL, PARTS, LOSSY_STEPS = 70_001, 3, 10
# Of what is missing of all steps' means together, for each element on average: 0.2 and 40 for three ranks, and 71 by topk if errors were forgotten.
BOUNDS = {"int8": 1.0, "topk:k=0.1": 55.0}
SAME_STEPS, SAME_NUMEL = 20, 3001


class Buffer:
    """A bucket's memory."""

    waits = False

    def __init__(self, values: NDArray[np.float32]) -> None:
        self.array, self.skipped = values, True

    def load(self) -> NDArray[Any]:
        return self.array

    def store(self, skipped: bool) -> None:
        self.skipped = skipped


def gradient(rank: int, bucket: int, step: int, numel: int = 0) -> NDArray[np.float32]:
    """Whole numbers, whose sums are exact in any order, of an odd number of elements unless ``numel`` says how many."""
    random = np.random.default_rng([rank, bucket, step])
    return random.integers(-99, 99, numel or 1 + 2 * (bucket % 23)).astype(np.float32)


def layout_of(session: Session, name: str, numel: int, parts: int, chosen: Sequence[tuple[str, tuple[str, ...]]]) -> Layout:
    """A bucket for each codec and option."""
    tensors = tuple(TensorSpec(f"t{n}", gradient(0, n, 0, numel).shape, "float32") for n in range(len(chosen)))
    buckets = tuple(BucketSpec((n,), codec, -n, parts, option=option) for n, (codec, option) in enumerate(chosen))
    return session.declare(Declaration(name, "plan", tensors, "none", True, used=tuple(range(len(tensors))), buckets=buckets))


def step_of(session: Session, layout: Layout, step: int, numel: int) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Each bucket's result, and the mean that it should be."""
    count = len(layout.buckets)
    buffers = [Buffer(gradient(session.rank, n, step, numel)) for n in range(count)]
    session.wait([session.submit(layout, n, buffer) for n, buffer in enumerate(buffers)])
    assert not any(buffer.skipped for buffer in buffers)
    means = [sum(gradient(rank, n, step, numel) for rank in range(session.size)) / np.float32(session.size) for n in range(count)]
    return [(buffer.array, mean) for buffer, mean in zip(buffers, means, strict=True)]


def check_over_servers(session: Session) -> None:
    """Print what became of them, with a digest of all results."""
    behind = [option for option in server_options(("cpu",)) if option[0].startswith("intra")]
    chosen = [(codec, option) for codec in ("none", *BOUNDS) for option in behind if codec == "none" or encodes(option)]
    layout = layout_of(session, "over servers", NUMEL, PARTS, chosen)
    missing, digest = [np.zeros(NUMEL) for _ in chosen], 0
    for step in range(LOSSY_STEPS):
        for n, (found, mean) in enumerate(step_of(session, layout, step, NUMEL)):
            missing[n] += mean.astype(np.float64) - found
            digest = zlib.crc32(found.tobytes(), digest)
    for (codec, option), lacks in zip(chosen, missing, strict=True):
        most = np.abs(lacks).mean()
        # Error feedback keeps what is missing, so that it does not grow with the steps.
        assert most <= BOUNDS.get(codec, 0.0), f"{codec}, {option}: {most:.2f} of each element are missing after {LOSSY_STEPS} steps"
    print(f"checked {len(chosen)} buckets over servers, digest {digest:08x}", flush=True)


def check_lossy(session: Session, codecs: Sequence[str], options: Sequence[tuple[str, ...]]) -> None:
    """The same gradients in each step: errors that were forgotten would add up, to SAME_STEPS times the first; what residuals keep stays below half of it."""
    chosen = [(codec, option) for codec in codecs for option in options if encodes(option)]
    layout = layout_of(session, "lossy", SAME_NUMEL, 1, chosen)
    missing, first, digest = [np.zeros(SAME_NUMEL) for _ in chosen], list[float](), 0
    for step in range(SAME_STEPS):
        for n, (found, mean) in enumerate(step_of(session, layout, 0, SAME_NUMEL)):
            missing[n] += mean.astype(np.float64) - found
            digest = zlib.crc32(found.tobytes(), digest)
        if not step:
            first = [float(np.abs(lacks).mean()) for lacks in missing]
    lossy = dict.fromkeys(codec for (codec, _), alone in zip(chosen, first, strict=True) if alone > 0)
    for (codec, option), lacks, alone in zip(chosen, missing, first, strict=True):
        most = np.abs(lacks).mean()
        assert most <= 0.5 * SAME_STEPS * alone, (
            f"{codec}, {option}: {most:.3f} of each element are missing after {SAME_STEPS} steps, {alone:.3f} after one"
        )
    print(
        f"checked {len(chosen)} lossy buckets, digest {digest:08x}, of {len(lossy)} codecs that lose something: {' '.join(lossy)}",
        flush=True,
    )


def note_awaited(record: logging.LogRecord, late: str, awaited: Path) -> bool:
    if re.search(rf"rank \d+ waits in \S+ of 't\d+' in its step 1 for .*\b{late};", record.getMessage()):
        awaited.touch()
    return True


def main() -> None:
    psgc.init()
    session = current_session()
    session.groups_of = functools.partial(job_groups, session)
    options = all_options()[:: int(os.environ.get("OPTIONS_EVERY", "1"))]
    if os.environ.get("OPTIONS_LOSSY"):
        check_lossy(session, os.environ["OPTIONS_LOSSY"].split(), options)
        psgc.barrier()
        psgc.shutdown()
        return
    codec = os.environ.get("OPTIONS_CODEC", "none")
    layout = layout_of(session, "options", 0, 1, [(codec, option) for option in options])
    began = time.monotonic()
    if late := os.environ.get("OPTIONS_LATE"):
        awaited = Path(os.environ["OPTIONS_AWAITED"])
        logging.getLogger("psgc.worker.network").addFilter(lambda record: note_awaited(record, late, awaited))
        while late == str(session.rank) and not awaited.exists():
            time.sleep(0.01)
    for step in range(STEPS):
        for option, (found, mean) in zip(options, step_of(session, layout, step, 0), strict=True):
            assert (found == mean).all(), f"{option}: {found}, expected {mean}"
    print(f"checked {len(options)} options, nodes of {session.ranks.node_sizes}, in {time.monotonic() - began:.0f} s", flush=True)
    check_over_servers(session)
    psgc.barrier()
    psgc.shutdown()


if __name__ == "__main__":
    main()
