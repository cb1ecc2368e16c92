"""Merges the timelines of all members into one trace, with a process for each member, on one clock, and the simulated step beside them if given.

Times begin at the first event. The simulated step is repeated at each of rank 0's traced steps, from its first gradient on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from psgc.observe.clocks import Offset, offsets
from psgc.observe.lanes import BACKWARD
from psgc.observe.timeline import Event, Timeline, metadata

SIMULATED = 1


def align(timelines: Sequence[Timeline]) -> list[Offset]:
    """Find the offsets of the clocks and set each timeline's ``shift_us``."""
    found = offsets(timelines)
    for one, offset in zip(timelines, found, strict=True):
        one.shift_us = -offset.us
    return found


def merge(timelines: Sequence[Timeline], simulated: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """One trace of aligned timelines. simulated: of ``psgc.plan.report.trace``."""
    zero = min((event["ts"] + one.shift_us for one in timelines for event in one.events), default=0.0)
    every: list[Event] = []
    if simulated is not None:
        every += _repeated(simulated["traceEvents"], [at - zero for at in _begins(timelines)])
    for pid, one in enumerate(timelines, SIMULATED + 1):
        every += [metadata("process_name", pid, name=one.about.name), metadata("process_sort_index", pid, sort_index=pid)]
        for track, name in one.tracks.items():
            every += [metadata("thread_name", pid, track, name=name), metadata("thread_sort_index", pid, track, sort_index=track)]
        every += [{**event, "pid": pid, "ts": event["ts"] + one.shift_us - zero} for event in one.events]
    return {"displayTimeUnit": "ms", "traceEvents": every}


def _begins(timelines: Sequence[Timeline]) -> list[float]:
    """When the first rank's steps begin."""
    first = next((one for one in timelines if one.about.role == "rank"), None)
    if first is None:
        return []
    moments: dict[int, float] = {}
    for event in first.events:
        if event["cat"] == BACKWARD:
            step = event["args"]["step"]
            moments[step] = min(event["ts"] + first.shift_us, moments.get(step, event["ts"] + first.shift_us))
    return [moments[step] for step in sorted(moments)]


def _repeated(events: Sequence[Event], begins: Sequence[float]) -> list[Event]:
    names = [{**event, "pid": SIMULATED} for event in events if event["ph"] == "M"]
    names.append(metadata("process_sort_index", SIMULATED, sort_index=SIMULATED))
    return [*names, *({**event, "pid": SIMULATED, "ts": event["ts"] + at} for at in begins for event in events if event["ph"] == "X")]
