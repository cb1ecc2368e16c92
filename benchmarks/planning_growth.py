"""How the search's time grows with tensors and nodes, and what the whole command takes. ``planning.py --growth`` prints it; ``--plot`` draws it."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from psgc.plan.inputs.cluster import load_cluster
from psgc.plan.inputs.profile import V100_CODECS, Profile, TensorProfile
from psgc.plan.methods.registry import METHODS
from psgc.plan.model.problem import Problem, codec_costs

REPEATS: Final = 5
CODEC: Final = "efsignsgd"
TENSORS: Final = (10, 100, 1000, 10_000)
NODES: Final = (8, 64, 1024)  # of eight GPUs
CLUSTER: Final = """name = "{bed}, {nodes} nodes"
nodes = {nodes}
gpus_per_node = 8
intra = {{gbps = {intra.gbps}, latency_us = {intra.latency_us}, kind = "{intra.kind}"}}
inter = {{gbps = {inter.gbps}, latency_us = {inter.latency_us}, kind = "{inter.kind}"}}
"""


@dataclass(frozen=True, slots=True)
class Point:
    """What planning took. search_ms: processor time of the search in a process that has planned before, median; command_s: wall time of `psgc plan`,
    from its start to its end, and command_cpu_s its processor time; both 0 if it was not run."""

    bed: str
    tensors: int
    nodes: int
    search_ms: float
    command_s: float = 0.0
    command_cpu_s: float = 0.0


def made_up(tensors: int) -> Profile:
    """Sizes over four orders of magnitude, ready at random within 200 ms."""
    rng = np.random.default_rng(tensors)
    numel = np.ceil(10 ** rng.uniform(2, 6.5, tensors))
    ready = np.cumsum(rng.exponential(2e5 / tensors, tensors))
    specs = tuple(TensorProfile(f"t{at}", int(n), float(us - ready[0])) for at, (n, us) in enumerate(zip(numel, ready, strict=True)))
    return Profile(f"made up, {tensors}", specs, codecs=V100_CODECS)


def grown(bed: str, tensors: int, nodes: int, whole: bool = False) -> Point:
    """Plan for a made-up model on ``nodes`` nodes of a testbed. whole: run the command, too."""
    profile, cluster = made_up(tensors), replace(load_cluster(bed), nodes=nodes)
    problem = Problem(profile, cluster, codec_costs(CODEC, profile, cluster.gpus))
    METHODS["psgc"](problem)
    took = []
    for _ in range(REPEATS):
        began = time.process_time()
        METHODS["psgc"](problem)
        took.append(1e3 * (time.process_time() - began))
    return Point(bed, tensors, nodes, statistics.median(took), *(command(bed, tensors, nodes) if whole else (0.0, 0.0)))


def command(bed: str, tensors: int, nodes: int) -> tuple[float, float]:
    """Wall and processor time, in s, of `psgc plan` in a process of its own, interpreter and imports included. It must have found a plan."""
    profile, cluster = made_up(tensors), load_cluster(bed)
    with tempfile.TemporaryDirectory() as folder:
        rows = "".join(f"{tensor.name},{tensor.numel},{tensor.ready_us}\n" for tensor in profile.tensors)
        (Path(folder) / "profile.csv").write_text(f"name,numel,ready_us\n{rows}")
        (Path(folder) / "cluster.toml").write_text(CLUSTER.format(bed=bed, nodes=nodes, intra=cluster.intra, inter=cluster.inter))
        words = [sys.executable, "-m", "psgc.launch", "plan", "--profile", "profile.csv", "--cluster", "cluster.toml", "--force", "--json"]
        before, began = os.times(), time.monotonic()
        done = subprocess.run([*words, "-o", "plan.json"], cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
        wall, after = time.monotonic() - began, os.times()
        assert json.loads(done.stdout)["buckets"], "a plan"
    return wall, after.children_user + after.children_system - before.children_user - before.children_system


def growth(beds: Sequence[str], tensors: Sequence[int] = TENSORS, nodes: Sequence[int] = NODES) -> list[Point]:
    """All of them; the command for the largest of both."""
    return [grown(bed, t, n, whole=(t, n) == (max(tensors), max(nodes))) for bed in beds for t in tensors for n in nodes]


def rows(points: Sequence[Point]) -> list[list[str]]:
    """One for each number of tensors and nodes, with a column for each testbed, and one for its command."""
    beds = list(dict.fromkeys(point.bed for point in points))
    by_size = {(p.tensors, p.nodes, p.bed): p for p in points}
    sizes = list(dict.fromkeys((p.tensors, p.nodes) for p in points))
    return [
        [
            f"{tensors:,}", f"{nodes:,} x 8",
            *(f"{by_size[tensors, nodes, bed].search_ms:.1f}" for bed in beds),
            *(f"{p.command_s:.1f} ({p.command_cpu_s:.1f})" if (p := by_size[tensors, nodes, bed]).command_s else "" for bed in beds),
        ]
        for tensors, nodes in sizes
    ]  # fmt: skip


def draw(points: Sequence[Point], path: Path) -> None:
    """The search's time over tensors, a line for each testbed and number of nodes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for bed in dict.fromkeys(point.bed for point in points):
        for nodes in dict.fromkeys(point.nodes for point in points):
            line = [(p.tensors, p.search_ms) for p in points if (p.bed, p.nodes) == (bed, nodes)]
            panel.plot(
                *zip(*line, strict=True), marker="o", label=f"{bed}, {nodes:,} x 8 GPUs", linestyle="-" if bed.endswith("nvlink") else "--"
            )
    panel.set(xscale="log", yscale="log", xlabel="tensors", ylabel="search, ms of processor time", title="Planning at size")
    panel.legend(fontsize="small")
    figure.savefig(path)
