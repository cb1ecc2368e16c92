"""``auto``: a running job's gradients travel uncompressed at first, and then by what is measured to be quickest.

Owns the measuring of an exchange's steps, the table in which ranks tell each other theirs, and the switches. ``psgc.plan.live`` decides: ``steering`` when to
plan and what to keep, the same on every rank; ``levels`` which codecs the job's level of quality allows; ``outlook`` what to try, on rank 0, which
publishes it. A table travels while the next step is taken, so nobody
waits for it; ranks wait for each other only while rank 0 plans.

A step is what an optimizer applies, however many backwards it took: it lasts from the moment at which the last gradients before it had arrived to the moment
for the next one. What follows from it is done as soon as the optimizer has stepped. Of several exchanges in a job one at a time tries its candidates: rank 0
has the others wait, because they all measure the same loop.
"""

from __future__ import annotations

import functools
import json
import logging
import statistics
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from psgc.errors import CodecError, PsgcError
from psgc.layout import Declaration, TensorSpec, build_layout
from psgc.plan.inputs.estimates import with_gpu_estimates
from psgc.plan.inputs.observed import LEAST_ITERATIONS, Iteration, profile_of
from psgc.plan.inputs.profile import Profile
from psgc.plan.live.levels import all_candidates, candidates, loss_of, loss_of_codec, stage_of
from psgc.plan.live.outlook import MOST_ENCODES, OVERHEADS, PLAN, PRESENT_PLAN, Machines, Outlook, loss_of_name, outlook
from psgc.plan.live.steering import SETTLING, WINDOW, Steering
from psgc.plan.model.level import SAFE
from psgc.plan.model.plan import UNCOMPRESSED, Plan, PlannedBucket
from psgc.plan.model.quality import RELAY, allowed, encodings
from psgc.plan.planfile.runtime import plan_of
from psgc.program.backends import Backend, Facts, backend_of
from psgc.torch.collectives.device_group import facts_of
from psgc.torch.device.engines import engine_of
from psgc.torch.gradients import measuring
from psgc.torch.gradients.exchange import GradientExchange
from psgc.torch.gradients.observer import Observer
from psgc.torch.gradients.profiler import Recorder, hardware_of
from psgc.torch.gradients.sampling import GradientSample
from psgc.torch.plans.choice import Choice
from psgc.torch.plans.device_times import DeviceTimes
from psgc.torch.plans.planned import TRACED_CLUSTER, TRACED_PROFILE, leave_file
from psgc.torch.session.run_report import run_logger
from psgc.worker.session import Session, Ticket

logger = logging.getLogger(__name__)
WARM_UP: Final = 3  # steps at the beginning, which declare, compile and fill caches
AWAITED: Final = "rank 0's"  # the file of a plan that auto chose, on other ranks
MOST_WAITS: Final = 5  # windows without a step of the exchange that tries its candidates, after which another one need not wait for it
SLOWER: Final = 1.1  # a rank that computes for longer than rank 0 by this factor is named


class _Table:
    """A row of numbers of each rank; the sum over ranks is the whole table."""

    waits = False

    def __init__(self, session: Session, name: str, columns: int) -> None:
        self._session = session
        self._flat = np.zeros(session.size * columns, np.float64)
        self._rows = self._flat.reshape(session.size, columns)
        self._declaration = Declaration(name, "adhoc", (TensorSpec("figures", self._flat.shape, "float64"),), UNCOMPRESSED, mean=False)
        self._ticket: Ticket | None = None

    def send(self, *row: float) -> None:
        self._flat[:] = 0
        self._rows[self._session.rank] = row
        self._ticket = self._session.submit_named(self._declaration, self)

    @property
    def sent(self) -> bool:
        """Whether it is under way, or there and not looked at yet."""
        return self._ticket is not None

    def rows(self) -> NDArray[Any]:
        """Every rank's, once all have sent theirs."""
        assert self._ticket is not None
        self._session.wait([self._ticket])
        self._ticket = None
        return self._rows

    def load(self) -> NDArray[Any]:
        return self._flat

    def store(self, skipped: bool) -> None:
        """Do nothing: the sum is in the array."""


