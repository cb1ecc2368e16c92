"""What a start, a step, a server's death and a new plan take with 16 to 1,024 nodes, and an exchange with up to 10,000 learners around a syncer: simulated, and
the simulation held against real jobs of 2, 4, 8 and 16 workers of this machine.

    python benchmarks/scale.py --results FILE [--real 2,4,8,16] [--nodes 16,64,256,1024] [--gbps 10] [--latency-us 50] [--cores 8]
                               [--rounds 1] [--ghosts 8,16,64,256,1024] [--report]
                               [--plot FILE] [--parameters 10e6] [--every-s 600]

The model (``scale_model.py``) is one of threads that share cores and messages that share links; that all processes of the real jobs share this machine's
cores is told to it like anything else. Its costs are processor times, measured in the two smallest real jobs, and for each kind of event one constant: what
processor times do not explain of its wall time in these jobs. The larger jobs are predicted from these (``scale_jobs.py`` runs them); what
is simulated beyond has its costs from the smallest and the largest, and what a member costs the scheduler from
``ghosts.py`` at the nearest size: a scheduler that waits for sixteen processes to start spends more on waiting than on them. What other work
takes of the cores during a real job is measured, and the model has that much less.

--results: a line of JSON for each real job; jobs that are there are not run again, so that a run goes on where it was stopped. --rounds: real jobs of
each size, and runs of ghosts, one round after the other; every number of a size is the median of its runs. --report prints docs/results/scale.md: of
benchmarks/scale.jsonl. --plot draws what ``ghosts.py`` has measured (``ghosts_report.py``).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent))

import ghosts_report
from scale_jobs import EVENTS as DEATHS_AND_SWITCHES
from scale_jobs import LEARNER_BYTES, PART_KIB, Job, Learners, Used, run_job, run_learners
from scale_model import Costs, Phase, Rarely, Shape, Simulated, exchanges

from psgc.diagnostics.machine import machine
from psgc.layout import Declaration, TensorSpec
from psgc.layout.building import build_layout

NUMEL: Final = 1_000_000  # of a real job's model
STEPS: Final = 40
EXCHANGES: Final = 60
EVENTS: Final = ("start", "first step", "step", "recovery", "new plan")
LEAST_CORES: Final = 0.25  # of this machine's, which other work leaves
LARGE_LEARNERS: Final = (16, 1_000, 10_000)
LARGE_MIB: Final = (1, 64)
FLAT_FROM: Final = 64  # workers
GHOSTS: Final = {"none": (), "onebit": ("--part-kib", "1024", "--keys", "4")}  # payloads of 64 KiB, and of 32


def parts_of(numel: int, servers: int, workers: int) -> list[tuple[int, int]]:
    """As a job lays out four equal matrices: of each part its server and its bytes."""
    side = round(numel**0.5 / 2)
    specs = tuple(TensorSpec(f"{number}.weight", (side, side), "float32") for number in range(4))
    declaration = Declaration(
        "optimizer0", "plan", specs, "none", True, order=tuple(range(4))[::-1], used=tuple(range(4)), part_bytes=PART_KIB << 10
    )
    layout = build_layout(declaration, layout_id=1, servers=servers, workers=workers)
    return [(part.server, 4 * part.numel) for _, part in layout.parts()]


# costs


def line(small: float, large: float, few: int, more: int) -> tuple[float, float]:
    """What is there once, and what each worker adds; neither below 0."""
    each = max(0.0, (large - small) / (more - few))
    return max(0.0, small - few * each), each


def costs_of(small: Job, large: Job) -> Costs:
    """Of the two smallest jobs."""
    few, more = small.workers, large.workers
    parts = parts_of(NUMEL, 1, few)

    def role(phase: str, name: str) -> tuple[float, float]:
        return line(small.phases[phase].roles[name], large.phases[phase].roles[name], few, more)

    def worker(phase: str) -> float:
        return statistics.mean(job.phases[phase].roles["worker"] / job.workers for job in (small, large))

    scheduler, joining = role("start", "scheduler")
    server, admitting = role("start", "server")
    launcher, _ = role("start", "launcher")
    handled = [job.phases["steps"].roles["server"] / (STEPS * job.workers * len(parts)) for job in (small, large)]
    spent = [job.phases["steps"].roles["worker"] / (STEPS * job.workers) for job in (small, large)]
    own = statistics.mean((small.own_s, large.own_s))
    contribution = statistics.mean(handled)
    again, reached = line(*(job.restarted - contribution * job.workers * len(parts) for job in (small, large)), few, more)
    costs = Costs(
        again=again, reached=reached, launcher=launcher, worker=worker("start"), server=server, scheduler=scheduler,
        join=Phase(worker=0.0, scheduler=joining, server=admitting),
        first=Phase(worker=worker("first"), scheduler=role("first", "scheduler")[1], server=role("first", "server")[1]),
        replan=Phase(worker=0.0, scheduler=role("first", "scheduler")[1], server=role("first", "server")[1]),
        compute=own, send=max(0.0, statistics.mean(spent) - own) / (2 * len(parts)), contribution=contribution,
    )  # fmt: skip
    beyond = {event: statistics.mean(measured(job)[event] - predicted(job, costs)[event] for job in (small, large)) for event in EVENTS}
    return replace(
        costs, join=replace(costs.join, beyond=beyond["start"]), first=replace(costs.first, beyond=beyond["first step"]), step_beyond=beyond["step"],
        recovery_beyond=beyond["recovery"], replan=replace(costs.replan, beyond=beyond["new plan"] - beyond["step"]),
    )  # fmt: skip


def measured(job: Job) -> dict[str, float]:
    return dict(zip(EVENTS, (job.start, job.first, job.step, job.recovery, job.replan), strict=True))


def predicted(job: Job, costs: Costs) -> dict[str, float]:
    """The same, of the model, on as many of this machine's cores as others left."""
    own = os.cpu_count() or 1

    def shape(phase: str) -> Shape:
        cores = max(LEAST_CORES, own - job.others[phase])
        return Shape(workers=job.workers, servers=1, parts=parts_of(NUMEL, 1, job.workers), cores=cores, one_machine=True)

    return at_once(costs, shape("start"), shape("first"), shape("steps"), shape("recoveries"), shape("replans"))


