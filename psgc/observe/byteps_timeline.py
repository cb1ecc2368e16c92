"""A worker's timeline in BytePS's format and place: ``FOLDER/LOCAL_RANK/comm.json``, which tools for BytePS look for.

Owns that format: Chrome trace events, times in microseconds since 1970. ``pid`` is the tensor, as ``Comm.byteps.Gradient.NAME``. An event whose ``tid`` is
"total" is one step of the tensor, from its readiness to its result; any other is one stage of one part, whose key ``tid`` is, and its name ends with
BytePS's name of the stage. Tensors that were fused into one part have the same times.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from psgc.errors import PsgcError
from psgc.layout import Layout
from psgc.observe.lanes import DECODE, ENCODE, PULL, PUSH, READY, WAIT, Described
from psgc.observe.recorder import Recorded

_OVER_SERVERS: Final = {PUSH: "PUSH", PULL: "PULL"}
_COPIES: Final = {ENCODE: "COPYD2H", DECODE: "COPYH2D"}  # what BytePS calls the copy of an uncompressed part
_CODED: Final = {ENCODE: "COMPRESS", DECODE: "DECOMPRESS"}
_IN_WORDS: Final = (
    ("decomp", "DECOMPRESS"), ("comp", "COMPRESS"), ("reduce", "REDUCE"), ("gather", "BROADCAST"), ("broadcast", "BROADCAST"), ("push", "PUSH"),
    ("pull", "PULL"),
)  # fmt: skip
_PREFIXES: Final = {"plan": "Gradient.", "broadcast": "Parameter."}


def stage(described: Described, action: int) -> str:
    """BytePS's name of an action's stage."""
    if action in _OVER_SERVERS:
        return _OVER_SERVERS[action]
    if action in (ENCODE, DECODE):
        return (_COPIES if described.codec == "none" else _CODED)[action]
    word = described.action(action)
    return next((name for sign, name in _IN_WORDS if sign in word), word.upper())


def comm_events(
    spans: Sequence[Recorded], layouts: Mapping[int, Layout], described: Mapping[tuple[int, int], Described], epoch_ns: int
) -> Iterator[Any]:
    """The events of these spans. layouts: by id. described: by layout and bucket. epoch_ns: what the machine's monotonic clock showed 0 at, since 1970."""
    totals: dict[tuple[str, int], tuple[int, int]] = {}  # by tensor and step: its first and last moment
    parts = {part.key: part for layout in layouts.values() for _, part in layout.parts()}
    for span in spans:
        number, bucket_number = span.key >> 48, span.key >> 24 & 0xFFFFFF
        layout = layouts.get(number)
        if layout is None or span.action == WAIT:
            continue
        bucket, part = layout.buckets[bucket_number], parts.get(span.key)
        for name, place in layout.places(bucket):
            if part is not None and span.action != READY and not (part.offset < place.stop and place.start < part.offset + part.numel):
                continue
            tensor = f"Comm.byteps.{_PREFIXES.get(layout.kind, '')}{name}"
            began = span.ended_ns if span.action == READY else span.began_ns
            first, last = totals.get((tensor, span.step), (began, span.ended_ns))
            totals[tensor, span.step] = min(first, began), max(last, span.ended_ns)
            if span.action != READY:
                what = f"{tensor}.{stage(described[number, bucket_number], span.action)}"
                yield _event(tensor, what, str(span.key), span.began_ns + epoch_ns, span.ended_ns + epoch_ns)
    for (tensor, _), (first, last) in totals.items():
        yield _event(tensor, tensor, "total", first + epoch_ns, last + epoch_ns)


def _event(tensor: str, name: str, tid: str, began_ns: int, ended_ns: int) -> dict[str, Any]:
    return {
        "ph": "X", "args": {"name": tensor}, "pid": tensor, "name": name, "ts": began_ns // 1000, "dur": ended_ns // 1000 - began_ns // 1000, "tid": tid,
        "cat": "Comm",
    }  # fmt: skip


def write_comm(folder: str, local_rank: int, events: Iterator[Any]) -> Path:
    """Write the worker's file, event by event. Raises PsgcError if the folder cannot be written."""
    path = Path(folder, str(local_rank), "comm.json")
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("w") as file:
            file.write('{\n    "traceEvents": [')
            for count, event in enumerate(events):
                file.write(("," if count else "") + "\n" + json.dumps(event))
            file.write('\n    ],\n    "displayTimeUnit": "ms"\n}\n')
        part.replace(path)
    except OSError as error:
        raise PsgcError(f"the trace cannot be written to {path}: {error.strerror}; set BYTEPS_TRACE_DIR") from None
    return path
