"""Step times that the planner's model predicts, beside those of real jobs on the testbed, for the layouts that psgc runs by default.

    python benchmarks/prediction.py [--profile PROFILE] [--afresh] [--links 0.1,1,unlimited] [--codecs none,bf16,int8,onebit] [--json]

Takes a profile of the demo's GPT with ``psgc profile`` (as many workers at once as the jobs have, so that they share this machine as there),
then, for each link and codec, runs ``examples/train_gpt.py`` over hosts and simulates the layout that this job says it used. Nothing is
fitted to what is then measured. ``--afresh`` times the model's computation again before and after each job, by the same command, and takes the mean:
for a machine whose speed changes from minute to minute. Settings such as PSGC_PART_BYTES are the jobs', too. Needs root, as the testbed does.

Where hosts share this machine's cores, so do backward, codecs, server and TCP; ``SharedCores`` owns what the planner's model of real hosts
does not have to know of that.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

from psgc.launch.tables import print_table
from psgc.machine import machine
from psgc.plan.inputs.cluster import Cluster, Link
from psgc.plan.inputs.profile import Profile, load_profile
from psgc.plan.model.costs import CPU, GPU, RECEIVE, SEND, SERVER, CodecCosts
from psgc.plan.model.options import Constraints, Option
from psgc.plan.model.plan import UNCOMPRESSED, load_plan
from psgc.plan.model.problem import Problem, codec_costs, simulate

BENCHMARKS: Final = Path(__file__).parent
SCRIPT: Final = BENCHMARKS.parent / "examples" / "train_gpt.py"
UNLIMITED: Final = "unlimited"
TCP_SHARE: Final = 1448 / 1514  # of an Ethernet frame's bytes, which tbf counts, those that TCP carries
WARM_UP: Final = 4  # iterations that declare, compile and fill caches
LEAST_STEPS, MOST_STEPS = 10, 40
UNLIMITED_GBPS: Final = 1000.0  # a link that nothing waits for: cores do the moving
RUN_S: Final = 20.0  # a job trains about so long


@dataclass(frozen=True, slots=True)
class Row:
    """One job. Times of a whole iteration, in milliseconds. error: of the prediction, as a share of what was measured; others: the
    share of this machine's cores that processes other than the job's took meanwhile, which the prediction knows nothing of; drift: with
    ``--afresh``, how much longer the model's computation took after the job than before it, or before it than after it."""

    link: str
    codec: str
    predicted_ms: float
    measured_ms: float
    iqr_ms: float
    iterations: int
    error: float
    others: float
    drift: float = 0.0


@dataclass(frozen=True)
class SharedCores(Problem):
    """A job whose processes all share ``cores``, and whose model is trained on them: what communication computes delays backward.

    So it is done where backward is done: each worker's codecs and copies, and its share of what the server and the messages take. A
    message keeps a core at each end busy for as long as loopback takes for its bytes, and one for half of ``next_part_us``.
    """

    cores: int = 1

    def part_tasks(self, option: Option, numel: float, codec: CodecCosts) -> list[tuple[str, int, float]]:
        return [made for task in super().part_tasks(option, numel, codec) for made in self._on_cores(*task)]

    def _on_cores(self, action: str, resource: int, us: float) -> list[tuple[str, int, float]]:
        workers = self.cluster.gpus
        if resource == CPU:
            return [(action, GPU, us * max(1.0, workers / self.cores))]
        if resource == SERVER:  # of its one core's time each of the others gives its part
            return [(action, GPU, us / self.cores), (action, SERVER, us - us / self.cores)]
        if resource in (SEND, RECEIVE):
            return [(action, GPU, self._message_us(us) * workers / self.cores), (action, resource, us)]
        return [(action, resource, us)]

    def _message_us(self, travel_us: float) -> float:
        """What cores do for a worker's message that takes so long on the link that the server shares out."""
        size = travel_us / (self.cluster.gpus * self.cluster.inter.us_per_byte)
        return self.profile.overheads.get("next_part_us", 0.0) / 2 + 2 * size * self.cluster.intra.us_per_byte


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
    """Times the model's computation before and after each job."""

    def __init__(self, profile: Profile, workers: int) -> None:
        self._profile, self._workers = profile, workers
        self._last = timed_again(profile, workers)

    def around(self) -> tuple[Profile, float]:
        """The profile with the mean of the times before and after what has been done since it was last timed, and the drift."""
        before, self._last = self._last, timed_again(self._profile, self._workers)
        return mean_of(before, self._last), drift_of(before, self._last)


