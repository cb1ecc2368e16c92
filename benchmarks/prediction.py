"""Iterations that the planner's model predicts, beside those of real jobs on the testbed: 24 cells.  Needs root, as the testbed does.

    python benchmarks/prediction.py [--out rows.jsonl] [--cells 'int8.*4 workers'] [--profile PROFILE] [--json]

Takes a profile of the demo's GPT with ``psgc profile`` (as many workers at once as the job has, so that they share this machine as there);
then, for each cell, runs ``examples/train_gpt.py`` over hosts and simulates the layout that this job says it used. The model's computation is
timed again before and after each job, by the same command, and the mean is what is predicted with: a machine's speed changes from minute to
minute. No constant is fitted to what is then measured. A cell whose computation drifted by more than 5 %, or whose iterations' interquartile
range is more than 10 % of their median, is run once more, and of the two the steadier counts. ``--out`` keeps each cell when it is done;
the same command goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

from shared_cores import problem_for

from psgc.diagnostics.machine import machine
from psgc.launch.tables import print_table
from psgc.plan.inputs.profile import Profile, load_profile
from psgc.plan.methods.bound import lower_bounds
from psgc.plan.model.plan import UNCOMPRESSED
from psgc.plan.model.problem import Problem, simulate
from psgc.plan.planfile.reading import load_plan

BENCHMARKS: Final = Path(__file__).parent
SCRIPT: Final = BENCHMARKS.parent / "examples" / "train_gpt.py"
UNLIMITED: Final = "unlimited"
WARM_UP: Final = 4  # iterations that declare, compile and fill caches
LEAST_STEPS, MOST_STEPS = 10, 40
RUN_S: Final = 20.0  # a job trains about so long
SMALL_BYTES: Final = "131072"  # of parts and fused buckets: 18 buckets, up to 51 parts
STEADY_DRIFT, STEADY_RANGE = 0.05, 0.10


class Cell(NamedTuple):
    """A job. gbps: of every host's link, each way; None: no limit. beside: servers run on the workers' hosts, else each has a host of its
    own. delay_ms: one way, between any two hosts."""

    gbps: float | None
    codec: str
    workers: int = 2
    servers: int = 1
    beside: bool = False
    delay_ms: float = 0.0
    small_parts: bool = False

    @property
    def title(self) -> str:
        link = UNLIMITED if self.gbps is None else f"{self.gbps:g} Gbit/s"
        servers = f"{self.servers} server{'s' * (self.servers > 1)}{' beside' * self.beside}"
        return ", ".join(
            [link, self.codec, f"{self.workers} workers", servers]
            + [f"{self.delay_ms:g} ms"] * (self.delay_ms > 0)
            + ["small parts"] * self.small_parts
        )

    @property
    def hosts(self) -> int:
        return self.workers + (0 if self.beside else self.servers)

    @property
    def environment(self) -> dict[str, str]:
        """Of the job."""
        parts = {"PSGC_PART_BYTES": SMALL_BYTES, "PSGC_FUSE_BYTES": SMALL_BYTES} if self.small_parts else {}
        return {"PSGC_CODEC": self.codec, **parts}


CELLS: Final = (
    *(Cell(gbps, codec) for gbps in (0.1, 1.0, None) for codec in ("none", "bf16", "int8", "onebit")),
    Cell(0.1, "int8", small_parts=True),
    Cell(1.0, "none", small_parts=True),
    Cell(1.0, "onebit", small_parts=True),
    Cell(None, "bf16", small_parts=True),
    Cell(0.1, "none", delay_ms=20.0),
    Cell(1.0, "int8", delay_ms=20.0),
    Cell(1.0, "none", delay_ms=20.0, small_parts=True),
    Cell(0.1, "none", workers=4),
    Cell(1.0, "int8", workers=4, servers=2),
    Cell(0.1, "onebit", workers=4, servers=2),
    Cell(0.1, "none", servers=2, beside=True),
    Cell(1.0, "bf16", servers=2, beside=True),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One cell. Times of a whole iteration, in milliseconds. bound_ms: below which no plan with these buckets can come, by the model of hosts
    with cores of their own and the quicker of the two timings of the model's computation; error: of the prediction, as a share of what was
    measured; others: the share of this machine's cores that processes other than the job's took meanwhile, which the prediction knows nothing of;
    drift: how much longer the model's computation took after the job than before it, or before it than after it; runs: how often the cell was
    measured."""

    cell: str
    predicted_ms: float
    measured_ms: float
    bound_ms: float
    iqr_ms: float
    iterations: int
    error: float
    others: float
    drift: float
    runs: int = 1

    @property
    def steady(self) -> bool:
        return self.drift <= STEADY_DRIFT and self.iqr_ms <= STEADY_RANGE * self.measured_ms

    @property
    def unsteadiness(self) -> float:
        """Of two runs the one with less counts, whatever its error."""
        return self.drift / STEADY_DRIFT + self.iqr_ms / self.measured_ms / STEADY_RANGE