@dataclass(slots=True)
class _Turn:
    """On rank 0: whose turn it is to try candidates. steps: it had taken when another exchange asked last; waits: how often one has asked since then."""

    of: weakref.ref[AutoPlan] | None = None
    steps: int = 0
    waits: int = 0

    def is_free_for(self, one: AutoPlan) -> bool:
        holder = None if self.of is None else self.of()
        if holder is None or holder is one or not holder.trying:
            return True
        self.waits = self.waits + 1 if holder.steps == self.steps else 0
        self.steps = holder.steps
        return self.waits > MOST_WAITS


_turns: weakref.WeakKeyDictionary[Session, _Turn] = weakref.WeakKeyDictionary()


class _Compute(NamedTuple):
    """What a rank computes for in a step, in microseconds: from the first gradient until it asks for them, and everything before. rank: whose."""

    rank: int
    backward_us: float
    forward_us: float

    @property
    def us(self) -> float:
        return self.backward_us + self.forward_us

    @classmethod
    def of(cls, rank: int, iterations: Sequence[Iteration]) -> _Compute:
        if len(iterations) < LEAST_ITERATIONS:
            return cls(rank, 0.0, 0.0)
        backward_us = statistics.median(each.backward_us + each.tail_us for each in iterations)
        return cls(rank, backward_us, statistics.median(each.forward_us for each in iterations))


def _timed(profile: Profile, buckets: Sequence[PlannedBucket]) -> bool:
    """Whether the profile has times of all that the buckets have encoded on GPUs."""
    on_gpus = {bucket.codec for bucket in buckets if any(action.endswith("@gpu") for action in bucket.option)}
    return all("gpu" in profile.codecs.get(codec.partition(":")[0], profile.codecs.get(codec, {})) for codec in on_gpus)


