"""What compression costs in quality: short trainings over real jobs under every codec, written to docs/quality.md.

    python benchmarks/quality.py                       # the whole study; start it again and it goes on where it was
    python benchmarks/quality.py --only none,int8      # of these only what is not done yet; the page has all that is done
    python benchmarks/quality.py --minutes 4           # as much as fits into so many minutes: no run is begun that would last longer
    python benchmarks/quality.py --left                # how many runs are not done, and for about how many minutes; trains nothing

Two tasks: the byte-level GPT (AdamW) and the digits (SGD with momentum) of examples/. For each codec the learning rate is tuned on
a grid of factors of two, with a seed that the study itself does not use, until the best rate is inside the grid. Then five seeds (of
initialisation and data) for the codecs that should cost no quality, three for the others. A seed gives the same initialisation and data under every
codec. Every finished run is a line of the results file and is not repeated; delete the file to begin anew.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks")]

from demo import machine  # noqa: E402 - the examples are no package
from early_quality import table as early_table  # noqa: E402
from jobs import TrainingFailed, train  # noqa: E402

from psgc.codecs import registered_codecs, registered_schemes  # noqa: E402

TUNING_SEED, STUDY_SEEDS, FEWER_SEEDS = 100, (1, 2, 3, 4, 5), (1, 2, 3)
EXTENSIONS = 3  # how often a grid may grow towards a best at its end
CLAIMED = ("none", "int8", "int4:rotate=1", "fp8", "powersgd:rank=4")  # and 1-bit Adam: five seeds
FURTHER = ("powersgd:rank=16", "dithering:k=1", "topk:select=sampled", "onebit:ef=0,scale=unit")  # beside each codec's own line
USUAL_S = {"gpt": 30.0, "digits": 15.0}  # a run, before one has been timed
PARAMETERS = {"int4": "int4:rotate=1", "powersgd": "powersgd:rank=4"}  # where the study does not take a codec's defaults


@dataclass(frozen=True)
class Task:
    """A training. rates: middle of the learning rates' grid, by optimizer."""

    name: str
    script: str
    optimizer: str
    rates: dict[str, float]
    flags: dict[str, object]


TASKS = (
    Task(
        "gpt", "train_gpt.py", "adamw", {"adamw": 6e-3, "onebit-adam": 6e-3, "zero-one-adam": 6e-3},
        {"steps": 300, "width": 64, "layers": 2, "context": 64},
    ),
    Task("digits", "train_digits.py", "sgd", {"sgd": 5e-2, "onebit-adam": 3e-3, "zero-one-adam": 3e-3}, {"steps": 200}),
)  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """What is compared. optimizer: None for each task's own."""

    title: str
    codec: str
    optimizer: str | None
    seeds: tuple[int, ...]

    @property
    def name(self) -> str:
        """What --only calls it."""
        return self.optimizer or self.codec.partition(":")[0]


def variants() -> list[Variant]:
    """Every codec and scheme that is registered, then the optimizers that know of the compression."""
    codecs = [PARAMETERS.get(name, name) for name in (*registered_codecs(), *registered_schemes())]
    found = [Variant(f"`{codec}`", codec, None, STUDY_SEEDS if codec in CLAIMED else FEWER_SEEDS) for codec in (*codecs, *FURTHER)]
    found.append(Variant("1-bit Adam (`onebit`)", "onebit", "onebit-adam", STUDY_SEEDS))
    found.append(Variant("0/1 Adam (`onebit`)", "onebit", "zero-one-adam", FEWER_SEEDS))
    return found


@dataclass(frozen=True)
class Run:
    task: str
    optimizer: str
    codec: str
    lr: float
    seed: int
    flags: str


class NotDone(Exception):
    """A run that is not among the results, and is not to be started."""


class SliceOver(Exception):
    """There is no time for another run."""


