"""A job's view as a table for people, and as a document for machines."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from psgc.observe.table import FIGURES

if TYPE_CHECKING:
    from rich.console import RenderableType

    from psgc.observe.live import Row, View

HEADER = ("", "steps", "ms", "waits", "overlap", "ratio", "MB/s", "load", "process", "")


def document(view: View) -> dict[str, Any]:
    """What ``psgc top --json`` prints, and the status page shows. Members' figures have the names of ``psgc/observe/table.py``."""
    return {
        "complete": view.complete, "steps": view.steps, "step_ms": view.median("step_ms"), "ratio": view.median("ratio"),
        "overlap": view.median("overlap"), "slowest_rank": view.slowest_rank, "awaited": list(view.awaited),
        "slow": [asdict(one) for one in view.slow],
        "workers": [_plain(row) for row in view.workers], "servers": [_plain(row) for row in view.rows if row.role == "server"],
        "events": [asdict(event) for event in view.events],
    }  # fmt: skip


def _plain(row: Row) -> dict[str, Any]:
    figures = {each.name: row.figures.get(each.name) for each in FIGURES if each.is_of(row.role)}
    return {"index": row.index, "hostname": row.hostname, "pid": row.pid, "left": row.left, "silent_s": row.silent_s, **figures}


def table(view: View, silence_s: float) -> RenderableType:
    """The job as a table. silence_s: members that have been silent for this long are marked."""
    from rich import box
    from rich.table import Table

    made = Table(title=headline(view), title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    rows = [_cells(row, view, silence_s) for row in view.rows] or [[""] * len(HEADER)]
    shown = [number for number, name in enumerate(HEADER) if name or not number or any(row[number] for row in rows)]
    for number in shown:
        name = HEADER[number]
        needed = None if name == "process" else max(len(name), *(len(row[number]) for row in rows))  # a narrow terminal cuts host names
        made.add_column(name, justify="left" if name in ("", "process") else "right", no_wrap=True, min_width=needed)
    for row in rows:
        made.add_row(*(row[number] for number in shown))
    return made


def headline(view: View) -> str:
    """The job in one line."""
    if not view.complete:
        return f"{len(view.rows)} members are there; others are awaited"
    parts = [f"step {view.steps}" if view.steps else "no step yet"]
    if (step := view.median("step_ms")) is not None:
        parts.append(f"{step:.1f} ms each")
    if (ratio := view.median("ratio")) is not None:
        parts.append(f"{ratio:.1f}x fewer bytes than uncompressed")
    if view.awaited:
        where = {one.member: f" ({one.where})" for one in view.slow}
        parts.append(f"others wait for {', '.join(member + where.get(member, '') for member in view.awaited)}")
    return ", ".join(parts)


def _cells(row: Row, view: View, silence_s: float) -> list[str]:
    notes = ["has left"] if row.left else [f"silent for {row.silent_s:.0f} s"] if row.silent_s > silence_s else []
    slow = [f"slow: {one.where}" for one in view.slow if one.member == row.member]
    if not slow and row.role == "worker" and row.index == view.slowest_rank:
        slow = ["slowest"]
    notes += slow
    steps, rate = row.number("steps"), row.number("bytes_per_s")
    return [
        row.member, "" if steps is None else f"{steps:,}", _number(row.number("step_ms"), 1), _share(row.number("waits")), _share(row.number("overlap")),
        _number(row.number("ratio"), 1), "" if rate is None else f"{rate / 1e6:.2f}", _share(row.number("load")), f"{row.pid}@{row.hostname}",
        ", ".join(notes),
    ]  # fmt: skip


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"
