"""Tables and a chart of what ``far_apart.py`` has measured: ``--report`` prints them, ``--plot`` draws. Pure but for the drawing."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

NAMES: Final = {
    "ddp": "DDP, an exchange in every step",
    "torchft": "torchft's DiLoCo, as by default",
    "torchft buckets": "torchft's, with buckets",
    "torchft streaming": "torchft's, buckets, 5 fragments, delay 5, mix 0.5",
    "torchft slow": "torchft's, buckets, one learner ten times slower",
    "torchft killed": "torchft's, buckets, one learner killed after a quarter of its steps",
    "psgc none": "psgc's DiLoCo, uncompressed",
    "psgc bf16": "bf16",
    "psgc int4": "int4",
    "psgc streaming none": "uncompressed, 5 fragments, delay 5, mix 0.5",
    "psgc streaming": "int4, 5 fragments, delay 5, mix 0.5",
    "psgc servers": "int4, outer steps on servers",
    "psgc sparseloco": "SparseLoCo",
    "psgc demo": "DeMo, an exchange in every step",
    "psgc decoupled": "learners around a syncer, int4",
    "psgc decoupled slow": "the same, one learner ten times slower",
    "psgc decoupled killed": "the same, one learner killed after a quarter of its steps",
}
AT_ONCE: Final = {"ddp", "torchft streaming", "psgc streaming none", "psgc streaming"}  # travel while they compute
PROBES: Final = "psgc "  # begins names of systems that measure a fast link with bytes of their own, next to none on a slow one
LR: Final = 3e-3  # of AdamW, where none is named
HIGHEST: Final = 3.4  # of the losses that are drawn: the first steps of some are far above all others
DRAWN: Final = (
    "ddp",
    "torchft",
    "torchft buckets",
    "psgc none",
    "psgc int4",
    "psgc streaming",
    "psgc sparseloco",
    "psgc demo",
    "psgc decoupled",
)


@dataclass(frozen=True, slots=True)
class Run:
    """One system with one seed over one link (mbit 0: without a limit). of: what else was the same for all. curve: tokens, seconds, loss."""

    system: str
    learners: int
    steps: int
    every: int
    mbit: float
    delay_ms: float
    seed: int
    seconds: float
    sent_bytes: int
    loss: float
    memory_bytes: int
    curve: tuple[tuple[float, float, float], ...]
    lr: float = LR
    again: int = 0


def run_of(document: dict[str, Any]) -> Run:
    """Of a line of results."""
    system, job, _ = json.loads(document["of"])
    row = document["row"]
    return Run(
        system, job["learners"], job["steps"], job["every"], job["mbit"], job["delay_ms"], job["seed"], row["seconds"], row["sent_bytes"], row["loss"],
        row["memory_bytes"], tuple(tuple(point) for point in row["curve"]), job.get("lr", LR), job.get("again", 0),
    )  # fmt: skip


def runs_of(text: str) -> list[Run]:
    """Of all lines of results; of the same run, on another day or machine, the last."""
    runs = map(run_of, map(json.loads, text.splitlines()))
    which = {(run.system, run.learners, run.steps, run.every, run.mbit, run.delay_ms, run.seed, run.lr, run.again): run for run in runs}
    return list(which.values())


def first_of(runs: Sequence[Run]) -> Run:
    """Of the lowest seed: bytes do not depend on it."""
    return min(runs, key=lambda run: run.seed)


def scatter(values: Sequence[float]) -> str:
    """Mean and standard deviation, if there are several."""
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"


def tables(runs: Iterable[Run]) -> str:
    """One in Markdown for each number of learners and steps. Seconds: the median of all runs; bytes: of the first seed; over links on which a system was not
    run, at least so many seconds (``least_seconds``). Loss, bytes and memory: over links without a limit, where there are such runs: a link changes nothing
    but where nobody waits for anybody."""
    groups: dict[tuple[int, int, int, float], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.learners, run.steps, run.every, -run.lr), []).append(run)
    links = sorted({run.mbit for group in groups.values() for run in group}, key=lambda mbit: (mbit > 0, -mbit))
    return "\n\n".join(_table(*key, links, groups[key]) for key in sorted(groups))


def least_seconds(system: str, runs: Sequence[Run], mbit: float) -> float | None:
    """What a system takes at least over such a link: the computation of its runs without a limit, and what its bytes take, the fewest that it has sent over
    any link; the longer of both where bytes travel while it computes. Delays and messages come on top. None where there are no such runs, where the time is
    that of one learner of many, where bytes become fewer on a slow link (a syncer's learners push when they can), or where the only runs were over links
    that it measured first."""
    free, sent = [run for run in runs if not run.mbit], [run for run in runs if run.mbit or not system.startswith(PROBES)]
    if not free or not sent or system.endswith((" slow", " killed")) or system.startswith("psgc decoupled"):
        return None
    computes, travels = statistics.median(run.seconds for run in free), min(run.sent_bytes for run in sent) * 8e-6 / mbit
    return max(computes, travels) if system in AT_ONCE else computes + travels


def _table(learners: int, steps: int, every: int, less_lr: float, links: Sequence[float], runs: Sequence[Run]) -> str:
    seeds = len({run.seed for run in runs})
    lines = [
        f"{learners} learners, {steps} steps, every {every}, lr {-less_lr:g}; {seeds} seed{'s' if seeds > 1 else ''}:",
        "",
        "| | "
        + " | ".join("seconds" if not mbit else f"at {mbit:g} Mbit/s" for mbit in links)
        + " | sent by a host, MB | a learner's memory, MB | validation loss |",
        "|---|" + "---|" * (len(links) + 3),
    ]
    for system in NAMES:
        own = [run for run in runs if run.system == system]
        if not own:
            continue
        cells = []
        for mbit in links:
            seconds = [run.seconds for run in own if run.mbit == mbit]
            least = least_seconds(system, own, mbit) if mbit else None
            cells.append(f"{statistics.median(seconds):,.0f}" if seconds else "" if least is None else f"≥ {least:,.0f}")
        free = [run for run in own if not run.mbit] or own
        losses = list({run.seed: run.loss for run in free}.values())
        sent = first_of(free).sent_bytes / 1e6
        held = [run.memory_bytes / 1e6 for run in free if run.memory_bytes >= 0]
        memory = f"{statistics.median(held):,.0f}" if held else ""
        few = f" ({len(losses)} seed{'s' if len(losses) > 1 else ''})" if len(losses) < seeds else ""
        lines.append(f"| {NAMES[system]} | {' | '.join(cells)} | {sent:,.0f} | {memory} | {scatter(losses)}{few} |")
    return "\n".join(lines)


def draw(runs: Sequence[Run], learners: int, path: Path) -> None:
    """Loss over tokens of all learners, and over seconds, a panel for each link, of the lowest seed that has a curve there; of the length and rate with most
    runs. Raises ValueError if there is no curve."""
    chosen = [run for run in runs if run.learners == learners and len(run.curve) > 1 and run.system in DRAWN]
    kinds = Counter((run.steps, run.every, run.lr) for run in chosen)
    chosen = [run for run in chosen if (run.steps, run.every, run.lr) == kinds.most_common(1)[0][0]]
    links = sorted({run.mbit for run in chosen}, key=lambda mbit: (mbit > 0, -mbit))
    if not links:
        raise ValueError(f"no run with {learners} learners has a curve; expected --curve in the runs of the results")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    count = len(links) + 1
    figure, panels = pyplot.subplots(1, count, figsize=(4.4 * count, 4.2), sharey=True, squeeze=False, layout="constrained")
    colours = {system: f"C{number}" for number, system in enumerate(DRAWN)}
    for panel, (mbit, axis) in zip(panels[0], [(links[0], 0), *((mbit, 1) for mbit in links)], strict=True):
        for system in DRAWN:
            own = [run for run in chosen if (run.system, run.mbit) == (system, mbit)]
            if own:
                first = first_of(own)
                panel.plot(
                    [point[axis] for point in first.curve],
                    [point[2] for point in first.curve],
                    marker=".",
                    color=colours[system],
                    label=NAMES[system],
                )
        delay = max(run.delay_ms for run in chosen if run.mbit == mbit)
        link = f"{mbit:g} Mbit/s, {delay:g} ms each way" if mbit else "no limit"
        panel.set(xlabel=("tokens", "seconds")[axis], title=link)
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("validation loss, nats a byte")
    panels[0][0].set_ylim(top=HIGHEST)
    handles = {label: handle for panel in panels[0] for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, metadata={"Date": None})