@dataclass
class Results:
    """The runs done so far, in memory and in the file. may_train: whether a run that is not among them happens when it is asked for. until: the time
    (``time.monotonic``) by which the last run has to have ended, as far as those before can tell."""

    path: Path
    may_train: bool = True
    until: float = math.inf
    done: dict[Run, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            record = json.loads(line)
            self.done[Run(**record["run"])] = record

    def loss(self, task: Task, variant: Variant, lr: float, seed: int) -> float:
        """Validation loss of one run; infinite where training diverged."""
        loss = float(self.record(task, variant, lr, seed)["loss"])
        return loss if math.isfinite(loss) else math.inf

    def record(self, task: Task, variant: Variant, lr: float, seed: int) -> dict[str, Any]:
        """One run, which happens now if it did not before. Raises TrainingFailed, NotDone, SliceOver."""
        run = run_of(task, variant, lr, seed)
        if run not in self.done:
            if not self.may_train:
                raise NotDone
            if time.monotonic() + self.usual_s(task) > self.until:
                raise SliceOver
            began = time.perf_counter()
            flags = {**task.flags, "optimizer": run.optimizer, "codec": run.codec, "lr": run.lr, "seed": run.seed}
            with tempfile.TemporaryDirectory() as folder:
                got = train(task.script, flags, Path(folder) / "record.json", lambda step, loss: None)
            record = {
                "run": asdict(run), "loss": got["final_val_loss"], "accuracy": got["val_accuracy"],
                "bytes": got["wire_bytes_per_step_per_worker"], "seconds": round(time.perf_counter() - began, 1),
            }  # fmt: skip
            self.done[run] = record
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")
            print(f"{task.name} {run.optimizer} {run.codec} lr {lr:g} seed {seed}: {record['loss']:.4f}"
                  f"  ({time.perf_counter() - began:.0f} s)", flush=True)  # fmt: skip
        return self.done[run]

    def usual_s(self, task: Task) -> float:
        """What a run of the task takes: the median of those that were timed."""
        timed = [record["seconds"] for run, record in self.done.items() if run.task == task.name and "seconds" in record]
        return statistics.median(timed) if timed else USUAL_S[task.name]

    def left(self, task: Task, variant: Variant) -> int:
        """How many runs the variant lacks; where its rate is not tuned yet, at the least."""
        try:
            rate = self.tuned(task, variant)
        except NotDone:
            middle = task.rates[variant.optimizer or task.optimizer]
            return len(variant.seeds) + sum(
                run_of(task, variant, lr, TUNING_SEED) not in self.done for lr in (middle / 2, middle, middle * 2)
            )
        return sum(run_of(task, variant, rate, seed) not in self.done for seed in variant.seeds)

    def tuned(self, task: Task, variant: Variant) -> float:
        """The learning rate with the least validation loss under the tuning seed."""
        middle = task.rates[variant.optimizer or task.optimizer]
        losses = {lr: self.loss(task, variant, lr, TUNING_SEED) for lr in (middle / 2, middle, middle * 2)}
        for _ in range(EXTENSIONS):
            best = min(losses, key=losses.__getitem__)
            beyond = best / 2 if best == min(losses) else best * 2
            if beyond in losses:
                break
            losses[beyond] = self.loss(task, variant, beyond, TUNING_SEED)
        return min(losses, key=losses.__getitem__)


def run_of(task: Task, variant: Variant, lr: float, seed: int) -> Run:
    return Run(task.name, variant.optimizer or task.optimizer, variant.codec, lr, seed, json.dumps(task.flags, sort_keys=True))


@dataclass(frozen=True)
class Cell:
    """A variant's runs of one task."""

    lr: float
    records: list[dict[str, Any]]

    @property
    def losses(self) -> list[float]:
        return [float(record["loss"]) for record in self.records]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.losses)


def study(results: Results, chosen: list[Variant]) -> Iterator[tuple[Variant, Task, Cell | str]]:
    """Each variant's cell of each task, or why there is none; of variants that are not chosen, and of all once the time is over, what is done."""
    over = False
    for variant in variants():
        for task in TASKS:
            results.may_train = variant in chosen and not over
            try:
                try:
                    yield (
                        variant,
                        task,
                        Cell(lr := results.tuned(task, variant), [results.record(task, variant, lr, seed) for seed in variant.seeds]),
                    )
                except (NotDone, SliceOver) as reason:
                    over = over or isinstance(reason, SliceOver)
                    results.may_train = False
                    lr = results.tuned(task, variant)
                    done = [results.done[run] for seed in variant.seeds if (run := run_of(task, variant, lr, seed)) in results.done]
                    if done:
                        yield variant, task, Cell(lr, done)
            except TrainingFailed as error:
                print(error, file=sys.stderr)
                yield variant, task, str(error).splitlines()[-1]
            except NotDone:
                continue
    results.may_train = True
    if over:
        print("the time is over; the same command goes on from here", flush=True)


def table(cells: dict[tuple[Variant, str], Cell | str]) -> str:
    """Markdown: losses, and their distance from `none`'s mean in units of the standard deviation of its seeds."""
    head = ["codec", "seeds"]
    for task in TASKS:
        head += [f"{task.name}: rate", "validation loss", *(["accuracy"] if task.name == "digits" else []), "against none"]
    rows = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    plain = {task.name: cell for (variant, name), cell in cells.items() for task in TASKS if variant.codec == "none" and task.name == name}
    for variant in dict.fromkeys(variant for variant, _ in cells):
        counts = {len(cell.records) for task in TASKS if isinstance(cell := cells.get((variant, task.name)), Cell)}
        row = [variant.title, " and ".join(map(str, sorted(counts)))]
        for task in TASKS:
            row += columns(task, cells.get((variant, task.name)), plain.get(task.name))
        rows.append("| " + " | ".join(row) + " |")
    return "\n".join(rows)


def columns(task: Task, cell: Cell | str | None, plain: Cell | str | None) -> list[str]:
    wanted = 4 if task.name == "digits" else 3
    if not isinstance(cell, Cell):
        return ["failed" if cell else "not done", *[""] * (wanted - 1)]
    spread = f" ± {statistics.stdev(cell.losses):.4f}" if len(cell.losses) > 1 else ""
    accuracy = [f"{statistics.fmean(record['accuracy'] for record in cell.records):.2%}"] if task.name == "digits" else []
    return [f"{cell.lr:g}", f"{cell.mean:.4f}{spread}", *accuracy, distance(cell, plain)]


