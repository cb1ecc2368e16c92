"""Computes a profile from a trace of a training run: when gradients were ready, and how long collectives took.

Pure: a trace is a list of events with times. Owns their interpretation: where an iteration ends, which backward pass is the last before the
optimizer, and when a GPU has finished a gradient. ``kineto`` (torch.profiler) and ``nsight`` (Nsight Systems) read the files.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from psgc.errors import UsageError
from psgc.plan.inputs.cluster import Link
from psgc.plan.inputs.observed import LEAST_ITERATIONS, Iteration, profile_of
from psgc.plan.inputs.profile import Profile
from psgc.plan.inputs.shape_names import name_of

ACCUMULATE: Final = "torch::autograd::AccumulateGrad"
BACKWARD: Final = "autograd::engine::evaluate_function"
OPTIMIZER: Final = "Optimizer.step"


@dataclass(frozen=True, slots=True)
class Span:
    """An event on a thread, in microseconds of the trace's clock."""

    start: float
    end: float
    thread: int = 0


@dataclass(frozen=True, slots=True)
class Accumulated(Span):
    """One AccumulateGrad: autograd has finished a gradient of this shape. () is a scalar."""

    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Launch:
    """A thread queued work for a GPU at ``at``, which ran from ``start`` to ``end``."""

    thread: int
    at: float
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Collective:
    """An all-reduce of ``nbytes`` among ``ranks``, and when it ran."""

    start: float
    end: float
    nbytes: int
    ranks: int


@dataclass(slots=True)
class Trace:
    """One process's events, in any order. operators: start times; those outside backward and optimizer belong to forward; launches: without
    collectives."""

    gradients: list[Accumulated] = field(default_factory=list)
    backward: list[Span] = field(default_factory=list)
    optimizer: list[Span] = field(default_factory=list)
    operators: list[float] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)


def profile_of_trace(trace: Trace, source: str, *, hardware: str = "") -> Profile:
    """The profile of the traced training. A trace has no tensor names, so gradients are named by their shapes, which the profile keeps.

    The first iteration is left out, because the trace lacks its beginning. Raises UsageError, in one line, for an incomplete trace.
    """
    if not trace.gradients:
        raise UsageError(
            f"{source}: no gradients: it has no event {ACCUMULATE} with a shape; profile whole iterations with record_shapes=True"
        )
    if not trace.optimizer:
        raise UsageError(f"{source}: no optimizer step: it has no event {OPTIMIZER}#..., which marks the end of an iteration")
    clock = _Clock(trace)
    steps = _steps(trace)
    iterations: list[Iteration] = []
    shapes: dict[str, tuple[int, ...]] = {}
    for before, step in itertools.pairwise(steps):
        passed = [gradient for gradient in trace.gradients if before.end <= gradient.start < step.start]
        if not passed:
            continue
        ready = {}
        for name, gradient in _named(_last_pass(passed, clock.forward)):
            ready[name] = clock.ready(gradient)
            shapes[name] = gradient.shape
        first, last, asked = min(ready.values()), max(ready.values()), clock.begun(step)
        iterations.append(Iteration(
            ready_us={name: at - first for name, at in ready.items()}, tail_us=max(0.0, asked - last), forward_us=max(0.0, first - clock.begun(before)),
        ))  # fmt: skip
    if len(iterations) < LEAST_ITERATIONS:
        raise UsageError(f"{source}: {len(iterations)} whole iterations in it, expected at least {LEAST_ITERATIONS}: profile "
                         f"{LEAST_ITERATIONS + 1} steps or more")  # fmt: skip
    numel = {name: math.prod(shape) for name, shape in shapes.items() if math.prod(shape)}
    device = "cuda" if trace.launches else "cpu"  # what a GPU worked on, or nothing
    found = replace(profile_of(iterations, numel, model=source, hardware=hardware, shapes=shapes), device=device)
    return found if (link := link_of(trace.collectives)) is None else _with_link(found, link)


