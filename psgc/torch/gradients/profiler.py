"""When gradients become ready: hooks and clocks over iterations of a model, on its own or inside a job.

Owns marks in time, of the host's clock or of a CUDA stream, and what turns them into iterations; ``psgc.plan.inputs.observed`` makes the profile.
Inside a job (PSGC_PROFILE) the first DistributedOptimizer is observed while its buckets wait for synchronize: ready times are those of
computation alone, beside the other workers of this machine. An iteration waits for the slowest rank, so with PSGC_PROFILE_ONLY, which all ranks
have, each iteration's times are stretched to those of its slowest rank.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch

from psgc.diagnostics.machine import machine
from psgc.errors import ConfigError, UsageError
from psgc.layout import ITEM_BYTES
from psgc.plan.inputs.observed import LEAST_ITERATIONS, Iteration, profile_of, unsteady
from psgc.plan.inputs.profile import Profile
from psgc.torch.gradients.buckets import GradientBucket
from psgc.torch.gradients.exchange import GradientExchange
from psgc.torch.gradients.observer import UNOBSERVED, Observer
from psgc.torch.session.uncompiled import uncompiled
from psgc.torch.tensors.rank_table import RankTable
from psgc.worker.session import Session

logger = logging.getLogger(__name__)
WARM_UP: Final = 5  # the first iterations allocate, declare and compile
# A step of a job waits for its network, and caches are cold then: on cores it computes for up to twice as long as one that follows another at once. So an
# observed iteration on cores begins after a pause, too; longer ones were not found to change more.
PAUSE_S: Final = 0.02
Mark = Any  # nanoseconds of the host's clock, or an event of a CUDA stream
Clock = Callable[[], Mark]


def host_mark() -> int:
    return time.perf_counter_ns()


def cuda_mark() -> torch.cuda.Event:
    """The time at which the current stream has finished the work queued so far: gradients are ready then, not when hooks run."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def us_between(earlier: Mark, later: Mark) -> float:
    if isinstance(earlier, int):
        return float(later - earlier) * 1e-3
    later.synchronize()
    return float(earlier.elapsed_time(later)) * 1e3


def clock_for(parameter: torch.Tensor) -> Clock:
    return cuda_mark if parameter.is_cuda else host_mark


def hardware_of(parameter: torch.Tensor) -> str:
    gpu = [torch.cuda.get_device_name(parameter.device)] if parameter.is_cuda else []
    return ", ".join([*gpu, machine()])


@dataclass(slots=True)
class Marks:
    """One iteration. ready: by tensor, in the order of readiness."""

    ready: dict[str, Mark] = field(default_factory=dict)
    leaving: Mark = None
    delivered: Mark = None

    @property
    def first(self) -> Mark:
        return next(iter(self.ready.values()))

    @property
    def last(self) -> Mark:
        return self.ready[next(reversed(self.ready))]


class Recorder:
    """Marks of one iteration after the other."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._marks = [Marks()]
        self._merged = 0  # of the iterations, those that are a whole step each

    def ready(self, name: str) -> None:
        """Of several backwards an iteration the last counts."""
        ready = self._marks[-1].ready
        ready.pop(name, None)
        ready[name] = self.clock()

    def leaving(self) -> None:
        self._marks[-1].leaving = self.clock()

    def delivered(self) -> None:
        """Communication is over: what follows belongs to the next iteration."""
        self._end(self.clock())

    def pause(self, seconds: float, sleep: Callable[[float], object] = time.sleep) -> None:
        """Let caches grow cold before the next iteration, whose time this does not count in. Only with a host's clock."""
        begun = self.clock()
        sleep(seconds)
        if self.complete:
            self._marks[-2].delivered += self.clock() - begun

    def merge(self) -> None:
        """Make one iteration of all that were completed since the last time: its gradients are those of the last one, and what was before it was other work."""
        del self._marks[self._merged : max(self._merged, self.complete - 1)]
        self._merged = self.complete

    def backward_over(self) -> None:
        """Leave the time of communication out, as if the trainer had continued right after the last gradient."""
        marks = self._marks[-1]
        if marks.ready:
            marks.leaving = marks.last
            self._end(marks.last)

    def _end(self, mark: Mark) -> None:
        if self._marks[-1].ready:  # else nothing was iterated
            self._marks[-1].delivered = mark
            self._marks.append(Marks())

    @property
    def complete(self) -> int:
        """Iterations observed to their ends."""
        return len(self._marks) - 1

    def iterations(self, leave_out: int) -> list[Iteration]:
        """All iterations but the first ``leave_out`` and the last, whose end was not observed."""
        return [_iteration(now, then.first) for now, then in pairwise(self._marks[leave_out:-1])]


def _iteration(marks: Marks, next_first: Mark) -> Iteration:
    first = marks.first
    ready = {name: us_between(first, mark) for name, mark in marks.ready.items()}
    return Iteration(ready, us_between(marks.last, marks.leaving), us_between(marks.delivered, next_first))


