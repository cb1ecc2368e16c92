"""``psgc bench kernels``: how fast codecs run on one thread, compared with a memcpy of the same fp32 data in the same run.

Measures only; ``tables`` prints. A kernel whose bytes differ from its reference is not timed, and neither is a baseline with wrong results.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from psgc.codecs.catalogue import answered
from psgc.codecs.codec import F32, Bytes, Codec
from psgc.codecs.common.definitions import reference_commit, reference_decode, reference_encode, reference_finish, reference_fold
from psgc.codecs.common.one_part import RESCALE, STREAM, WORKERS, Part, gaussian
from psgc.codecs.registry import parse_scheme
from psgc.codecs.relay import is_relayed
from psgc.codecs.scheme import BucketContext, PairScheme, Scheme, SchemeState, slices
from psgc.diagnostics.machine import machine
from psgc.errors import CodecError, ConfigError, UsageError
from psgc.launch.bench.baselines import IMPLEMENTATIONS, MULTIPLE, WITH_BASELINES, Runner, one_thread, runner

SIZES: Final = (1 << 16, 1 << 20, 1 << 24)  # elements: 256 KB, 4 MB and 64 MB of fp32
CHECKED: Final = 70_001  # elements that a kernel is checked on: more than a chunk, and no multiple of a block
CHECKED_BASELINE: Final = 17 * MULTIPLE
REPEATS, LEAST_REPEATS, BUDGET_S = 9, 3, 1.0  # the median of 9 runs, or of at least 3 if they take longer than the budget
MIN_TIMED_ELEMENTS: Final = 1 << 20  # a smaller subject is run several times in one measurement, because the clock is too coarse

Progress = Callable[[str], None]
Operations = dict[str, Callable[[], object]]
Clock = Callable[[], int]


def bench_kernels(
    sizes: Sequence[int], codecs: Sequence[str], device: str = "cpu", progress: Progress | None = None,
    beside: Sequence[str] = IMPLEMENTATIONS,
) -> dict[str, Any]:  # fmt: skip
    """Time each codec's encode, decode (with commit, if it has error feedback) and server pass, and its baselines.

    progress: called with a line of text before each codec. beside: implementations of the same encode and decode that are timed, too, where
    there are any; ``left_out`` of the result lists those that could not be timed, and why. Raises ConfigError for a device without kernels,
    CodecError for a kernel with wrong results.
    """
    if device != "cpu":
        raise ConfigError(f"bench kernels: --device {device}: expected cpu or cuda")
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"bench kernels: --sizes (or --numel) of at least 1 element expected, got {', '.join(map(str, sizes))}")
    bench, tell = _Bench({numel: Beside(numel) for numel in sorted(set(sizes))}), progress or (lambda text: None)
    for text in codecs:
        subject = timed_subject(text)
        tell(f"{subject.canonical}: checking, then timing")
        check_codec(subject) if isinstance(subject, Codec) else check_scheme(subject)
        bench.time_kernels(subject)
        for implementation in beside:
            tell(f"{subject.canonical}: {implementation} beside it")
            bench.time_baseline(implementation, subject.canonical)
    return {
        "memcpy_gbps": bench.memcpy_gbps(),
        "codecs": bench.rows,
        "left_out": bench.left_out,
        "machine": machine(("numpy", "torch", "numba")),
    }


def read_sizes(text: str) -> list[int]:
    """Numbers of elements from ``64K,1M,16M``. Raises UsageError."""
    found = [re.fullmatch(r"(\d+)([KM]?)", item.strip()) for item in text.split(",")]
    sizes = [int(match[1]) << {"": 0, "K": 10, "M": 20}[match[2]] for match in found if match is not None]
    if len(sizes) < len(found):
        raise UsageError(f"bench kernels: --sizes {text}: numbers of elements expected, such as 64K,1M,16M")
    return sizes


def timed_subject(text: str, numel: int = CHECKED) -> Codec | Scheme:
    """The codec or scheme of several rounds that ``text`` names; low rank is that of a matrix of ``numel`` elements, about square. Raises CodecError for
    what is neither."""
    scheme = parse_scheme(text, BucketContext(workers=WORKERS, shapes=_about_square(numel)))
    if "/" in scheme.canonical:
        raise CodecError(f"codec {text}: bench kernels takes one codec at a time, not a pair; give --codec twice")
    if is_relayed(scheme):
        raise CodecError(
            f"codec {text}: servers relay its payloads, and each rank adds up as many as there are; only codecs whose payloads servers add are timed"
        )
    return scheme.pair.push if isinstance(scheme, PairScheme) else scheme


def _about_square(numel: int) -> tuple[tuple[int, ...], ...]:
    rows = math.isqrt(numel)
    columns = numel // rows
    return ((rows, columns), (numel - rows * columns,))


@dataclass
class _Bench:
    """The rows so far."""

    beside: dict[int, Beside]
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def time_kernels(self, subject: Codec | Scheme) -> None:
        # BLAS computes in threads of its own, so that of a scheme the whole process's time counts.
        clock = time.thread_time_ns if isinstance(subject, Codec) else time.process_time_ns
        for numel, beside in self.beside.items():
            for op, run in operations(subject, numel).items():
                self._add(subject.canonical, "psgc", op, numel, *beside.time(run, clock))

    def time_baseline(self, implementation: str, codec: str) -> None:
        if codec not in WITH_BASELINES or implementation in self.left_out:
            return
        odd = [numel for numel in self.beside if numel % MULTIPLE]
        if odd:
            self.left_out[implementation] = f"baselines need a multiple of {MULTIPLE} elements, not {odd[0]}"
            return
        compiled, largest = implementation == "torch.compile", max(self.beside)
        with nullcontext() if implementation == "numpy" else one_thread():
            try:
                found = runner(implementation, codec)
                check_baseline(implementation, codec, found, largest if compiled else CHECKED_BASELINE)
            except Exception as error:
                if not compiled or isinstance(error, CodecError):
                    raise
                self.left_out[implementation] = " ".join(f"{type(error).__name__}: {error}".split())[:200]  # whatever torch says
                return
            for numel in [largest] if compiled else self.beside:
                for op, run in _baseline_operations(found, numel).items():
                    self._add(codec, implementation, op, numel, *self.beside[numel].time(run, time.thread_time_ns))

    def memcpy_gbps(self) -> float:
        """The rows of the largest size."""
        beside = self.beside[max(self.beside)]
        if not beside.copies:
            beside.time(lambda: None, time.thread_time_ns)
        return round(4e-9 * beside.numel / statistics.median(beside.copies), 3)

    def _add(self, codec: str, implementation: str, op: str, numel: int, copy_s: float, run_s: float) -> None:
        self.rows.append({
            "codec": codec,
            "implementation": implementation,
            "op": op,
            "numel": numel,
            "threads": 1,
            "gbps": float(f"{4e-9 * numel / run_s:.4g}"),
            "ns_per_element": float(f"{1e9 * run_s / numel:.4g}"),
            "ratio_to_memcpy": float(f"{copy_s / run_s:.4g}"),
        })  # fmt: skip


class Beside:
    """Times operations on a number of elements, in turns with a memcpy of them, so that other load on the machine affects both."""

    def __init__(self, numel: int) -> None:
        self.numel, self.copies = numel, list[float]()
        self._source, self._target = np.ones(numel, np.float32), np.ones(numel, np.float32)
        self._together = max(1, MIN_TIMED_ELEMENTS // numel)

    def time(self, run: Callable[[], object], clock: Clock) -> tuple[float, float]:
        """Medians of a memcpy and of ``run``, in seconds of CPU time: kernels never wait, so on an idle machine that is the wall time,
        and on a busy one it stays so."""
        run()
        copies, runs, end = list[float](), list[float](), time.monotonic() + BUDGET_S
        while len(runs) < LEAST_REPEATS or (len(runs) < REPEATS and time.monotonic() < end):
            copies.append(self._seconds(self._copy, clock))
            runs.append(self._seconds(run, clock))
        self.copies += copies
        return statistics.median(copies), statistics.median(runs)

    def _copy(self) -> None:
        np.copyto(self._target, self._source)

    def _seconds(self, run: Callable[[], object], clock: Clock) -> float:
        begun = clock()
        for _ in range(self._together):
            run()
        return 1e-9 * max(1, clock() - begun) / self._together


def operations(subject: Codec | Scheme, numel: int) -> Operations:
    """The operations to time, by name."""
    if isinstance(subject, Codec):
        part = Part.filled(subject, numel)
        payloads, acc = [part.payload.copy() for _ in range(WORKERS)], np.zeros(subject.chunk or numel, np.float32)
        return {"encode": part.encode, "decode": part.decode, "server": lambda: part.serve(payloads, acc)}
    scheme = timed_subject(subject.canonical, numel)
    assert isinstance(scheme, Scheme)
    step = Step.filled(scheme, numel)
    return {"encode": step.encode, "decode": step.decode, "server": step.serve}


@dataclass
class Step:
    """The buffers for a step of a scheme of several rounds: of one worker, and of the server that sums the payloads of ``WORKERS`` such workers."""

    state: SchemeState
    grad: F32
    residual: F32 | None
    outs: list[Bytes]
    sent: list[Bytes]
    pushed: list[list[Bytes]]  # what the server gets: as many copies as workers
    answers: list[Bytes]
    served: list[Bytes]
    target: F32
    kept: F32 | None

    @classmethod
    def filled(cls, scheme: Scheme, numel: int) -> Step:
        grad, residual = gaussian(numel, 0), gaussian(numel, 1) if scheme.feedback else None
        step = cls(scheme.new_state(numel), grad, residual, [], [], [], [], [], grad.copy(), None if residual is None else residual.copy())
        for index, round_ in enumerate(step.state.rounds):
            out = np.zeros(round_.pair.push.payload_bound(round_.numel), np.uint8)
            step.outs.append(out)
            step.sent.append(out[: step.state.encode(index, grad, residual, RESCALE, STREAM, out).payload_bytes].copy())
            step.pushed.append([step.sent[-1].copy() for _ in range(WORKERS)])
            step.answers.append(answered(round_, step.pushed[-1], WORKERS if round_.divides else 1))
            step.served.append(np.zeros(round_.pair.pull.payload_bound(round_.numel), np.uint8))
            if index < len(step.state.rounds) - 1:
                step.state.take(index, step.answers[-1])
        return step

    def encode(self) -> None:
        """The payloads of all rounds."""
        for index, out in enumerate(self.outs):
            self.state.encode(index, self.grad, self.residual, RESCALE, STREAM, out)

    def decode(self) -> None:
        """Take the answers of all rounds; ``target`` and ``kept`` become the aggregate and the residual."""
        for index, answer in enumerate(self.answers[:-1]):
            self.state.take(index, answer)
        self.state.apply(self.answers[-1], self.sent, self.target, self.kept, RESCALE)

    def serve(self) -> list[Bytes]:
        """The server's answers of all rounds, slice by slice."""
        answers = []
        for round_, pushed, out in zip(self.state.rounds, self.pushed, self.served, strict=True):
            push, pull, numel = round_.pair.push, round_.pair.pull, round_.numel
            acc, divisor = np.empty(min(numel, push.chunk or numel), push.acc_dtype), WORKERS if round_.divides else 1
            for lo, hi in slices(push, numel):
                push.fold(pushed, numel, lo, hi, acc[: hi - lo], True)
                written = pull.finish(acc[: hi - lo], numel, lo, hi, divisor, None, None, 1.0, STREAM, out).payload_bytes
            answers.append(out[:written])
        return answers