def link_of(collectives: Sequence[Collective]) -> Link | None:
    """The link on which ring all-reduces take these times. The bandwidth comes from the large collectives (at least a quarter of the largest), the
    latency from the rest of the smallest ones' time, divided by a ring's 2 (n - 1) messages. None without collectives."""
    moved = [c for c in collectives if c.ranks > 1 and c.nbytes and c.end > c.start]
    if not moved:
        return None
    largest = max(c.nbytes for c in moved)
    us_per_byte = statistics.median((c.end - c.start) / _ring_bytes(c) for c in moved if 4 * c.nbytes >= largest)
    least = min(c.nbytes for c in moved)
    beyond = statistics.median(
        max(0.0, c.end - c.start - us_per_byte * _ring_bytes(c)) / (2 * (c.ranks - 1)) for c in moved if c.nbytes <= 2 * least
    )
    return Link(gbps=8e-3 / us_per_byte, latency_us=beyond)


def _ring_bytes(collective: Collective) -> float:
    return 2 * (collective.ranks - 1) / collective.ranks * collective.nbytes


def _with_link(profile: Profile, link: Link) -> Profile:
    return replace(profile, links={**profile.links, "collectives": link})


def _steps(trace: Trace) -> list[Span]:
    """The optimizers' steps; consecutive steps without a gradient in between are joined into one."""
    starts = sorted(gradient.start for gradient in trace.gradients)
    joined: list[Span] = []
    for span in sorted(trace.optimizer, key=lambda span: span.start):
        if joined and bisect.bisect(starts, joined[-1].end) == bisect.bisect(starts, span.start):
            joined[-1] = Span(joined[-1].start, max(joined[-1].end, span.end), joined[-1].thread)
        else:
            joined.append(span)
    return joined


def _last_pass(gradients: Sequence[Accumulated], forward: Sequence[float]) -> list[Accumulated]:
    """The gradients of the last backward pass; a forward lies between two passes."""
    ordered = sorted(gradients, key=lambda gradient: gradient.start)
    kept = [ordered[-1]]
    for gradient, after in zip(ordered[-2::-1], ordered[:0:-1], strict=True):
        if bisect.bisect(forward, gradient.end) != bisect.bisect(forward, after.start):
            break
        kept.append(gradient)
    return kept[::-1]


def _named(gradients: Sequence[Accumulated]) -> list[tuple[str, Accumulated]]:
    """The gradients with names made of their shape and of how many of that shape were ready before."""
    counts: dict[tuple[int, ...], int] = {}
    named = []
    for gradient in gradients:
        number = counts[gradient.shape] = counts.get(gradient.shape, -1) + 1
        named.append((name_of(gradient.shape, number), gradient))
    return named


class _Clock:
    """Tells when a thread's work was finished: on a CPU immediately, on a GPU at the end of the last kernel that the thread had queued by then."""

    def __init__(self, trace: Trace) -> None:
        self._launches: dict[int, list[Launch]] = {}
        for launch in sorted(trace.launches, key=lambda launch: launch.at):
            self._launches.setdefault(launch.thread, []).append(launch)
        self._at = {thread: [launch.at for launch in launches] for thread, launches in self._launches.items()}
        self.forward = _outside(trace.operators, [*trace.backward, *trace.optimizer])

    def ready(self, gradient: Accumulated) -> float:
        number = bisect.bisect(self._at.get(gradient.thread, []), gradient.end)
        return self._launches[gradient.thread][number - 1].end if number else gradient.end

    def begun(self, step: Span) -> float:
        """When the optimizer's first work began on the device."""
        at = self._at.get(step.thread, [])
        number = bisect.bisect_left(at, step.start)
        return self._launches[step.thread][number].start if number < len(at) and at[number] <= step.end else step.start


def _outside(times: Sequence[float], spans: Sequence[Span]) -> list[float]:
    """The times that lie in none of the spans, which may nest and overlap; sorted."""
    outside, reached, ahead = [], -math.inf, sorted((span.start, span.end) for span in spans)
    number = 0
    for time in sorted(times):
        while number < len(ahead) and ahead[number][0] <= time:
            reached = max(reached, ahead[number][1])
            number += 1
        if time > reached:
            outside.append(time)
    return outside


def collective_bytes(numel: int, dtype: str) -> int:
    """Bytes of ``numel`` elements; dtype as torch or NCCL spell it, 4 bytes an element if it is unknown."""
    return numel * _BYTES.get(dtype.lower().removeprefix("nccl"), 4)


_BYTES: Final[Mapping[str, int]] = {
    "double": 8, "float64": 8, "long": 8, "int64": 8, "float": 4, "float32": 4, "int": 4, "int32": 4, "half": 2, "float16": 2, "bfloat16": 2,
    "short": 2, "char": 1, "byte": 1, "int8": 1, "uint8": 1,
}  # fmt: skip
