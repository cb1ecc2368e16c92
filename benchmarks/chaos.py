"""Hundreds of events of chaos, in jobs of ten each, that can be interrupted: what is in the file of results is not run again.

    python benchmarks/chaos.py --events 200 --results chaos.jsonl

Of three jobs in turn (gradients by a lossy codec; weights that servers hold, in rounds with momentum; DiLoCo on servers), each run undisturbed and with ten
events of its own seed: servers and the scheduler are killed, stopped, cut off and slowed (``psgc chaos``). Each must end with the same bits. Prints what was
broken, and how long jobs took to go on. Status 1: a promise was broken.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "tests" / "jobs"
STEPS, PAUSE_S, EVENTS = "600", "0.05", 10  # long enough for ten events, a second apart, and the pauses that they make
JOBS = {
    "gradients": ["lost_server.py", STEPS, "onebit", "optimizer", PAUSE_S],
    "rounds": ["lost_weights.py", "rounds", STEPS, PAUSE_S],
    "outer": ["lost_weights.py", "outer", STEPS, PAUSE_S],
}


def command(seed: int) -> list[str]:
    script, *arguments = list(JOBS.values())[seed % len(JOBS)]
    job = ["psgc", "run", "--no-prefix", "--workers", "2", "--servers", "2", "--", sys.executable, str(SCRIPTS / script), *arguments]
    return [sys.executable, "-m", "psgc", "chaos", "--seed", str(seed), "--events", str(EVENTS), "--json", "--", *job]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=200, help="in all; a multiple of ten")
    parser.add_argument("--results", type=Path, required=True, help="one line a job; what is there is not run again")
    given = parser.parse_args()
    done = read(given.results)
    for seed in range(given.events // EVENTS):
        if seed in done:
            continue
        print(f"seed {seed}: {list(JOBS)[seed % len(JOBS)]}", flush=True)
        ran = subprocess.run(command(seed), stdout=subprocess.PIPE, check=False, text=True)
        if ran.returncode not in (0, 1) or not ran.stdout.strip():
            print(f"seed {seed}: psgc chaos ended with {ran.returncode}", file=sys.stderr)
            return 1
        done[seed] = {"seed": seed, "job": list(JOBS)[seed % len(JOBS)], "status": ran.returncode, "report": json.loads(ran.stdout)}
        begun = given.results.exists() and not given.results.read_text().endswith("\n")  # a line that an interrupted run has not finished
        with given.results.open("a") as file:
            file.write("\n" * begun + json.dumps(done[seed]) + "\n")
    return said(done)


def read(path: Path) -> dict[int, dict[str, Any]]:
    """By seed. What is no whole line counts for nothing."""
    found: dict[int, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            one = json.loads(line)
        except ValueError:
            continue
        found[one["seed"]] = one
    return found


def said(done: dict[int, dict[str, Any]]) -> int:
    broken = [(seed, text) for seed, one in sorted(done.items()) for text in one["report"]["broken"]]
    waits = sorted(wait for one in done.values() for wait in waits_of(one["report"]))
    for seed, text in broken:
        print(f"seed {seed} ({done[seed]['job']}): {text}")
    events = EVENTS * len(done)
    print(f"{len(done)} jobs, {events} events, {len(broken)} promises broken")
    if waits:
        print(
            f"went on after {statistics.median(waits):.1f} s (median), {waits[int(0.99 * (len(waits) - 1))]:.1f} s (p99), {waits[-1]:.1f} s at most"
        )
    return int(bool(broken))


def waits_of(report: dict[str, Any]) -> list[float]:
    """How long the job took to go on after each event; none for one behind which it ended."""
    return [float(blow["recovered_s"]) for blow in report["blows"] if blow["recovered_s"] is not None]


if __name__ == "__main__":
    sys.exit(main())
