"""``auto`` beside fixed codecs on the testbed's links, and on a link that becomes slower.  Needs root, as the testbed does.

    python benchmarks/auto.py [--gbps 0.1 --gbps 1 --gbps 0] [--codecs none,bf16,int8,int4] [--rounds 3] [--change] [--json]
                              [--workers 2] [--per-host 1] [--servers 1] [--ddp]

Trains the demo's GPT by each codec and by ``auto``, in turns, on hosts of ``--per-host`` workers each and one of a server; with ``--servers 0`` on hosts of
workers alone; with ``--ddp`` under DistributedDataParallel and psgc's hook. An iteration is the median of a job's last
``--steps``; ``auto`` has first had ``--settle`` iterations to choose in. The codecs are those that the level ``safe`` allows, which are those that
``auto`` may choose from. ``--gbps 0`` is no limit. With ``--change`` a job begins at the largest rate that was given and goes on at the least one: how many
iterations later has it planned again? With ``--measuring`` it says what measuring takes of one gradient and of a step of that training, by a clock around all
that ``auto`` does between and beside the steps of a job on this machine (which needs no root), and runs nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

from testbed import Testbed, TestbedError, psgc_job, run_members

from psgc.diagnostics.machine import machine
from psgc.launch.tables import print_table

BENCHMARKS: Final = Path(__file__).parent
SCRIPT: Final = BENCHMARKS.parent / "examples" / "train_gpt.py"
AUTO: Final = "auto"
WITHIN: Final = 30  # iterations in which a job is to plan again
POLL_S: Final = 0.05


class AutoError(Exception):
    """What went wrong, in one line."""


class Ran(NamedTuple):
    """times: of iterations, in milliseconds; text: what the job printed."""

    times: list[float]
    text: str


class Shape(NamedTuple):
    """Of a job. hosts: with workers."""

    hosts: int
    per_host: int = 1
    servers: int = 1
    ddp: bool = False


def run(gbps: float, shape: Shape, by: str, steps: int, changes: tuple[int, float] | None = None) -> Ran:
    """A job on the testbed. changes: the iteration at which all links get another rate, and that rate."""
    with tempfile.TemporaryDirectory(prefix="psgc-auto-") as name:
        out = Path(name) / "times.json"
        flags = ["--inner", json.dumps([gbps, shape, by, steps, changes, str(out)])]
        done = subprocess.run([sys.executable, __file__, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode or not out.exists():
            raise AutoError((done.stdout.strip().splitlines() or [f"status {done.returncode}"])[-1])
        ends = json.loads(out.read_text())
    return Ran([(later - earlier) * 1e3 for earlier, later in pairwise(ends)], done.stdout)


def inner(gbps: float, shape: Shape, by: str, steps: int, changes: tuple[int, float] | None, out: str) -> int:
    """The process that holds the testbed."""
    server_hosts = min(1, shape.servers)
    counted = Path(out).with_name("steps")
    env = {"TIMED_STEPS": str(counted), **({"PSGC_PLAN": AUTO} if by == AUTO else {"PSGC_CODEC": by})}
    command = [sys.executable, str(BENCHMARKS / "timed.py"), out, str(SCRIPT), "--steps", str(steps), *(["--ddp"] if shape.ddp else [])]
    with Testbed(shape.hosts + server_hosts, gbps or None) as testbed:
        if changes is not None:
            threading.Thread(target=_change_at, args=(testbed, counted, *changes), daemon=True).start()
        return run_members(testbed, psgc_job(testbed, command, shape.per_host, shape.servers, env, server_hosts))


def _change_at(testbed: Testbed, counted: Path, step: int, gbps: float) -> None:
    while not (counted.exists() and int(counted.read_text() or 0) >= step):
        time.sleep(POLL_S)
    print(f"changed at iteration {counted.read_text()}", flush=True)
    testbed.set_gbps(gbps)


def kept(text: str) -> str:
    """What ``auto`` ended with."""
    said = re.findall(r"auto, step \d+: (\S+) (?:stays|from now on)", text)
    return said[-1] if said else "?"


def shape_of(given: Any) -> Shape:
    return Shape(given.workers, given.per_host, given.servers, given.ddp)


def compare(gbps: float, codecs: Sequence[str], given: Any) -> dict[str, Any]:
    """One link: the medians of each codec's jobs and of auto's, in turns."""
    times: dict[str, list[float]] = {name: [] for name in (*codecs, AUTO)}
    ends = []
    for number in range(given.rounds):
        for by in (*codecs, AUTO) if number % 2 == 0 else (AUTO, *reversed(codecs)):
            steps = given.steps + (given.settle if by == AUTO else given.warm_up)
            ran = run(gbps, shape_of(given), by, steps)
            times[by].append(statistics.median(ran.times[-given.steps :]))
            if by == AUTO:
                ends.append(kept(ran.text))
            print(f"{gbps or 'unlimited'} Gbit/s, {by}: {times[by][-1]:.0f} ms {ends[-1] if by == AUTO else ''}", file=sys.stderr)
    medians = {name: statistics.median(found) for name, found in times.items()}
    best = min(codecs, key=lambda name: medians[name])
    ratios = [mine / theirs for mine, theirs in zip(times[AUTO], times[best], strict=True)]
    return {
        "gbps": gbps, "ms": medians, "best": best, "auto_ended_with": ends, "auto_over_best": medians[AUTO] / medians[best],
        "least_ratio": min(ratios), "most_ratio": max(ratios),
    }  # fmt: skip


def change(high: float, low: float, given: Any) -> dict[str, Any]:
    """How many iterations after a link has become slower a job has planned again, and what it then takes."""
    ran = run(high, shape_of(given), AUTO, given.settle + WITHIN + 2 * given.settle, (given.settle, low))
    changed = re.search(r"changed at iteration (\d+)", ran.text)
    if changed is None:
        raise AutoError("the job ended before its link was changed")
    at = int(changed.group(1))
    again = [int(step) for step in re.findall(r"auto, step (\d+): a step takes \S+ ms instead of \S+: planning again", ran.text)]
    after = [step - at for step in again if step > at]
    return {
        "from_gbps": high, "to_gbps": low, "iterations": after[0] if after else None, "ended_with": kept(ran.text),
        "before_ms": statistics.median(ran.times[at - given.steps : at]), "after_ms": statistics.median(ran.times[-given.steps :]),
    }  # fmt: skip


def measuring_ns() -> float:
    """What noting one gradient's readiness takes, in nanoseconds: the least of several steps of many gradients."""
    from psgc.torch.gradients.profiler import Recorder, host_mark

    recorder, names, times = Recorder(host_mark), [f"layers.{number}.weight" for number in range(200)], []
    for _ in range(100):
        began = time.perf_counter_ns()
        for name in names:
            recorder.ready(name)
        recorder.leaving()
        recorder.delivered()
        times.append(time.perf_counter_ns() - began)
    return min(times) / len(names)


