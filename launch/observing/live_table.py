"""A job's view as a table for people, and as a document for machines."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

    from psgc.observe.live import Row, View

HEADER = ("", "steps", "ms", "waits", "overlap", "ratio", "MB/s", "load", "process", "")


def document(view: View) -> dict[str, Any]:
    """What ``psgc top --json`` prints."""
    return {
        "complete": view.complete, "steps": view.steps, "step_ms": view.median("step_ms"), "ratio": view.median("ratio"),
        "overlap": view.median("overlap"), "slowest_rank": view.slowest_rank,
        "workers": [_plain(row, ("load",)) for row in view.workers],
        "servers": [_plain(row, ("steps", "step_ms", "waits", "ratio", "overlap")) for row in view.rows if row.role == "server"],
    }  # fmt: skip


def _plain(row: Row, without: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in asdict(row).items() if name not in ("role", *without)}


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
    if view.slowest_rank is not None:
        parts.append(f"others wait for rank {view.slowest_rank}")
    return ", ".join(parts)


def _cells(row: Row, view: View, silence_s: float) -> list[str]:
    name = f"{'rank' if row.role == 'worker' else 'server'} {row.index if row.index >= 0 else '?'}"
    notes = ["has left"] if row.left else [f"silent for {row.silent_s:.0f} s"] if row.silent_s > silence_s else []
    if row.role == "worker" and row.index == view.slowest_rank:
        notes.append("slowest")
    return [
        name, "" if row.steps is None else f"{row.steps:,}", _number(row.step_ms, 1), _share(row.waits), _share(row.overlap), _number(row.ratio, 1),
        "" if row.bytes_per_s is None else f"{row.bytes_per_s / 1e6:.2f}", _share(row.load), f"{row.pid}@{row.hostname}", ", ".join(notes),
    ]  # fmt: skip


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"
