"""How trainings go in their first 100 steps, and to the end of a short run, under each codec and under ``auto``: validation losses against uncompressed.

    python benchmarks/early_quality.py                                         # all tasks and codecs, five seeds
    python benchmarks/early_quality.py --tasks readme --codecs none,auto --seeds 10
    python benchmarks/early_quality.py --codecs none,auto --link-mbit 100      # over simulated links, where auto compresses

Tasks, each at one learning rate that suits it uncompressed (nothing is tuned for a codec, as nobody tunes for ``auto``): **readme** (the README's script:
SGD with momentum, 100 and 400 steps), **digits** (a CNN, SGD with momentum), **gpt** (a byte-level GPT, AdamW, gradients clipped) and **lstm** (a byte-level
LSTM, SGD with momentum, gradients clipped), 100 and 300 steps. A seed gives the same initialisation and data under every codec. All trainings run one after the
other in one real job. "sd" is the difference of means in standard deviations of ``none`` over its own seeds; beyond 2 it is due to compression.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

EARLY: Final = 100
CODECS: Final = "none,bf16,int8,fp8,int4,int4:rotate=1,dithering,onebit,topk,auto"
FOUND: Final = "early-quality "  # before a result in the job's output


class Training(NamedTuple):
    """loss: of a training batch, drawn from the generator. measure: the validation loss. clip: norm to which gradients are clipped; 0: not."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[torch.Generator], torch.Tensor]
    measure: Callable[[], float]
    clip: float = 0.0


def readme() -> Training:
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))
    held_out = torch.randn(2000, 784, generator=torch.Generator().manual_seed(0))

    def of(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), x[:, :10].argmax(1))

    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return Training(model, sgd, lambda generator: of(torch.randn(64, 784, generator=generator)), lambda: float(of(held_out)))


def digits() -> Training:
    from train_digits import build, load

    model, (images, labels, held_out, expected) = build(), load()

    def loss(generator: torch.Generator) -> torch.Tensor:
        rows = torch.randint(len(labels), (32,), generator=generator)
        return F.cross_entropy(model(images[rows]), labels[rows])

    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return Training(model, sgd, loss, lambda: float(F.cross_entropy(model(held_out), expected)))


class Lstm(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(256, 64), nn.LSTM(64, 128, batch_first=True), nn.Linear(128, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(x))[0])  # type: ignore[no-any-return]


def on_text(model: nn.Module, optimizer: torch.optim.Optimizer) -> Training:
    from text_data import batch_of, load_text

    train, validation = load_text()

    def of(text: torch.Tensor, sequences: int, generator: torch.Generator) -> torch.Tensor:
        x, y = batch_of(text, sequences, 64, generator)
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    def measure() -> float:
        generator = torch.Generator().manual_seed(1)
        return statistics.fmean(float(of(validation, 16, generator)) for _ in range(8))

    return Training(model, optimizer, lambda generator: of(train, 8, generator), measure, clip=1.0)


def gpt() -> Training:
    from gpt_model import Gpt, GptConfig

    model = Gpt(GptConfig(context=64, width=64, layers=2))
    return on_text(model, torch.optim.AdamW(model.parameters(), lr=3e-3))


def lstm() -> Training:
    model = Lstm()
    return on_text(model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9))


TASKS: Final[dict[str, tuple[Callable[[], Training], int]]] = {
    "readme": (readme, 400),
    "digits": (digits, 300),
    "gpt": (gpt, 300),
    "lstm": (lstm, 300),
}


def train(make: Callable[[], Training], steps: int, codec: str, seed: int) -> tuple[float, float, float, str]:
    """Validation losses after EARLY steps and at the end, the median of the steps' times after EARLY steps in milliseconds, and what it ended with."""
    import psgc.torch as psgc

    torch.manual_seed(seed)
    training = make()
    psgc.broadcast_parameters(training.model.state_dict(), root_rank=0)
    optimizer: Any = psgc.DistributedOptimizer(training.optimizer, training.model.named_parameters(), compression=codec)
    generator, early = torch.Generator().manual_seed(1000 * seed + psgc.rank()), 0.0
    times = []
    for step in range(1, steps + 1):
        began = time.perf_counter()
        optimizer.zero_grad()
        training.loss(generator).backward()
        if training.clip:
            torch.nn.utils.clip_grad_norm_(training.model.parameters(), training.clip)
        optimizer.step()
        times.append(time.perf_counter() - began)
        if step == EARLY:
            with torch.no_grad():
                early = training.measure()
    with torch.no_grad():
        end = training.measure()
    choice = optimizer._psgc_gradients.exchange.choice
    return early, end, 1e3 * statistics.median(times[EARLY:]), "plan" if choice.plan is not None or choice.awaited else choice.codec