class PredictionError(Exception):
    """What went wrong, in one line."""


def take_profile(path: Path, workers: int, codecs: Sequence[str]) -> None:
    """Have psgc measure the model's gradients; and, if there are codecs, what they and messages cost."""
    costs = ["--codecs", ",".join(dict.fromkeys([UNCOMPRESSED, *codecs])), "--links", "--transport", "tcp"] if codecs else ["--no-codecs"]
    flags = ["--script", "--workers", str(workers), *costs, "-o", str(path)]
    call([sys.executable, "-m", "psgc.launch", "profile", *flags, "--", sys.executable, str(SCRIPT), "--steps", "1000"], {})


def timed_again(profile: Profile, workers: int) -> Profile:
    """The same, with the model's times of now."""
    with tempfile.TemporaryDirectory(prefix="psgc-prediction-") as folder:
        path = Path(folder) / "profile.json"
        take_profile(path, workers, [])
        now = load_profile(str(path))
    return replace(profile, tensors=now.tensors, forward_us=now.forward_us)


class Timer:
    """Times the model's computation before and after each job, with as many workers as it has."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._workers = 0
        self._last = profile

    def begin(self, workers: int) -> None:
        """Before a job; nothing to do if the one before had as many workers."""
        if workers != self._workers:
            self._workers, self._last = workers, timed_again(self._profile, workers)

    def around(self) -> tuple[Profile, Profile]:
        """The profile with the times before what has been done since it was last timed, and with those after it."""
        before, self._last = self._last, timed_again(self._profile, self._workers)
        return before, self._last


def mean_of(one: Profile, other: Profile) -> Profile:
    ready_us = {tensor.name: tensor.ready_us for tensor in other.tensors}
    tensors = (replace(tensor, ready_us=(tensor.ready_us + ready_us[tensor.name]) / 2) for tensor in one.tensors)
    forward_us = ((one.forward_us or 0.0) + (other.forward_us or 0.0)) / 2
    return replace(one, tensors=tuple(sorted(tensors, key=lambda tensor: tensor.ready_us)), forward_us=forward_us)


def compute_us(profile: Profile) -> float:
    """Of an iteration without communication."""
    return (profile.forward_us or 0.0) + profile.backward_us


def drift_of(one: Profile, other: Profile) -> float:
    less, more = sorted(map(compute_us, (one, other)))
    return more / less - 1


def cell_problem(cell: Cell, profile: Profile, cores: int, *, apart: bool = False) -> Problem:
    """apart: as ``problem_for`` has it."""
    return problem_for(
        profile, cell.codec, cell.gbps, cores, workers=cell.workers, servers=cell.servers, beside=cell.beside, delay_ms=cell.delay_ms,
        apart=apart,
    )  # fmt: skip


def predict_ms(problem: Problem, layout: Path) -> float:
    """An iteration under that layout: what communication does not touch, and the simulated rest."""
    return ((problem.profile.forward_us or 0.0) + simulate(problem, load_plan(str(layout)).buckets).step_us) / 1e3


def bound_ms(problem: Problem, layout: Path) -> float:
    """What an iteration takes at least with that layout's buckets, whatever is done with them."""
    buckets = load_plan(str(layout)).buckets
    return ((problem.profile.forward_us or 0.0) + lower_bounds(problem, buckets, simulate(problem, buckets).step_us).given_us) / 1e3


