"""Reader of traces that Nsight Systems exports as SQLite (``nsys export --type sqlite``), for ``traces``.

Such a trace has gradients and their shapes if the training ran under ``torch.autograd.profiler.emit_nvtx(record_shapes=True)``. It has no sizes
of NCCL's messages, so no links are derived from it.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from psgc.errors import UsageError
from psgc.plan.inputs.traces import ACCUMULATE, BACKWARD, OPTIMIZER, Accumulated, Launch, Span, Trace

MAGIC: Final = b"SQLite format 3\0"
_RANGE: Final = 59  # NVTX_EVENTS.eventType of ranges that a thread pushes and pops
_SIZES: Final = re.compile(r"sizes = \[\[([\d, ]*)\]")
_NVTX: Final = """
    SELECT events.start, events.end, events.globalTid, COALESCE(events.text, strings.value)
    FROM NVTX_EVENTS AS events LEFT JOIN StringIds AS strings ON events.textId = strings.id
    WHERE events.eventType = ? AND events.end IS NOT NULL"""
# A call and its kernel have the same process, in the upper bits of globalTid and globalPid, and the same correlation id.
_KERNELS: Final = """
    SELECT calls.globalTid, calls.start, kernels.start, kernels.end
    FROM CUPTI_ACTIVITY_KIND_KERNEL AS kernels
    JOIN CUPTI_ACTIVITY_KIND_RUNTIME AS calls
    ON calls.correlationId = kernels.correlationId AND calls.globalTid / 0x1000000 = kernels.globalPid / 0x1000000
    JOIN StringIds AS names ON names.id = kernels.shortName
    WHERE names.value NOT LIKE 'nccl%'"""


def read(path: Path) -> tuple[Trace, str]:
    """The trace in ``path``, and the name of its GPU, if any. Raises UsageError, in one line, for any other file."""
    trace, gpu = Trace(), ""
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if not {"NVTX_EVENTS", "StringIds"} <= tables:
                raise UsageError(f"{path}: no NVTX ranges in it; run nsys with --trace=cuda,nvtx, and the training under "
                                 f"torch.autograd.profiler.emit_nvtx(record_shapes=True)")  # fmt: skip
            if "TARGET_INFO_GPU" in tables:
                gpu = next((str(name) for (name,) in database.execute("SELECT name FROM TARGET_INFO_GPU ORDER BY id")), "")
            for start, end, thread, text in _rows(database, _NVTX, _RANGE):
                _range(trace, Span(start / 1e3, end / 1e3, thread), str(text))
            if {"CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"} <= tables:  # nsys omits empty tables
                trace.launches += [Launch(thread, at / 1e3, start / 1e3, end / 1e3) for thread, at, start, end in _rows(database, _KERNELS)]
    except sqlite3.Error as error:
        raise UsageError(f"{path}: not an SQLite export of Nsight Systems: {error}") from None
    return trace, gpu


def _rows(database: sqlite3.Connection, query: str, *values: Any) -> Iterator[tuple[Any, ...]]:
    yield from database.execute(query, values)


def _range(trace: Trace, span: Span, text: str) -> None:
    name = text.partition(",")[0]
    if name == ACCUMULATE:
        if (sizes := _SIZES.search(text)) is not None:
            shape = tuple(int(size) for size in sizes[1].split(",") if size.strip())
            trace.gradients.append(Accumulated(span.start, span.end, span.thread, shape))
    elif name.startswith(BACKWARD):
        trace.backward.append(span)
    elif name.startswith(OPTIMIZER):
        trace.optimizer.append(span)
    elif name.startswith("aten::"):
        trace.operators.append(span.start)
