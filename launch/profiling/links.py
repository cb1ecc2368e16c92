"""Measures the cost of messages: between a worker and a server, through the session that trainers use, and among workers, through their groups.

``measure_here`` starts small jobs on this machine, ``measure_joined`` is the worker of one whose scheduler and server are elsewhere; ``fit`` and ``fit_group``
turn round trips into a link and what carriers cost. A part of n elements over a server takes

    2 lone_us + 2 latency_us + encode(n) + fold(n) + finish(n) + decode(n) + 2 * 4 n bytes at gbps

from submission to delivery: the codec's times are those of ``none``, latency_us is half a barrier's round trip (the smallest message there
and back, over psgc's transport and network thread), lone_us what remains for each of the two operations of a part of no size. Among two workers, a
reduce_scatter and an all_gather move 2 n bytes each, and neither copies by a codec: 2 lone_us + 2 latency_us + 4 n bytes at gbps.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psgc.config import Config
from psgc.errors import JobFailed, UsageError
from psgc.layout import Declaration, TensorSpec
from psgc.plan.inputs.carriers import MEMORY, SHM, SOCKETS, TCP, CarrierCosts
from psgc.plan.inputs.cluster import Link
from psgc.plan.inputs.observed import spread_of
from psgc.plan.inputs.profile import CostCurve, Spread
from psgc.worker.connect import open_session
from psgc.worker.session import Session

SIZES: Final = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20)  # elements, one part each: up to 4 MiB
PARTS_IN_FLIGHT: Final = 32  # parts in flight at once, to measure the cost of each further part
WARM_UP, LEAST_ROUNDS, ROUNDS, BARRIERS = 3, 5, 25, 100
GROUP_ROUNDS: Final = 15  # the same number on every rank, whatever they take: each waits for the others
BUDGET_S: Final = 3.0  # for each median; on a slow link fewer rounds fit
PAUSE_S: Final = 0.01  # before each round: a job's threads have computed or waited since their last message, too, and their caches are cold
PART_BYTES: Final = 4 << 20
MOST_GBPS: Final = 1000.0  # a faster link cannot be told from the copies and sums of the bytes (shared memory)


@dataclass(frozen=True, slots=True)
class Trips:
    """Round trips in microseconds. parts: by SIZES, or only the least of them; together: of PARTS_IN_FLIGHT parts of the least size submitted at once."""

    barrier: Spread
    parts: tuple[Spread, ...]
    together: Spread

    @property
    def spread(self) -> dict[str, Spread]:
        """Round trips of the smallest messages, by name; variation is largest there."""
        return {"barrier_us": self.barrier, "small_part_us": self.parts[0]}

    @classmethod
    def of(cls, document: Any) -> Trips:
        return cls(Spread(**document["barrier"]), tuple(Spread(**part) for part in document["parts"]), Spread(**document["together"]))


class Measured(NamedTuple):
    """Round trips by carrier: of one worker over a server, and of groups, by their number of workers."""

    served: Mapping[str, Trips]
    groups: Mapping[str, Mapping[int, Trips]]

    @property
    def link(self) -> Trips:
        """Those that the link between a worker and a server is fitted to: the quicker carrier's that was measured."""
        return next(iter(self.served.values()))


def measure_here(transport: str, tell: Callable[[str], None]) -> Measured:
    """Run jobs on this machine. transport: as PSGC_TRANSPORT; the carriers that it allows are measured. tell: is told what is measured next. Raises
    JobFailed."""
    served = {}
    for name in [SHM, TCP] if transport == "auto" else [transport]:
        tell(f"a worker and a server over {name}")
        served[name] = _job("worker_main", name, workers=1, servers=1)
    groups: dict[str, dict[int, Trips]] = {}
    for carrier, over, sizes in ((MEMORY, "auto", (2,)), (SOCKETS, "tcp", (2, 3))):
        if transport in ("auto", over):
            tell(f"collectives among workers by {carrier}")
            groups[carrier] = {workers: _job("group_main", over, workers=workers, servers=0) for workers in sizes}
    return Measured(served, groups)