def at_once(costs: Costs, start: Shape, first: Shape, steps: Shape, recoveries: Shape, replans: Shape) -> dict[str, float]:
    step = Simulated(steps, costs).step()
    return {
        "start": Simulated(start, costs).start(),
        "first step": Simulated(first, costs).first_step(),
        "step": step,
        "recovery": Simulated(recoveries, costs).recovery(),
        "new plan": (step if replans is steps else Simulated(replans, costs).step()) + Simulated(replans, costs).replan(),
    }


def among(costs: Costs, nodes: int, members: dict[int, float]) -> Costs:
    """With what a member costs the scheduler among about so many, in seconds by their number (``ghosts.py``): all that it does until the layout, in
    each phase. A server that admits a worker does what one does that has taken a dead one's place, whose costs no waiting is in."""
    scheduler = members[min(members, key=lambda size: abs(math.log(size / nodes)))]
    join = replace(costs.join, scheduler=scheduler, server=costs.reached)
    return replace(costs, join=join, first=replace(costs.first, scheduler=scheduler), replan=replace(costs.replan, scheduler=scheduler))


def large(costs: Costs, nodes: int, options: argparse.Namespace) -> dict[str, float]:
    """On so many machines, each with a worker and a server."""
    shape = Shape(
        workers=nodes, servers=nodes, parts=parts_of(int(options.parameters), nodes, nodes), cores=options.cores, gbps=options.gbps,
        latency_s=options.latency_us / 1e6,
    )  # fmt: skip
    return at_once(costs, *[shape] * 5)


def learners_costs(small: Learners, large_: Learners) -> tuple[float, float]:
    """Processor seconds of a learner and of the syncer for an exchange."""
    return statistics.mean((small.learner, large_.learner)), statistics.mean((small.syncer, large_.syncer))


def exchange_of(found: Learners, learner: float, syncer: float) -> float:
    """What the model says of these real learners' exchanges, which follow one another at once."""
    cores = max(LEAST_CORES, (os.cpu_count() or 1) - found.others)
    shape = Rarely(
        learners=found.learners, every_s=0.0, learner=learner, syncer=syncer, nbytes=LEARNER_BYTES, cores=cores, one_machine=True
    )
    return exchanges(shape, EXCHANGES)[0]


# real runs


def machines_of(path: Path) -> list[str]:
    return [json.loads(text)["machine"] for text in path.read_text().splitlines()]


def stored(path: Path) -> tuple[dict[int, list[Job]], dict[int, list[Learners]]]:
    """Those of a file of results, by size."""
    jobs: dict[int, list[Job]] = {}
    learners: dict[int, list[Learners]] = {}
    for text in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(text)
        if row["kind"] == "job":
            row["job"]["phases"] = {name: Used(**phase) for name, phase in row["job"]["phases"].items()}
            jobs.setdefault(row["job"]["workers"], []).append(Job(**row["job"]))
        elif row["kind"] == "learners":
            learners.setdefault(row["learners"]["learners"], []).append(Learners(**row["learners"]))
    return jobs, learners


