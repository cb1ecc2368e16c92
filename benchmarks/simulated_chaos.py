"""Counts what happens in the simulation of whole jobs: processes that end and connections that break, until so many events have been survived.

    python benchmarks/simulated_chaos.py --events 1000000 --results simulated.jsonl [--first 0] [--kinds servers,schedulers,machines,hosts,workers,shrinking]

Jobs are those of ``tests/sim``, each from its seed alone: servers that are started again, schedulers, machines that are lost under PSGC_REPLICAS, hosts
with a worker and a server, workers under PSGC_ON_WORKER_LOSS=wait and under shrink. Every one is checked as the tests check it; a broken promise ends the
run with the seed. A line of the file has what 500 seeds of a kind came to; what is there is not run again.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "sim")]

SLICE: Final = 500
KINDS: Final = {  # module of tests/sim, and what draws a job from a seed
    "servers": ("test_crashes", "crashing"),
    "schedulers": ("test_scheduler_crashes", "crashing"),
    "machines": ("test_lost_machines", "losing"),
    "hosts": ("test_lost_hosts", "losing"),
    "workers": ("test_lost_workers", "dying"),
    "shrinking": ("test_shrinking", "shrinking"),
}


def job_of(kind: str) -> Callable[[int], Any]:
    """Runs the seed's job, and gives what is left of its world. Raises if a promise was broken."""
    module, draw = KINDS[kind]
    found = importlib.import_module(module)
    run = getattr(found, "run", None) or found.simulate
    return lambda seed: run(getattr(found, draw)(seed))


def events_of(world: Any) -> dict[str, int]:
    return {
        "connections cut": world.network.cuts,
        "servers ended": world.crashes,
        "schedulers ended": world.scheduler.processes - 1,
        "workers ended": getattr(world, "deaths", 0),
    }


def measured(kind: str, first: int) -> dict[str, Any]:
    """A line of the results."""
    job, counts, began = job_of(kind), dict[str, int](), time.process_time()
    for seed in range(first, first + SLICE):
        try:
            found = events_of(job(seed))
        except BaseException:
            print(f"{kind}, seed {seed}:", file=sys.stderr)
            raise
        counts = {what: counts.get(what, 0) + count for what, count in found.items()}
    return {"kind": kind, "first": first, "jobs": SLICE, "events": counts, "cpu_s": round(time.process_time() - began, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=10_000, help="in all (default: 10000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"with commas (default: {','.join(KINDS)})")
    parser.add_argument("--results", type=Path, required=True, help="one line for 500 seeds of a kind; what is there is not run again")
    given = parser.parse_args()
    kinds = given.kinds.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"--kinds {','.join(unknown)}: expected one or more of {','.join(KINDS)}")
    lines = [json.loads(line) for line in given.results.read_text().splitlines()] if given.results.exists() else []
    first = given.first
    while sum(sum(line["events"].values()) for line in lines) < given.events:
        for kind in kinds:
            if not any((line["kind"], line["first"]) == (kind, first) for line in lines):
                lines.append(measured(kind, first))
                with given.results.open("a") as file:
                    file.write(json.dumps(lines[-1]) + "\n")
        first += SLICE
    print(said(lines))


def said(lines: list[dict[str, Any]]) -> str:
    counts: dict[str, int] = {}
    for line in lines:
        for what, count in line["events"].items():
            counts[what] = counts.get(what, 0) + count
    each = ", ".join(f"{count:,} {what}" for what, count in counts.items())
    return f"{sum(line['jobs'] for line in lines):,} jobs, {sum(counts.values()):,} events ({each}), no promise broken"


if __name__ == "__main__":
    main()