class Measured(NamedTuple):
    """Of rank 0: what auto took of all steps, and apart from that what planning took; how many plans there were; steps; and how long they lasted."""

    measuring_ms: float
    planning_ms: float
    plans: int
    steps: int
    lasted_ms: float

    @property
    def share(self) -> float:
        return self.measuring_ms / self.lasted_ms

    def __str__(self) -> str:
        return (
            f"measuring took {1e3 * self.measuring_ms / self.steps:,.0f} us of a step of {self.lasted_ms / self.steps:,.1f} ms, {100 * self.share:.2f} % "
            f"({self.steps} steps); {self.plans} plan(s) took {self.planning_ms:,.0f} ms"
        )


def measured(script: Sequence[str], workers: int, servers: int) -> Measured:
    """A job of this machine that runs the script under auto."""
    with tempfile.TemporaryDirectory(prefix="psgc-auto-") as name:
        out = Path(name) / "measured.json"
        job = [sys.executable, "-m", "psgc.launch", "run", "--workers", str(workers), "--servers", str(servers), "--plan", AUTO]
        command = [*job, "--", sys.executable, __file__, "--clocked", str(out), *script]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode or not out.exists():
            raise AutoError((done.stdout.strip().splitlines() or [f"status {done.returncode}"])[-1])
        return Measured(*json.loads(out.read_text()))