def mean_of(one: Profile, other: Profile) -> Profile:
    ready_us = {tensor.name: tensor.ready_us for tensor in other.tensors}
    tensors = (replace(tensor, ready_us=(tensor.ready_us + ready_us[tensor.name]) / 2) for tensor in one.tensors)
    forward_us = ((one.forward_us or 0.0) + (other.forward_us or 0.0)) / 2
    return replace(one, tensors=tuple(sorted(tensors, key=lambda tensor: tensor.ready_us)), forward_us=forward_us)


def drift_of(one: Profile, other: Profile) -> float:
    times = sorted((profile.forward_us or 0.0) + profile.backward_us for profile in (one, other))
    return times[1] / times[0] - 1


def problem_for(gbps: float | None, codec: str, workers: int, profile: Profile, cores: int) -> Problem:
    """The testbed's job: a worker a host, one server, all links alike. Without a limit what TCP on this machine does is one."""
    loopback = profile.links["loopback"]
    shared = cores < workers + 1
    most = UNLIMITED_GBPS if shared else loopback.gbps
    inter = Link(most if gbps is None else min(gbps * TCP_SHARE, most), loopback.latency_us)
    cluster, costs = Cluster("testbed", workers, 1, loopback, inter, servers=1), codec_costs(codec, profile, workers)
    constraints = Constraints(servers=True)
    return SharedCores(profile, cluster, costs, constraints, cores=cores) if shared else Problem(profile, cluster, costs, constraints)


def predict_ms(problem: Problem, layout: Path) -> float:
    """An iteration under that layout: what communication does not touch, and the simulated rest."""
    return ((problem.profile.forward_us or 0.0) + simulate(problem, load_plan(str(layout)).buckets).step_us) / 1e3


def measure_ms(gbps: float | None, codec: str, workers: int, steps: int, folder: Path) -> tuple[list[float], Path]:
    """Every iteration's time on the testbed after the first ones, and the file of the layout that was used."""
    times, layout = folder / "times.json", folder / "layout.json"
    bed = [sys.executable, str(BENCHMARKS / "testbed.py"), "--hosts", str(workers + 1), "--job"]
    bed += [] if gbps is None else ["--gbps", str(gbps)]
    job = [sys.executable, str(BENCHMARKS / "timed.py"), str(times), str(SCRIPT), "--steps", str(steps)]
    call([*bed, "--", *job], {"PSGC_CODEC": codec, "PSGC_LAYOUT_OUT": str(layout)})
    ends = json.loads(times.read_text())
    return [(later - earlier) * 1e3 for earlier, later in pairwise(ends[WARM_UP:])], layout


def steps_for(gbps: float | None, workers: int, profile: Profile) -> int:
    """As many as take about RUN_S without compression, within bounds."""
    sent_s = 0.0 if gbps is None else workers * profile.numel * 32 / (gbps * 1e9)
    iteration_s = ((profile.forward_us or 0.0) + profile.backward_us) * 1e-6 + 2 * sent_s
    return WARM_UP + 1 + max(LEAST_STEPS, min(MOST_STEPS, round(RUN_S / iteration_s)))


