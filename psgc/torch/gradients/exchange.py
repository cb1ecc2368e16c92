"""Synchronizes one optimizer's gradients: decides which buckets may leave, and when a step is over.

Owns readiness, layouts and the step's flags; ``optimizers/distributed.py`` has the methods that users call. The first synchronization declares the layout, in
the order in which gradients became ready; from then on a bucket is submitted from backward as soon as its last gradient is ready, and
synchronize submits the rest: at the end of the backward that completes the step, or late, when the trainer steps. A gradient takes part if
its hook ran, or if p.grad was set by hand. The mean that an earlier synchronization left in p.grad is the same on all ranks: it is set aside while
backward adds to it, so that only the addition travels.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final, Literal

import torch

from psgc.errors import UsageError
from psgc.layout import BucketSpec, Declaration, Layout, TensorSpec
from psgc.plan.model.plan import Plan
from psgc.torch.device.engines import captured, engine_of
from psgc.torch.gradients import backward_end, loss_scale
from psgc.torch.gradients.backward_end import BackwardEnd
from psgc.torch.gradients.buckets import Gradient, GradientBucket
from psgc.torch.gradients.finishing import finish
from psgc.torch.gradients.hooks import follow
from psgc.torch.gradients.observer import Observer
from psgc.torch.gradients.skips import Skips
from psgc.torch.gradients.step_flags import StepFlags
from psgc.torch.plans.choice import Choice, plan_for
from psgc.torch.plans.planned import declared_buckets, is_of, leave_for_trace, of_model, write_layout
from psgc.torch.plans.rules import buckets_by_rule
from psgc.torch.session import api, speed
from psgc.torch.session.run_report import report_of
from psgc.torch.state.carried import CarriedResiduals, add_carried
from psgc.torch.state.residuals import Kept, Residuals
from psgc.worker.session import RAISED, Session

logger = logging.getLogger(__name__)
FIRST: Final = "optimizer0"  # the first optimizer of a session
LOST: Final = "raised before it was over, so that gradients are incomplete; call optimizer.zero_grad()"
Outcome = Literal["settled", "delivered", "put back", "raised"]


class GradientExchange:
    """See the module's text. rates: reads the parameter groups' learning rates as they are now; None: residuals do not follow them.
    choice: what gradients travel by; a plan must be of exactly these gradients.

    outcome: what became of the last step: still "delivered" in p.grad; "settled": step() has applied it, or the script went on without, and used or
    discarded the gradients as it liked; or "put back" (the loss scaler skipped it, or put_back() was called), which the next step's flag tells the
    servers, so that it goes back into the residual. "raised": put back because this rank's backward raised after some of its gradients had left.
    paused: gradients stay local to this rank, and synchronizing does nothing. It is changed between two steps, on all ranks alike.
    late: gradients are delivered by ``synchronize`` only, not at the end of backward. held: backwards only accumulate for now.
    refresh: has the owner watch parameters that are new.
    observer: who times this rank's steps; None between two steps ends it.
    """

    def __init__(
        self, session: Session, name: str, choice: Choice, passes: int,
        rates: Callable[[], tuple[float, ...]] | None = None, late: bool = False,
    ) -> None:  # fmt: skip
        self.session, self.name, self.choice, self.passes = session, name, choice, passes
        self._next: Choice | None = None  # from the next step on
        self._choices = 0  # how many have been declared
        self._plan: Plan | None = None  # of the last of them
        self.outcome: Outcome = "settled"
        self.synchronized = False
        self.paused = False
        self.late = late
        self._tells_end = backward_end.AVAILABLE  # late, too: that a backward has raised is told by an end that never comes
        if not self._tells_end:
            self._end_untold("queue_callback is missing")
        self.held = False
        self.refresh: Callable[[], None] = lambda: None
        self.observer: Observer | None = None
        self.residuals = Residuals(session)
        self._rates = rates or (lambda: ())
        self._loss_scale: Callable[[], float] = _unscaled
        self._gradients: list[Gradient] = []
        self._known: set[int] = set()  # ids of the watched parameters, which _gradients keeps alive
        self._declared = 0  # how many of _gradients are in a layout
        self._ready_order: dict[int, None] = {}  # of those that are not
        self._layouts = 0
        self._buckets: list[GradientBucket] = []
        self._flags: StepFlags | None = None
        self._last: StepFlags | None = None
        self._skips, self._forgets = Skips(), False
        self._fresh_units = False  # those of _last were loaded, and no step has been taken since
        self._end: BackwardEnd | None = None  # of the backward that hooks have run in last
        self._backward = 0  # its number
        self._backwards = 0  # those of this step that are over
        self._carried = CarriedResiduals()  # of a session that this process has left
        self._lock = threading.RLock()  # backward may run hooks in a thread for each device
        api.add_member(self)

    def check_leaving(self) -> None:
        """Raise UsageError in the middle of a step, or where ``auto`` or a profile observes steps."""
        _ = self.units
        if self.observer is not None:
            raise UsageError("suspend(): auto and PSGC_PROFILE observe the steps of one job; name a codec or a plan, or start a new job")

    def leave(self) -> None:
        """The session ends: take along what codecs keep."""
        self.notice_cleared()
        kept = self.residuals.collect(self._was_put_back, self._forgets)
        self._carried.take(kept.tensors, kept.servers)
        self._carried.workers = self.session.size

    def kept(self) -> Kept:
        """What codecs keep of the gradients between two steps. What is still in p.grad is not saved: it counts as put back, but in scripts that use it by
        hand."""
        self.notice_cleared()
        unsaved = self.outcome == "delivered" and not self._skips.by_hand
        return self.residuals.collect(unsaved or self._was_put_back, self._forgets)

    def notice_cleared(self) -> None:
        """Where the last result was cleared without this exchange's knowledge, by module.zero_grad() or p.grad = None, it was the script's."""
        if not any(gradient.keeps_mean for gradient in self._gradients):
            self._leave_to_script()

    def rejoin(self, session: Session) -> None:
        """Go on in another session: tensors are declared anew in the first step."""
        with self._lock:
            self.session, self.residuals, self._layouts, self._choices, self.outcome = session, Residuals(session), 0, 0, "settled"
            self._forgets = False
            self._give_up_layouts()

    def _pay(self) -> None:
        """In the first step after ``rejoin``, send what is carried along with the gradients."""
        assert self._flags is not None
        for gradient in self._gradients:
            carried = self._carried.pop(gradient.spec.name, self.session.size, self._flags.rescale(self._last, gradient.spec.group))
            if carried is not None:
                add_carried(gradient.parameter, carried)
                assert gradient.parameter.grad is not None
                gradient.look(gradient.parameter.grad)

    def follows(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._known

    def watch(self, parameters: Iterable[tuple[torch.Tensor, TensorSpec]]) -> None:
        """Follow these parameters' gradients, if they require one and are not followed yet."""
        with self._lock:
            for parameter, spec in parameters:
                if parameter.requires_grad and not self.follows(parameter):
                    self._known.add(id(parameter))
                    self._gradients.append(Gradient(parameter, spec))
                    follow(self, self._gradients[-1], len(self._gradients) - 1)
                    self.synchronized = False

    def parameter(self, index: int) -> torch.Tensor:
        return self._gradients[index].parameter

    def coming(self, index: int) -> None:
        """Backward is about to add to a gradient. Runs in autograd's thread."""
        if not self.paused and not self._captures(index):
            with self._lock:
                self._enter()
                self._gradients[index].set_aside()

    def ready(self, index: int) -> None:
        """Backward has added to a gradient. Runs in autograd's thread: counts, and enqueues the bucket that is complete."""
        gradient = self._gradients[index]
        grad = gradient.parameter.grad
        if grad is None or self.paused:  # None: another hook has taken it
            return
        if self._captures(index):
            gradient.captured = grad
            return
        with self._lock:
            self._enter()
            gradient.look(grad)
            if self.held:
                return
            if gradient.backward == self._backward and not self.late:
                self._repeated(gradient)
                return
            gradient.passes, gradient.backward = gradient.passes + 1, self._backward
            if gradient.passes > self.passes:
                raise UsageError(
                    f"gradient of {gradient.spec.name!r} was computed {gradient.passes} times before step(), but "
                    f"backward_passes_per_step is {self.passes}; call step() after each backward, or raise backward_passes_per_step"
                )
            if index >= self._declared:
                self._ready_order[index] = None
            if gradient.passes == self.passes:
                self._finished(gradient)

    def _captures(self, index: int) -> bool:
        """Whether this backward is captured in a graph, where it is not to be sent: it computes nothing yet, and is in no step."""
        return self.held and captured(self._gradients[index].parameter)

    def replayed(self) -> None:
        """A graph that captured backwards has written its gradients anew: they take part in the coming step. Raises UsageError if none was captured, and
        between a backward and its step."""
        with self._lock:
            found = [gradient for gradient in self._gradients if gradient.captured is not None]
            if not found:
                raise UsageError(
                    "replayed(): no backward of these parameters was captured; capture it inside `with optimizer.no_sync(), torch.cuda.graph(graph):`"
                )
            begun = [gradient.spec.name for gradient in self._gradients if gradient.passes]
            if begun:
                raise UsageError(
                    f"replayed() while the gradient of {begun[0]!r} is under way; call it after step(), right after graph.replay()"
                )
            for gradient in found:
                gradient.note_replay()
            self.synchronized = False

    def _enter(self) -> None:
        """Called first by every hook: if a new backward has begun, wait for its end."""
        if self._tells_end and (self._end is None or not self._end.ahead):
            if self._end is not None and self._end.lost:
                self._give_up_lost()
            self._end = self._await_end()
        self._begin()

    def _await_end(self) -> BackwardEnd | None:
        try:
            return backward_end.await_end(self, finish)
        except (AttributeError, RuntimeError, TypeError) as error:
            self._end_untold(str(error))
            return None

    def _end_untold(self, reason: str) -> None:
        self._tells_end = False
        if not self.late:
            self.late = True
            backward_end.warn_once(reason)

    def _repeated(self, gradient: Gradient) -> None:
        """One backward adds to a gradient again: from now on its bucket leaves only when backward is over."""
        gradient.repeats = True
        if gradient.bucket is not None and gradient.bucket.ticket is not None:
            raise UsageError(
                f"gradient of {gradient.spec.name!r} was added to in several parts of one backward (reentrant checkpoints that share "
                f"a parameter), in this step for the first time, when it was under way; checkpoint with use_reentrant=False, or run "
                f"backward inside `with optimizer.no_sync():` and call optimizer.synchronize() after it"
            )

    def _finished(self, gradient: Gradient) -> None:
        """The gradient's last backward pass is done: submit the bucket if it is complete."""
        if self.observer is not None and gradient.parameter.grad is not None:
            self.observer.ready(gradient.spec.name, gradient.parameter.grad)
        if self.session.trace is not None:
            self.session.trace.gradient(self.name)
        bucket = gradient.bucket
        if bucket is not None:
            bucket.waiting -= 1
            if bucket.complete and not (self.observer is not None and self.observer.holds):
                self._submit(bucket)

    def backward_over(self) -> bool:
        """Count a backward that is over. True if it completes a step."""
        with self._lock:
            if self.late:
                return False
            self._backward += 1
            if self._flags is None or self.held:  # None: a hook has synchronized already
                return False
            self._backwards += 1
            self.refresh()
            return self._backwards >= self.passes

    @property
    def declared(self) -> bool:
        """Whether all gradients are in a layout."""
        return self._declared == len(self._gradients)

    def synchronize(self) -> None:
        """Send the remaining buckets, wait for the means, and store them in p.grad. Does nothing if no gradient has come since the last time."""
        if self.synchronized:
            return
        self.session.check()
        if self.paused:
            self.synchronized = True
            return
        if self._end is not None and self._end.lost:
            raise UsageError(f"the last backward {LOST} before the next one")
        self.send()
        self.receive()

    def send(self) -> None:
        """Submit the buckets that have not left yet."""
        if self.observer is not None:
            self.observer.leaving()
        with self._lock:
            self._begin()
            for gradient in self._gradients:
                left = gradient.bucket is not None and gradient.bucket.ticket is not None
                gradient.look_again(fixed=left or self.late)
            missed = next((gradient.spec.name for gradient in self._gradients if gradient.missed), None)
            if missed is not None:
                raise UsageError(
                    f"gradient of {missed!r} was captured in a CUDA graph, and nothing tells whether it was computed again; call optimizer.replayed() "
                    "after each graph.replay()"
                )
            if self._carried:
                self._pay()
            self._declare()
            for bucket in self._buckets:
                if bucket.ticket is None:
                    self._submit(bucket)

    def receive(self) -> None:
        """Wait for the submitted buckets, and store their means in p.grad."""
        report_of(self.session).wait(self.name, [bucket.ticket for bucket in self._buckets if bucket.ticket is not None])
        with self._lock:
            self._deliver()
        speed.look(self.session)
        if self.observer is not None:
            self.observer.delivered()

    def forget(self) -> None:
        """zero_grad is about to run: drop the accumulated gradients. Raises UsageError if some of them may be in flight."""
        with self._lock:
            lost = self._end is not None and self._end.lost
            begun = [gradient for gradient in self._gradients if gradient.passes >= self.passes]
            if begun and not lost:
                raise UsageError(
                    f"zero_grad() while the gradient of {begun[0].spec.name!r} is under way; "
                    f"call it after step() or synchronize(), or before backward()"
                )
            raised = bool(begun and self._buckets)
            if raised:
                self._skip_the_rest()
            for gradient in self._gradients:
                gradient.reset()
            for bucket in self._buckets:
                bucket.reset()
            self._flags, self._end, self._backwards = None, None, 0
            if raised:
                self.outcome = "raised"
            self._leave_to_script()
            for gradient in self._gradients:
                gradient.note_step()
            self.synchronized = raised  # this rank has taken part in the step

    def put_back(self) -> None:
        """The last result goes back into the residuals; so it does already after a backward that raised. Raises UsageError if there is none."""
        if self.outcome in ("settled", "put back"):
            raise UsageError(
                "put_back(): no averaged gradients wait for step(); call it in place of step(), after backward() and before zero_grad()"
            )
        self.end_step(applied=False)

    def _leave_to_script(self) -> None:
        """The script goes on without step(): the last result was its to use or to discard, as in DDP."""
        if self.outcome == "delivered":
            self.outcome, self._forgets = "settled", self._skips.leave()
            report_of(self.session).left_to_script(self.name)

    def _give_up_lost(self) -> None:
        """A new backward begins after one that raised, whose gradients must have been cleared. Raises UsageError if they were not."""
        for gradient in self._gradients:
            if gradient.seen is not None and gradient.parameter.grad is gradient.seen:
                raise UsageError(f"the backward before this one {LOST} before the next one")
        for gradient in self._gradients:
            gradient.kept = None
        self.forget()

    def _skip_the_rest(self) -> None:
        """Skip the buckets that have not left: a backward raised after some had, and the other ranks wait for the rest of the step."""
        for bucket in self._buckets:
            if bucket.ticket is None:
                bucket.bind_nothing()
                self._submit(bucket, bound=True)
        self.session.wait([bucket.ticket for bucket in self._buckets if bucket.ticket is not None])
        for bucket in self._buckets:
            bucket.buffer.arrive()  # whatever becomes of these gradients now comes after what is still written to them
        self._last, self.outcome = self._flags, "delivered"

    def note_zeros(self) -> None:
        """zero_grad has left zeros instead of None."""
        for gradient in self._gradients:
            gradient.note_zero()

    def end_step(self, applied: bool) -> None:
        """Note that step() has applied the last result, or that it was not and is to be put back."""
        delivered = self.outcome == "delivered"
        if applied and delivered:
            report_of(self.session).step_over(self.name)
            self._skips.step()
        if (applied or delivered) and self.outcome != "raised":  # of a step that was given up, step() has nothing to apply
            self.outcome = "settled" if applied else "put back"
        for gradient in self._gradients:
            gradient.note_step()
        self.synchronized = False
        if applied and delivered and self.observer is not None:
            self.observer.stepped()

    def set_passes(self, passes: int) -> None:
        """Change how many backwards make a step. Raises UsageError between a backward and its step."""
        if self._backwards or any(gradient.passes for gradient in self._gradients):
            raise UsageError("set_backward_passes_per_step() between backward() and step(); call it after step()")
        self.passes = passes

    def scale_with(self, scale: Callable[[], float]) -> None:
        """From now on gradients are multiplied by ``scale()``. Earlier steps count as scaled by the same factor, except those of a loaded state."""
        with self._lock:
            self._loss_scale = scale
            now = scale()
            self._flags = None if self._flags is None else replace(self._flags, loss_scale=now)
            if self._last is not None and not self._fresh_units:
                self._last = replace(self._last, loss_scale=now)

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Specs of all gradients that are followed."""
        return tuple(gradient.spec for gradient in self._gradients)

    @property
    def layouts(self) -> list[Layout]:
        """By which the gradients travel now."""
        return list({bucket.layout.name: bucket.layout for bucket in self._buckets}.values())

    @property
    def on_gpu(self) -> bool:
        """Whether gradients on a GPU are encoded there where no plan says where."""
        return self.session.config.gpu_codecs

    def proposed(self, codec: str) -> Declaration:
        """What would be declared of all gradients by this codec, in the order of the present layouts."""
        names = {gradient.spec.name: index for index, gradient in enumerate(self._gradients)}
        order = [names[bucket.layout.tensors[i].name] for bucket in self._buckets for i in bucket.bucket.tensors]
        return self._declaration(self.specs, codec, tuple(order), ())

    @property
    def units(self) -> StepFlags:
        """The flags of the last step that was sent: the units of its residuals. Raises UsageError in the middle of a step."""
        if self._flags is not None:
            raise UsageError("residuals are saved and loaded between two steps: after step(), before the next backward()")
        return self._last or StepFlags(False, self._loss_scale(), self._rates())

    def go_on(self, units: StepFlags) -> None:
        """Resume from residuals of an earlier job, in these units: existing layouts are dropped, and the next synchronization declares
        new ones. Raises UsageError in the middle of a step."""
        _ = self.units
        self._last, self._fresh_units, self.outcome, self._forgets = units, True, "settled", False
        self._give_up_layouts()

    def switch(self, choice: Choice) -> None:
        """From the next step on, gradients travel by this choice. Every rank must call it between the same two steps. What codecs keep goes along. Raises
        UsageError in the middle of a step."""
        with self._lock:
            if self._flags is not None:
                raise UsageError("switch_plan() in the middle of a step; call it after step(), before the next backward()")
            self._next = choice

    def _take_next(self) -> None:
        """Give up the layouts: the tensors are declared anew when this step is sent. What codecs have kept of them is collected now, when the outcome
        of the last step is known."""
        if self._next is None:
            return
        self.choice, self._next = self._next, None
        if self._declared:
            self.residuals.replace(self._was_put_back)
            self.outcome = "settled"  # a result that was put back is in what has been collected
            self._give_up_layouts()

    def _give_up_layouts(self) -> None:
        self._declared, self._buckets = 0, []
        for gradient in self._gradients:
            gradient.bucket = None

    def _begin(self) -> None:
        """Fix the step's flags at its first submission, so that all ranks send the same flags whenever their buckets leave."""
        self.synchronized = False
        if self._flags is None:
            self.notice_cleared()
            self._take_next()
            scaler_pending = self._fresh_units and self._loss_scale is _unscaled  # the scaler tells of itself after this backward
            scale = loss_scale.latest(default=1.0) if scaler_pending else self._loss_scale()
            skipped = RAISED if self.outcome == "raised" else self.outcome == "put back"
            self._flags, self._forgets = StepFlags(skipped, scale, self._rates(), self._forgets), False

    @property
    def _was_put_back(self) -> bool:
        return self.outcome in ("put back", "raised")

    @property
    def begun(self) -> bool:
        """Whether a backward has begun a step that is not synchronized yet."""
        return self._flags is not None

    def _submit(self, bucket: GradientBucket, bound: bool = False) -> None:
        assert self._flags is not None
        if not bound:
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
        default = self._declaration(specs, self.choice.codec, order, self._planned(specs, fresh))
        for declaration, members in self.residuals.declarations(default, self._next_name):
            layout = self.session.declare(declaration)
            declared = [fresh[i] for i in members]
            on_gpu = config.gpu_codecs and (not default.buckets or self.choice.rule is not None)  # a plan itself says where
            if config.layout_out and self.session.rank == 0:
                self._write_layout(config.layout_out, layout, on_gpu and all(engine_of(g.parameter) for g in declared))
            if layout.name == FIRST or (self.name == FIRST and self._choices > 1):
                leave_for_trace(self.session, self._plan, layout, on_gpu and all(engine_of(g.parameter) for g in declared))
            report_of(self.session).laid_out(layout)
            self.residuals.add(layout, declaration)
            self._buckets += [GradientBucket.of(layout, bucket, declared, on_gpu) for bucket in layout.buckets]
        self._declared = len(self._gradients)
        self._ready_order.clear()

    def _declaration(
        self, specs: tuple[TensorSpec, ...], codec: str, order: tuple[int, ...], buckets: tuple[BucketSpec, ...]
    ) -> Declaration:  # fmt: skip
        config = self.session.config
        return Declaration(
            name=self.name, kind="plan", tensors=specs, codec=codec, mean=True, order=order, used=tuple(sorted(order)),
            part_bytes=config.part_bytes, fuse_bytes=config.fuse_bytes, min_compress_bytes=config.min_compress_bytes, buckets=buckets,
        )  # fmt: skip

    def _next_name(self) -> str:
        self._layouts += 1
        return self.name if self._layouts == 1 else f"{self.name}.{self._layouts}"

    def _planned(self, specs: tuple[TensorSpec, ...], fresh: list[Gradient]) -> tuple[BucketSpec, ...]:
        if self._declared and (self.choice.plan is not None or self.choice.awaited):
            if self.choice.auto:
                return ()  # uncompressed, until ``auto`` plans for all of them
            raise UsageError(
                f"parameter {specs[0].name!r} was added after the first step, but the job runs a plan, which is of the parameters "
                f"of the first step; add it before, or run without a plan"
            )
        if not self._declared:
            self._choices += 1
        self._plan = None
        if self.choice.rule is not None:
            return buckets_by_rule(self.choice.rule, specs, [gradient.parameter for gradient in fresh], self.session.config.fuse_bytes)
        plan = plan_for(self.session, self.choice, f"plan {self._choices} of {self.name}")
        if plan is not None and self.choice.auto and not is_of(plan, specs):
            plan = None  # parameters were added since ``auto`` made it
        self._plan = plan = None if plan is None else of_model(plan, specs, self.session)
        return () if plan is None else declared_buckets(plan, specs, self.session)

    def _write_layout(self, path: str, layout: Layout, on_gpu: bool) -> None:
        """Write the layout of the first optimizer as a plan, and again after a switch; a plan covers parameters that exist from the first step."""
        if layout.name == FIRST or (self.name == FIRST and self._choices > 1):
            write_layout(path, layout, self.session, on_gpu)
        else:
            logger.warning("PSGC_LAYOUT_OUT has the layout of %s; that of %s is not written", FIRST, layout.name)

    def _deliver(self) -> None:
        for bucket in self._buckets:
            bucket.deliver()
        for gradient in self._gradients:
            gradient.reset()
        self._last, self._flags, self._backwards, self._fresh_units = self._flags, None, 0, False
        self.outcome, self.synchronized = "delivered", True


def _unscaled() -> float:
    return 1.0