def check_codec(codec: Codec, numel: int = CHECKED) -> None:
    """Raise CodecError unless every kernel gives the reference's bytes."""
    part = Part.filled(codec, numel)
    wanted = reference_encode(codec, part.grad, part.residual, RESCALE, STREAM)
    _same(codec, "encode", part.encode(), wanted)
    old = None if part.kept is None else part.kept.copy()
    part.decode()
    _same(codec, "decode", part.elements, reference_fold(codec, [wanted], numel, None).tobytes())
    if part.kept is not None and old is not None:
        _same(codec, "commit", part.kept, reference_commit(codec, wanted, part.grad, old, RESCALE).tobytes())
    total = reference_fold(codec, [wanted] * WORKERS, numel, None)
    server = codec.answering(codec)
    answer, left = reference_finish(server, total, WORKERS, part.residual if server.feedback else None, RESCALE, STREAM)
    _same(codec, "server", part.serve([part.payload] * WORKERS, np.zeros(codec.chunk or numel, np.float32)), answer)
    if part.kept is not None and left is not None:
        _same(codec, "server residual", part.kept, left.tobytes())


def check_scheme(scheme: Scheme, numel: int = CHECKED) -> None:
    """Raise CodecError unless a step of identical workers gives the reference's aggregate, and residual + aggregate = gradient."""
    from psgc.codecs.powersgd import PowerSgdScheme
    from psgc.codecs.shared import SharedScheme, reference_step

    step = Step.filled(scheme, numel)
    step.decode()
    p = step.grad if step.residual is None else step.grad + np.float32(RESCALE) * step.residual
    for served, answer in zip(step.serve(), step.answers, strict=True):
        _same(scheme, "server", served, answer.tobytes())
    if step.kept is not None and not np.allclose(step.target + step.kept, p, rtol=0, atol=1e-5 * np.abs(p).max()):
        raise _wrong(scheme, "residual")
    if isinstance(scheme, SharedScheme):
        residuals = None if step.residual is None else [step.residual] * WORKERS
        wanted, left = reference_step([step.grad] * WORKERS, residuals, RESCALE, [STREAM] * WORKERS, WORKERS)
        _same(scheme, "decode", step.target, wanted.tobytes())
        if step.kept is not None:
            _same(scheme, "commit", step.kept, left[0].tobytes())
    if isinstance(scheme, PowerSgdScheme):
        for matrix in scheme.split(numel)[0]:
            cut = slice(matrix.first, matrix.first + matrix.rows * matrix.columns)
            product, whole = step.target[cut].reshape(matrix.rows, -1), p[cut].reshape(matrix.rows, -1)
            basis = np.linalg.svd(product, full_matrices=False)[0][:, : scheme.rank]
            if not np.allclose(basis @ (basis.T @ whole), product, rtol=0, atol=1e-4 * np.abs(whole).max()):
                raise _wrong(scheme, "decode")  # it is not the projection of p onto so many directions


