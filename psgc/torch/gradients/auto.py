"""``auto``: a running job's gradients travel uncompressed at first, and then by what is measured to be quickest.

Owns the measuring of an exchange's steps, the table in which ranks tell each other theirs, and the switches. ``psgc.plan.live`` decides: ``steering`` when to
plan and what to keep, the same on every rank; ``outlook`` what to try, on rank 0, which publishes it. A table travels while the next step is taken, so nobody
waits for it; ranks wait for each other only while rank 0 plans. A step ends when its gradients have arrived (``arrived``); what follows from it is done between
two steps (``decide``), which under DDP is when the next one begins.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from psgc.errors import CodecError, PsgcError
from psgc.layout import Declaration, Layout, TensorSpec, build_layout
from psgc.plan.inputs.estimates import with_gpu_estimates
from psgc.plan.inputs.observed import LEAST_ITERATIONS, profile_of
from psgc.plan.inputs.profile import Profile
from psgc.plan.live.outlook import OVERHEADS, PLAN, PRESENT_PLAN, Machines, Outlook, losses, outlook, sound_codecs
from psgc.plan.live.steering import Steering
from psgc.plan.model.plan import UNCOMPRESSED, Plan, PlannedBucket
from psgc.plan.planfile.runtime import plan_of
from psgc.torch.device.engines import engine_of
from psgc.torch.gradients.profiler import Recorder, clock_for, hardware_of
from psgc.torch.plans.calibrating import measured_curves, within_node_gbps
from psgc.torch.plans.choice import Choice
from psgc.torch.plans.device_times import DeviceTimes
from psgc.torch.plans.planned import TRACED_CLUSTER, TRACED_PROFILE, leave_file
from psgc.torch.session.run_report import run_logger
from psgc.worker.session import Session, Ticket

logger = logging.getLogger(__name__)
WINDOW: Final = 5  # steps whose median is one figure
WARM_UP: Final = 3  # steps at the beginning, which declare, compile and fill caches
SETTLING: Final = 2  # steps after a switch: the one that declares, and the next
AWAITED: Final = "rank 0's"  # the file of a plan that auto chose, on other ranks


class Steered(Protocol):
    """What is switched: the gradients' exchange."""

    session: Session
    name: str
    choice: Choice

    @property
    def specs(self) -> tuple[TensorSpec, ...]: ...
    @property
    def layouts(self) -> list[Layout]:
        """By which the gradients travel now."""

    @property
    def on_gpu(self) -> bool:
        """Whether gradients on a GPU are encoded there where no plan says where."""

    def proposed(self, codec: str) -> Declaration:
        """What would be declared of the gradients by this codec."""

    def switch(self, choice: Choice) -> None: ...


class _Table:
    """Each rank's step time of one window; the sum over ranks is the whole table."""

    waits = False

    def __init__(self, size: int) -> None:
        self.ms = np.zeros(size, np.float64)

    def load(self) -> NDArray[Any]:
        return self.ms

    def store(self, skipped: bool) -> None:
        """Do nothing: the sum is in the array."""


def _timed(profile: Profile, buckets: Sequence[PlannedBucket]) -> bool:
    """Whether the profile has times of all that the buckets have encoded on GPUs."""
    on_gpus = {bucket.codec for bucket in buckets if any(action.endswith("@gpu") for action in bucket.option)}
    return all("gpu" in profile.codecs.get(codec.partition(":")[0], profile.codecs.get(codec, {})) for codec in on_gpus)


