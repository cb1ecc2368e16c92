"""The main job: two real trainings over a scheduler, a server and two workers, uncompressed and compressed, side by side; and a few steps of one
of them over slow links, which ``psgc run --link-mbit`` simulates, to see the time that compression saves there.

Writes demo-out/losses.png and demo-report.json, and prints two tables. ``--quick`` runs a tenth of the steps.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from jobs import TrainingFailed, train
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from psgc.diagnostics.machine import machine

SEED = 0
# task, script, codec, steps, learning rate (tuned for each codec on the digits; one for all of GPT)
RUNS = (
    ("gpt", "train_gpt.py", "none", 150, 3e-3),
    ("gpt", "train_gpt.py", "bf16", 150, 3e-3),
    ("gpt", "train_gpt.py", "int8", 150, 3e-3),
    ("digits", "train_digits.py", "none", 800, 0.05),
    ("digits", "train_digits.py", "onebit", 800, 0.02),
    ("digits", "train_digits.py", "topk:k=0.01", 800, 0.05),
)
# The same over links of so many 1e6 bit/s: uncompressed against the codec that wins there.
LINK_MBIT = 100.0
LINKED_RUNS = (
    ("gpt", "train_gpt.py", "none", 12, 3e-3),
    ("gpt", "train_gpt.py", "int8", 12, 3e-3),
)
LEAST_STEPS = 3  # the first settles the layout, and its time is no step's time


def run(
    task: str, script: str, codec: str, steps: int, lr: float, out: Path, progress: Progress, bar: TaskID, link_mbit: float | None = None
) -> dict[str, Any]:
    """One job; its record. Ends the demo with the job's own last words if it fails."""
    link = "" if link_mbit is None else f"-{link_mbit:g}-mbit"
    record = out / f"{task}-{re.sub('[^a-z0-9]+', '-', codec)}{link}.json"
    flags = {"steps": steps, "codec": codec, "lr": lr, "seed": SEED}
    try:
        made = train(script, flags, record, lambda step, loss: progress.update(bar, completed=step, loss=loss), link_mbit)
        return made if link_mbit is None else {**made, "link_mbit": link_mbit}
    except TrainingFailed as error:
        sys.exit(f"{error}\ndemo: {task} under {codec} failed")


def with_ratios(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Bytes against the uncompressed run of the same task, and against half of that, which a bf16 peer would send."""
    plain = {r["task"]: r["wire_bytes_per_step_per_worker"] for r in records if r["codec"] == "none"}
    for r in records:
        r["ratio_to_fp32"] = round(plain[r["task"]] / r["wire_bytes_per_step_per_worker"], 2)
        r["ratio_to_bf16"] = round(plain[r["task"]] / 2 / r["wire_bytes_per_step_per_worker"], 2)
    return records


def plot(records: list[dict[str, Any]], path: Path) -> None:
    """Training loss of rank 0 by step, smoothed over ten steps; one panel a task."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    tasks = list(dict.fromkeys(r["task"] for r in records))
    figure, panels = plt.subplots(1, len(tasks), figsize=(6 * len(tasks), 4), squeeze=False)
    for panel, task in zip(panels[0], tasks, strict=True):
        for r in (r for r in records if r["task"] == task):
            losses = r["losses"]
            smooth = [sum(losses[max(0, i - 9) : i + 1]) / len(losses[max(0, i - 9) : i + 1]) for i in range(len(losses))]
            panel.plot(
                range(1, len(smooth) + 1), smooth, label=f"{r['codec']} ({r['wire_bytes_per_step_per_worker'] / 1e3:,.0f} kB a step)"
            )
        panel.set(title=task, xlabel="step", ylabel="training loss")
        panel.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def show(records: list[dict[str, Any]]) -> None:
    table = Table(title="psgc demo: 2 workers, 1 server")
    for column in ("task", "codec", "steps", "train loss", "val loss", "accuracy", "bytes a step", "over fp32", "over bf16", "steps/s"):
        table.add_column(column, justify="left" if column in ("task", "codec") else "right")
    for r in records:
        accuracy = "" if r["val_accuracy"] is None else f"{r['val_accuracy']:.2%}"
        table.add_row(
            r["task"], r["codec"], str(r["steps"]), f"{r['final_train_loss']:.4f}", f"{r['final_val_loss']:.4f}", accuracy,
            f"{r['wire_bytes_per_step_per_worker']:,}", f"{r['ratio_to_fp32']:.1f}x", f"{r['ratio_to_bf16']:.1f}x", f"{r['steps_per_s']:.2f}",
        )  # fmt: skip
    console = Console()
    console.width = max(console.width, 120)  # a figure cut in half is none
    console.print(table)


def show_linked(records: list[dict[str, Any]]) -> None:
    """What compression does for the time of a step where the network is slow."""
    plain = next(r["median_step_s"] for r in records if r["codec"] == "none")
    table = Table(title=f"over links of {LINK_MBIT:g} Mbit/s (psgc run --link-mbit {LINK_MBIT:g})")
    for column in ("task", "codec", "steps", "bytes a step", "seconds a step", "faster"):
        table.add_column(column, justify="left" if column in ("task", "codec") else "right")
    for r in records:
        table.add_row(
            r["task"], r["codec"], str(r["steps"]), f"{r['wire_bytes_per_step_per_worker']:,}", f"{r['median_step_s']:.2f}",
            f"{plain / r['median_step_s']:.1f}x",
        )  # fmt: skip
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps")
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    parser.add_argument("--report", type=Path, default=Path("demo-report.json"))
    options = parser.parse_args()
    options.out.mkdir(exist_ok=True)
    columns = (
        TextColumn("{task.description:30}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} loss {task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    records, linked = [], []
    with Progress(*columns) as progress:
        for made, runs, link_mbit in ((records, RUNS, None), (linked, LINKED_RUNS, LINK_MBIT)):
            for task, script, codec, full, lr in runs:
                steps = max(LEAST_STEPS, full // 10) if options.quick else full
                over = "" if link_mbit is None else f", {link_mbit:g} Mbit/s"
                bar = progress.add_task(f"{task} under {codec}{over}", total=steps, loss="-")
                made.append(run(task, script, codec, steps, lr, options.out, progress, bar, link_mbit))
    with_ratios(records)
    plot(records, options.out / "losses.png")
    show(records)
    show_linked(linked)
    without_losses = [{key: value for key, value in r.items() if key != "losses"} for r in (*records, *linked)]
    options.report.write_text(json.dumps({"machine": machine(), "runs": without_losses}, indent=1) + "\n")
    print(f"wrote {options.report} and {options.out / 'losses.png'}")


if __name__ == "__main__":
    main()
