"""A worker whose layouts have a bucket for each group of ranks: prints a digest of what its own bucket holds after some steps, by codec. Run by tests.

Ranks r, r + groups, r + 2 x groups, ... are group r's members, and what they contribute follows from their place among these alone.
"""

from __future__ import annotations

import argparse
import hashlib

import numpy as np
from array_buffer import ArrayBuffer

import psgc.torch as psgc
from psgc.layout import BucketSpec, Declaration, TensorSpec
from psgc.torch.session.api import current_session
from psgc.worker.session import Session

STEPS, NUMEL = 6, 70_001


def run(session: Session, codec: str, option: tuple[str, ...], groups: int) -> str:
    """``groups`` = 1: one bucket of all ranks, which names none."""
    group, place = session.rank % groups, session.rank // groups
    tensors = tuple(TensorSpec(f"t{number}", (NUMEL,), "float32") for number in range(groups))
    of = [tuple(range(number, session.size, groups)) if groups > 1 else () for number in range(groups)]
    buckets = tuple(BucketSpec((number,), codec, -number, 3, option=option, members=of[number]) for number in range(groups))
    layout = session.declare(
        Declaration(f"{codec} {' '.join(option)}", "plan", tensors, codec, True, used=tuple(range(groups)), buckets=buckets)
    )
    digest = hashlib.sha256()
    for step in range(STEPS):
        array = np.random.default_rng([step, place]).standard_normal(NUMEL, np.float32)
        exact = sum(np.random.default_rng([step, member]).standard_normal(NUMEL, np.float32) for member in range(session.size // groups))
        if place == 0 and step == 3:
            array[5] = np.nan if codec == "none" else array[5]
        buffer = ArrayBuffer(array)
        skip = place == 1 and step == 2
        session.wait([session.submit(layout, group, buffer, skip=skip, previous_skipped=int(step == 4))])
        if codec == "none" and step not in (2, 3):
            assert np.allclose(array, exact / (session.size // groups), atol=1e-5), f"step {step}: not the members' mean"
        digest.update(array.tobytes())
    return digest.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--codecs", nargs="+")
    parser.add_argument("--options", nargs="*", default=[""])
    given = parser.parse_args()
    psgc.init()
    session = current_session()
    for codec in given.codecs:
        for option in given.options:
            print(f"{codec} [{option}] {run(session, codec, tuple(option.split()), given.groups)}", flush=True)
    psgc.shutdown()


main()