class AutoPlan:
    """Observes an exchange and switches it; see the module's text. linear: whether the optimizer's steps are linear in the gradient, which says what codecs
    are sound; sample: any of the parameters."""

    holds = False

    def __init__(self, exchange: Steered, linear: Callable[[], bool], sample: torch.Tensor) -> None:
        self._exchange, self._linear = exchange, linear
        self._clock, self._sample = clock_for(sample), sample
        self._gpu: DeviceTimes | None = None
        self._steering = Steering()
        self._recorder, self._recorded = Recorder(self._clock), Recorder(self._clock)  # of this window, and of the last whole one
        self._skip = WARM_UP
        self._last = self._deciding = self._steps = 0  # nanoseconds: the end of the last step, and what was done between steps since
        self._periods: list[int] = []  # nanoseconds
        self._table = _Table(exchange.session.size)
        self._ticket: Ticket | None = None
        self._plans = 0
        self._choices: list[Choice] = []  # by candidate
        self._names: list[str] = []
        self._curves: Mapping[str, Any] = {}
        self._times = ""  # of codecs on GPUs, in words
        self._within_gbps = 0.0  # of a node's memory, once it has been measured

    def ready(self, name: str) -> None:
        self._recorder.ready(name)

    def leaving(self) -> None:
        self._recorder.leaving()

    def delivered(self) -> None:
        """A step's gradients are there, and the trainer between two steps."""
        self.arrived()
        self.decide()

    def arrived(self) -> None:
        """A step's gradients are there: count it."""
        now = time.perf_counter_ns()
        self._recorder.delivered()
        self._steps += 1
        if self._skip:
            self._skip -= 1
            if self._steps <= WARM_UP:
                self._time_gpu()
        else:
            self._periods.append(now - self._last - self._deciding)
        self._last, self._deciding = now, 0

    def _time_gpu(self) -> None:
        """On rank 0, where gradients lie on a GPU: have it measure itself, beside the steps that do not count."""
        engine = engine_of(self._sample) if self._exchange.session.rank == 0 else None
        if engine is None:
            return
        if self._gpu is None:
            self._gpu = DeviceTimes(engine, [codec for codec in sound_codecs(adam=not self._linear()) if codec != UNCOMPRESSED])
        self._gpu.enqueue()

    def decide(self) -> None:
        """Act on what all ranks know by now. Every rank calls it after the same step. What it takes is no part of a step."""
        began = time.perf_counter_ns()
        if self._ticket is not None:
            self._take_table()
        if len(self._periods) == WINDOW:
            self._send_table(statistics.median(self._periods) * 1e-6)
        elif not self._periods:
            self._recorder = Recorder(self._clock)
        self._deciding += time.perf_counter_ns() - began

    def _send_table(self, step_ms: float) -> None:
        session = self._exchange.session
        self._periods.clear()
        self._recorded, self._recorder = self._recorder, Recorder(self._clock)
        self._table.ms[:] = 0
        self._table.ms[session.rank] = step_ms
        spec = TensorSpec("step_ms", self._table.ms.shape, "float64")
        declaration = Declaration(f"psgc.auto {self._exchange.name}", "adhoc", (spec,), UNCOMPRESSED, mean=False)
        self._ticket = session.submit_named(declaration, self._table)

    def _take_table(self) -> None:
        assert self._ticket is not None
        self._exchange.session.wait([self._ticket])
        self._ticket = None
        step_ms = float(self._table.ms.max())  # a step waits for the slowest rank
        steering, before = self._steering, self._steering.reference_ms
        was_over = steering.over
        verdict = steering.window(step_ms)
        if verdict == "plan":
            if was_over:
                self._say(f"a step takes {step_ms:,.1f} ms instead of {before:,.1f}: planning again")
            self._plan(step_ms)
            verdict = steering.planned(losses(self._names))
        if verdict == "switch":
            self._exchange.switch(self._choices[steering.kept])
            self._skip = SETTLING
            self._periods.clear()
        if steering.over and not was_over and len(self._names) > 1:
            times = ", ".join(f"{name} {ms:,.1f}" for name, ms in zip(self._names, steering.measured_ms, strict=True))
            self._say(f"{self._names[steering.kept]} from now on; measured, in ms a step: {times}")

    def _plan(self, step_ms: float) -> None:
        """Agree on the candidates: rank 0 finds them, the others wait for what it publishes."""
        exchange, session = self._exchange, self._exchange.session
        self._plans += 1
        name, plan = f"auto {self._plans} of {exchange.name}", None
        if session.rank == 0:
            found = self._find(step_ms)
            plan = found.plan if found is not None else None
            session.publish(name, json.dumps(list(found.tried if found is not None else ())).encode())
        tried = [str(each) for each in json.loads(session.lookup(name))]
        self._names = [self._present, *tried]
        self._choices = [exchange.choice, *(self._choice(each, plan) for each in tried)]

    @property
    def _present(self) -> str:
        choice = self._exchange.choice
        return choice.codec if choice.plan is None and not choice.awaited else PRESENT_PLAN

    def _choice(self, name: str, plan: Plan | None) -> Choice:
        if name != PLAN:
            return Choice(name)
        return Choice(awaited=AWAITED) if plan is None else Choice(plan=plan)

    def _find(self, step_ms: float) -> Outlook | None:
        """On rank 0: what is worth a trial; None where nothing can be said."""
        iterations = self._recorded.iterations(0)
        if len(iterations) < LEAST_ITERATIONS:
            self._say("this rank computed too few gradients to plan by; nothing is changed")
            return None
        try:
            found = self._outlook(step_ms, iterations)
        except PsgcError as error:
            self._say(f"nothing is changed: {error}")
            return None
        self._tell(step_ms, found)
        return found

    def _outlook(self, step_ms: float, iterations: Sequence[Any]) -> Outlook:
        exchange = self._exchange
        codecs = sound_codecs(adam=not self._linear())
        if not self._curves:
            self._curves = measured_curves(codecs)
        codecs = [codec for codec in codecs if codec in self._curves]  # an optimizer that turned out not to be linear has fewer
        used = {name for layout in exchange.layouts for name in (tensor.name for tensor in layout.tensors if tensor.numel)}
        numel = {spec.name: spec.numel for spec in exchange.specs if spec.name in used}
        shapes = {spec.name: tuple(spec.shape) for spec in exchange.specs if spec.name in used}
        kinds = {(spec.group, spec.dtype) for spec in exchange.specs if spec.name in used}
        ready = [each for each in iterations if each.ready_us]
        profile = replace(profile_of(ready, numel, model=exchange.name, shapes=shapes), codecs=self._curves)
        profile = replace(profile, device="cpu") if self._gpu is None else self._with_gpu(profile, self._gpu, codecs)
        present = [
            bucket for layout in exchange.layouts for bucket in plan_of(layout, on_gpu=self._gpu is not None and exchange.on_gpu).buckets
        ]
        layouts = {codec: buckets for codec in codecs if (buckets := self._buckets_by(codec)) is not None and _timed(profile, buckets)}
        by_plan, machines = exchange.choice.plan is not None, self._machines()
        found = outlook(profile, machines, step_ms, present, layouts, "" if by_plan else exchange.choice.codec, plans=len(kinds) == 1)
        folder = exchange.session.config.trace_folder
        if folder and exchange.name in ("optimizer0", "ddp0"):
            leave_file(folder, TRACED_PROFILE, json.dumps(replace(profile, overheads=OVERHEADS).to_json()))
            leave_file(folder, TRACED_CLUSTER, machines.cluster(found.gbps).to_toml())
        return found

    def _with_gpu(self, profile: Profile, gpu: DeviceTimes, codecs: Sequence[str]) -> Profile:
        """With what the GPU was measured to take; with estimates for what it has not come to, where its memory is known."""
        measured = gpu.curves()
        curves = {codec: {**profile.codecs[codec], **({"gpu": measured[codec]} if codec in measured else {})} for codec in codecs}
        board = hardware_of(self._sample).partition(",")[0] if self._sample.is_cuda else ""
        found, estimated, _ = with_gpu_estimates(replace(profile, codecs=curves, device="cuda"), board, codecs)
        told = [f"{', '.join(names)} {how}" for names, how in ((sorted(measured), "measured"), (sorted(estimated), "estimated")) if names]
        self._times = f"; codec times on the GPU: {', '.join(told) or 'not known'}"
        return found

    def _buckets_by(self, codec: str) -> tuple[PlannedBucket, ...] | None:
        """The buckets that the job would have by this codec; None where it does not carry some gradient's dtype."""
        session, declaration = self._exchange.session, self._exchange.proposed(codec)
        try:
            layout = build_layout(
                declaration,
                layout_id=1,
                servers=session.config.servers,
                workers=session.size,
                used_by_all=frozenset(declaration.used),
                ranks=session.ranks,
            )
        except CodecError:
            return None
        return plan_of(layout, on_gpu=self._gpu is not None and self._exchange.on_gpu).buckets

    def _machines(self) -> Machines:
        session = self._exchange.session
        sizes, config = session.node_sizes, session.config
        groups = not (config.encrypt or config.link_mbit)  # they are not encrypted, and no simulated link paces them
        cores, gpu = os.cpu_count() or 1, self._gpu
        machines = Machines(
            len(sizes), max(sizes), config.servers, cores, config.cpu_threads, groups or not config.servers, len(set(sizes)) == 1,
            gpus=gpu is not None, host=None if gpu is None else gpu.host_link(),
        )  # fmt: skip
        if max(sizes) > 1 and len(sizes) > 1:
            self._within_gbps = self._within_gbps or within_node_gbps(max(sizes), cores)
            machines = replace(machines, within_gbps=self._within_gbps)
        return machines

    def _tell(self, step_ms: float, found: Outlook) -> None:
        predicted = ", ".join(f"{name} {ms:,.1f}" for name, ms in sorted(found.predicted_ms.items(), key=lambda one: one[1]))
        have = self._present
        within = f" (within nodes {self._within_gbps:,.3g}, by what copies and sums take here)" if self._within_gbps else ""
        links = f"as over links of {found.gbps:,.3g} Gbit/s{within}"
        figures = f"a step takes {step_ms:,.1f} ms by {have}, {links}; predicted, in ms: {predicted or 'nothing else'}{self._times}"
        if found.tried:
            self._say(f"trying {', '.join(found.tried)}: {figures}")
        else:
            self._say(f"{have} stays, since nothing else would save 5 %: {figures}")

    def _say(self, text: str) -> None:
        if self._exchange.session.rank == 0:
            run_logger.info("%s: auto, step %d: %s", self._exchange.name, self._steps, text)