def distance(cell: Cell, plain: Cell | str | None) -> str:
    """On the seeds that both have, so that one seed's luck is on both sides."""
    if plain is None or isinstance(plain, str) or plain is cell:
        return ""
    shared = plain.losses[: len(cell.losses)]
    return f"{(cell.mean - statistics.fmean(shared)) / statistics.stdev(plain.losses):+.1f} sd"


def say_left(results: Results, chosen: list[Variant]) -> None:
    results.may_train = False
    runs = [(task, sum(results.left(task, variant) for variant in chosen)) for task in TASKS]
    minutes = sum(count * results.usual_s(task) for task, count in runs) / 60
    each = ", ".join(f"{task.name} {count}" for task, count in runs)
    print(f"{sum(count for _, count in runs)} runs are not done ({each}), about {minutes:.0f} minutes")


EARLY = ROOT / "benchmarks" / "early_quality.jsonl"
PAGE = """# Quality under compression

What each codec costs in validation loss, learning rate tuned for each. One command makes this page, goes on where it was stopped, and
trains over real jobs (2 workers, 1 server):

```sh
python benchmarks/quality.py      # --left says for how many minutes, --minutes 4 stops before
```

{tasks}
"against none" is the difference of mean validation losses over the same seeds, in units of the standard deviation of `none` over its
five seeds: a difference above 2 sd is due to compression, a smaller one is within the spread of seeds. Learning rates are
tuned on a grid of factors of two, by the validation loss of a sixth seed. Runs are reproducible bit for bit on one machine.

{table}

The codecs that should cost no quality have five seeds, the others three; where fewer are done, or a cell is "not done", the command adds them.

A rate is tuned with one seed, and may be that seed's luck: on digits `bf16` got 0.2, where `none` got 0.1, and its distance is that rate's.
With equal rates, in the table below, it is within 0.1 sd at the end.

Why `powersgd:rank=4` costs quality under AdamW, and what helps: [codecs.md](codecs.md#powersgds-rank-under-adam).

1-bit Adam and 0/1 Adam are `psgc.OneBitAdam` and `psgc.ZeroOneAdam` ([optimizers.md](optimizers.md)) on both tasks, a third of the steps warm-up; all else is
`DistributedOptimizer` with the task's own optimizer. These trainings are short, {steps} steps: the delay of error feedback
matters more here than in a real training.

## The first 100 steps

A model learns most in its first steps, and there the delay of error feedback counts most. Nothing is tuned here: each task has the learning rate that suits it
uncompressed, as where `auto` or a plan chooses the codec ([plans.md](plans.md#auto)).

```sh
python benchmarks/early_quality.py --json benchmarks/early_quality.jsonl
```

* **readme**: the README's script, SGD with momentum, 400 steps. **digits**: as above, 300 steps. **gpt**: as above, learning rate 0.003, 300 steps.
* **lstm**: a byte-level LSTM of 250,000 parameters on the same text, SGD with momentum, gradients clipped at norm 1, 300 steps.

Validation losses, mean ± standard deviation over five seeds; "against none" as above.

{early}

So `bf16`, `int8`, `fp8` and `int4` are what the level `safe` allows. `onebit` and `topk` are many standard deviations
behind on some task, after 100 steps or at the end.

Measured on {machine}.
"""
TASK_LINES = """* **gpt**: a byte-level GPT (2 layers of width 64, context 64) on Python's own sources, AdamW, gradients clipped at norm 1, {gpt} steps.
* **digits**: a small CNN (150,000 parameters) on 1797 handwritten digits, SGD with momentum 0.9, {digits} steps.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "quality.jsonl", help="finished runs, one a line")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "quality.md")
    parser.add_argument("--only", help="codecs or optimizers, with commas; default all")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="stop before the first run that would end later; default: when all is done"
    )
    parser.add_argument("--left", action="store_true", help="say what is not done; train nothing, write nothing")
    options = parser.parse_args()
    results = Results(options.results, until=time.monotonic() + 60 * options.minutes)
    only = set(options.only.split(",")) if options.only else {variant.name for variant in variants()}
    chosen = [variant for variant in variants() if variant.name in only]
    cells: dict[tuple[Variant, str], Cell | str] = {}
    if options.left:
        say_left(results, chosen)
        return
    for variant, task, cell in study(results, chosen):
        cells[variant, task.name] = cell
    steps = {task.name: task.flags["steps"] for task in TASKS}
    tasks = TASK_LINES.format(**steps)
    both = " and ".join(map(str, steps.values()))
    early = early_table([json.loads(line) for line in EARLY.read_text().splitlines()])
    options.page.write_text(PAGE.format(tasks=tasks, table=table(cells), steps=both, early=early, machine=machine()))
    print(f"wrote {options.page}")
    if any(isinstance(cell, str) for cell in cells.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
