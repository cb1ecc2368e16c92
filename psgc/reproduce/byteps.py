"""BytePS's experiments (Jiang et al., OSDI 2020): bytes and time against CPU machines, links within a machine, partitions.

Owns which experiment asks what. Exchanges are those of ``exchange.py``, programs those that jobs run.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from psgc.plan.methods.baselines import HIERARCHICAL, OVER_SERVERS, tensor_by_tensor, with_option
from psgc.plan.model.options import Constraints, Option
from psgc.plan.model.problem import Problem, simulate
from psgc.program.compile import compile_option
from psgc.program.ranks import Ranks
from psgc.program.steps import Program, Raw, Serve, Transfer
from psgc.reproduce.claims import Claim, Experiment
from psgc.reproduce.espresso_jobs import BEDS, JOBS, Job, iteration_us, problem_of
from psgc.reproduce.exchange import (
    BYTES_PER_S,
    FLOAT,
    bytes_over_optimum,
    declared,
    exchange_s,
    machines_of,
    placed_by_byteps,
    placed_by_psgc,
)

PAPER: Final = "Jiang et al. 2020"
MODEL: Final = "vgg16"
CLUSTERS: Final = ((8, 0), (8, 2), (8, 4), (8, 6), (8, 8), (16, 8), (16, 16))  # GPU machines, CPU machines
ALIKE: Final = 0.10  # a simulated exchange ends with a last part that nothing overlaps
NODE: Final = 8  # GPUs of a machine
ROOTS: Final = (2, 3)  # that do not share the network interface's switch (figure 8)
IN_NODE: Final[Option] = ("intra.reduce_scatter", "inter.push", "inter.pull", "intra.all_gather")
PART: Final = 1 << 22  # elements
MEGABYTE: Final = 1 << 18  # elements of float32
REAL_NODES, REAL_APART = 3, 3
REAL_FLAGS: Final = ("--gbps", "0.05", "--megabytes", "12", "--rounds", "5")
REAL_BYTES, REAL_BYTES_PER_S = 12e6, 0.05 * 0.956 * 1e9 / 8  # 0.956: what TCP gets of a link (docs/predicted-and-measured.md)
PATIENCE_S: Final = 300.0
MEASURED: Final = "What CPU machines gain, by real processes"
WHOLE: Final = 1e12  # elements: larger than any tensor


def optimum_s(nodes: int, apart: int, nbytes: float, bytes_per_s: float = BYTES_PER_S) -> float:
    """The paper's formula (section 4.1): 2 n (n - 1) M / ((n^2 + k n - 2 k) B)."""
    return 2 * nodes * (nodes - 1) * nbytes / ((nodes**2 + apart * nodes - 2 * apart) * bytes_per_s)


@functools.cache
def _nbytes(model: str) -> float:
    return float(sum(tensor.numel for tensor in declared(model).tensors)) * FLOAT


@functools.cache
def _exchange_ms(nodes: int, apart: int, placement: str = "") -> float:
    """A simulated exchange of the model's gradients. placement: one of BytePS's hash functions; psgc's own if left out."""
    declaration, machines = declared(MODEL), machines_of(nodes, apart)
    parts = placed_by_byteps(declaration, machines, placement) if placement else placed_by_psgc(declaration, machines)
    return exchange_s(parts, machines) * 1e3


def _gain_over_none_apart(nodes: int, apart: int) -> float:
    return _exchange_ms(nodes, 0) / _exchange_ms(nodes, apart) - 1


