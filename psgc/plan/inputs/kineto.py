"""Reader of traces that torch.profiler exports (Kineto's Chrome JSON), for ``traces``."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeGuard

from psgc.errors import UsageError
from psgc.plan.inputs.traces import ACCUMULATE, BACKWARD, OPTIMIZER, Accumulated, Collective, Launch, Span, Trace, collective_bytes

_DEVICE_WORK: Final = ("kernel", "gpu_memcpy", "gpu_memset")
_QUEUED_BY: Final = ("cuda_runtime", "cuda_driver")
_GZIP: Final = b"\x1f\x8b"


def read(path: Path) -> tuple[Trace, str]:
    """The trace in ``path`` (JSON or gzipped JSON), and the name of its GPU, if any. Raises UsageError, in one line, for any other file."""
    try:
        data = path.read_bytes()
        document = json.loads(gzip.decompress(data) if data[:2] == _GZIP else data)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    except (ValueError, EOFError, RecursionError, zlib.error) as error:
        raise UsageError(f"{path}: not a trace of torch.profiler: {error}") from None
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise UsageError(f'{path}: not a trace of torch.profiler: no list "traceEvents" in it')
    complete = [event for event in events if isinstance(event, dict) and event.get("ph") == "X" and _is_time(event.get("ts"))]
    return trace_of(complete), _gpu(document)


def _gpu(document: Any) -> str:
    devices = document.get("deviceProperties") if isinstance(document, dict) else None
    return str(devices[0].get("name", "")) if isinstance(devices, list) and devices and isinstance(devices[0], dict) else ""


def trace_of(events: Sequence[Mapping[str, Any]]) -> Trace:
    """The trace of these complete events ("ph": "X"), whose times are in microseconds."""
    trace, work = Trace(), {}
    for event in events:
        if event.get("cat") in _DEVICE_WORK and (correlation := _args(event).get("correlation")):
            work[correlation] = event
    for event in events:
        category, name = event.get("cat"), str(event.get("name", ""))
        if category == "cpu_op":
            _operator(trace, event, name)
        elif category == "user_annotation" and name.startswith(OPTIMIZER):
            trace.optimizer.append(_span(event))
        elif category in _QUEUED_BY:
            done = work.get(_args(event).get("correlation"))
            if done is not None and not _is_nccl(done):
                span = _span(done)
                trace.launches.append(Launch(_thread(event), float(event["ts"]), span.start, span.end))
        elif category == "kernel" and _is_nccl(event):
            _collective(trace, event)
    return trace


def _operator(trace: Trace, event: Mapping[str, Any], name: str) -> None:
    span = _span(event)
    if name == ACCUMULATE:
        shapes = _args(event).get("Input Dims")
        if isinstance(shapes, list) and shapes and isinstance(shapes[0], list) and all(isinstance(n, int) for n in shapes[0]):
            trace.gradients.append(Accumulated(span.start, span.end, span.thread, tuple(shapes[0])))
    elif name.startswith(BACKWARD):
        trace.backward.append(span)
    elif name.startswith("aten::"):
        trace.operators.append(span.start)


def _collective(trace: Trace, event: Mapping[str, Any]) -> None:
    said, span = _args(event), _span(event)
    numel, ranks = said.get("In msg nelems"), said.get("Group size")
    if isinstance(numel, int) and isinstance(ranks, int) and "allreduce" in str(said.get("Collective name", "")).lower():
        trace.collectives.append(Collective(span.start, span.end, collective_bytes(numel, str(said.get("dtype", ""))), ranks))


def _is_time(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def _is_nccl(event: Mapping[str, Any]) -> bool:
    return str(event.get("name", "")).lower().startswith("nccl")


def _args(event: Mapping[str, Any]) -> Mapping[str, Any]:
    found = event.get("args")
    return found if isinstance(found, dict) else {}


def _thread(event: Mapping[str, Any]) -> int:
    return hash((event.get("pid"), event.get("tid")))


def _span(event: Mapping[str, Any]) -> Span:
    start, lasted = float(event["ts"]), event.get("dur")
    return Span(start, start + (lasted if _is_time(lasted) else 0.0), _thread(event))
