"""Our plans beside those of published systems, on the jobs that Espresso was published with, all by one timeline.

    python benchmarks/planning.py --traces DIR [--achieved SHARE] [--json]
    python benchmarks/planning.py --growth [--plot FILE]
    python benchmarks/planning.py --rivals 1000 --tensors 1-200 [--first-seed SEED] [--seconds S] [--out FILE]
    python benchmarks/planning.py --adversary 100 --tensors 5-400 [--attack S] [--seconds S] [--first-seed SEED] [--out FILE]
    python benchmarks/planning.py --orders 400 --tensors 1-200

The traces are the public artefact's (Wang et al., EuroSys 2023): tensors and when backward on a V100 had computed each. They are not part of
this repository; without them there is nothing to plan for, and the bench says so. Codec times are the built-in V100's, payloads are as
large as the paper's (a sparse value takes 8 bytes with its index). A trace has no forward; a gain is of whole iterations, with a forward that is
taken to last half as long as the trace's backward.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from psgc.plan.inputs.cluster import load_cluster
from psgc.plan.inputs.profile import V100_CODECS, load_profile
from psgc.plan.methods.baselines import byteps_compress, fp32, hipress, hitopkcomm
from psgc.plan.methods.bound import lower_bounds
from psgc.plan.methods.espresso import espresso
from psgc.plan.methods.registry import METHODS
from psgc.plan.methods.result import Found
from psgc.plan.model.plan import PlannedBucket
from psgc.plan.model.problem import Problem, codec_costs, simulate
from psgc.plan.model.timeline import define_timeline
from psgc.reproduce.espresso_jobs import BEDS, JOBS, PAPER_BYTES

CODECS = {
    name: next(job.codec for job in JOBS if job.model.replace("-", "_") == name)
    for name in ("vgg16", "resnet101", "ugatit", "bert_base", "gpt2", "lstm")
}
# What Espresso gains over others on 64 GPUs, in the paper's text; by the traces' names of the models.
PUBLISHED = {(job.model.replace("-", "_"), job.bed): job.gains for job in JOBS}
FORWARD = 0.5  # of the trace's backward
REPEATS = 5

Method = Callable[..., Found]


def hitopkcomm_at_its_best(problem: Problem, buckets: Sequence[PlannedBucket] | None = None) -> Found:
    """With the threshold, a power of two, that our timeline likes best."""
    largest = max(bucket.numel for bucket in buckets) if buckets else max(tensor.numel for tensor in problem.profile.tensors)
    tried = [hitopkcomm(problem, buckets, least_numel=1 << bits) for bits in range(largest.bit_length())]
    return min(tried, key=lambda found: found.step_us)


BASELINES: dict[str, Method] = {
    "fp32": fp32, "byteps-compress": byteps_compress, "hitopkcomm": hitopkcomm, "hitopkcomm, best threshold": hitopkcomm_at_its_best,
    "hipress": hipress, "hipress, fused": functools.partial(hipress, fused=True), "espresso": espresso,
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A trace on a test bed, and what every method makes of it: (step, with our buckets, select), in us."""

    model: str
    bed: str
    backward_us: float
    steps: dict[str, tuple[float, float, float]]
    given_bound_us: float
    any_bound_us: float
    bound_us: float

    def iteration(self, method: str, *, bucketed: bool = False) -> float:
        return FORWARD * self.backward_us + self.steps[method][bucketed]

    def gain(self, ours: str, over: str) -> float:
        """How much more a second ``ours`` trains."""
        return self.iteration(over) / self.iteration(ours) - 1

    def to_json(self) -> dict[str, Any]:
        methods = {
            name: {"step_ms": step / 1e3, "step_with_our_buckets_ms": bucketed / 1e3, "select_ms": select / 1e3}
            for name, (step, bucketed, select) in self.steps.items()
        }
        return {
            "model": self.model, "cluster": self.bed, "codec": CODECS[self.model], "backward_ms": self.backward_us / 1e3, "methods": methods,
            "lower_bound_ms": self.given_bound_us / 1e3, "lower_bound_any_bucketing_ms": self.any_bound_us / 1e3,
        }  # fmt: skip


