"""Measures the cost of messages between a worker and a server: a small job of one each, through the session that trainers use.

``measure_here`` starts the job on this machine, ``measure_joined`` is the worker of one whose scheduler and server are elsewhere; ``fit``
turns round trips into a link. A part of n elements takes

    part_us + 2 latency_us + encode(n) + fold(n) + finish(n) + decode(n) + 2 * 4 n bytes at gbps

from submission to delivery: the codec's times are those of ``none``, latency_us is half a barrier's round trip (the smallest message there
and back, over psgc's transport and network thread), part_us what remains for a part of no size.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psgc.config import Config
from psgc.errors import JobFailed, UsageError
from psgc.layout import Declaration, TensorSpec
from psgc.plan.inputs.cluster import Link
from psgc.plan.inputs.observed import spread_of
from psgc.plan.inputs.profile import CostCurve, Spread
from psgc.worker.connect import open_session
from psgc.worker.session import Session

SIZES: Final = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20)  # elements, one part each: up to 4 MiB
PARTS_IN_FLIGHT: Final = 32  # parts in flight at once, to measure the cost of each further part
WARM_UP, LEAST_ROUNDS, ROUNDS, BARRIERS = 3, 5, 25, 100
BUDGET_S: Final = 3.0  # for each median; on a slow link fewer rounds fit
PART_BYTES: Final = 4 << 20
MOST_GBPS: Final = 1000.0  # a faster link cannot be told from the copies and sums of the bytes (shared memory)


@dataclass(frozen=True, slots=True)
class Trips:
    """Round trips in microseconds. parts: by SIZES; together: of PARTS_IN_FLIGHT parts of the least size submitted at once."""

    barrier: Spread
    parts: tuple[Spread, ...]
    together: Spread

    @property
    def spread(self) -> dict[str, Spread]:
        """Round trips of the smallest messages, by name; variation is largest there."""
        return {"barrier_us": self.barrier, "small_part_us": self.parts[0]}


def measure_here(transport: str) -> Trips:
    """Run a job of one worker and one server on this machine. transport: as PSGC_TRANSPORT. Raises JobFailed."""
    with tempfile.TemporaryDirectory(prefix="psgc-links-") as folder:
        out = Path(folder) / "trips.json"
        command = [sys.executable, "-m", "psgc.launch", "run", "--workers", "1", "--servers", "1", "--",
                   sys.executable, "-c", "from psgc.launch.profiling.links import worker_main; worker_main()", str(out)]  # fmt: skip
        env = {**os.environ, "PSGC_TRANSPORT": transport}
        done = subprocess.run(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode or not out.exists():
            lines = done.stderr.strip().splitlines()
            raise JobFailed(f"profile: the job that measures links failed: {lines[-1] if lines else f'status {done.returncode}'}")
        found = json.loads(out.read_text())
    return Trips(Spread(**found["barrier"]), tuple(Spread(**part) for part in found["parts"]), Spread(**found["together"]))


def measure_joined(transport: str) -> Trips:
    """Join the job that the environment names as its only worker. Raises ConfigError, JobFailed, or UsageError if the job has other workers."""
    config = Config.from_env(role="worker", transport=transport, force_distributed=True)
    config.require_cluster()
    if config.nodes * config.local_size != 1:
        raise UsageError(
            f"profile: --join: a job of {config.nodes * config.local_size} workers, expected 1: set DMLC_NUM_WORKER=1 everywhere"
        )
    return _trips(config)


def worker_main() -> None:
    """What the worker of ``measure_here`` runs: take the times, and write them to the file that the last argument names."""
    Path(sys.argv[-1]).write_text(json.dumps(asdict(_trips(Config.from_env()))))


def fit(trips: Trips, none: Mapping[str, CostCurve]) -> tuple[Link, dict[str, float]]:
    """The link, and a part's fixed costs (part_us; next_part_us: of each further part while others are in flight).

    none: the curves of codec none. A line is fitted to the remaining times by least squares of relative errors.
    """
    cpu, server = none["cpu"], none["server"]
    computed = [cpu.encode(n) + server.decode(n) + server.encode(n) + cpu.decode(n) for n in SIZES]
    measured = np.array([part.median for part in trips.parts])
    per_element, fixed = np.polyfit(SIZES, measured - np.array(computed), 1, w=1 / measured)
    gbps = min(MOST_GBPS, 2 * 32e-3 / per_element) if per_element > 0 else MOST_GBPS
    link = Link(round(float(gbps), 3), round(trips.barrier.median / 2, 2))
    next_part = (trips.together.median - trips.parts[0].median) / (PARTS_IN_FLIGHT - 1)
    overheads = {"part_us": fixed - 2 * link.latency_us, "next_part_us": next_part}
    return link, {name: round(max(0.0, float(us)), 2) for name, us in overheads.items()}


class _Array:
    """A bucket that is one flat array."""

    waits = False

    def __init__(self, numel: int) -> None:
        self.array = np.ones(numel, np.float32)

    def load(self) -> NDArray[Any]:
        return self.array

    def store(self, skipped: bool) -> None:
        """Do nothing: the result is decoded into the array."""


def _trips(config: Config) -> Trips:
    session = open_session(config)
    try:
        parts = tuple(_parts(session, [numel]) for numel in SIZES)
        return Trips(_times(session.barrier, BARRIERS), parts, _parts(session, [SIZES[0]] * PARTS_IN_FLIGHT))
    finally:
        session.close()


def _parts(session: Session, sizes: Sequence[int]) -> Spread:
    """Time from the submission of several parts at once to the delivery of all of them."""
    many = len(sizes)
    specs = [TensorSpec(f"{many}.{index}.{numel}", (numel,), "float32") for index, numel in enumerate(sizes)]
    parts = [(Declaration(spec.name, "adhoc", (spec,), "none", True, part_bytes=PART_BYTES), _Array(spec.numel)) for spec in specs]
    return _times(lambda: session.wait([session.submit_named(declaration, buffer) for declaration, buffer in parts]), ROUNDS)


def _times(run: Callable[[], object], rounds: int) -> Spread:
    """Times in microseconds over ``rounds`` rounds, or fewer if they take longer than BUDGET_S."""
    for _ in range(WARM_UP):
        run()
    times, end = list[float](), time.perf_counter() + BUDGET_S
    while len(times) < LEAST_ROUNDS or (len(times) < rounds and time.perf_counter() < end):
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return spread_of([seconds * 1e6 for seconds in times])
