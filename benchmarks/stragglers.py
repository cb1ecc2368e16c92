"""What pauses of single ranks cost a training, with PSGC_BACKUP_WORKERS and without.

    python benchmarks/stragglers.py                       k = 0, 1 and 2 of 4 workers, some three minutes
    python benchmarks/stragglers.py --chance 0.3 --pause-ms 40 --json
    python benchmarks/stragglers.py --rounds 0 --workers 16 --steps 1000     the model alone, no job

Each job trains examples/train_digits.py's network, a server and WORKERS workers on this machine. A step's computation on a device is a sleep of
``--compute-ms``; with the chance ``--chance`` a rank pauses for up to twice ``--pause-ms`` besides. Pauses follow from seed, rank and step: they are the same
for every k. The columns:

    step ms    of the whole job, as long as its slowest rank took; the median of the rounds, in which the ks take turns
    model ms   what pauses alone would make of it, if nothing but sleeping took time: the rule of closing, step after step
    bound ms   the rank whose own work and pauses are the longest; no rule can beat that while every rank takes every step
    late       share of contributions that miss their step, by the model
    loss       on the validation images; accuracy

A job whose ranks end with different parameters ends the script.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from psgc.diagnostics.machine import machine
from psgc.launch.tables import print_table

EXAMPLES: Final = Path(__file__).parents[1] / "examples"
LIMIT_S: Final = 240.0


@dataclass(frozen=True, slots=True)
class Jitter:
    """own_s: what a rank sleeps in a step."""

    seed: int
    compute_s: float
    pause_s: float
    chance: float

    def own_s(self, rank: int, step: int) -> float:
        luck = random.Random(f"{self.seed} {rank} {step}")
        return self.compute_s + (2 * self.pause_s * luck.random() if luck.random() < self.chance else 0.0)


@dataclass(frozen=True, slots=True)
class Row:
    """See the script's text. step_ms, loss, accuracy: None where no job ran."""

    backup: int
    step_ms: float | None
    model_ms: float
    bound_ms: float
    late: float
    loss: float | None
    accuracy: float | None


def model_of(jitter: Jitter, workers: int, steps: int, backup: int) -> tuple[float, float]:
    """Seconds until the slowest rank has taken all steps, if nothing but sleeping took time, and the share of late contributions."""
    ready, before, late = [0.0] * workers, [0.0] * workers, 0
    for step in range(steps):
        ends = [start + jitter.own_s(rank, step) for rank, start in enumerate(ready)]
        closed = max(sorted(ends)[workers - 1 - backup], *before)  # whoever was late for the step before is awaited
        late += sum(end > closed for end in ends)
        before, ready = ends, [max(end, closed) for end in ends]
    return max(ready), late / (workers * steps)


def bound_of(jitter: Jitter, workers: int, steps: int) -> float:
    return max(sum(jitter.own_s(rank, step) for step in range(steps)) for rank in range(workers))


def work(steps: int, jitter: Jitter) -> None:
    """A worker: what it trained in how long, as one line of JSON."""
    sys.path.insert(0, str(EXAMPLES))
    import torch
    from torch.nn import functional as F  # noqa: N812
    from train_digits import build, load

    import psgc.torch as psgc

    psgc.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build()
    sgd = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    optimizer = psgc.DistributedOptimizer(sgd, model.named_parameters())
    images, labels, val_images, val_labels = load()
    rank = psgc.rank()
    generator = torch.Generator().manual_seed(1000 * jitter.seed + rank)

    def take(own_s: float) -> None:
        rows = torch.randint(len(labels), (16,), generator=generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[rows]), labels[rows])
        time.sleep(own_s)
        loss.backward()
        optimizer.step()

    for _ in range(3):  # the first steps declare and compile
        take(0.0)
    psgc.barrier()
    began = time.monotonic()
    for step in range(steps):
        take(jitter.own_s(rank, step))
    seconds = time.monotonic() - began
    psgc.barrier()
    with torch.no_grad():
        logits = model(val_images)
    digest = hashlib.sha256(b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())).hexdigest()
    found = {
        "seconds": seconds,
        "digest": digest,
        "loss": float(F.cross_entropy(logits, val_labels)),
        "accuracy": float((logits.argmax(1) == val_labels).float().mean()),
    }
    os.write(1, f"FOUND {json.dumps(found)}\n".encode())
    psgc.shutdown()


def run(options: argparse.Namespace, backup: int) -> list[dict[str, Any]]:
    """What each rank of a job has found."""
    settings = [str(x) for pair in (("--steps", options.steps), ("--chance", options.chance), ("--pause-ms", options.pause_ms),
                                    ("--compute-ms", options.compute_ms), ("--seed", options.seed)) for x in pair]  # fmt: skip
    command = [sys.executable, "-m", "psgc.launch", "run", "--no-prefix", "--workers", str(options.workers), "--servers", "1", "--", sys.executable,
               str(Path(__file__).resolve()), "--work", *settings]  # fmt: skip
    env = {**os.environ, "PSGC_BACKUP_WORKERS": str(backup)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    found = [json.loads(line) for line in re.findall(r"^FOUND (.*)$", done.stdout, re.M)]
    if done.returncode or len(found) != options.workers:
        sys.exit(f"stragglers.py: the job with PSGC_BACKUP_WORKERS={backup} ended with status {done.returncode}: {done.stderr[-500:]}")
    if len({of_rank["digest"] for of_rank in found}) > 1:
        sys.exit(f"stragglers.py: with PSGC_BACKUP_WORKERS={backup} ranks ended with different parameters")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--backup", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=2, help="jobs of each k; 0: the model alone")
    parser.add_argument("--compute-ms", type=float, default=60.0)
    parser.add_argument("--pause-ms", type=float, default=120.0, help="of a pause, on average")
    parser.add_argument("--chance", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    jitter = Jitter(options.seed, options.compute_ms / 1e3, options.pause_ms / 1e3, options.chance)
    if options.work:
        work(options.steps, jitter)
        return
    jobs: dict[int, list[list[dict[str, Any]]]] = {backup: [] for backup in options.backup}
    for _ in range(options.rounds):
        for backup in options.backup:
            jobs[backup].append(run(options, backup))
    rows = []
    for backup, rounds in jobs.items():
        expected_s, late = model_of(jitter, options.workers, options.steps, backup)
        model_ms, bound_ms = (1e3 * each_s / options.steps for each_s in (expected_s, bound_of(jitter, options.workers, options.steps)))
        step_ms = loss = accuracy = None
        if rounds:
            step_ms = 1e3 * statistics.median(max(of_rank["seconds"] for of_rank in found) for found in rounds) / options.steps
            loss, accuracy = (statistics.mean(found[0][what] for found in rounds) for what in ("loss", "accuracy"))
        rows.append(Row(backup, step_ms, model_ms, bound_ms, late, loss, accuracy))
    if options.json:
        print(json.dumps({"machine": machine(), "workers": options.workers, "rows": [asdict(row) for row in rows]}))
        return
    print(machine())
    columns = ["k", "step ms", "model ms", "bound ms", "late", "loss", "accuracy"]
    print_table(
        columns,
        [
            [
                str(r.backup),
                _text(r.step_ms, ".1f"),
                f"{r.model_ms:.1f}",
                f"{r.bound_ms:.1f}",
                f"{r.late:.0%}",
                _text(r.loss, ".4f"),
                _text(r.accuracy, ".2%"),
            ]
            for r in rows
        ],
    )


def _text(figure: float | None, form: str) -> str:
    return "" if figure is None else format(figure, form)


if __name__ == "__main__":
    main()
