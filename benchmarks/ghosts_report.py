"""A table and a chart of what ``ghosts.py`` has measured, as ``scale.py`` keeps it in its file of results: what a server and the scheduler do for up to a
thousand workers. Pure but for the drawing."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

Sizes = Sequence[Mapping[str, Any]]  # of one codec: what ``ghosts.measure`` returns, the fewest workers first
PANELS: Final = (
    ("server_us", "server, us a contribution"),
    ("server_mib", "server's memory, MiB"),
    ("step_s", "a step, s (most of it the ghosts' own work)"),
    ("scheduler_ms", "scheduler, ms a member until the layout"),
)


def ghosts_of(lines: Iterable[str]) -> dict[str, Sizes]:
    """By codec; of several runs with a codec every number is the median."""
    found: dict[str, dict[int, list[Mapping[str, Any]]]] = {}
    for row in map(json.loads, lines):
        if row["kind"] == "ghosts":
            of_codec = found.setdefault(row["ghosts"]["codec"], {})
            for size in row["ghosts"]["sizes"]:
                of_codec.setdefault(size["workers"], []).append(size)
    return {
        codec: [{name: statistics.median(run[name] for run in runs) for name in runs[0]} for _, runs in sorted(of_codec.items())]
        for codec, of_codec in found.items()
    }


def runs_of(lines: Iterable[str]) -> Counter[str]:
    """How many runs there are of each codec."""
    return Counter(row["ghosts"]["codec"] for row in map(json.loads, lines) if row["kind"] == "ghosts")


def members_of(ghosts: Mapping[str, Sizes]) -> dict[int, float]:
    """What a member costs the scheduler until the layout, in processor seconds by the number of members, uncompressed."""
    return {size["workers"]: size["scheduler_ms"] / 1e3 for size in ghosts.get("none", ())}


def heading(codec: str, sizes: Sizes) -> str:
    """Of a codec's columns: what its payloads are."""
    nbytes, keys = sizes[0]["payload_bytes"], sizes[0]["keys"]
    return f"`{codec}`, {keys} payloads of {nbytes / 1024:.0f} KiB"


def measured(ghosts: Mapping[str, Sizes]) -> str:
    """A row for each number of workers."""
    columns = ("server, us a contribution", "its memory, MiB", "a step, s")
    names = ["workers", *(f"{heading(codec, sizes)}: {column}" for codec, sizes in ghosts.items() for column in columns)]
    names += ["scheduler, ms a member until the layout", "its messages a member"]
    every = sorted({size["workers"] for sizes in ghosts.values() for size in sizes})
    by_size = {codec: {size["workers"]: size for size in sizes} for codec, sizes in ghosts.items()}
    lines = [names, ["---"] * len(names)]
    for workers in every:
        cells = [f"{workers:,}"]
        for sizes in by_size.values():
            size = sizes.get(workers)
            cells += ["", "", ""] if size is None else [f"{size['server_us']:.0f}", f"{size['server_mib']:,.0f}", f"{size['step_s']:.3f}"]
        one = by_size.get("none", {}).get(workers)
        lines.append([*cells, *(["", ""] if one is None else [f"{one['scheduler_ms']:.2f}", f"{one['messages']:.1f}"])])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def flat(ghosts: Mapping[str, Sizes], least: int) -> str:
    """A sentence: how a contribution's cost changes from so many workers on; "" if there are no such jobs."""
    told = []
    for codec, sizes in ghosts.items():
        costs = [size["server_us"] for size in sizes if size["workers"] >= least]
        if not costs:
            return ""
        told.append(f"`{codec}` {costs[0]:.0f} us to {costs[-1]:.0f}, at most {max(costs) / min(costs) - 1:.0%} apart")
    return f"What a contribution costs from {least} workers to the most: {'; '.join(told)}."


def draw(ghosts: Mapping[str, Sizes], path: Path) -> None:
    """A panel for each of PANELS, over the number of workers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(PANELS), figsize=(4.0 * len(PANELS), 3.6), squeeze=False, layout="constrained")
    for panel, (what, label) in zip(panels[0], PANELS, strict=True):
        for codec, sizes in ghosts.items():
            panel.plot(
                [size["workers"] for size in sizes],
                [size[what] for size in sizes],
                marker="o",
                label=heading(codec, sizes).replace("`", ""),
            )
        ticks = sorted({size["workers"] for sizes in ghosts.values() for size in sizes})
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        panel.set(xlabel="workers", title=label)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8)
    figure.savefig(path, metadata={"Date": None})