def problem_of(model: str, bed: str, traces: Path, achieved: float) -> Problem:
    profile = replace(load_profile(str(traces / f"{model}.csv")), codecs=V100_CODECS)
    cluster = load_cluster(bed)
    cluster = replace(cluster, inter=replace(cluster.inter, gbps=achieved * cluster.inter.gbps))
    codec = codec_costs(CODECS[model], profile, cluster.gpus)
    return Problem(profile, cluster, replace(codec, bytes_per_element=PAPER_BYTES[CODECS[model]], pull_bytes_per_element=None))


def checked(problem: Problem, found: Found) -> Found:
    """A plan whose step is the definition's."""
    simulated = simulate(problem, found.buckets)
    if simulated.step_us != found.step_us or define_timeline(simulated.chains).step_us != found.step_us:
        sys.exit(f"planning: {problem.profile.model} on {problem.cluster.name}: a step of {found.step_us} us is not the timeline's")
    return found


def timed(method: Method, problem: Problem) -> tuple[Found, float]:
    """The plan, and the processor time that it took, in us: a busy machine changes that less than the time on the clock."""
    begun = time.process_time()
    found = method(problem)
    return found, (time.process_time() - begun) * 1e6


def measured(model: str, bed: str, traces: Path, achieved: float) -> Job:
    problem = problem_of(model, bed, traces, achieved)
    tries = [timed(METHODS["psgc"], problem) for _ in range(REPEATS)]
    ours = checked(problem, tries[0][0])
    begun = time.process_time()
    bounds = lower_bounds(problem, ours.buckets, ours.step_us)
    bound_us = (time.process_time() - begun) * 1e6
    steps = {"psgc": (ours.step_us, ours.step_us, statistics.median(us for _, us in tries))}
    for name, method in BASELINES.items():
        (found, us), bucketed = timed(method, problem), method(problem, ours.buckets)
        steps[name] = (found.step_us, bucketed.step_us, us)
    return Job(model, bed, problem.profile.backward_us, steps, bounds.given_us, bounds.any_us, bound_us)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(header) + " |"
    yield "|---" + "|--:" * (len(header) - 1) + "|"
    yield from ("| " + " | ".join(row) + " |" for row in rows)


def steps_table(jobs: Sequence[Job]) -> Iterator[str]:
    """Steps in ms, tensor by tensor / with the buckets of our plan."""
    methods = list(jobs[0].steps)
    rows = []
    for job in jobs:
        cells = [
            f"{step / 1e3:.1f}" if name == "psgc" else f"{step / 1e3:.1f} / {bucketed / 1e3:.1f}"
            for name, (step, bucketed, _) in job.steps.items()
        ]
        rows.append([f"{job.model} {CODECS[job.model]}, {job.bed.removeprefix('espresso-')}", f"{job.backward_us / 1e3:.1f}", *cells])
    return table(["step, ms", "backward", *methods], rows)


def selection_table(jobs: Sequence[Job]) -> Iterator[str]:
    rows = [
        [
            f"{job.model} {CODECS[job.model]}, {job.bed.removeprefix('espresso-')}", f"{job.steps['psgc'][2] / 1e3:.1f}",
            f"{job.steps['espresso'][2] / 1e3:.0f}", f"{job.steps['psgc'][0] / job.given_bound_us:.3f}",
            f"{job.steps['psgc'][0] / job.any_bound_us:.3f}", f"{job.steps['espresso'][0] / job.any_bound_us:.3f}", f"{job.bound_us / 1e3:.0f}",
        ]
        for job in jobs
    ]  # fmt: skip
    return table(
        [
            "",
            "psgc select, CPU ms",
            "espresso select, CPU ms",
            "psgc / bound",
            "psgc / bound of any buckets",
            "espresso / the same",
            "bounds, CPU ms",
        ],
        rows,
    )