def measure_ms(cell: Cell, steps: int, folder: Path) -> tuple[list[float], Path]:
    """Every iteration's time on the testbed after the first ones, and the file of the layout that was used."""
    times, layout = folder / "times.json", folder / "layout.json"
    server_hosts = 0 if cell.beside else cell.servers
    bed = [sys.executable, str(BENCHMARKS / "testbed.py"), "--hosts", str(cell.hosts), "--job", "--servers", str(cell.servers)]
    bed += ["--server-hosts", str(server_hosts), "--delay-ms", str(cell.delay_ms)]
    bed += [] if cell.gbps is None else ["--gbps", str(cell.gbps)]
    job = [sys.executable, str(BENCHMARKS / "timed.py"), str(times), str(SCRIPT), "--steps", str(steps)]
    call([*bed, "--", *job], {**cell.environment, "PSGC_LAYOUT_OUT": str(layout)})
    ends = json.loads(times.read_text())
    return [(later - earlier) * 1e3 for earlier, later in pairwise(ends[WARM_UP:])], layout


def steps_for(cell: Cell, profile: Profile) -> int:
    """As many as take about RUN_S without compression, within bounds."""
    sent_s = 0.0 if cell.gbps is None else cell.workers * profile.numel * 32 / (cell.gbps * 1e9) / cell.servers
    iteration_s = ((profile.forward_us or 0.0) + profile.backward_us) * 1e-6 + 2 * sent_s
    return WARM_UP + 1 + max(LEAST_STEPS, min(MOST_STEPS, round(RUN_S / iteration_s)))


def measure(cell: Cell, profile: Profile, timer: Timer) -> Row:
    """Measure one job, and predict it."""
    cores = len(os.sched_getaffinity(0))
    timer.begin(cell.workers)
    with tempfile.TemporaryDirectory(prefix="psgc-prediction-") as folder:
        before = busy_s()
        times, layout = measure_ms(cell, steps_for(cell, profile), Path(folder))
        others = others_share(before, busy_s())
        around = timer.around()
        predicted = predict_ms(cell_problem(cell, mean_of(*around), cores), layout)
        bound = bound_ms(cell_problem(cell, min(around, key=compute_us), cores, apart=True), layout)
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return Row(cell.title, predicted, median, bound, high - low, len(times), predicted / median - 1, others, drift_of(*around))


def row(cell: Cell, profile: Profile, timer: Timer) -> Row:
    """A cell; measured twice if the machine was not steady the first time."""
    first = measure(cell, profile, timer)
    if first.steady:
        return first
    return replace(min(first, measure(cell, profile, timer), key=lambda run: run.unsteadiness), runs=2)


class Busy(NamedTuple):
    """Seconds of cores so far: at work, altogether, and at work for commands of ours that have ended."""

    working: float
    passed: float
    ours: float


