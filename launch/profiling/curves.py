"""Measures codec times on this CPU by size: curves for a profile, on one thread, with data that is not in the caches (``Cold``), as a job's is not.

Owns the sizes and operations of a curve. A kernel whose bytes differ from its reference is not timed.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from psgc.codecs.codec import Codec
from psgc.codecs.common.cold import Cold
from psgc.codecs.common.one_part import WORKERS, Part
from psgc.codecs.scheme import Scheme
from psgc.errors import CodecError, PsgcError
from psgc.launch.bench.kernels import check_codec, check_scheme, operations, timed_subject
from psgc.plan.inputs.passes import PAYLOADS, server_curve
from psgc.plan.inputs.profile import CostCurve, Curves

if TYPE_CHECKING:
    from psgc.launch.bench.gpu_kernels import Stopwatch

DEFAULT_CODECS: Final = ("none", "bf16", "fp16", "int8", "onebit", "topk")


class Times(NamedTuple):
    """Of one size. passes_us: a server's, by the number of payloads."""

    encode_us: float
    decode_us: float
    passes_us: Mapping[int, float]


def curve_codecs(texts: Sequence[str]) -> list[str]:
    """The single codecs to time for these texts: a pair counts as its push and its pull codec. Raises CodecError."""
    parts = [part.strip() for text in texts for part in text.split("/")]
    return list(dict.fromkeys(timed_subject(part).canonical for part in parts))


def measure_curves(codecs: Sequence[str], sizes: Sequence[int], progress: Callable[[str], None]) -> Curves:
    """Curves by codec, in microseconds of CPU time. On the ``cpu``: encode, and decode with the residual's commit. On a ``server`` (see
    ``psgc.plan.inputs.profile``): passes over PAYLOADS payloads, and a line through them. For schemes of several rounds, the server's pass is divided by the
    number of payloads.

    progress: called before each of the ``len(codecs) * len(sizes)`` measurements. Raises PsgcError for a kernel that is wrong.
    """
    subjects = [timed_subject(text) for text in codecs]
    for subject in subjects:
        try:
            check_codec(subject) if isinstance(subject, Codec) else check_scheme(subject)
        except CodecError as error:  # it exists: a kernel is wrong
            raise PsgcError(str(error)) from None
    rows: dict[str, list[Times]] = {subject.canonical: [] for subject in subjects}
    for numel in sorted(sizes):  # sizes outside: the input of each is made once
        for subject in subjects:
            progress(f"{subject.canonical}, {numel:,} elements")
            rows[subject.canonical].append(_times_us(subject, numel))
    return {name: _curves(sorted(sizes), found) for name, found in rows.items()}


def measure_gpu_curves(codecs: Sequence[str], sizes: Sequence[int], watch: Stopwatch, progress: Callable[[str], None]) -> Curves:
    """Curves by codec, on the ``gpu``: encode, and decode with the residual's commit, of codecs that have a GPU side. Raises PsgcError for a kernel that is
    wrong."""
    from psgc.launch.bench.gpu_kernels import bench_gpu_kernels

    single = [text for text in codecs if isinstance(timed_subject(text), Codec)]
    try:
        rows = bench_gpu_kernels(sizes, single, watch, progress, ())["rows"]
    except CodecError as error:
        raise PsgcError(str(error)) from None
    us = {(row["codec"], row["op"], row["numel"]): 1e6 * row["seconds"] for row in rows}
    numel = sorted(set(sizes))
    return {
        name: {
            "gpu": CostCurve(
                tuple(map(float, numel)),
                tuple(round(us[name, "encode", n], 3) for n in numel),
                tuple(round(us[name, "decode", n] + us.get((name, "commit", n), 0.0), 3) for n in numel),
            )
        }
        for name in dict.fromkeys(row["codec"] for row in rows)
    }


def _times_us(subject: Codec | Scheme, numel: int) -> Times:
    us = Cold(time.thread_time_ns if isinstance(subject, Codec) else time.process_time_ns).us
    if isinstance(subject, Scheme):
        timed = {op: us(run) for op, run in operations(subject, numel).items()}
        return Times(timed["encode"], timed["decode"], {WORKERS: timed["server"]})
    part = Part.filled(subject, numel)
    payloads, acc = [part.payload.copy() for _ in range(PAYLOADS[-1])], np.zeros(subject.chunk or numel, np.float32)
    passes = {count: us(functools.partial(part.serve, payloads[:count], acc)) for count in PAYLOADS}
    return Times(us(part.encode), us(part.decode), passes)


def _curves(sizes: Sequence[int], rows: Sequence[Times]) -> dict[str, CostCurve]:
    encode, decode = (
        tuple(round(us, 3) for us in column) for column in zip(*((row.encode_us, row.decode_us) for row in rows), strict=True)
    )
    return {"cpu": CostCurve(tuple(map(float, sizes)), encode, decode), "server": server_curve(sizes, [row.passes_us for row in rows])}