def gains_table(jobs: Sequence[Job]) -> Iterator[str]:
    """Whole iterations: what the paper measured, and what both plans are predicted to gain over each."""
    rows = []
    for job in jobs:
        for over, paper in PUBLISHED.get((job.model, job.bed), {}).items():
            rows.append(
                [
                    f"{job.model} {CODECS[job.model]}, {job.bed.removeprefix('espresso-')}", over, f"{paper:+.0%}",
                    f"{job.gain('espresso', over):+.1%}", f"{job.gain('psgc', over):+.1%}",
                ]
            )  # fmt: skip
    return table(["", "over", "espresso, published", "espresso, predicted", "psgc, predicted"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, help="folder of the artefact's traces, as CSV: name, numel, ready_us")
    parser.add_argument(
        "--growth", action="store_true", help="time the search on made-up models of up to 10,000 tensors, and up to 1,024 nodes"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="with --growth: draw it, as PNG or SVG")
    parser.add_argument(
        "--rivals", type=int, metavar="JOBS", help="so many random jobs instead (planning_rivals.py), beside every rival's plan"
    )
    parser.add_argument(
        "--adversary",
        type=int,
        metavar="JOBS",
        help="attack our plans of so many random jobs (planning_adversary.py), each for --attack seconds",
    )
    parser.add_argument(
        "--attack", type=float, default=40.0, metavar="S", help="how long the adversary has for each job, in processor time"
    )
    parser.add_argument(
        "--orders", type=int, metavar="JOBS", help="what another order of tasks gains on so many random jobs (planning_order.py)"
    )
    parser.add_argument("--tensors", default="1-200", metavar="A-B", help="how many tensors the random jobs have")
    parser.add_argument("--first-seed", type=int, metavar="SEED", help="of the random jobs")
    parser.add_argument("--seconds", type=float, help="search each random job for so long")
    parser.add_argument("--out", type=Path, help="keep the random jobs' results in this file, and go on from it")
    parser.add_argument(
        "--achieved", type=float, default=1.0, help="what everybody gets of the links between nodes, as a share of line rate"
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    count = next((each for each in (arguments.adversary, arguments.rivals, arguments.orders) if each is not None), None)
    if count is not None:
        fewest, _, most = arguments.tensors.partition("-")
        if not (fewest.isdigit() and most.isdigit() and 1 <= int(fewest) <= int(most) and count > 0):
            sys.exit(f"planning: {count} jobs of --tensors {arguments.tensors}: expected a number of jobs, and a range as 1-200")
        given = {} if arguments.first_seed is None else {"first": arguments.first_seed}
        if arguments.adversary is not None:
            import planning_adversary  # beside this script

            rows = planning_adversary.run(count, int(fewest), int(most), arguments.out, arguments.attack, arguments.seconds, **given)
            print("\n".join(planning_adversary.summary(rows)))
            return
        if arguments.rivals is None:
            import planning_order  # beside this script

            print(planning_order.summary(count, int(fewest), int(most), arguments.seconds))
            return
        import planning_rivals  # beside this script

        rows = planning_rivals.run(arguments.rivals, int(fewest), int(most), arguments.out, arguments.seconds, **given)
        print("\n".join(planning_rivals.summary(rows)))
        return
    if arguments.growth:
        from planning_growth import draw, growth, rows

        points = growth(BEDS)
        print(
            "\n".join(table(["tensors", "nodes", *(f"{bed}, CPU ms" for bed in BEDS), *("command, s (CPU s)" for _ in BEDS)], rows(points)))
        )
        if arguments.plot is not None:
            draw(points, arguments.plot)
        return
    if arguments.traces is None:
        sys.exit("planning: give --traces, the folder of the artefact's traces as CSV, or --growth")
    missing = [model for model in CODECS if not (arguments.traces / f"{model}.csv").is_file()]
    if missing:
        sys.exit(f"planning: no trace of {', '.join(missing)} in {arguments.traces}; give --traces the artefact's, as CSV")
    METHODS["psgc"](problem_of("lstm", BEDS[0], arguments.traces, 1.0))  # compiles
    jobs = [measured(model, bed, arguments.traces, arguments.achieved) for bed in BEDS for model in CODECS]
    if arguments.json:
        print(json.dumps([job.to_json() for job in jobs], indent=1))
        return
    for made in (steps_table(jobs), selection_table(jobs), gains_table(jobs)):
        print("\n".join(made), end="\n\n")


if __name__ == "__main__":
    main()