def worker(options: argparse.Namespace) -> None:
    import psgc.torch as psgc

    psgc.init()
    torch.set_num_threads(1)
    for task in options.tasks.split(","):
        make, steps = TASKS[task]
        for seed in range(1, options.seeds + 1):
            for codec in options.codecs.split(";"):
                early, end, ms, ended = train(make, steps, codec, seed)
                if psgc.rank() == 0:
                    record = {"task": task, "codec": codec, "seed": seed, "early": early, "end": end, "ms": ms, "ended": ended}
                    print(FOUND + json.dumps(record), flush=True)
    psgc.shutdown()


def records(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    link = ["--link-mbit", f"{options.link_mbit:g}"] if options.link_mbit else []
    job = [
        sys.executable,
        "-m",
        "psgc.launch",
        "run",
        "--workers",
        str(options.workers),
        "--servers",
        str(options.servers),
        "--no-prefix",
        *link,
        "--",
    ]
    flags = ["--worker", "--tasks", options.tasks, "--codecs", ";".join(parts(options.codecs)), "--seeds", str(options.seeds)]
    env = {**os.environ, "PSGC_LOG_LEVEL": "warning"}
    with subprocess.Popen([*job, sys.executable, __file__, *flags], stdout=subprocess.PIPE, text=True, env=env) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if line.startswith(FOUND):
                yield json.loads(line.removeprefix(FOUND))
            else:
                print(line, end="", file=sys.stderr)
    if running.returncode:
        sys.exit(running.returncode)


def parts(codecs: str) -> list[str]:
    """``a,b:x=1,y=2`` as ``a`` and ``b:x=1,y=2``: what has a ``=`` and no ``:`` belongs to the codec before it."""
    found: list[str] = []
    for part in codecs.split(","):
        if "=" in part and ":" not in part:
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found


def table(found: list[dict[str, Any]]) -> str:
    """Markdown: means and standard deviations over seeds, and the distance from ``none``; where they were timed, steps after the first EARLY ones, also as
    a multiple of those of the same seed's quickest codec."""
    timed = all("ms" in one for one in found)
    lines = ["| task | codec | after 100 steps | against none | at the end | against none |" + " ms a step | over the quickest |" * timed]
    lines.append("|---" * (6 + 2 * timed) + "|")
    for task in dict.fromkeys(one["task"] for one in found):
        of_task = [one for one in found if one["task"] == task]
        for codec in dict.fromkeys(one["codec"] for one in of_task):
            cells = []
            for when in ("early", "end"):
                mine, plain = ([one[when] for one in of_task if one["codec"] == wanted] for wanted in (codec, "none"))
                spread = statistics.stdev(plain)
                away = "" if codec == "none" else f"{(statistics.fmean(mine) - statistics.fmean(plain[: len(mine)])) / spread:+.1f} sd"
                cells += [f"{statistics.fmean(mine):.3f} ± {statistics.stdev(mine):.3f}", away]
            if timed:
                quickest = {one["seed"]: min(each["ms"] for each in of_task if each["seed"] == one["seed"]) for one in of_task}
                ratios = [one["ms"] / quickest[one["seed"]] for one in of_task if one["codec"] == codec]
                cells += [
                    f"{statistics.median(one['ms'] for one in of_task if one['codec'] == codec):.1f}",
                    f"{statistics.median(ratios):.2f}",
                ]
            ended = sorted({one["ended"] for one in of_task if one["codec"] == codec})
            name = f"`{codec}`" + (f" ({', '.join(ended)})" if codec.startswith("auto") else "")
            lines.append(f"| {task} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--codecs", default=CODECS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--link-mbit", type=float, default=0.0)
    parser.add_argument("--json", type=Path, help="write the records to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    found = []
    for record in records(options):
        found.append(record)
        print(
            f"{record['task']} {record['codec']} seed {record['seed']}: {record['early']:.4f} {record['end']:.4f} {record['ms']:.2f} ms {record['ended']}",
            file=sys.stderr,
        )
    if options.json:
        options.json.write_text("".join(json.dumps(record) + "\n" for record in found))
    print(table(found))


if __name__ == "__main__":
    main()