def stored_ghosts(path: Path) -> dict[str, ghosts_report.Sizes]:
    return ghosts_report.ghosts_of(path.read_text().splitlines() if path.exists() else ())


def run_ghosts(path: Path, sizes: str, rounds: int) -> None:
    """Of each codec as many runs as are missing."""
    for number in range(1, rounds + 1):
        for codec, settings in GHOSTS.items():
            if path.exists() and ghosts_report.runs_of(path.read_text().splitlines())[codec] >= number:
                continue
            print(f"ghosts with {codec} ...", file=sys.stderr)
            command = [
                sys.executable,
                str(Path(__file__).with_name("ghosts.py")),
                "--workers",
                sizes,
                "--codec",
                codec,
                *settings,
                "--json",
            ]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(
                    f"ghosts.py ended with status {done.returncode}: {(done.stderr.strip() or 'it said nothing').splitlines()[-1]}"
                )
            with path.open("a") as file:
                print(json.dumps({"kind": "ghosts", "ghosts": json.loads(done.stdout), "machine": machine()}), file=file)


def run_missing(path: Path, sizes: Sequence[int], rounds: int = 1) -> tuple[dict[int, list[Job]], dict[int, list[Learners]]]:
    jobs, learners = stored(path)
    for number in range(1, rounds + 1):
        for size in sizes:
            for kind, found, run in (
                ("job", jobs, lambda n: run_job(n, STEPS, NUMEL)),
                ("learners", learners, lambda n: run_learners(n, EXCHANGES)),
            ):
                if len(found.setdefault(size, [])) < number:  # type: ignore[attr-defined]
                    print(f"{kind} of {size} ...", file=sys.stderr)
                    found[size].append(run(size))  # type: ignore[index]
                    with path.open("a") as file:
                        print(json.dumps({"kind": kind, kind: asdict(found[size][-1]), "machine": machine()}), file=file)  # type: ignore[index,call-overload]
    return jobs, learners


def median(of: Sequence[Any]) -> Any:
    """Of documents of the same form: every number is the median of those in its place."""
    if isinstance(of[0], dict):
        return {key: median([one[key] for one in of]) for key in of[0]}
    middle = statistics.median(of)
    return int(middle) if isinstance(of[0], int) else middle


def middle_job(of: Sequence[Job]) -> Job:
    found = median([asdict(one) for one in of])
    return Job(**{**found, "phases": {name: Used(**phase) for name, phase in found["phases"].items()}})


def middle_learners(of: Sequence[Learners]) -> Learners:
    return Learners(**median([asdict(one) for one in of]))


# what is printed


def seconds(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (names, ["---"] * len(names), *rows))


def validation(
    jobs: dict[int, Job], learners: dict[int, Learners], costs: Costs, own: tuple[float, float]
) -> tuple[str, str, dict[str, list[float]]]:
    """The table of predicted and measured, that of the learners, and the errors of jobs that no cost was taken from, by event."""
    rows, errors = [], {event: list[float]() for event in EVENTS}
    fitted = sorted(jobs)[:2]
    for workers, job in sorted(jobs.items()):
        guess, found, cells = predicted(job, costs), measured(job), []
        for event in EVENTS:
            error = guess[event] / found[event] - 1
            cells.append(f"{seconds(guess[event])} / {seconds(found[event])} ({error:+.0%})")
            if workers not in fitted:
                errors[event].append(error)
        rows.append([f"{workers}{', costs are from here' if workers in fitted else ''}", *cells, f"{max(job.others.values()):.1f}"])
    errors["exchange"] = []
    of_learners = []
    for count, found_ in sorted(learners.items()):
        guessed = exchange_of(found_, *own)
        error = guessed / found_.exchange - 1
        if count not in sorted(learners)[:2]:
            errors["exchange"].append(error)
        of_learners.append(
            [
                str(count),
                f"{1e3 * guessed:.1f} / {1e3 * found_.exchange:.1f} ({error:+.0%})",
                f"{1e6 * found_.syncer:.0f}",
                f"{found_.others:.1f}",
            ]
        )
    return (
        table(["workers", *(f"{event}, s" for event in EVENTS), "cores taken by others, at most"], rows),
        table(["learners", "an exchange, ms", "the syncer's processor time, us", "cores taken by others"], of_learners), errors,
    )  # fmt: skip


def around_syncer(learners: int, mib: int, own: tuple[float, float], options: argparse.Namespace) -> list[str]:
    """So many learners whose payloads have so many MiB each way; processor times are in proportion to those of LEARNER_BYTES."""
    times = mib * (1 << 20) / LEARNER_BYTES
    shape = Rarely(
        learners=learners, every_s=options.every_s, learner=own[0] * times, syncer=own[1] * times, nbytes=mib << 20, cores=options.cores,
        gbps=options.gbps, latency_s=options.latency_us / 1e6,
    )  # fmt: skip
    mean, longest, busy = exchanges(shape, 3)
    return [seconds(mean), seconds(longest), f"{busy:.1%}"]