@functools.cache
def _real_exchange(nodes: int, apart: int) -> dict[str, Any]:
    """What ``benchmarks/cpu_machines.py`` measured: a job of real processes on hosts behind limited links."""
    script = Path(__file__).resolve().parents[2] / "benchmarks" / "cpu_machines.py"
    command = [sys.executable, str(script), "--nodes", str(nodes), "--apart", str(apart), *REAL_FLAGS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _real_ms(nodes: int, apart: int) -> float:
    return float(_real_exchange(nodes, apart)["measured_s"]) * 1e3


def _real_gain(nodes: int, apart: int) -> float:
    return _real_ms(nodes, 0) / _real_ms(nodes, apart) - 1


def _as_root(measure: Callable[[], float]) -> Callable[[], float] | None:
    return measure if os.geteuid() == 0 else None


def _bytes_over_optimum(nodes: int, apart: int) -> float:
    machines = machines_of(nodes, apart)
    return bytes_over_optimum(placed_by_psgc(declared(MODEL), machines), machines)


def _collectives(programs: Sequence[Program]) -> Iterator[Raw]:
    """Each collective of floats of a node's programs once."""
    seen = set()
    for program in programs:
        for step in program.steps:
            for number, collective in enumerate(step.collectives if isinstance(step, Transfer) else ()):
                if isinstance(collective, Raw) and (step.action, number, collective.members, collective.region) not in seen:
                    seen.add((step.action, number, collective.members, collective.region))
                    yield collective


def bytes_between_switches(switch: int) -> float:
    """Bytes that leave a PCIe switch of four GPUs towards the CPU for a part, over the part's: each collective is a ring over its members, which
    leaves the switch once. switch: BYTEPS_PCIE_SWITCH_SIZE."""
    total = 0.0
    for each in _collectives(compile_option(IN_NODE, PART, Ranks((NODE,), (), (switch,)))):
        if len({member // 4 for member in each.members}) > 1:
            elements, members = each.region[1] - each.region[0], len(each.members)
            total += elements * (members - 1) / members
    return total / PART


def pushed_share(local_ranks: Sequence[int]) -> float:
    """The share of a part that these of a machine's ranks push to servers with BYTEPS_REDUCE_ROOTS=2,3."""
    programs = compile_option(IN_NODE, PART, Ranks((NODE,), (ROOTS,)))
    steps = (step for rank in local_ranks for step in programs[rank].steps if isinstance(step, Serve))
    return sum(high - low for step in steps for low, high in step.pieces) / PART


def _over(job: Job, nodes: int, servers: int) -> Problem:
    """The job on NVLink machines with CPU machines, or with the summation service on GPU machines alone (0)."""
    problem = problem_of(job, nodes=nodes, bed=BEDS[0], constraints=Constraints(servers=servers > 0))
    return replace(problem, cluster=replace(problem.cluster, servers=servers))


def _step_us(problem: Problem, option: Option, part_numel: float) -> float:
    """A step without compression: every tensor by this option, cut at so many elements."""
    cut = (with_option(bucket, option, problem, max(1, round(bucket.numel / part_numel))) for bucket in tensor_by_tensor(problem))
    return simulate(problem, tuple(cut)).step_us


def _partition_gain(job: Job, over_numel: float) -> float:
    """How much more partitions of 4 MB train than others, with as many CPU machines as GPU machines."""
    problem = _over(job, 8, 8)
    ours, other = (iteration_us(job, _step_us(problem, OVER_SERVERS, numel)) for numel in (4 * MEGABYTE, over_numel))
    return other / ours - 1


def _largest_gain_over_all_reduce(nodes: int) -> float:
    """The most, of the jobs at hand, that as many CPU machines as GPU machines gain over an all-reduce, whose parts are as large as suits it."""
    gains = []
    for job in JOBS:
        with_servers = iteration_us(job, _step_us(_over(job, nodes, nodes), OVER_SERVERS, 4 * MEGABYTE))
        without = iteration_us(
            job, min(_step_us(_over(job, nodes, 0), HIERARCHICAL, numel) for numel in (4 * MEGABYTE, 64 * MEGABYTE, WHOLE))
        )
        gains.append(without / with_servers - 1)
    return max(gains)


def experiments() -> Iterator[Experiment]:
    nbytes = _nbytes(MODEL)
    setup = "VGG-16, n GPU machines and k CPU machines, 10 Gbit/s each, all gradients ready at once"
    yield Experiment(
        "Time of an exchange against the number of CPU machines",
        f"{PAPER}, section 4.1, the optimum by formula",
        setup,
        "simulator of links, on layouts as jobs make them",
        ALIKE,
        [Claim(f"n = {n}, k = {k}", optimum_s(n, k, nbytes) * 1e3, functools.partial(_exchange_ms, n, k), "ms") for n, k in CLUSTERS],
    )
    yield Experiment(
        "Bytes of the busiest link, over the least possible",
        f"{PAPER}, section 4.1",
        setup,
        "counted, on layouts as jobs make them",
        0.015,
        [Claim(f"n = {n}, k = {k}", 1.0, functools.partial(_bytes_over_optimum, n, k), "times") for n, k in CLUSTERS],
    )
    yield Experiment(
        "What CPU machines gain over all-reduce",
        f"{PAPER}, section 4.1: (n^2 + k n - 2 k) / n^2 times; figure 13",
        f"{setup}; all-reduce is k = 0",
        "simulator of links",
        ALIKE,
        [
            Claim(
                f"n = {n}, k = {k}",
                optimum_s(n, 0, nbytes) / optimum_s(n, k, nbytes) - 1,
                functools.partial(_gain_over_none_apart, n, k),
            )
            for n, k in CLUSTERS
            if k and (n, 0) in CLUSTERS
        ],
    )
    n, k = REAL_NODES, REAL_APART
    formula = {apart: optimum_s(n, apart, REAL_BYTES, REAL_BYTES_PER_S) for apart in (0, k)}
    yield Experiment(
        MEASURED,
        f"{PAPER}, section 4.1, the optimum by formula",
        f"{n} GPU machines with a worker and a server each, and {k} CPU machines or none; 12 MB, 0.05 Gbit/s a host; `benchmarks/cpu_machines.py`",
        "real processes on network namespaces of this machine, measured",
        ALIKE,
        [
            Claim(f"n = {n}, k = {k}, over k = 0", formula[0] / formula[k] - 1, _as_root(functools.partial(_real_gain, n, k))),
            *(
                Claim(f"n = {n}, k = {apart}", formula[apart] * 1e3, _as_root(functools.partial(_real_ms, n, apart)), "ms")
                for apart in (0, k)
            ),
        ],
        "it needs root; three workers and up to six servers share the cores of this machine, which others use too, and a part is answered when all "
        "of it has come",
    )
    yield Experiment(
        "BytePS's own hash (mixed mode) on the same exchange",
        f"{PAPER}, section 4.1; the public code's BYTEPS_ENABLE_MIXED_MODE",
        setup,
        "simulator of links",
        ALIKE,
        [
            Claim(f"n = {n}, k = {k}", optimum_s(n, k, nbytes) * 1e3, functools.partial(_exchange_ms, n, k, "mixed"), "ms")
            for n, k in CLUSTERS
        ],
        "a hash places partitions without their sizes and without what a server already has; psgc's placement (the first table) balances them",
    )
    yield Experiment(
        "Bytes within a machine",
        f"{PAPER}, section 4.2 and figures 7, 8 and 14",
        "8 GPUs, M bytes of gradients; counted in the programs that ranks run, as rings",
        "counted",
        0.0,
        [
            Claim(
                "PCIe, all-reduce over 8 GPUs (switch size 8): bytes that leave a switch, over M",
                7 / 4,
                lambda: bytes_between_switches(8),
                "times",
            ),
            Claim("PCIe, CPU-assisted (switch size 4): the same", 1.0, lambda: bytes_between_switches(4), "times"),
            Claim("NVLink, roots 2 and 3: share of M that they push", 1.0, lambda: pushed_share(ROOTS), "times"),
            Claim(
                "NVLink: share of M that the GPUs behind the network's switch push", 0.0, lambda: pushed_share([0, 1]), "times", "at most"
            ),
        ],
    )
    sizes = (("whole tensors", WHOLE), ("partitions of 64 MB", 64 * MEGABYTE), ("partitions of 64 KiB", MEGABYTE / 16))
    yield Experiment(
        "Partitions of 4 MB",
        f"{PAPER}, sections 3.2 and 5 (no curve is published as numbers: only that 4 MB is best is claimed)",
        "8 GPU machines with NVLink, 8 CPU machines, 100 Gbit/s; gains in iterations a second",
        "simulator",
        1e-3,
        [
            Claim(f"{job.model}: 4 MB over {what}", 0.0, functools.partial(_partition_gain, job, numel), "gain", "at least")
            for what, numel in sizes
            for job in JOBS
        ],
        "a job whose exchange hides behind backward does not see the partitions' size",
    )
    yield Experiment(
        "The headline",
        f"{PAPER}, abstract and section 7: 256 GPUs",
        "32 machines of 8 V100, NVLink, 100 Gbit/s, 32 CPU machines; the most of six jobs",
        "simulator",
        0.25,
        [
            Claim(
                "up to 84 % faster than all-reduce",
                0.84,
                lambda: _largest_gain_over_all_reduce(32),
                reason="the six models are not the paper's; tensor by tensor, a ring of 32 nodes pays 62 messages of 20 us each time, which takes the "
                "gain beyond the 94 % that the formula, without latency, allows",
            ),
            Claim(
                "up to 245 % faster than a parameter server",
                2.45,
                None,
                reason="the rival was MXNet's own parameter server; its overheads are not in any model here",
            ),
            Claim(
                "credit (BYTEPS_SCHEDULING_CREDIT): the curve",
                0.0,
                None,
                reason="the simulator sends by priority and has no credit; no curve is published as numbers",
            ),
        ],
    )
