"""Hundreds of events of chaos, in jobs of ten each, that can be interrupted: what is in the file of results is not run again.

    python benchmarks/chaos.py --events 200 --results chaos.jsonl [--at-once 1] [--jobs gradients,rounds,outer,workers,spares,missing]

Of these jobs in turn, each run undisturbed and with ten events of its own seed (``psgc chaos``): members are killed, stopped, cut off and slowed, and some
are killed again while they come back. Each must end with the same bits; under PSGC_ON_WORKER_LOSS=shrink, with the same on all ranks.

    gradients  summed by a lossy codec; servers and the scheduler suffer
    rounds     weights that servers hold, in rounds with momentum; likewise
    outer      DiLoCo on servers; likewise
    workers    under PSGC_ON_WORKER_LOSS=wait, three workers, who suffer, too
    spares     the same with a process that waits to take a dead worker's place
    missing    under PSGC_ON_WORKER_LOSS=shrink, likewise

--at-once: jobs beside each other; they rest most of the time, so that few cores are enough. Prints what was broken, and how long jobs took to go on.
Status 1: a promise was broken. On SIGTERM the jobs that run are ended, and begin anew the next time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "tests" / "jobs"
STEPS, PAUSE_S, EVENTS = "600", "0.05", 10  # long enough for ten events, a second apart, and the pauses that they make


@dataclass(frozen=True, slots=True)
class Kind:
    """A job: its script with arguments, its workers, who suffers, and what it prints that must be the same."""

    script: list[str]
    workers: int = 2
    roles: str = "server,scheduler"
    result: str = r"(digest|loss(es)?|found|weights)\b.*"
    env: dict[str, str] = field(default_factory=dict)


ALL: Final = "server,scheduler,worker"
WAIT: Final = {"PSGC_ON_WORKER_LOSS": "wait"}
JOBS: Final = {
    "gradients": Kind(["lost_server.py", STEPS, "onebit", "optimizer", PAUSE_S]),
    "rounds": Kind(["lost_weights.py", "rounds", STEPS, PAUSE_S]),
    "outer": Kind(["lost_weights.py", "outer", STEPS, PAUSE_S]),
    "workers": Kind(["lost_worker.py", STEPS, "none", PAUSE_S], 3, ALL, r"found \w+", WAIT),
    "spares": Kind(["lost_worker.py", STEPS, "none", PAUSE_S], 3, ALL, r"found \w+", {**WAIT, "PSGC_SPARES": "1"}),
    "missing": Kind(["lost_worker.py", STEPS, "none", PAUSE_S], 3, ALL, r"found \w+", {"PSGC_ON_WORKER_LOSS": "shrink"}),
}


class Running:
    """The jobs that run, each in a thread that waits for it."""

    def __init__(self) -> None:
        self._popens: set[subprocess.Popen[str]] = set()

    def run(self, command: list[str], env: dict[str, str]) -> tuple[int, str]:
        """Status and stdout."""
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as popen:
            self._popens.add(popen)
            out, _ = popen.communicate()
            self._popens.discard(popen)
        return popen.returncode, out

    def end(self, *_: object) -> None:
        """Of SIGTERM: a thread whose job has ended so begins no other."""
        for popen in list(self._popens):
            popen.terminate()
        sys.exit(128 + signal.SIGTERM)


RUNNING: Final = Running()


def command(seed: int, name: str) -> list[str]:
    kind = JOBS[name]
    script, *arguments = kind.script
    job = [
        sys.executable,
        "-m",
        "psgc",
        "run",
        "--no-prefix",
        "--workers",
        str(kind.workers),
        "--servers",
        "2",
        "--",
        sys.executable,
        str(SCRIPTS / script),
        *arguments,
    ]
    flags = ["--seed", str(seed), "--events", str(EVENTS), "--roles", kind.roles, "--result", kind.result, "--json"]
    return [sys.executable, "-m", "psgc", "chaos", *flags, "--", *job]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=200, help="in all; a multiple of ten; a job that ends before has fewer")
    parser.add_argument("--results", type=Path, required=True, help="one line a job; what is there is not run again")
    parser.add_argument("--at-once", type=int, default=1, help="jobs beside each other (default: 1)")
    parser.add_argument("--jobs", default=",".join(JOBS), help=f"with commas (default: {','.join(JOBS)})")
    given = parser.parse_args()
    names = given.jobs.split(",")
    if unknown := [name for name in names if name not in JOBS]:
        parser.error(f"--jobs {','.join(unknown)}: expected one or more of {','.join(JOBS)}")
    chosen = [(seed, names[seed % len(names)]) for seed in range(given.events // EVENTS)]
    done, lock, failed = read(given.results), threading.Lock(), list[int]()

    def run(job: tuple[int, str]) -> None:
        seed, name = job
        if failed:
            return
        print(f"seed {seed}: {name}", flush=True)
        env = {**os.environ, **JOBS[name].env}
        status, out = RUNNING.run(command(seed, name), env)
        with lock:
            if status not in (0, 1) or not out.strip():
                print(f"seed {seed}: psgc chaos ended with {status}", file=sys.stderr)
                failed.append(seed)
                return
            done[job] = {"seed": seed, "job": name, "status": status, "report": json.loads(out)}
            begun = given.results.exists() and not given.results.read_text().endswith(
                "\n"
            )  # a line that an interrupted run has not finished
            with given.results.open("a") as file:
                file.write("\n" * begun + json.dumps(done[job]) + "\n")

    with ThreadPoolExecutor(given.at_once) as pool:
        list(pool.map(run, [job for job in chosen if job not in done]))
    return 1 if failed else said([done[job] for job in chosen])


def read(path: Path) -> dict[tuple[int, str], dict[str, Any]]:
    """By seed and job. What is no whole line counts for nothing."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            one = json.loads(line)
        except ValueError:
            continue
        found[one["seed"], one["job"]] = one
    return found


def said(done: list[dict[str, Any]]) -> int:
    broken = [(one, text) for one in done for text in one["report"]["broken"]]
    waits = sorted(wait for one in done for wait in waits_of(one["report"]))
    for one, text in broken:
        print(f"seed {one['seed']} ({one['job']}): {text}")
    print(f"{len(done)} jobs, {sum(one['report']['happened'] for one in done)} events, {len(broken)} promises broken")
    for what, own in by_kind(done).items():
        print(f"  {what}: {len(own)} times, went on after {statistics.median(own):.1f} s (median), {max(own):.1f} s at most")
    if waits:
        print(
            f"went on after {statistics.median(waits):.1f} s (median), {waits[int(0.99 * (len(waits) - 1))]:.1f} s (p99), {waits[-1]:.1f} s at most"
        )
    return int(bool(broken))


def by_kind(done: list[dict[str, Any]]) -> dict[str, list[float]]:
    """How long jobs took to go on after each kind of event, such as "kill server"; only those after which they did."""
    found: dict[str, list[float]] = {}
    for one in done:
        for blow in one["report"]["blows"]:
            if blow["recovered_s"] is not None:
                found.setdefault(f"{blow['kind']} {blow['role']}", []).append(float(blow["recovered_s"]))
    return dict(sorted(found.items()))


def waits_of(report: dict[str, Any]) -> list[float]:
    """How long the job took to go on after each event; none for one behind which it ended."""
    return [float(blow["recovered_s"]) for blow in report["blows"] if blow["recovered_s"] is not None]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, RUNNING.end)
    sys.exit(main())
