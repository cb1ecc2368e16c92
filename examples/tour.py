"""A tour of five minutes: would compression pay, where is the plan's time spent, and what do two workers on a slow link see of it?  make tour

tour.ipynb is the same tour as a notebook, and takes what it runs and draws from here.

Runs four of psgc's commands as a user would, and writes tour-out/index.html: each command, what it printed, and its chart. Training is real (a small CNN on
handwritten digits), the link of ``--link-mbit`` is simulated.
"""

from __future__ import annotations

import argparse
import html
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jobs import SERVERS, WORKERS, TrainingFailed, train

from psgc.diagnostics.machine import machine

CODECS = (("none", 0.05), ("int8", 0.05), ("onebit", 0.02))  # with the learning rates that the demo found
LEAST_STEPS = 3
STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}pre{background:#f4f4f4;padding:1em;overflow:auto}"
    "img{max-width:100%}td,th{padding:.2em 1em;text-align:right}"
)


class TourEnded(Exception):
    """A command failed; the text is its last words."""


def psgc(*words: str) -> str:
    """What a command prints."""
    done = subprocess.run([sys.executable, "-m", "psgc.launch", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise TourEnded(f"psgc {' '.join(words)}:\n{done.stderr}")
    return done.stdout


class Page:
    """The page, a section at a time; also said on the terminal."""

    def __init__(self, out: Path) -> None:
        self.out, self._parts, self._began = out, list[str](), time.monotonic()

    def section(self, title: str, text: str) -> None:
        print(f"{time.monotonic() - self._began:4.0f} s  {title}", flush=True)
        self._parts.append(f"<h2>{html.escape(title)}</h2><p>{html.escape(text)}</p>")

    def said(self, command: str, text: str) -> None:
        self._parts.append(f"<pre>$ {html.escape(command)}\n{html.escape(text.rstrip())}</pre>")

    def picture(self, name: str, shows: str) -> None:
        self._parts.append(f'<img src="{name}" alt="{html.escape(shows)}">')

    def table(self, rows: Sequence[Sequence[str]]) -> None:
        """The first row is the head."""
        lines = ["".join(f"<{'td' if at else 'th'}>{html.escape(cell)}" for cell in row) for at, row in enumerate(rows)]
        self._parts.append("<table>" + "".join(f"<tr>{line}" for line in lines) + "</table>")

    def link(self, name: str, text: str) -> None:
        self._parts.append(f'<p><a href="{name}">{html.escape(text)}</a></p>')

    def write(self) -> Path:
        path = self.out / "index.html"
        title = "psgc, a tour"
        path.write_text(
            f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{STYLE}</style><h1>{title}</h1><p>On {machine()}.</p>{''.join(self._parts)}"
        )
        return path


def pays(page: Page) -> None:
    page.section(
        "1. Would compression pay?",
        "GPT-2 on eight V100 machines, on a link of 10 Gbit/s each. The verdict compares with bf16, which costs nothing to send.",
    )
    words = ["advise", "--model", "gpt2", "--gpu", "v100", "--nodes", "8", "--link", "10"]
    page.said(f"psgc {' '.join(words)}", psgc(*words))
    words = ["whatif", "--profile", "gpt2", "--gpu", "v100", "--cluster", "espresso-nvlink", "--codec", "int8"]
    page.said(f"psgc {' '.join(words)} --plot whatif.png", psgc(*words, "--plot", str(page.out / "whatif.png")))
    page.picture("whatif.png", "Step time over bandwidths, with faster computers, and for codecs of other speeds")


def plan(page: Page) -> None:
    page.section("2. Where does a step's time go?", "A plan for each bucket of BERT, and the simulated step as a page with its timeline.")
    words = ["plan", "--profile", "bert-base", "--gpu", "v100", "--cluster", "espresso-nvlink", "--codec", "onebit", "--force"]
    page.said(f"psgc {' '.join(words)} --report plan.html", psgc(*words, "--report", str(page.out / "plan.html")))
    page.link("plan.html", "The plan's page, with the timeline")


def train_with(codec: str, rate: float, steps: int, link_mbit: float, out: Path) -> dict[str, Any]:
    """A record of one training. Raises TourEnded."""
    try:
        return train(
            "train_digits.py", {"steps": steps, "codec": codec, "lr": rate}, out / f"digits-{codec}.json", lambda *_: None, link_mbit
        )
    except TrainingFailed as error:
        raise TourEnded(str(error)) from None


def trained(page: Page, steps: int, link_mbit: float) -> list[dict[str, Any]]:
    """A record for each codec. Raises TourEnded."""
    page.section(
        "3. Two workers on a slow link",
        f"A small CNN on handwritten digits, {steps} steps, a simulated link of {link_mbit:g} Mbit/s for each process.",
    )
    records = []
    for codec, rate in CODECS:
        records.append(train_with(codec, rate, steps, link_mbit, page.out))
        page.said(
            f"psgc run --workers {WORKERS} --servers {SERVERS} --link-mbit {link_mbit:g} -- python examples/train_digits.py --codec {codec}",
            f"loss {records[-1]['final_train_loss']:.4f}, {records[-1]['median_step_s']} s a step",
        )
    return records


def compared(records: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Rows, of which the first is the head: each codec against the first, which is none."""
    plain = records[0]
    return [["codec", "s a step", "faster", "bytes a step", "fewer", "validation accuracy"]] + [
        [
            r["codec"],
            f"{r['median_step_s']:.3f}",
            f"{plain['median_step_s'] / r['median_step_s']:.1f}x",
            f"{r['wire_bytes_per_step_per_worker']:,}",
            f"{plain['wire_bytes_per_step_per_worker'] / r['wire_bytes_per_step_per_worker']:.1f}x",
            f"{r['val_accuracy']:.1%}",
        ]
        for r in records
    ]


def chart(records: Sequence[dict[str, Any]]) -> Any:
    """A figure: loss over steps, loss over time, and bytes a step."""
    from matplotlib import pyplot

    figure, (by_step, by_time, sizes) = pyplot.subplots(1, 3, figsize=(14, 4), layout="constrained")
    for record in records:
        losses, pace = record["losses"], record["median_step_s"]
        by_step.plot(losses, label=record["codec"])
        by_time.plot([pace * step for step in range(len(losses))], losses, label=record["codec"])
    by_step.set(xlabel="step", ylabel="training loss, rank 0", title="Loss over steps")
    by_time.set(xlabel="s, at the median step", title="Loss over time")
    by_step.legend()
    sizes.bar([r["codec"] for r in records], [r["wire_bytes_per_step_per_worker"] for r in records])
    sizes.set(ylabel="bytes a step and worker", title="What travelled", yscale="log")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--link-mbit", type=float, default=20.0)
    parser.add_argument("--out", type=Path, default=Path("tour-out"))
    options = parser.parse_args()
    if options.steps < LEAST_STEPS:
        parser.error(f"--steps {options.steps}: at least {LEAST_STEPS}, because the first settles the layout")
    options.out.mkdir(parents=True, exist_ok=True)
    page = Page(options.out)
    try:
        pays(page)
        plan(page)
        records = trained(page, options.steps, options.link_mbit)
    except TourEnded as error:
        sys.exit(f"{error}\ntour: the command above failed")
    import matplotlib

    matplotlib.use("Agg")
    chart(records).savefig(options.out / "training.png")
    page.picture("training.png", "Loss over steps and over time, and bytes a step, for each codec")
    page.table(compared(records))
    page.section("4. Next", "README.md has the four lines that a script needs; docs/index.md says which page answers which question.")
    (options.out / "tour.json").write_text(json.dumps(records))
    print(f"read {page.write()}")


if __name__ == "__main__":
    main()
