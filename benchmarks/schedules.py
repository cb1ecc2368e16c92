"""Codecs under learning rates that rise again, and under optimizers that psgc does not know: accuracy beside uncompressed training.

    python benchmarks/schedules.py                # over psgc run, 2 workers and 1 server: a table
    python benchmarks/schedules.py --seeds 1 --steps 200 --only warm-restarts

The CNN on handwritten digits of examples/. All trainings of one seed run one after the other in one job. Residuals stay as they are when
the learning rate changes; where they followed it, warm restarts ended in NaN.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

SGD_CODECS = ("none", "int8", "topk:k=0.01", "onebit")
OTHER_CODECS = ("none", "int8")


class Training(NamedTuple):
    optimizer: str
    lr: float
    schedule: str
    codec: str


def trainings(only: str = "") -> list[Training]:
    """All of one seed, or those of one schedule. One learning rate for all codecs: what changes is the codec alone."""
    sgd = [("sgd", 0.02, schedule, codec) for schedule in ("warm-restarts", "one-cycle", "cosine") for codec in SGD_CODECS]
    others = [(name, lr, "cosine", codec) for name, lr in (("lion", 3e-4), ("adamw", 3e-3)) for codec in OTHER_CODECS]
    return [training for each in (*sgd, *others) if only in ("", (training := Training(*each)).schedule)]


def work(steps: int, seed: int, out: Path, only: str) -> None:
    """One worker of the job: every training in turn. A process joins and leaves a job once."""
    import train_digits

    import psgc.torch as psgc

    leave, psgc.shutdown = psgc.shutdown, lambda: None
    for number, training in enumerate(trainings(only)):
        flags = [f"--{name}={value}" for name, value in training._asdict().items()]
        sys.argv = ["train_digits.py", *flags, f"--steps={steps}", f"--seed={seed}", f"--out={out / f'{number}.json'}"]
        train_digits.main()
    leave()


def study(steps: int, seed: int, only: str) -> list[dict[str, Any]]:
    """The record of every training of one seed."""
    with tempfile.TemporaryDirectory() as folder:
        me = [sys.executable, str(Path(__file__).resolve()), "--steps", str(steps), "--seed", str(seed), "--out", folder, "--only", only]
        job = [sys.executable, "-m", "psgc.launch", "run", "--workers", "2", "--", *me]
        subprocess.run(job, check=True, stdout=sys.stderr, env={**os.environ, "PSGC_LOG_LEVEL": "warning"})
        return [json.loads((Path(folder) / f"{number}.json").read_text()) for number in range(len(trainings(only)))]


def table(records: list[list[dict[str, Any]]], only: str) -> str:
    """Mean over seeds of accuracy and validation loss. records: by seed, then by training."""
    lines = ["| optimizer | schedule | codec | accuracy | against none | validation loss |", "|---|---|---|---|---|---|"]
    baseline = 0.0
    for number, training in enumerate(trainings(only)):
        accuracy = statistics.mean(100 * seed[number]["val_accuracy"] for seed in records)
        loss = statistics.mean(seed[number]["final_val_loss"] for seed in records)
        baseline = accuracy if training.codec == "none" else baseline
        against = "" if training.codec == "none" else f"{accuracy - baseline:+.2f} points"
        lines.append(f"| {training.optimizer} | {training.schedule} | `{training.codec}` | {accuracy:.2f} % | {against} | {loss:.4f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="one schedule: warm-restarts, one-cycle or cosine")
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out is not None:
        work(options.steps, options.seed, options.out, options.only)
    else:
        print(table([study(options.steps, seed, options.only) for seed in range(options.seeds)], options.only))


if __name__ == "__main__":
    main()