def busy_s() -> Busy:
    fields = [int(field) / os.sysconf("SC_CLK_TCK") for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = fields[3] + fields[4]
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Busy(sum(fields) - idle, sum(fields), children.ru_utime + children.ru_stime)


def others_share(before: Busy, after: Busy) -> float:
    """Of the cores, between two moments."""
    working, passed, ours = (later - earlier for earlier, later in zip(before, after, strict=True))
    return max(0.0, working - ours) / passed


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """Of the errors' sizes, median and largest; and how far the measured iteration that is shortest beside its bound is above it."""
    sizes = [abs(row.error) for row in rows]
    nearest = min(row.measured_ms / row.bound_ms for row in rows) - 1
    return {"median_error": statistics.median(sizes), "worst_error": max(sizes), "least_above_bound": nearest}


def call(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Run a command of ours. Raises PredictionError with its last words."""
    done = subprocess.run(argv, env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise PredictionError(f"{Path(argv[1]).name}: {(done.stdout.strip().splitlines() or [f'status {done.returncode}'])[-1]}")


def tell(rows: Sequence[Row], hardware: str) -> None:
    body = [
        [
            row.cell, f"{row.predicted_ms:,.0f}", f"{row.measured_ms:,.0f}", f"{row.bound_ms:,.0f}", f"{row.iqr_ms:,.0f}", str(row.iterations),
            f"{row.error:+.1%}", f"{row.others:.0%}", f"{row.drift:.0%}", str(row.runs),
        ]
        for row in rows
    ]  # fmt: skip
    head = ["cell", "predicted ms", "measured ms", "bound ms", "iqr ms", "iterations", "error", "others", "drift", "runs"]
    print_table(head, body, title=hardware)
    found = summary(rows)
    print(
        f"error: median {found['median_error']:.1%}, worst {found['worst_error']:.1%}; the measured iteration nearest to its bound is "
        f"{found['least_above_bound']:+.1%} from it; others: what else ran on this machine, of its cores; drift: how far the model's own times "
        "before and after the job were apart; runs: a cell that was not steady was run twice"
    )


def done_before(out: Path | None) -> dict[str, Row]:
    """By title, what the file has; a line that was cut off when the run was interrupted does not count."""
    rows: dict[str, Row] = {}
    for line in out.read_text().splitlines() if out is not None and out.exists() else ():
        try:
            found = json.loads(line)
            rows[found["cell"]] = Row(**{field.name: found[field.name] for field in fields(Row)})
        except (ValueError, KeyError):
            continue
    return rows


def run(cells: Iterable[Cell], given: Path | None, out: Path | None) -> list[Row]:
    rows = done_before(out)
    left = [cell for cell in cells if cell.title not in rows]
    if left:
        with tempfile.TemporaryDirectory(prefix="psgc-prediction-") as folder:
            path = given or Path(folder) / "profile.json"
            if given is None:
                take_profile(path, left[0].workers, sorted({cell.codec for cell in CELLS}))
            profile = load_profile(str(path))
        timer = Timer(profile)
        for cell in left:
            rows[cell.title] = made = row(cell, profile, timer)
            if out is not None:
                with out.open("a") as file:
                    file.write(json.dumps(asdict(made)) + "\n")
            print(f"{made.cell}: predicted {made.predicted_ms:.0f}, measured {made.measured_ms:.0f} ms", file=sys.stderr)
    return [rows[cell.title] for cell in cells]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default="", metavar="REGEX", help="those whose title it is found in; default: all 24")
    parser.add_argument("--list", action="store_true", help="print the cells' titles and do nothing else")
    parser.add_argument("--profile", type=Path, help="as psgc profile --script --links wrote it; default: take one")
    parser.add_argument("--out", type=Path, help="JSON lines: a cell is added when it is done, and not measured again")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    options = parser.parse_args()
    try:
        cells = [cell for cell in CELLS if re.search(options.cells, cell.title)]
    except re.error as error:
        parser.error(f"--cells {options.cells}: {error}")
    if not cells:
        parser.error(f"--cells {options.cells}: no cell has it in its title; --list prints them")
    if options.list:
        print("\n".join(cell.title for cell in cells))
        return
    try:
        rows = run(cells, options.profile, options.out)
    except PredictionError as error:
        sys.exit(f"prediction: {error}")
    if options.json:
        document: dict[str, Any] = {"hardware": machine(), "rows": [asdict(r) for r in rows], **summary(rows)}
        print(json.dumps(document))
    else:
        tell(rows, machine())


if __name__ == "__main__":
    main()