def profile_model(
    model: torch.nn.Module, step_fn: Callable[[], object], iterations: int = 20, *, warm_up: int = WARM_UP, name: str = ""
) -> Profile:  # fmt: skip
    """When each gradient of ``model`` becomes ready, over ``iterations`` calls of ``step_fn``, after ``warm_up`` calls that do not count.

    step_fn: one iteration on this process alone: forward, backward and, for a true ``forward_us``, the optimizer's step and data. If it runs
    backward several times, the last one counts. On a CPU each call follows a pause, as a job's steps follow a wait. name: of the model; its class by
    default. Outliers are left out (``psgc.plan.inputs.observed``); what varies much is logged as a warning. On a GPU times are those of its stream, not of
    the hooks.
    Raises UsageError where there is nothing to observe.
    """
    if iterations < LEAST_ITERATIONS or warm_up < 0:
        raise UsageError(f"profile_model: iterations={iterations}, warm_up={warm_up}: expected at least {LEAST_ITERATIONS} and 0")
    watched = {label: parameter for label, parameter in model.named_parameters() if parameter.requires_grad and parameter.numel()}
    if not watched:
        raise UsageError("profile_model: no parameter of the model requires a gradient")
    sample = next(iter(watched.values()))
    recorder = Recorder(clock_for(sample))
    hooks = [parameter.register_post_accumulate_grad_hook(_hook(recorder, label)) for label, parameter in watched.items()]  # type: ignore[no-untyped-call]
    try:
        for _ in range(warm_up + iterations + 1):
            step_fn()
            recorder.backward_over()
            if not sample.is_cuda:
                recorder.pause(PAUSE_S)
    finally:
        for hook in hooks:
            hook.remove()
    if recorder.complete < warm_up + iterations + 1:
        raise UsageError("profile_model: step_fn computed no gradient of the model; it must run forward and backward")
    shapes = {label: tuple(parameter.shape) for label, parameter in watched.items()}
    itemsizes = {label: parameter.element_size() for label, parameter in watched.items()}
    profile = _profile(recorder.iterations(warm_up), shapes, itemsizes, name or type(model).__name__, sample)
    if warning := unsteady(profile):
        logger.warning("%s", warning)
    return profile


def _hook(recorder: Recorder, name: str) -> Callable[[torch.Tensor], None]:
    return uncompiled(lambda parameter: recorder.ready(name))


def _profile(
    iterations: Sequence[Iteration], shapes: Mapping[str, tuple[int, ...]], itemsizes: Mapping[str, int], model: str, sample: torch.Tensor, of_ranks: int = 1,
) -> Profile:  # fmt: skip
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    numel = {name: math.prod(shape) for name, shape in shapes.items()}
    found = profile_of(
        iterations, numel, model=model, hardware=hardware_of(sample), date=date, shapes=shapes, itemsizes=itemsizes, of_ranks=of_ranks
    )
    return replace(found, device=sample.device.type, compute_threads=0 if sample.is_cuda else torch.get_num_threads())


def of_the_slowest(session: Session, iterations: Sequence[Iteration]) -> list[Iteration]:
    """This rank's iterations, each stretched to the longest computation that any rank had in it. Every rank must call it, with as many iterations."""
    table = RankTable(session, "psgc.profile", len(iterations))
    table.send(*(iteration.compute_us for iteration in iterations))
    return [iteration.stretched(float(us)) for iteration, us in zip(iterations, table.rows().max(axis=0), strict=True)]


class JobObserver(Observer):
    """Observes an exchange for WARM_UP iterations and those asked for; then rank 0 writes the profile, and buckets leave early again, or
    with PSGC_PROFILE_ONLY the script exits: every rank after the same step, so that none is missed by another.

    sample: any of its parameters. Raises ConfigError where PSGC_PROFILE is no place for a file.
    """

    holds = True

    def __init__(self, exchange: GradientExchange[GradientBucket], sample: torch.Tensor) -> None:
        path = Path(exchange.session.config.profile)
        if exchange.session.whole.rank == 0 and not os.access(path.parent, os.W_OK | os.X_OK):
            raise ConfigError(f"PSGC_PROFILE={path}: cannot write in {path.parent}; name a file in a folder that is there")
        self._exchange, self._sample = exchange, sample
        self._recorder = Recorder(clock_for(sample))

    def ready(self, name: str, gradient: torch.Tensor) -> None:
        self._recorder.ready(name)

    def leaving(self) -> None:
        self._recorder.leaving()

    def delivered(self) -> None:
        self._recorder.delivered()
        if not self._sample.is_cuda:
            self._recorder.pause(PAUSE_S)
        config = self._exchange.session.config
        if self._recorder.complete < WARM_UP + config.profile_iterations + 1:
            return
        self._exchange.observer = UNOBSERVED
        session, iterations = self._exchange.session, self._recorder.iterations(WARM_UP)
        if config.profile_only:  # else it may be this rank alone that observes, and the others would not take part
            iterations = of_the_slowest(session, iterations)
        if session.whole.rank == 0:
            specs = [spec for spec in self._exchange.specs if spec.numel]
            shapes, itemsizes = {spec.name: tuple(spec.shape) for spec in specs}, {spec.name: ITEM_BYTES[spec.dtype] for spec in specs}
            of_ranks = session.size if config.profile_only else 1
            write_whole(Path(config.profile), _profile(iterations, shapes, itemsizes, "", self._sample, of_ranks))
        if config.profile_only:
            sys.exit(0)


def write_whole(path: Path, profile: Profile) -> None:
    """Write the file atomically, so that a reader never finds a part of it."""
    draft = path.with_name(path.name + ".part")
    draft.write_text(json.dumps(profile.to_json()))
    os.replace(draft, path)
