"""A member's timeline as a file: writes the recorder's spans as Chrome trace events, which Perfetto (ui.perfetto.dev) opens, and reads them.

Owns the file's format. An event is named bucket/part/action, as in the simulator, preceded by the layout's name if the job has several layouts.
Times are microseconds of the machine's monotonic clock. ``otherData`` names the member, and has what merging and summaries need.

Source: "Trace Event Format", Google: complete events (``X``) with times in microseconds, and metadata events (``M``) that name lanes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from psgc.errors import PsgcError, UsageError
from psgc.observe.lanes import COLLECTIVES, LANES, Described, Line, lanes_of
from psgc.observe.recorder import Recorded

FORMAT: Final = 1
Event = dict[str, Any]


@dataclass(slots=True)
class About:
    """The member that a file is from. clock: equal for members that share a clock; first, last: the range of steps to trace; steps: the last step that the
    member began, of any bucket; dropped: number of spans for which there was no memory left."""

    role: str
    index: int
    host: str
    clock: str
    node_sizes: tuple[int, ...]
    first: int
    last: int
    steps: int = 0
    dropped: int = 0
    format: int = FORMAT

    @property
    def name(self) -> str:
        return f"{self.role} {self.index}"

    @property
    def file_name(self) -> str:
        return f"{self.role}{self.index}.json"


class Name(NamedTuple):
    """A layout's bucket in a timeline."""

    layout: str
    bucket: int
    described: Described


Names = Mapping[tuple[int, int], Name]  # by the key's layout and bucket


@dataclass(slots=True)
class Timeline:
    """One file's contents. events: the events with times (``X``); tracks: the displayed lane name of each tid."""

    about: About
    events: list[Event]
    tracks: dict[int, str]
    source: str = ""
    shift_us: float = field(default=0.0)  # to be added to its times, so that they are of the first rank's clock


class _Tracks:
    """Assigns spans to tracks of the file. A lane has one track for each thing that was busy on it."""

    def __init__(self, spans: Sequence[Recorded], node_sizes: Sequence[int]) -> None:
        found: dict[str, dict[tuple[int, ...], int]] = {lane: {} for lane in LANES}
        for span in spans:
            for lane in lanes_of(span.line, node_sizes):
                found[lane].setdefault(_whose(span), len(found[lane]))
        self.names: dict[int, str] = {}
        self._of: dict[tuple[str, tuple[int, ...]], int] = {}
        for lane, owners in found.items():
            for owner, number in owners.items():
                track = self._of[lane, owner] = len(self.names)
                self.names[track] = lane if len(owners) == 1 else f"{lane} {number}"

    def of(self, lane: str, span: Recorded) -> int:
        return self._of[lane, _whose(span)]


def _whose(span: Recorded) -> tuple[int, ...]:
    """What was busy in a span. Each layout has separate threads for collectives."""
    return (span.line, span.key >> 48) if span.line in COLLECTIVES else (span.line, span.track)


def metadata(kind: str, pid: int, tid: int = 0, **what: Any) -> Event:
    """An event that names a process or a track."""
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": what}


def events(spans: Sequence[Recorded], names: Names, node_sizes: Sequence[int], pid: int = 1) -> Iterator[Event]:
    """The events of these spans, those that name tracks first."""
    spans = [span for span in spans if (span.key >> 48, span.key >> 24 & 0xFFFFFF) in names]
    tracks = _Tracks(spans, node_sizes)
    for track, name in tracks.names.items():
        yield metadata("thread_name", pid, track, name=name)
        yield metadata("thread_sort_index", pid, track, sort_index=track)
    several = len({layout for layout, _ in names}) > 1
    for span in spans:
        layout, number, part = span.key >> 48, span.key >> 24 & 0xFFFFFF, span.key & 0xFFFFFF
        bucket = names[layout, number]
        action = bucket.described.action(span.action)
        where = f"{number}/{action}" if action == "backward" else f"{number}/{part}/{action}"
        args = {
            "layout": bucket.layout,
            "step": span.step,
            "bucket": number,
            "part": part,
            "action": action,
            "tensor": bucket.described.tensor,
        }
        if span.line in (Line.SEND, Line.RECEIVE):
            args["peer"] = span.track  # the server's index, or at a server the rank
        if span.nbytes:
            args["bytes"] = span.nbytes
        if bucket.described.codec != "none":
            args["codec"] = bucket.described.codec
        for lane in lanes_of(span.line, node_sizes):
            yield {
                "ph": "X", "name": f"{bucket.layout}/{where}" if several else where, "cat": lane, "pid": pid, "tid": tracks.of(lane, span),
                "ts": span.began_ns / 1e3, "dur": (span.ended_ns - span.began_ns) / 1e3, "args": args,
            }  # fmt: skip


def write_timeline(folder: str, about: About, spans: Sequence[Recorded], names: Names) -> Path:
    """Write the member's file, event by event, so that other threads can run in between. Raises PsgcError if the folder cannot be written."""
    path = Path(folder, about.file_name)
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with part.open("w") as file:
            file.write(f'{{"displayTimeUnit":"ms","otherData":{json.dumps(asdict(about))},"traceEvents":[\n')
            file.write(json.dumps(metadata("process_name", 1, name=about.name)))
            for event in events(spans, names, about.node_sizes):
                file.write(",\n")
                file.write(json.dumps(event, separators=(",", ":")))
            file.write("\n]}\n")
        part.replace(path)
    except OSError as error:
        raise PsgcError(f"the trace cannot be written to {path}: {error.strerror}") from None
    return path


def read_timeline(path: Path) -> Timeline:
    """The timeline in a file. Raises UsageError, which names the file, if no member wrote it."""
    try:
        document = json.loads(path.read_text())
        about = About(**{**document["otherData"], "node_sizes": tuple(document["otherData"]["node_sizes"])})
        every = document["traceEvents"]
        tracks = {event["tid"]: event["args"]["name"] for event in every if event["ph"] == "M" and event["name"] == "thread_name"}
        found = [event for event in every if event["ph"] == "X"]
        for event in found:
            event["ts"], event["dur"], event["args"]["step"], event["args"]["action"], event["tid"], event["cat"]
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is no timeline of a member ({type(error).__name__}: {error}); expected what PSGC_TRACE writes") from None
    if about.format != FORMAT:
        raise UsageError(
            f"{path} is of format {about.format}, this version of psgc reads format {FORMAT}; merge with the version that wrote it"
        )
    return Timeline(about, found, tracks, str(path))


def read_folder(folder: Path) -> list[Timeline]:
    """The timelines in a folder, ranks first. Raises UsageError if there are none."""
    files = sorted((*folder.glob("rank*.json"), *folder.glob("server*.json"))) if folder.is_dir() else []
    found = sorted((read_timeline(file) for file in files), key=lambda one: (one.about.role != "rank", one.about.index))
    if not found:
        raise UsageError(f"{folder} has no timelines (rank0.json, server0.json, ...); a job writes them with PSGC_TRACE={folder}")
    return found