class AutoPlan(Observer):
    """Observes an exchange and switches it; see the module's text. sample: any of the parameters. It has no lock: see ``observer.py``."""

    def __init__(self, exchange: GradientExchange[Any], sample: torch.Tensor) -> None:
        session = exchange.session
        self._exchange, self._level = exchange, exchange.choice.quality
        self._measuring, self._sample = measuring.in_use(), sample
        self._clock = self._measuring.clock(sample)
        self._gpu: DeviceTimes | None = None
        self._steering = Steering()
        self._recorder, self._recorded = Recorder(self._clock), Recorder(self._clock)  # of this window, and of the last whole one
        self._noting = True
        self._merged = 0  # of the recorder's iterations, those that are a whole step each
        self._skip = WARM_UP
        self._arrived = self._last = self._deciding = (
            0  # nanoseconds: the last arrival, that of the last step, and what was done between steps since
        )
        self._fresh = self._told = False  # gradients have arrived since the last step; an optimizer has told of a step
        self.steps = 0
        self._periods: list[int] = []  # nanoseconds
        self._sampled: GradientSample | None = None  # of the step under way, or the last one that was sampled
        self._sampling = False
        self._stage = 0
        self._given_up: set[str] = set()  # codecs whose relative error grew beyond the level's limit
        self._table = _Table(session, f"psgc.auto {exchange.name}", 2)
        self._encoders = [codec for codec in all_candidates(self._level) if codec != UNCOMPRESSED]
        self._computes = _Table(session, f"psgc.auto {exchange.name}, compute", 2 + len(self._encoders))
        self._plans = self._known = 0  # _known: parameters
        self._choices: list[Choice] = []  # by candidate
        self._names: list[str] = []
        self._curves: dict[str, Any] = {}
        self._errors: dict[str, float] = {}  # of the codecs that the level has, on any rank, when it planned last
        self._times = ""  # of codecs on GPUs, in words
        self._backend: Backend | None = None  # what collectives of gradients on GPUs go through, once rank 0 has asked
        self._within_gbps = 0.0  # of a node's memory, once it has been measured
        self._said_held = False
        if session.rank == 0:
            session.at_end(functools.partial(_tell_end, weakref.ref(self)))

    def ready(self, name: str, gradient: torch.Tensor) -> None:
        if self._noting:
            self._recorder.ready(name)
        if self._sampling and self._sampled is not None:
            self._sampled.take(name, gradient)

    def leaving(self) -> None:
        if self._noting:
            self._recorder.leaving()

    def delivered(self) -> None:
        """A step's gradients are there, or some of them: it may take several backwards."""
        self._arrived, self._fresh = self._measuring.now_ns(), True
        if self._noting:
            self._recorder.delivered()

    def begins(self) -> None:
        """DDP hands over the first gradients of the next step: where no optimizer tells of its steps, one ends here."""
        if not self._told:
            self._step()

    def stepped(self) -> None:
        self._told = True
        self._step()

    def _step(self) -> None:
        """A step is over, if gradients have arrived since the last one: count it."""
        if not self._fresh or not self._exchange.layouts:
            return
        self._fresh = False
        self._recorder.merge(self._merged)
        self._merged = self._recorder.complete
        self.steps += 1
        if self._skip:
            self._skip -= 1
            if self.steps <= WARM_UP:
                self._time_gpu()
        else:
            self._periods.append(self._arrived - self._last - self._deciding)
        self._last, self._deciding = self._arrived, 0
        self._decide()

    def _time_gpu(self) -> None:
        """On rank 0, where gradients lie on a GPU: have it measure itself, beside the steps that do not count."""
        engine = engine_of(self._sample) if self._exchange.session.rank == 0 else None
        if engine is None:
            return
        if self._gpu is None:
            self._gpu = DeviceTimes(engine, [codec for codec in all_candidates(self._level, self._dtypes) if codec != UNCOMPRESSED])
        self._gpu.enqueue()

    @property
    def trying(self) -> bool:
        """Whether candidates of the last plan are being tried."""
        return self._steering.trying

    def _decide(self) -> None:
        """Act on what all ranks know by now. Every rank calls it after the same step. What it takes is no part of a step."""
        began = self._measuring.now_ns()
        if self._table.sent:
            self._take_table()
        if len(self._exchange.specs) != self._known:
            self._begin_again()
        if len(self._periods) == WINDOW:
            self._recorded = self._recorder
            self._note_anew()
            self._table.send(statistics.median(self._periods) * 1e-6, self._excess())
            self._periods.clear()
        elif not self._periods:
            self._note_anew()
        self._sampling = len(self._periods) == WINDOW - 1 and (self._noting or self._steering.checks)
        if self._sampling:
            self._sampled = GradientSample(sum(spec.numel for spec in self._exchange.specs))
        self._deciding += self._measuring.now_ns() - began

    def _note_anew(self) -> None:
        self._noting = self._steering.noting
        self._recorder, self._merged = Recorder(self._clock), 0

    def _begin_again(self) -> None:
        """There are parameters that were not there before: what was measured, and a plan, are not of them."""
        before, self._known = self._known, len(self._exchange.specs)
        if not before:
            return
        self._say(f"{self._known - before} parameters were added: uncompressed again, and measuring anew")
        self._restart()

    def _switch(self, choice: Choice) -> None:
        self._exchange.switch(choice)
        self._skip = SETTLING
        self._periods.clear()

    @property
    def _dtypes(self) -> set[str]:
        return {spec.dtype for spec in self._exchange.specs}

    def _excess(self) -> float:
        """The relative error on this rank's gradients of what they travel by, if it is looked at and more than the level allows; else 0."""
        if not (self._steering.checks and self._judges):
            return 0.0
        names: dict[str, list[str]] = {}
        often: dict[str, int] = {}
        for bucket in self._present_buckets():
            names.setdefault(bucket.codec, []).extend(bucket.tensors)
            often[bucket.codec] = max(often.get(bucket.codec, 0), encodings(bucket))
        excess = 0.0
        for codec, of in names.items():
            error = None if codec == UNCOMPRESSED else self._error(codec, of)
            if error is not None and not allowed(codec, self._level, encodings=often[codec], error=error):
                excess = max(excess, error)
        return excess

    def _error(self, codec: str, names: Collection[str] | None = None) -> float | None:
        """The larger relative error of the codec's two halves on the gradients that were sampled last; None if that is not known."""
        if self._sampled is None:
            return None
        halves = [half for half in codec.split("/") if half not in (UNCOMPRESSED, RELAY)]
        errors = [error for half in halves if (error := self._sampled.relative_error(half, names)) is not None]
        return max(errors, default=None)

    def _known_error(self, codec: str) -> float:
        """The relative error on this rank's gradients; -1 if it is not known, or need not be."""
        known = self._level == SAFE and codec not in self._given_up and self._judges
        error = self._error(codec) if known else None
        return -1.0 if error is None else error

    @property
    def _judges(self) -> bool:
        """Whether this rank looks at errors. Ranks whose gradients lie on GPUs leave that to rank 0, because kernels for the CPU may not be compiled there."""
        return not (self._sample.is_cuda and self._exchange.session.rank)

    def _give_up(self, error: float) -> None:
        """What the gradients travel by loses too much of them: the job goes uncompressed, and measures anew what it may choose without it."""
        present = self._present
        self._given_up.add(max((bucket.codec for bucket in self._present_buckets()), key=loss_of_codec))
        self._say(f"{present} is given up: its relative error on the gradients is {error:.2g} now; uncompressed again, and measuring anew")
        self._restart()

    def _restart(self) -> None:
        self._steering, self._names = Steering(), []
        self._switch(Choice(auto=True))

    def _take_table(self) -> None:
        slowest_ms, excess = self._table.rows().max(axis=0)
        step_ms = float(slowest_ms)  # a step waits for the slowest rank
        if excess:
            self._give_up(float(excess))
            return
        steering, before = self._steering, self._steering.reference_ms
        was_over, asked = steering.over, steering.asked
        verdict = steering.window(step_ms)
        if verdict == "plan":
            if was_over and not steering.rechecks:
                why = "coarser codecs may be tried by now" if asked else f"a step takes {step_ms:,.1f} ms instead of {before:,.1f}"
                self._say(f"{why}: planning again")
            verdict = "go on" if (found := self._plan(step_ms)) is None else steering.planned(*found)
        if verdict == "switch":
            self._switch(self._choices[steering.kept])
        if steering.over and not was_over and len(self._names) > 1:
            times = ", ".join(f"{name} {ms:,.1f}" for name, ms in zip(self._names, steering.measured_ms, strict=True))
            self._say(f"{self._names[steering.kept]} from now on; measured, in ms a step: {times}")
        if steering.held_back and not self._said_held:
            self._say(
                f"a step takes {step_ms:,.1f} ms instead of {steering.reference_ms:,.1f}, but it changes too often: {self._present} stays for the time being, "
                f"after {steering.switches} switches"
            )
        self._said_held = steering.held_back
        if (stage := stage_of(self._level, self.steps)) > self._stage:
            self._stage = stage
            steering.ask()
        self._noting = steering.noting

    def _plan(self, step_ms: float) -> tuple[list[float], float] | None:
        """Agree on the candidates: rank 0 finds them, the others wait for what it publishes. How much each loses, and how long rank 0 took; None where
        another exchange is trying its own."""
        exchange, session, began = self._exchange, self._exchange.session, self._measuring.now_ns()
        self._plans += 1
        iterations = self._recorded.iterations(0)
        self._computes.send(*_Compute.of(session.rank, iterations)[1:], *map(self._known_error, self._encoders))
        rows = self._computes.rows()
        computes = [_Compute(rank, float(row[0]), float(row[1])) for rank, row in enumerate(rows)]
        self._errors = {codec: float(error) for codec, error in zip(self._encoders, rows[:, 2:].max(axis=0), strict=True) if error >= 0}
        name, plan = f"auto {self._plans} of {exchange.name}", None
        self._tell_facts()
        if session.rank == 0:
            text, plan = self._published(step_ms, iterations, computes, began)
            session.publish(name, text)
        told = json.loads(session.lookup(name))
        if told is None:
            self._steering.postponed()
            return None
        tried = [str(each) for each in told["tried"]]
        self._names = [self._present, *tried]
        self._choices = [exchange.choice, *(self._choice(each, plan) for each in tried)]
        return [float(each) for each in told["losses"]], float(told["ms"])

    def _tell_facts(self) -> None:
        """Tell rank 0 once where this rank's gradients lie, by which it knows what collectives would go through."""
        if self._plans == 1:
            session = self._exchange.session
            session.publish(f"facts {session.rank} of {self._exchange.name}", facts_of(session, engine_of(self._sample)).encode())

    def _asked_backend(self) -> Backend:
        """What collectives of gradients on GPUs would go through. Raises ConfigError where a rank asks for what the job cannot have."""
        if self._backend is None:
            session = self._exchange.session
            known = {rank: bytes(session.lookup(f"facts {rank} of {self._exchange.name}")) for rank in range(session.size)}
            self._backend = backend_of({rank: Facts.decode(facts) for rank, facts in known.items()})
        return self._backend

    @property
    def _present(self) -> str:
        choice = self._exchange.choice
        return choice.codec if choice.plan is None and not choice.awaited else PRESENT_PLAN

    def _choice(self, name: str, plan: Plan | None) -> Choice:
        if name != PLAN:
            return Choice(name)
        return Choice(awaited=AWAITED, auto=True) if plan is None else Choice(plan=plan, auto=True)

    def _published(
        self, step_ms: float, iterations: Sequence[Iteration], computes: Sequence[_Compute], began: int
    ) -> tuple[bytes, Plan | None]:
        """On rank 0: what it tells the others, and the plan among the candidates. began: when it began, in nanoseconds."""
        turn = _turns.setdefault(self._exchange.session, _Turn())
        if not turn.is_free_for(self):
            return b"null", None
        found = self._find(step_ms, iterations, computes)
        tried, plan = ((), None) if found is None else (found.tried, found.plan)
        turn.of, turn.waits = weakref.ref(self), 0
        losses = [loss_of(self._present_buckets()), *(loss_of_name(name, plan) for name in tried)]
        return json.dumps({"tried": tried, "losses": losses, "ms": (self._measuring.now_ns() - began) * 1e-6}).encode(), plan

    def _find(self, step_ms: float, iterations: Sequence[Iteration], computes: Sequence[_Compute]) -> Outlook | None:
        """On rank 0: what is worth a trial; None where nothing can be said."""
        if len(iterations) < LEAST_ITERATIONS:
            self._say("this rank computed too few gradients to plan by; nothing is changed")
            return None
        mine, slowest = computes[0], max(computes, key=lambda each: each.us)
        try:
            found = self._outlook(step_ms, [_as_of(each, mine, slowest) for each in iterations if each.ready_us])
        except PsgcError as error:
            self._say(f"nothing is changed: {error}")
            return None
        self._tell(
            step_ms, found, f"; rank {slowest.rank} computes for {slowest.us / 1e3:,.1f} ms of it" if slowest.us > SLOWER * mine.us else ""
        )
        return found

    def _present_buckets(self) -> list[PlannedBucket]:
        on_gpu = self._gpu is not None and self._exchange.on_gpu
        return [bucket for layout in self._exchange.layouts for bucket in plan_of(layout, on_gpu=on_gpu).buckets]

    def _outlook(self, step_ms: float, ready: Sequence[Iteration]) -> Outlook:
        exchange = self._exchange
        codecs = candidates(self._level, self._stage, self._dtypes)
        if unknown := [codec for codec in codecs if codec not in self._curves]:
            self._curves.update(self._measuring.curves(unknown))
        codecs = [codec for codec in codecs if codec not in self._given_up and self._allows(codec)]
        used = {name for layout in exchange.layouts for name in (tensor.name for tensor in layout.tensors if tensor.numel)}
        numel = {spec.name: spec.numel for spec in exchange.specs if spec.name in used}
        shapes = {spec.name: tuple(spec.shape) for spec in exchange.specs if spec.name in used}
        kinds = {(spec.group, spec.dtype) for spec in exchange.specs if spec.name in used}
        profile = replace(profile_of(ready, numel, model=exchange.name, shapes=shapes), codecs=self._curves)
        profile = replace(profile, device="cpu") if self._gpu is None else self._with_gpu(profile, self._gpu, codecs)
        layouts = {codec: buckets for codec in codecs if (buckets := self._buckets_by(codec)) is not None and _timed(profile, buckets)}
        machines, present_codec = self._machines(), "" if exchange.choice.plan is not None else exchange.choice.codec
        steering, present = self._steering, self._present_buckets()
        worth = (
            sum(numel.values()) * np.dtype(np.float32).itemsize >= exchange.session.config.min_compress_bytes
        )  # else a step is hardly the link's
        plans = len(kinds) == 1 and worth and not steering.rechecks
        found = outlook(profile, machines, step_ms, present, layouts, present_codec, plans, steering.tries_plain and loss_of(present) > 0)
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

    def _allows(self, codec: str) -> bool:
        return allowed(codec, self._level, encodings=MOST_ENCODES, error=self._errors.get(codec), dtypes=self._dtypes)

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
        cores, gpu = self._measuring.cores(), self._gpu
        machines = Machines(
            len(sizes), max(sizes), config.servers, cores, config.cpu_threads, groups or not config.servers, len(set(sizes)) == 1,
            gpus=gpu is not None, host=None if gpu is None else gpu.host_link(), connected=gpu is not None and self._asked_backend().on_device,
        )  # fmt: skip
        if max(sizes) > 1 and len(sizes) > 1:
            self._within_gbps = self._within_gbps or self._measuring.within_node_gbps(max(sizes), cores)
            machines = replace(machines, within_gbps=self._within_gbps)
        return machines

    def _tell(self, step_ms: float, found: Outlook, slowest: str) -> None:
        predicted = ", ".join(f"{name} {ms:,.1f}" for name, ms in sorted(found.predicted_ms.items(), key=lambda one: one[1]))
        have = self._present
        within = f" (within nodes {self._within_gbps:,.3g}, by what copies and sums take here)" if self._within_gbps else ""
        links = f"as over links of {found.gbps:,.3g} Gbit/s{within}"
        figures = (
            f"a step takes {step_ms:,.1f} ms by {have}, {links}; predicted, in ms: {predicted or 'nothing else'}{slowest}{self._times}"
        )
        if self._backend is not None:
            where = "from GPU to GPU" if self._backend.on_device else "through the hosts' memory"
            figures += f"; collectives go {where}: {self._backend.reason}"
        if self._level == SAFE:
            refused = [f"{codec} ({error:.2g})" for codec, error in self._errors.items() if not self._allows(codec)]
            figures += f"; relative error too large for quality=safe: {', '.join(refused)}" if refused else ""
        if found.tried:
            self._say(f"trying {', '.join(found.tried)}: {figures}")
        else:
            self._say(f"{have} stays, since nothing else would save 5 %: {figures}")

    def _say(self, text: str) -> None:
        if self._exchange.session.rank == 0:
            run_logger.info("%s: auto, step %d: %s", self._exchange.name, self.steps, text)

    def tell_end(self) -> None:
        """The job ends: say so where it has no verdict."""
        if self._exchange.session.failed or self._exchange.observer is not self:
            return
        if not self._names:
            self._say(f"the job ended before it was measured, which takes {WARM_UP + WINDOW + 1} steps: {self._present} throughout")
        elif self.trying:
            self._say(f"the job ended while {self._present} was tried")


def _tell_end(auto: weakref.ref[AutoPlan]) -> None:
    found = auto()
    if found is not None:
        found.tell_end()


def _as_of(iteration: Iteration, mine: _Compute, slowest: _Compute) -> Iteration:
    """This rank's iteration, as if it computed for as long as the slowest rank does: each takes that rank's medians, because this rank's own noise, scaled up
    to a rank that computes for ten times as long, would be taken for the links'."""
    backward_us = iteration.backward_us + iteration.tail_us
    if slowest.rank == mine.rank or not (backward_us and slowest.us):
        return iteration
    factor = slowest.backward_us / backward_us
    return Iteration({name: us * factor for name, us in iteration.ready_us.items()}, iteration.tail_us * factor, slowest.forward_us)