def clocked(out: str, script: str, *arguments: str) -> None:
    """A worker of such a job: runs the script with a clock around all that auto does, and on rank 0 writes what it says."""
    import psgc.torch as psgc
    from psgc.torch.auto.auto_plan import AutoPlan

    taken = dict.fromkeys(("ready", "leaving", "delivered", "stepped", "begins", "_plan"), 0)
    calls, began, ended = dict.fromkeys(taken, 0), 0, 0

    def around(name: str) -> None:
        inner = getattr(AutoPlan, name)

        def timed(self: Any, *given: Any) -> Any:
            nonlocal began, ended
            start = time.perf_counter_ns()
            try:
                return inner(self, *given)
            finally:
                ended = time.perf_counter_ns()
                taken[name] += ended - start
                calls[name] += 1
                began = began or start

        setattr(AutoPlan, name, timed)

    for name in taken:
        around(name)
    psgc.init()
    rank = psgc.rank()
    sys.argv[:] = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")
    if rank == 0:
        planning = taken.pop("_plan")
        found = Measured((sum(taken.values()) - planning) / 1e6, planning / 1e6, calls["_plan"], calls["delivered"], (ended - began) / 1e6)
        Path(out).write_text(json.dumps(found))


def main() -> None:
    if sys.argv[1:2] == ["--clocked"]:
        clocked(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gbps", type=float, action="append", help="of every link; 0: no limit; default: 0.1, 1 and 0")
    parser.add_argument("--codecs", default="none,bf16,int8,int4", help="the fixed ones")
    parser.add_argument("--workers", type=int, default=2, help="hosts with workers")
    parser.add_argument("--per-host", type=int, default=1, help="workers of each")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--ddp", action="store_true", help="train under DistributedDataParallel")
    parser.add_argument("--rounds", type=int, default=3, help="jobs by each, in turns")
    parser.add_argument("--steps", type=int, default=15, help="iterations that count, the last of a job")
    parser.add_argument("--settle", type=int, default=70, help="iterations that auto has before them")
    parser.add_argument("--warm-up", type=int, default=5, help="iterations that a fixed codec has before them")
    parser.add_argument("--change", action="store_true", help="only the link that becomes slower")
    parser.add_argument("--measuring", action="store_true", help="only what measuring costs, in a job on this machine")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    parser.add_argument("--inner", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inner:
        try:
            gbps, shape, *others = json.loads(given.inner)
            sys.exit(inner(gbps, Shape(*shape), *others))
        except TestbedError as error:
            sys.exit(f"auto: {error}")
    if given.measuring:
        try:
            found = measured([str(SCRIPT), "--steps", str(given.settle + given.steps)], given.workers, given.servers)
        except AutoError as error:
            sys.exit(f"auto: {error}")
        print(f"{measuring_ns():.0f} ns a gradient, in the steps that are noted; {found}")
        return
    rates = given.gbps or [0.1, 1.0, 0.0]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        limited = [rate for rate in rates if rate]
        changed = change(max(limited), min(limited), given) if len(limited) > 1 else None
        rows = [] if given.change else [compare(rate, given.codecs.split(","), given) for rate in rates]
    except AutoError as error:
        sys.exit(f"auto: {error}")
    if given.json:
        print(json.dumps({"hardware": machine(), "rows": rows, "change": changed}))
        return
    body = [
        [f"{row['gbps']:g}" if row["gbps"] else "no limit", *(f"{ms:,.0f}" for ms in row["ms"].values()), row["best"],
         ", ".join(row["auto_ended_with"]), f"{row['auto_over_best']:.3f} ({row['least_ratio']:.3f} to {row['most_ratio']:.3f})"]
        for row in rows
    ]  # fmt: skip
    if body:
        print_table(
            ["Gbit/s", *(f"{name} ms" for name in rows[0]["ms"]), "best codec", "auto ended with", "auto / best"], body, title=machine()
        )
    if changed is not None:
        print(
            f"from {changed['from_gbps']:g} to {changed['to_gbps']:g} Gbit/s: planned again {changed['iterations']} iterations after, and ended with "
            f"{changed['ended_with']}; {changed['before_ms']:,.0f} ms an iteration before, {changed['after_ms']:,.0f} at the end"
        )


if __name__ == "__main__":
    main()
