"""One optimizer's gradients on their way through the job: which buckets may leave, and when a step is over.

Owns readiness, layouts and the step's flags; ``optimizer`` owns the front that users see. The first synchronization declares the layout, in
the order in which gradients became ready; from then on a bucket is submitted from backward as soon as its last gradient is ready, and
synchronize submits the rest. A gradient takes part if its hook ran, or if p.grad is there all the same (set by hand, or kept from an
earlier step, as torch's own optimizers would apply it).
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal, Protocol

import torch

from psgc.errors import UsageError
from psgc.layout import BucketSpec, Declaration, Layout, TensorSpec
from psgc.plan.plan import Plan
from psgc.plan.runtime import planned_buckets
from psgc.torch.gradients import Gradient, GradientBucket
from psgc.torch.planned import write_layout
from psgc.torch.residuals import Residuals
from psgc.torch.run_report import report_of
from psgc.worker.session import Session

logger = logging.getLogger(__name__)
FIRST: Final = "optimizer0"  # the first optimizer of a session
MAX_RESCALE: Final = 1e30  # the header carries a float32
Outcome = Literal["applied", "delivered", "dropped"]


@dataclass(frozen=True, slots=True)
class StepFlags:
    """What every submission of one step says, the same on all ranks. rates: learning rate of each parameter group, or nothing where
    residuals do not follow it."""

    previous_skipped: bool
    loss_scale: float
    rates: tuple[float, ...]

    def rescale(self, last: StepFlags | None, group: int) -> float:
        """The residual's unit of step ``last`` over that of this one: residuals are scaled gradients and, for SGD without momentum on
        request, are worth their product with the learning rate to the parameters."""
        if last is None:
            return 1.0
        factor = self.loss_scale / last.loss_scale
        if group < min(len(last.rates), len(self.rates)):
            before, now = last.rates[group], self.rates[group]
            if before and now:
                factor *= before / now
        return max(-MAX_RESCALE, min(factor, MAX_RESCALE))


class Observer(Protocol):
    """Times a step's computation. While there is one, buckets stay until synchronize, so that nothing else runs beside backward."""

    def ready(self, name: str) -> None:
        """Backward has finished this tensor's gradient. Runs in autograd's thread."""

    def leaving(self) -> None:
        """The trainer asks for the synchronized gradients."""

    def delivered(self) -> None:
        """It has them."""