def row(gbps: float | None, codec: str, workers: int, profile: Profile, timer: Timer | None = None) -> Row:
    """Measure one job, and predict it."""
    drift = 0.0
    with tempfile.TemporaryDirectory(prefix="psgc-prediction-") as folder:
        before = busy_s()
        times, layout = measure_ms(gbps, codec, workers, steps_for(gbps, workers, profile), Path(folder))
        others = others_share(before, busy_s())
        if timer is not None:
            profile, drift = timer.around()
        predicted = predict_ms(problem_for(gbps, codec, workers, profile, len(os.sched_getaffinity(0))), layout)
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return Row(link_text(gbps), codec, predicted, median, high - low, len(times), predicted / median - 1, others, drift)


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
    """Of the errors' sizes, median and largest."""
    sizes = [abs(row.error) for row in rows]
    return {"median_error": statistics.median(sizes), "worst_error": max(sizes)}


def link_text(gbps: float | None) -> str:
    return UNLIMITED if gbps is None else f"{gbps:g} Gbit/s"


def read_link(text: str) -> float | None:
    return None if text == UNLIMITED else float(text)


def call(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Run a command of ours. Raises PredictionError with its last words."""
    done = subprocess.run(argv, env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise PredictionError(f"{Path(argv[1]).name}: {(done.stdout.strip().splitlines() or [f'status {done.returncode}'])[-1]}")


def tell(rows: Sequence[Row], profile: Profile) -> None:
    body = [
        [
            r.link,
            r.codec,
            f"{r.predicted_ms:,.0f}",
            f"{r.measured_ms:,.0f}",
            f"{r.iqr_ms:,.0f}",
            str(r.iterations),
            f"{r.error:+.1%}",
            f"{r.others:.0%}",
            f"{r.drift:.0%}",
        ]
        for r in rows
    ]
    print_table(
        ["link", "codec", "predicted ms", "measured ms", "iqr ms", "iterations", "error", "others", "drift"],
        body,
        title=profile.hardware or machine(),
    )
    found = summary(rows)
    print(
        f"error: median {found['median_error']:.1%}, worst {found['worst_error']:.1%}; others: what else ran on this machine, of its cores; "
        "drift: how far the model's own times before and after the job were apart, with --afresh"
    )


def run(options: argparse.Namespace) -> tuple[list[Row], Profile]:
    codecs = options.codecs.split(",")
    with tempfile.TemporaryDirectory(prefix="psgc-prediction-") as folder:
        path = options.profile or Path(folder) / "profile.json"
        if options.profile is None:
            take_profile(path, options.workers, codecs)
        profile = load_profile(str(path))
    timer = Timer(profile, options.workers) if options.afresh else None
    rows = []
    for gbps in map(read_link, options.links.split(",")):
        for codec in codecs:
            jobs = [row(gbps, codec, options.workers, profile, timer) for _ in range(options.repeats)]
            rows.append(min(jobs, key=lambda job: job.drift if timer else job.others))
            print(
                f"{rows[-1].link} {codec}: predicted {rows[-1].predicted_ms:.0f}, measured {rows[-1].measured_ms:.0f} ms", file=sys.stderr
            )
    return rows, profile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, help="as psgc profile --script --links wrote it; default: take one")
    parser.add_argument("--afresh", action="store_true", help="time the model's computation again before and after each job")
    parser.add_argument("--links", default=f"0.1,1,{UNLIMITED}", help="Gbit/s of every host's link, each way")
    parser.add_argument("--codecs", default="none,bf16,int8,onebit")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--repeats",
        type=int,
        default=1,
        help="jobs of each kind; the one beside which least else ran counts, with --afresh the one with the least drift",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    options = parser.parse_args()
    try:
        rows, profile = run(options)
    except PredictionError as error:
        sys.exit(f"prediction: {error}")
    if options.json:
        document: dict[str, Any] = {"hardware": profile.hardware, "rows": [asdict(r) for r in rows], **summary(rows)}
        print(json.dumps(document))
    else:
        tell(rows, profile)


if __name__ == "__main__":
    main()