def _job(main: str, transport: str, workers: int, servers: int) -> Trips:
    with tempfile.TemporaryDirectory(prefix="psgc-links-") as folder:
        out = Path(folder) / "trips.json"
        command = [sys.executable, "-m", "psgc.launch", "run", "--workers", str(workers), "--servers", str(servers), "--",
                   sys.executable, "-c", f"from psgc.launch.profiling.links import {main}; {main}()", str(out)]  # fmt: skip
        env = {**os.environ, "PSGC_TRANSPORT": transport}
        done = subprocess.run(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode or not out.exists():
            lines = done.stderr.strip().splitlines()
            raise JobFailed(f"profile: the job that measures links failed: {lines[-1] if lines else f'status {done.returncode}'}")
        return Trips.of(json.loads(out.read_text()))


def measure_joined(transport: str) -> Measured:
    """Join the job that the environment names as its only worker. Raises ConfigError, JobFailed, or UsageError if the job has other workers."""
    config = Config.from_env(role="worker", transport=transport, force_distributed=True)
    config.require_cluster()
    if config.nodes * config.local_size != 1:
        raise UsageError(
            f"profile: --join: a job of {config.nodes * config.local_size} workers, expected 1: set DMLC_NUM_WORKER=1 everywhere"
        )
    return Measured({TCP if transport == "auto" else transport: _trips(config)}, {})


def worker_main() -> None:
    """What the worker of a job with a server runs: take the times, and write them to the file that the last argument names."""
    Path(sys.argv[-1]).write_text(json.dumps(asdict(_trips(Config.from_env()))))


def group_main() -> None:
    """What each worker of a job without servers runs; rank 0 writes the times."""
    import torch

    import psgc.torch as psgc
    from psgc.torch.session.api import current_session
    from psgc.torch.tensors.sent import TensorExchange

    psgc.init()
    session = current_session()

    def times(*sizes: int) -> Spread:
        """Of tensors of these sizes that are handed over at once, a bucket each. As many rounds on every rank."""
        specs = tuple(TensorSpec(f"{len(sizes)}.{index}.{numel}", (numel,), "float32") for index, numel in enumerate(sizes))
        exchange = TensorExchange(session, Declaration(f"of {sizes}", "adhoc", specs, "none", True, part_bytes=PART_BYTES, fuse_bytes=0))
        tensors = [torch.ones(numel) for numel in sizes]
        return _times(lambda: exchange.run(tensors), GROUP_ROUNDS, GROUP_ROUNDS, after_pause(session.barrier))

    found = Trips(
        _times(session.barrier, BARRIERS, BARRIERS),
        tuple(times(numel) for numel in (SIZES if session.size == 2 else SIZES[:1])),
        times(*[SIZES[0]] * PARTS_IN_FLIGHT),
    )
    if session.rank == 0:
        Path(sys.argv[-1]).write_text(json.dumps(asdict(found)))
    psgc.shutdown()


def fit(trips: Trips, none: Mapping[str, CostCurve]) -> tuple[Link, CarrierCosts]:
    """The link, and what the carrier costs beside it.

    none: the curves of codec none. A line is fitted to the remaining times by least squares of relative errors.
    """
    cpu, server = none["cpu"], none["server"]
    added = CostCurve(server.numel, server.sum_us(1), server.sum_us(1))
    computed = [cpu.encode(n) + added.encode(n) + cpu.decode(n) for n in SIZES]
    fixed, per_element = _line(trips, computed)
    gbps = min(MOST_GBPS, 2 * 32e-3 / per_element) if per_element > 0 else MOST_GBPS
    link = Link(round(gbps, 3), round(trips.barrier.median / 2, 2))
    return link, _costs(trips, fixed, gbps)


def fit_group(trips: Mapping[int, Trips]) -> CarrierCosts:
    """What collectives of a group cost, by trips of two workers and, if they are there, of three."""
    two, three = trips[2], trips.get(3)
    fixed, per_element = _line(two, [0.0] * len(SIZES))
    gbps = min(MOST_GBPS, 32e-3 / per_element) if per_element > 0 else MOST_GBPS
    found = _costs(two, fixed, gbps)
    more = 0.0 if three is None else max(0.0, _next_us(three) / 2 - found.each_us)
    return replace(found, peer_us=round(more, 2))


def _line(trips: Trips, computed: Sequence[float]) -> tuple[float, float]:
    """The fixed time of a part, and its time per element, besides what is computed."""
    measured = np.array([part.median for part in trips.parts])
    per_element, fixed = np.polyfit(SIZES, measured - np.array(computed), 1, w=1 / measured)
    return float(fixed), float(per_element)


def _next_us(trips: Trips) -> float:
    """Microseconds that each further small part adds."""
    return max(0.0, (trips.together.median - trips.parts[0].median) / (PARTS_IN_FLIGHT - 1))


def _costs(trips: Trips, fixed_us: float, gbps: float) -> CarrierCosts:
    """Of each of a part's two operations."""
    each_us = _next_us(trips) / 2
    lone_us = max(each_us, (fixed_us - trips.barrier.median) / 2)
    return CarrierCosts(round(lone_us, 2), round(each_us, 2), gbps=round(gbps, 3))


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
    return _times(
        lambda: session.wait([session.submit_named(declaration, buffer) for declaration, buffer in parts]), ROUNDS, before=after_pause()
    )


def after_pause(meet: Callable[[], object] = lambda: None) -> Callable[[], None]:
    """What comes before a round that is to find threads as a job's step finds them. meet: after the pause, since ranks do not wake at the same moment."""

    def wait() -> None:
        time.sleep(PAUSE_S)
        meet()

    return wait


def _times(run: Callable[[], object], rounds: int, least: int = LEAST_ROUNDS, before: Callable[[], object] = lambda: None) -> Spread:
    """Times in microseconds over ``rounds`` rounds, or fewer, but at least so many, if they take longer than BUDGET_S. before: done before each."""
    for _ in range(WARM_UP):
        run()
    times, end = list[float](), time.perf_counter() + BUDGET_S
    while len(times) < least or (len(times) < rounds and time.perf_counter() < end):
        before()
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return spread_of([seconds * 1e6 for seconds in times])
