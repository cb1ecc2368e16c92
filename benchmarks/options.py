"""Options that workers run among themselves, on nodes of several workers: iterations predicted and measured on the testbed.  Needs root, as that does.

    python benchmarks/options.py [--nodes 2] [--per-node 2] [--gbps 0.1] [--steps 20] [--only int8]

Trains the demo's GPT by one plan after another: the buckets that a job makes by itself, all of them taking one option. "hierarchical" sums within the node
first. The prediction is the timeline's, with the model's computation timed before and after each job, as many workers at once as the job has; hosts share
this machine's cores, as in ``prediction.py``. Bytes are what a node's workers send over the node's link in an iteration, all of it counted by the
kernel, and what the option has to send.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parent))

from prediction import SCRIPT, WARM_UP, PredictionError, Timer, call, mean_of, take_profile
from shared_cores import on_cores

from psgc.diagnostics.machine import machine
from psgc.launch.tables import print_table
from psgc.plan.inputs.cluster import TCP_SHARE, Cluster, Link
from psgc.plan.inputs.profile import Profile, load_profile
from psgc.plan.model.options import OVER_SERVERS, Constraints, encodes, over_groups
from psgc.plan.model.plan import UNCOMPRESSED, Plan, PlannedBucket, plan_text
from psgc.plan.model.problem import Problem, codec_costs, simulate
from psgc.plan.planfile.reading import load_plan
from psgc.program.compile import compile_option
from psgc.program.ranks import Ranks
from psgc.program.steps import Exchange

BENCHMARKS: Final = Path(__file__).parent
TWICE: Final = ("comp@cpu", "flat.all_to_all.c", "decomp@cpu", "comp@cpu", "flat.all_gather.c", "decomp@cpu")
IN_LEVELS: Final = (
    "intra.reduce_scatter", "comp@cpu", "inter.all_to_all.c", "decomp@cpu", "comp@cpu", "inter.all_gather.c", "decomp@cpu", "intra.all_gather",
)  # fmt: skip
PLANS: Final = {
    "servers, none": (OVER_SERVERS[0], UNCOMPRESSED),
    "flat, none": (("flat.reduce_scatter", "flat.all_gather"), UNCOMPRESSED),
    "hierarchical, none": (("intra.reduce_scatter", "inter.reduce_scatter", "inter.all_gather", "intra.all_gather"), UNCOMPRESSED),
    "servers, int8": (OVER_SERVERS[1], "int8"),
    "flat, int8": (TWICE, "int8"),
    "hierarchical, int8": (IN_LEVELS, "int8"),
}


def buckets_of(folder: Path, workers: int) -> tuple[PlannedBucket, ...]:
    """Those that a job makes by itself."""
    layout = folder / "layout.json"
    run = [sys.executable, "-m", "psgc.launch", "run", "--workers", str(workers), "--layout-out", str(layout), "--"]
    call([*run, sys.executable, str(SCRIPT), "--steps", "1"], {})
    return load_plan(str(layout)).buckets


def planned(buckets: Sequence[PlannedBucket], option: tuple[str, ...], codec: str) -> tuple[PlannedBucket, ...]:
    whole = {"parts": 1, "part_numel": 0} if over_groups(option) else {}
    return tuple(replace(bucket, option=option, codec=codec, servers=(), **whole) for bucket in buckets)


def predict_ms(profile: Profile, buckets: Sequence[PlannedBucket], codec: str, nodes: int, per_node: int, gbps: float) -> float:
    loopback, cores = profile.links["loopback"], len(os.sched_getaffinity(0))
    inter = Link(gbps * TCP_SHARE, loopback.latency_us)
    cluster = Cluster("testbed", nodes, per_node, loopback, inter, servers=1, cores=cores, one_machine=True, over_tcp=True)
    problem = Problem(on_cores(profile), cluster, codec_costs(codec, profile, nodes * per_node), Constraints(servers=True))
    return ((profile.forward_us or 0.0) + simulate(problem, buckets).step_us) / 1e3


def leaving_bytes(buckets: Sequence[PlannedBucket], nodes: int, per_node: int) -> float:
    """What one node's workers have to send to others in an iteration, in the codec's bytes; of the busiest node."""
    ranks, sent = Ranks((per_node,) * nodes), [0.0] * nodes
    for number, bucket in enumerate(buckets):
        a_byte = 1.016 if encodes(bucket.option) else 4.0
        if not over_groups(bucket.option):
            sent = [one + per_node * bucket.numel * a_byte for one in sent]
            continue
        for rank, program in enumerate(compile_option(bucket.option, bucket.numel, ranks, number)):
            for one in (one for transfer in program.transfers for one in transfer.collectives):
                away = [index for index, member in enumerate(one.members) if ranks.node_of[member] != ranks.node_of[rank]]
                if isinstance(one, Exchange):
                    elements = sum((p.range[1] - p.range[0]) * p.payloads for index in away for p in one.sends[index])
                else:  # reduce_scatter sends each its slice, all_gather its own to each
                    own = one.members.index(rank)
                    spans = away if one.op == "reduce_scatter" else [own] * len(away)
                    elements = sum(one.cuts[index + 1] - one.cuts[index] for index in spans)
                sent[ranks.node_of[rank]] += elements * a_byte
    return max(sent)


def measure(plan: Path, nodes: int, per_node: int, gbps: float, steps: int, folder: Path) -> tuple[list[float], float]:
    """Every iteration's time after the first ones, and the bytes that the first node sent in all of them, by the kernel's count."""
    times, counted = folder / "times.json", folder / "counted"
    bed = [
        sys.executable,
        str(BENCHMARKS / "testbed.py"),
        "--hosts",
        str(nodes + 1),
        "--per-host",
        str(per_node),
        "--gbps",
        str(gbps),
        "--job",
    ]
    job = [sys.executable, str(BENCHMARKS / "timed.py"), str(times), str(SCRIPT), "--steps", str(steps)]
    call([*bed, "--", *job], {"PSGC_PLAN": str(plan), "TIMED_BYTES": str(counted)})
    ends = json.loads(times.read_text())
    sent = [int(line) for line in counted.read_text().split()]
    return [(later - earlier) * 1e3 for earlier, later in pairwise(ends[WARM_UP:])], (sent[-1] - sent[WARM_UP]) / (len(sent) - WARM_UP - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--per-node", type=int, default=2, help="workers of a node")
    parser.add_argument("--gbps", type=float, default=0.1, help="of each node's link")
    parser.add_argument("--steps", type=int, default=20, help="iterations that count")
    parser.add_argument("--only", default="", metavar="TEXT", help="plans whose name it is found in")
    given = parser.parse_args()
    rows = []
    try:
        with tempfile.TemporaryDirectory(prefix="psgc-options-") as name:
            folder, workers = Path(name), given.nodes * given.per_node
            take_profile(folder / "profile.json", workers, ["int8"])
            profile = load_profile(str(folder / "profile.json"))
            buckets, timer = buckets_of(folder, 2), Timer(profile)
            timer.begin(workers)
            for title, (option, codec) in PLANS.items():
                if given.only not in title:
                    continue
                mine, path = planned(buckets, option, codec), folder / "plan.json"
                path.write_text(plan_text(Plan("gpt", "", mine).to_json()))
                times, sent = measure(path, given.nodes, given.per_node, given.gbps, WARM_UP + 1 + given.steps, folder)
                predicted = predict_ms(mean_of(*timer.around()), mine, codec, given.nodes, given.per_node, given.gbps)
                low, median, high = statistics.quantiles(times, n=4, method="inclusive")
                needed = leaving_bytes(mine, given.nodes, given.per_node)
                rows.append([
                    title, f"{predicted:,.0f}", f"{median:,.0f}", f"{high - low:,.0f}", f"{predicted / median - 1:+.1%}", f"{sent / 1e6:.2f}",
                    f"{sent / needed:.3f}",
                ])  # fmt: skip
                print(" | ".join(rows[-1]), file=sys.stderr)
    except PredictionError as error:
        sys.exit(f"options: {error}")
    title = f"{given.nodes} nodes of {given.per_node}, {given.gbps:g} Gbit/s; {machine()}"
    print_table(["plan", "predicted ms", "measured ms", "iqr ms", "error", "MB leave a node", "of what is needed"], rows, title=title)


if __name__ == "__main__":
    main()
