"""What messages cost between a worker and a server on this machine: a small job of one each, asked through the session as trainers ask.

``measure_link`` starts the job; ``worker_main`` is what its worker runs; ``fit`` turns round trips into a link. A part of n elements takes

    part_us + 2 latency_us + encode(n) + fold(n) + finish(n) + decode(n) + 2 * 4 n bytes at gbps

from submission to delivery: the codec's times are those of ``none``, latency_us is half a barrier's round trip (the smallest message there
and back, over psgc's transport and network thread), part_us what remains for a part of no size.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psgc.config import Config
from psgc.errors import JobFailed
from psgc.layout import Declaration, TensorSpec
from psgc.plan.cluster import Link
from psgc.plan.profile import CostCurve
from psgc.worker.connect import open_session
from psgc.worker.session import Session

SIZES: Final = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20)  # elements, one part each: up to 4 MiB
TOGETHER: Final = 32  # parts under way at once, for what each further one costs
WARM_UP, ROUNDS = 5, 25
PART_BYTES: Final = 4 << 20
MOST_GBPS: Final = 1000.0  # beyond, what moves bytes is lost in what copies and adds them (shared memory)


@dataclass(frozen=True, slots=True)
class Trips:
    """Medians in microseconds. part_us: by SIZES; together_us: of TOGETHER parts of the least size submitted at once."""

    barrier_us: float
    part_us: tuple[float, ...]
    together_us: float


def measure_link(transport: str) -> Trips:
    """Run the job. transport: auto, tcp or shm. Raises JobFailed."""
    with tempfile.TemporaryDirectory(prefix="psgc-links-") as folder:
        out = Path(folder) / "trips.json"
        command = [sys.executable, "-m", "psgc.launch", "run", "--workers", "1", "--servers", "1", "--",
                   sys.executable, "-c", "from psgc.launch.profile_links import worker_main; worker_main()", str(out)]  # fmt: skip
        env = {**os.environ, "PSGC_TRANSPORT": transport}
        done = subprocess.run(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode or not out.exists():
            lines = done.stderr.strip().splitlines()
            raise JobFailed(f"profile: the job that measures links failed: {lines[-1] if lines else f'status {done.returncode}'}")
        found = json.loads(out.read_text())
    return Trips(found["barrier_us"], tuple(found["part_us"]), found["together_us"])


def fit(trips: Trips, none: dict[str, CostCurve]) -> tuple[Link, dict[str, float]]:
    """The link, and what parts cost besides (part_us; next_part_us: of each further one while others are under way).

    none: its curves. The line through the times that they leave is fitted by least squares of relative errors.
    """
    cpu, server = none["cpu"], none["server"]
    computed = [cpu.encode(n) + server.decode(n) + server.encode(n) + cpu.decode(n) for n in SIZES]
    left = np.array(trips.part_us) - np.array(computed)
    per_element, fixed = np.polyfit(SIZES, left, 1, w=1 / np.array(trips.part_us))
    gbps = min(MOST_GBPS, 2 * 32e-3 / per_element) if per_element > 0 else MOST_GBPS
    link = Link(round(float(gbps), 3), round(trips.barrier_us / 2, 2))
    next_part = (trips.together_us - trips.part_us[0]) / (TOGETHER - 1)
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
        """The array is the result."""


def worker_main() -> None:
    """Take the times and write them to the file that the last argument names."""
    session = open_session(Config.from_env())
    parts = [_parts_us(session, [numel]) for numel in SIZES]
    found = {"barrier_us": _barrier_us(session), "part_us": parts, "together_us": _parts_us(session, [SIZES[0]] * TOGETHER)}
    session.close()
    Path(sys.argv[-1]).write_text(json.dumps(found))


def _barrier_us(session: Session) -> float:
    times = []
    for _ in range(WARM_UP + 4 * ROUNDS):
        begun = time.perf_counter()
        session.barrier()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[WARM_UP:]) * 1e6


def _parts_us(session: Session, sizes: Sequence[int]) -> float:
    """From the submission of so many parts at once to the delivery of all of them."""
    many = len(sizes)
    specs = [TensorSpec(f"{many}.{index}.{numel}", (numel,), "float32") for index, numel in enumerate(sizes)]
    declarations = [Declaration(spec.name, "adhoc", (spec,), "none", True, part_bytes=PART_BYTES) for spec in specs]
    buffers, times = [_Array(numel) for numel in sizes], []
    for _ in range(WARM_UP + ROUNDS):
        begun = time.perf_counter()
        session.wait([session.submit_named(declaration, buffer) for declaration, buffer in zip(declarations, buffers, strict=True)])
        times.append(time.perf_counter() - begun)
    return statistics.median(times[WARM_UP:]) * 1e6