def check_baseline(implementation: str, codec: str, found: Runner, numel: int) -> None:
    """Raise CodecError unless a baseline decodes to and keeps the reference's values, except for rounding. A compiled baseline is compared with the
    uncompiled one, at the size at which it is timed."""
    grad, residual = gaussian(numel, 0), gaussian(numel, 1)
    got = found.decode(*_baseline_inputs(found, numel))
    if implementation == "torch.compile":
        plain = runner("torch", codec)
        wanted = plain.decode(*_baseline_inputs(plain, numel))
    else:
        subject = timed_subject(codec)
        assert isinstance(subject, Codec)
        defined = reference_encode(subject, grad, residual if subject.feedback else None, RESCALE, STREAM)
        kept = reference_commit(subject, defined, grad, residual, RESCALE) if subject.feedback else None
        wanted = reference_decode(subject, defined, numel), kept
    for mine, theirs in zip(got, wanted, strict=True):
        error = np.zeros(1) if mine is None is theirs else np.asarray(mine, np.float64) - np.asarray(theirs, np.float64)
        if not np.sum(error**2) <= 1e-6 * np.sum(grad.astype(np.float64) ** 2):
            raise CodecError(f"codec {codec}: its baseline in {implementation} gives other results, so it is not timed")


def _baseline_inputs(found: Runner, numel: int) -> tuple[Any, ...]:
    """The inputs of a baseline's decode: two payloads, then the arrays that they were encoded from."""
    inputs = found.wrap(gaussian(numel, 0)), found.wrap(gaussian(numel, 1)), RESCALE
    return found.encode(*inputs), found.encode(*inputs), *inputs


def _baseline_operations(found: Runner, numel: int) -> Operations:
    pulled, sent, *inputs = _baseline_inputs(found, numel)
    return {"encode": lambda: found.encode(*inputs), "decode": lambda: found.decode(pulled, sent, *inputs)}


def _same(subject: Codec | Scheme, what: str, got: Any, wanted: bytes) -> None:
    if got.tobytes() != wanted:
        raise _wrong(subject, what)


def _wrong(subject: Codec | Scheme, what: str) -> CodecError:
    return CodecError(f"codec {subject.canonical}: {what} differs from its definition on this machine, so it is not timed")
