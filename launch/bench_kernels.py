"""``psgc bench kernels``: how fast codecs run on one thread, against a memcpy of the same fp32 in the same minutes.

Owns the measuring alone. A kernel whose bytes differ from its definition is not timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from psgc.codecs.codec import F32, Bytes, Codec, CodecPair, Stream, parse_codec
from psgc.codecs.definitions import define_commit, define_encode, define_finish, define_fold
from psgc.errors import CodecError, ConfigError

CHECKED: Final = 70_001  # elements of the check: more than a chunk, and no multiple of anything
REPEATS: Final = 9
WORKERS: Final = 4
STREAM: Final = Stream(seed=1, step=1, rank=0, bucket=0)
RESCALE: Final = 0.5

Progress = Callable[[str], None]


def bench_kernels(numel: int, codecs: Sequence[str], device: str = "cpu", progress: Progress | None = None) -> dict[str, Any]:
    """Time encode, decode (with commit, where there is feedback) and the server's pass of each codec.

    progress: called with a line of text before each codec. Raises ConfigError for a device there are no kernels for, CodecError for
    a kernel that is wrong.
    """
    if device != "cpu":
        raise ConfigError(f"bench kernels: device cpu expected, got {device!r}: there are no GPU kernels yet; use --device cpu")
    if numel < 1:
        raise ConfigError(f"bench kernels: --numel of at least 1 expected, got {numel}")
    rows, copies = [], []
    for text in codecs:
        codec = parse_codec(text)
        if progress is not None:
            progress(f"{codec.canonical}: checking, then timing {numel} elements")
        check_kernels(codec)
        for op, run in operations(codec, numel).items():
            copy_s, run_s = _time_beside_copy(numel, run)
            copies.append(copy_s)
            rows.append(_row(codec, op, numel, run_s, copy_s))
    memcpy_s = statistics.median(copies) if copies else _time_beside_copy(numel, lambda: None)[0]
    return {"memcpy_gbps": round(4e-9 * numel / memcpy_s, 3), "codecs": rows}


def _row(codec: Codec, op: str, numel: int, run_s: float, copy_s: float) -> dict[str, Any]:
    return {
        "codec": codec.canonical,
        "op": op,
        "numel": numel,
        "threads": 1,
        "gbps": round(4e-9 * numel / run_s, 3),
        "ns_per_element": round(1e9 * run_s / numel, 4),
        "ratio_to_memcpy": round(copy_s / run_s, 3),
    }


def _time_beside_copy(numel: int, run: Callable[[], object]) -> tuple[float, float]:
    """Medians of a memcpy and of ``run``, taken in turns so that whatever else the machine does falls on both."""
    source, target = np.ones(numel, np.float32), np.ones(numel, np.float32)
    run()
    copies, runs = [], []
    for _ in range(REPEATS):
        copies.append(_seconds(lambda: np.copyto(target, source)))
        runs.append(_seconds(run))
    return statistics.median(copies), statistics.median(runs)


def _seconds(run: Callable[[], object]) -> float:
    """CPU time of this thread: kernels never wait, so on an idle machine it is the wall time, and on a busy one it stays so."""
    begun = time.thread_time_ns()
    run()
    return 1e-9 * max(1, time.thread_time_ns() - begun)


@dataclass
class Part:
    """Everything that one part's way through a step needs."""

    codec: Codec
    grad: F32
    residual: F32 | None
    payload: Bytes
    out: Bytes
    elements: F32
    kept: F32 | None

    @classmethod
    def filled(cls, codec: Codec, numel: int) -> Part:
        rng = np.random.default_rng(numel)
        grad = rng.standard_normal(numel, np.float32)
        residual = rng.standard_normal(numel, np.float32) if codec.feedback else None
        out = np.zeros(codec.payload_bound(numel), np.uint8)
        written = codec.encode(grad, residual, RESCALE, STREAM, out).payload_bytes
        kept = np.zeros(numel, np.float32) if codec.feedback else None
        return cls(codec, grad, residual, out[:written].copy(), out, np.zeros(numel, np.float32), kept)

    def slices(self) -> list[slice]:
        """As callers take them: chunks that stay in cache, or the whole part."""
        numel, step = self.grad.size, self.codec.chunk or self.grad.size
        return [slice(lo, min(lo + step, numel)) for lo in range(0, numel, step)]

    def encode(self) -> Bytes:
        return self.out[: self.codec.encode(self.grad, self.residual, RESCALE, STREAM, self.out).payload_bytes]

    def decode(self) -> None:
        """Decode, and bring ``kept`` (taken for the residual, so that encode's input stays) up to date."""
        numel = self.grad.size
        for cut in self.slices():
            self.codec.decode(self.payload, numel, cut.start, cut.stop, self.elements[cut])
            if self.kept is not None:
                self.codec.commit(self.payload, numel, cut.start, cut.stop, self.grad[cut], self.kept[cut], RESCALE)

    def serve(self, payloads: Sequence[Bytes], acc: F32) -> Bytes:
        """The payload of the mean, in the codec's own way or else slice by slice in ``acc``, which holds one slice."""
        numel, residual, kept = self.grad.size, self.residual, self.kept
        adder = CodecPair(self.codec, self.codec).adder
        if adder is not None:
            adder.add(payloads, numel, self.out, True)
            return self.out[: adder.divide(self.out, numel, WORKERS).payload_bytes]
        at_once = self.codec.fold_and_finish(self.codec, payloads, numel, WORKERS, residual, kept, RESCALE, STREAM, self.out)
        if at_once is not None:
            return self.out[: at_once.payload_bytes]
        for cut in self.slices():
            total = acc[: cut.stop - cut.start]
            self.codec.fold(payloads, numel, cut.start, cut.stop, total, True)
            old, new = None if residual is None else residual[cut], None if kept is None else kept[cut]
            encoded = self.codec.finish(total, numel, cut.start, cut.stop, WORKERS, old, new, RESCALE, STREAM, self.out)
        return self.out[: encoded.payload_bytes]


def operations(codec: Codec, numel: int) -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    part = Part.filled(codec, numel)
    payloads, acc = [part.payload.copy() for _ in range(WORKERS)], np.zeros(codec.chunk or numel, np.float32)
    return {"encode": part.encode, "decode": part.decode, "server": lambda: part.serve(payloads, acc)}


def check_kernels(codec: Codec, numel: int = CHECKED) -> None:
    """Raise CodecError unless every kernel has the definition's bytes."""
    part = Part.filled(codec, numel)
    wanted = define_encode(codec, part.grad, part.residual, RESCALE, STREAM)
    _same(codec, "encode", part.encode(), wanted)
    old = None if part.kept is None else part.kept.copy()
    part.decode()
    _same(codec, "decode", part.elements, define_fold(codec, [wanted], numel, None).tobytes())
    if part.kept is not None and old is not None:
        _same(codec, "commit", part.kept, define_commit(codec, wanted, part.grad, old, RESCALE).tobytes())
    total = define_fold(codec, [wanted] * WORKERS, numel, None)
    server = codec.answering(codec)
    answer, left = define_finish(server, total, WORKERS, part.residual if server.feedback else None, RESCALE, STREAM)
    _same(codec, "server", part.serve([part.payload] * WORKERS, np.zeros(codec.chunk or numel, np.float32)), answer)
    if part.kept is not None and left is not None:
        _same(codec, "server residual", part.kept, left.tobytes())


def _same(codec: Codec, what: str, got: Any, wanted: bytes) -> None:
    if got.tobytes() != wanted:
        raise CodecError(f"codec {codec.canonical}: {what} differs from its definition on this machine, so it is not timed")
