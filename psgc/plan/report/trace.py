"""A simulated step in the trace format that Perfetto (ui.perfetto.dev) and chrome://tracing open: a lane for each resource, or for each thread of one
that has several, and one for backward.

Source: "Trace Event Format", Google: complete events (``X``) with times in microseconds, and metadata events (``M``) that name lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from psgc.plan.model.lanes import BACKWARD, LANES, Span, spans
from psgc.plan.model.plan import PlannedBucket
from psgc.plan.model.problem import Simulated
from psgc.plan.report.wording import tensors_text

PROCESS: Final = 1


def trace(simulated: Simulated, buckets: Sequence[PlannedBucket], title: str = "one step") -> dict[str, Any]:
    """The trace, ready for JSON. An event is named bucket/part/action, and has the bucket's tensors and option beside it."""
    named = [_metadata("process_name", 0, name=f"{title}, simulated")]
    found = spans(simulated)
    threads = {lane: max((span.thread for span in found if span.lane == lane), default=0) + 1 for lane in LANES}
    tracks = {(lane, thread): number for number, (lane, thread) in enumerate((lane, one) for lane in LANES for one in range(threads[lane]))}
    for (lane, thread), number in tracks.items():
        name = lane if threads[lane] == 1 else f"{lane} {thread}"
        named += [_metadata("thread_name", number, name=name), _metadata("thread_sort_index", number, sort_index=number)]
    return {"displayTimeUnit": "ms", "traceEvents": [*named, *(_event(span, tracks[span.lane, span.thread], buckets) for span in found)]}


def _metadata(kind: str, lane: int, **what: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": PROCESS, "tid": lane, "args": what}


def _event(span: Span, track: int, buckets: Sequence[PlannedBucket]) -> dict[str, Any]:
    return {
        "ph": "X", "name": _name(span), "cat": span.lane, "pid": PROCESS, "tid": track, "ts": span.start_us, "dur": span.us,
        "args": _details(buckets[span.bucket]) if span.bucket >= 0 else {},
    }  # fmt: skip


def _name(span: Span) -> str:
    if span.lane == BACKWARD:
        return BACKWARD if span.bucket < 0 else f"{span.bucket}/{BACKWARD}"
    return f"{span.bucket}/{span.part}/{span.action}"


def _details(bucket: PlannedBucket) -> dict[str, Any]:
    return {
        "tensors": tensors_text(bucket.tensors), "numel": bucket.numel, "parts": bucket.parts, "codec": bucket.codec,
        "option": " ".join(bucket.option),
    }  # fmt: skip