PAGE: Final = Path(__file__).with_name("scale_page.md")  # with places for what is measured and simulated


def report(
    jobs: dict[int, Job],
    learners: dict[int, Learners],
    ghosts: dict[str, ghosts_report.Sizes],
    options: argparse.Namespace,
    machines: Sequence[str],
    rounds: int,
    runs: int,
) -> str:
    """The page. machines: those of the results. rounds: jobs of each size; runs: of ghosts."""
    few, more, *_ = sorted(jobs)
    members = ghosts_report.members_of(ghosts)
    most = max(members)
    own = learners_costs(*(learners[size] for size in sorted(learners)[:2]))
    first, second, errors = validation(jobs, learners, costs_of(jobs[few], jobs[more]), own)
    costs = costs_of(jobs[few], jobs[max(jobs)])  # what a member adds is known best by jobs that differ most
    at_scale = [
        [f"{nodes:,}", *map(seconds, large(among(costs, nodes, members), nodes, options).values())]
        for nodes in map(int, options.nodes.split(","))
    ]
    around = [[f"{count:,}", *(cell for mib in LARGE_MIB for cell in around_syncer(count, mib, own, options))] for count in LARGE_LEARNERS]
    events = [f"{event}, s" for event in EVENTS]
    exchanging = [f"{mib} MiB: {what}" for mib in LARGE_MIB for what in ("an exchange, s", "the longest", "the syncer's thread works")]
    return PAGE.read_text().format(
        numel=NUMEL, part=PART_KIB, steps=STEPS, events=DEATHS_AND_SWITCHES, rounds=rounds,
        ghosts=ghosts_report.measured(ghosts), flat=ghosts_report.flat(ghosts, FLAT_FROM), runs=runs,
        most=f"{most:,}", member=f"{1e3 * members[most]:.2f}",
        machines="; ".join(sorted(set(machines))), jobs=first, learners=second,
        worst="; ".join(f"{event} {max(each, key=abs):+.0%}" for event, each in errors.items() if each) or "none was predicted", cores=options.cores,
        gbps=options.gbps, latency=options.latency_us, parameters=options.parameters / 1e6, nodes=table(["nodes", *events], at_scale), every=options.every_s,
        around=table(["learners", *exchanging], around),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--real", default="2,4,8,16", help="workers of the real jobs, and real learners; none: those in the file")
    parser.add_argument("--rounds", type=int, default=1, help="real jobs of each size, and runs of ghosts.py (default: 1)")
    parser.add_argument("--ghosts", default="8,16,64,256,1024", help="members of the runs of ghosts.py, once there are real jobs")
    parser.add_argument("--nodes", default="16,64,256,1024")
    parser.add_argument("--gbps", type=float, default=10.0)
    parser.add_argument("--latency-us", type=float, default=50.0)
    parser.add_argument("--cores", type=float, default=8.0, help="of each node")
    parser.add_argument("--parameters", type=float, default=10e6)
    parser.add_argument("--every-s", type=float, default=600.0, help="that a learner trains between two exchanges")
    parser.add_argument("--report", action="store_true", help="no real job is run")
    parser.add_argument("--plot", type=Path, help="draw what servers and the scheduler do for so many members into this file, .svg or .png")
    options = parser.parse_args()
    try:
        sizes = [] if options.report else [int(size) for size in options.real.split(",") if size.strip()]
        ran, exchanged = run_missing(options.results, sizes, options.rounds)
        if not options.report:
            run_ghosts(options.results, options.ghosts, options.rounds)
    except RuntimeError as error:
        sys.exit(f"scale: a real job failed: {error}")
    jobs = {size: middle_job(of) for size, of in ran.items()}
    learners = {size: middle_learners(of) for size, of in exchanged.items()}
    if len(jobs) < 2 or len(learners) < 2:
        sys.exit(f"scale: {options.results} has {len(jobs)} real jobs and {len(learners)} of learners; costs need two of each: --real 2,4")
    ghosts = stored_ghosts(options.results)
    if not ghosts_report.members_of(ghosts):
        sys.exit(f"scale: {options.results} has no run of ghosts.py, from which the scheduler's costs are taken: start it without --report")
    each = min(map(len, ran.values()))
    runs = min(ghosts_report.runs_of(options.results.read_text().splitlines()).values())
    if options.plot:
        ghosts_report.draw(ghosts, options.plot)
    print(report(jobs, learners, ghosts, options, machines_of(options.results), each, runs), end="")


if __name__ == "__main__":
    main()