class GradientExchange:
    """See the module's text. rates: reads the parameter groups' learning rates as they are now; None: residuals do not follow them.
    plan: of exactly these gradients; then ``codec`` is none.

    outcome: what became of the last step: "applied" by step(), still "delivered" in p.grad, or "dropped" (the loss scaler skipped it or
    zero_grad threw it away), which the next step's flag tells the servers, so that it goes back into the residual.
    paused: gradients stay this rank's own, and synchronizing does nothing. It is changed between two steps, on all ranks alike.
    observer: who times this rank's steps; None between two steps ends it.
    """

    def __init__(
        self, session: Session, name: str, codec: str, passes: int,
        rates: Callable[[], tuple[float, ...]] | None = None, plan: Plan | None = None,
    ) -> None:  # fmt: skip
        self.session, self.name, self.codec, self.passes = session, name, codec, passes
        self._plan = plan
        self.outcome: Outcome = "applied"
        self.synchronized = False
        self.paused = False
        self.observer: Observer | None = None
        self.residuals = Residuals(session)
        self._rates = rates or (lambda: ())
        self._loss_scale: Callable[[], float] = lambda: 1.0
        self._gradients: list[Gradient] = []
        self._known: set[int] = set()  # ids of the watched parameters, which _gradients keeps alive
        self._declared = 0  # how many of _gradients are in a layout
        self._ready_order: dict[int, None] = {}  # of those that are not
        self._layouts = 0
        self._buckets: list[GradientBucket] = []
        self._flags: StepFlags | None = None
        self._last: StepFlags | None = None
        self._known_units = False  # those of _last were loaded, or told by a scaler
        self._lock = threading.RLock()  # backward may run hooks in a thread for each device

    def watch(self, parameters: Iterable[tuple[torch.Tensor, TensorSpec]]) -> None:
        """Follow these parameters' gradients, those that require one and are not followed yet."""
        with self._lock:
            for parameter, spec in parameters:
                if parameter.requires_grad and id(parameter) not in self._known:
                    self._known.add(id(parameter))
                    self._gradients.append(Gradient(parameter, spec))
                    # By weak reference: parameters outlive their optimizer, whose hooks shall then do nothing.
                    hook = functools.partial(_on_ready, weakref.ref(self), len(self._gradients) - 1)
                    parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def ready(self, index: int) -> None:
        """Backward has added to a gradient. Runs in autograd's thread: counts, and enqueues the bucket that is complete."""
        gradient = self._gradients[index]
        grad = gradient.parameter.grad
        if grad is None or self.paused:  # None: another hook has taken it
            return
        with self._lock:
            self._begin()
            gradient.look(grad)
            gradient.passes += 1
            if gradient.passes > self.passes:
                raise UsageError(
                    f"gradient of {gradient.spec.name!r} was computed {gradient.passes} times before step(), but "
                    f"backward_passes_per_step is {self.passes}; call step() after each backward, or raise backward_passes_per_step"
                )
            if index >= self._declared:
                self._ready_order[index] = None
            if gradient.passes == self.passes:
                self._finished(gradient)

    def _finished(self, gradient: Gradient) -> None:
        """Its last pass is done: the bucket that it completes may leave."""
        if self.observer is not None:
            self.observer.ready(gradient.spec.name)
        bucket = gradient.bucket
        if bucket is not None:
            bucket.waiting -= 1
            if not bucket.waiting and self.observer is None:
                self._submit(bucket)

    def synchronize(self) -> None:
        """Send what has not left yet, wait, and leave every rank with the same p.grad. Does nothing if nothing happened since."""
        if self.synchronized:
            return
        self.session.check()
        if self.paused:
            self.synchronized = True
            return
        if self.observer is not None:
            self.observer.leaving()
        with self._lock:
            self._begin()
            for gradient in self._gradients:
                gradient.look_again()
            self._declare()
            for bucket in self._buckets:
                if bucket.ticket is None:
                    self._submit(bucket)
        report_of(self.session).wait(self.name, [bucket.ticket for bucket in self._buckets if bucket.ticket is not None])
        with self._lock:
            self._deliver()
        if self.observer is not None:
            self.observer.delivered()

    def forget(self) -> None:
        """zero_grad is about to run: what has accumulated is dropped. Raises UsageError if some of it may be under way."""
        with self._lock:
            for gradient in self._gradients:
                if gradient.passes >= self.passes:
                    raise UsageError(
                        f"zero_grad() while the gradient of {gradient.spec.name!r} is under way; "
                        f"call it after step() or synchronize(), or before backward()"
                    )
            for gradient in self._gradients:
                gradient.reset()
            for bucket in self._buckets:
                bucket.reset()
            self._flags = None
            self.end_step(applied=False)

    def note_zeros(self) -> None:
        """zero_grad has left zeros instead of None."""
        for gradient in self._gradients:
            gradient.note_zero()

    def end_step(self, applied: bool) -> None:
        """The trainer has applied the last result, or goes on without having done so."""
        if applied or self.outcome == "delivered":
            self.outcome = "applied" if applied else "dropped"
        self.synchronized = False

    def set_passes(self, passes: int) -> None:
        """Change how many backwards make a step. Raises UsageError between a backward and its step."""
        if any(gradient.passes for gradient in self._gradients):
            raise UsageError("set_backward_passes_per_step() between backward() and step(); call it after step()")
        self.passes = passes

    def scale_with(self, loss_scale: Callable[[], float]) -> None:
        """From now on gradients are multiplied by ``loss_scale()``. Steps up to now count as scaled alike."""
        with self._lock:
            self._loss_scale = loss_scale
            now = loss_scale()
            self._flags = None if self._flags is None else replace(self._flags, loss_scale=now)
            if self._last is not None and not self._known_units:
                self._last = replace(self._last, loss_scale=now)

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Of the gradients that are followed."""
        return tuple(gradient.spec for gradient in self._gradients)

    @property
    def units(self) -> StepFlags:
        """The flags of the last step that was sent: the units of its residuals. Raises UsageError in the middle of a step."""
        if self._flags is not None:
            raise UsageError("residuals are saved and loaded between two steps: after step(), before the next backward()")
        return self._last or StepFlags(False, self._loss_scale(), self._rates())

    @property
    def dropped(self) -> bool:
        """Whether the trainer did not apply the last step. Raises UsageError while it may still."""
        if self.outcome == "delivered":
            raise UsageError(
                "residuals are saved between two steps: after step() (or zero_grad(), which drops it), before the next backward()"
            )
        return self.outcome == "dropped"

    def go_on(self, units: StepFlags) -> None:
        """Residuals of an earlier job, in these units, are taken up: layouts that there are already are given up for new ones, which are
        declared at the next synchronization. Raises UsageError in the middle of a step."""
        _ = self.units
        self._last, self._known_units, self.outcome = units, True, "applied"
        self._declared, self._buckets = 0, []
        for gradient in self._gradients:
            gradient.bucket = None

    def _begin(self) -> None:
        """The first thing that happens in a step fixes its flags: ranks whose buckets leave early or late say the same."""
        self.synchronized = False
        if self._flags is None:
            self._flags = StepFlags(self.outcome == "dropped", self._loss_scale(), self._rates())

    def _submit(self, bucket: GradientBucket) -> None:
        assert self._flags is not None
        bucket.bind()
        rescale = self._flags.rescale(self._last, bucket.group)
        bucket.ticket = self.session.submit(
            bucket.layout, bucket.bucket.index, bucket.buffer, skip=bucket.skip, previous_skipped=self._flags.previous_skipped,
            rescale=rescale,
        )  # fmt: skip

    def _declare(self) -> None:
        """Declare the gradients that are in no layout yet, and wait until every rank has."""
        fresh = self._gradients[self._declared :]
        if not fresh:
            return
        config, specs = self.session.config, tuple(gradient.spec for gradient in fresh)
        hand_set = (i for i, g in enumerate(self._gradients) if i >= self._declared and g.seen is not None)
        order = tuple(i - self._declared for i in dict.fromkeys([*self._ready_order, *hand_set]))
        default = Declaration(
            name=self.name, kind="plan", tensors=specs, codec=self.codec, mean=True, order=order, used=tuple(sorted(order)), part_bytes=config.part_bytes,
            fuse_bytes=config.fuse_bytes, min_compress_bytes=config.min_compress_bytes, buckets=self._planned(specs),
        )  # fmt: skip
        for declaration, members in self.residuals.declarations(default, self._next_name):
            layout = self.session.declare(declaration)
            if config.layout_out and self.session.rank == 0:
                self._write_layout(config.layout_out, layout)
            report_of(self.session).laid_out(layout)
            self.residuals.add(layout, declaration)
            self._buckets += [GradientBucket.of(layout, bucket, [fresh[i] for i in members]) for bucket in layout.buckets]
        self._declared = len(self._gradients)
        self._ready_order.clear()

    def _next_name(self) -> str:
        self._layouts += 1
        return self.name if self._layouts == 1 else f"{self.name}.{self._layouts}"

    def _planned(self, specs: tuple[TensorSpec, ...]) -> tuple[BucketSpec, ...]:
        if self._plan is None:
            return ()
        if self._declared:
            raise UsageError(
                f"parameter {specs[0].name!r} was added after the first step, but the job runs a plan, which is of the parameters "
                f"of the first step; add it before, or run without a plan"
            )
        return planned_buckets(self._plan, specs)

    def _write_layout(self, path: str, layout: Layout) -> None:
        """The job's first layout; a plan is of one optimizer, and of parameters that are there from the beginning."""
        if layout.name == FIRST:
            write_layout(path, layout)
        else:
            logger.warning("PSGC_LAYOUT_OUT has the layout of %s; that of %s is not written", FIRST, layout.name)

    def _deliver(self) -> None:
        for bucket in self._buckets:
            bucket.deliver()
        for gradient in self._gradients:
            gradient.reset()
        self._last, self._flags = self._flags, None
        self.outcome, self.synchronized = "delivered", True


def _on_ready(exchange: weakref.ref[GradientExchange], index: int, parameter: torch.Tensor) -> None:
    found = exchange()
    if found is not None:
        found.ready(index)
