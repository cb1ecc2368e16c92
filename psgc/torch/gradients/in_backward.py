"""Gradients that are averaged in backward: an optimizer's, or those of a model that psgc wraps.

A bucket leaves as soon as its last gradient is ready. The mean goes to p.grad. A step is over when its last backward is, or late, when the trainer steps; that
sends what has not left. The first step declares the layout, in the order in which gradients became ready.

Owns when buckets leave and what a step's end does; ``optimizers/distributed.py`` and ``ddp/data_parallel.py`` have the methods that users call.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable

import torch

from psgc.errors import UsageError
from psgc.layout import TensorSpec
from psgc.torch.device.engines import captured
from psgc.torch.gradients.backwards import Backwards
from psgc.torch.gradients.buckets import Gradient, GradientBucket
from psgc.torch.gradients.exchange import GradientExchange
from psgc.torch.gradients.followed import LOST, Followed
from psgc.torch.session import api, speed
from psgc.torch.session.run_report import report_of
from psgc.torch.state.residuals import Kept
from psgc.worker.session import Session


class BackwardGradients:
    """See the module's text.

    paused: gradients stay local to this rank, and synchronizing does nothing. It is changed between two steps, on all ranks alike.
    synchronized: no gradient has come since the last step.
    watch: the owner's method that follows parameters which are new; the owner is held weakly.
    """

    def __init__(self, exchange: GradientExchange[GradientBucket], passes: int, late: bool, watch: Callable[[], None]) -> None:
        self.exchange = exchange
        self.backwards = Backwards(passes, late)
        self.gradients = Followed()
        self.synchronized = self.paused = False
        self._watch = weakref.WeakMethod(watch)
        self._lock = threading.RLock()  # backward may run hooks in a thread for each device
        api.add_member(self)

    # of one session and the next

    @property
    def session(self) -> Session:
        return self.exchange.session

    def check_leaving(self) -> None:
        """Raise UsageError in the middle of a step, or where ``auto`` or a profile observes steps."""
        self.exchange.last.refuse_midway()
        if self.exchange.observer is not None:
            raise UsageError("suspend(): auto and PSGC_PROFILE observe the steps of one job; name a codec or a plan, or start a new job")

    def leave(self) -> None:
        """The session ends: take along what codecs keep."""
        self._notice_cleared()
        self.exchange.leave()

    def rejoin(self, session: Session) -> None:
        """Go on in another session: tensors are declared anew in the first step."""
        with self._lock:
            self.exchange.rejoin(session)

    def kept(self) -> Kept:
        """What codecs keep of the gradients between two steps."""
        self._notice_cleared()
        return self.exchange.kept()

    def scale_with(self, scale: Callable[[], float]) -> None:
        """From now on gradients are multiplied by ``scale()``."""
        with self._lock:
            self.exchange.last.scale_with(scale)

    # what hooks call

    def watch(self, parameters: Iterable[tuple[torch.Tensor, TensorSpec]]) -> None:
        """Follow these parameters' gradients, if they require one and are not followed yet."""
        with self._lock:
            if self.gradients.add(self, parameters):
                self.exchange.specs, self.synchronized = self.gradients.specs, False

    def parameter(self, index: int) -> torch.Tensor:
        return self.gradients[index].parameter

    def coming(self, index: int) -> None:
        """Backward is about to add to a gradient. Runs in autograd's thread."""
        if not self.paused and not self._captures(index):
            with self._lock:
                self._enter()
                self.gradients[index].set_aside()

    def ready(self, index: int) -> None:
        """Backward has added to a gradient. Runs in autograd's thread: counts, and sends the bucket that is complete."""
        gradient, backwards = self.gradients[index], self.backwards
        grad = gradient.parameter.grad
        if grad is None or self.paused:  # None: another hook has taken it
            return
        if self._captures(index):
            gradient.captured = grad
            return
        with self._lock:
            self._enter()
            gradient.look(grad)
            if backwards.held:
                return
            if gradient.backward == backwards.number and not backwards.late:
                gradient.note_repeat()
                return
            gradient.backward = backwards.number
            last = gradient.count_pass(backwards.passes)
            if index >= self.exchange.declared:
                self.gradients.note_ready(index)
            if last:
                self._finished(gradient)

    def _captures(self, index: int) -> bool:
        """Whether this backward is captured in a graph, where it is not to be sent: it computes nothing yet, and is in no step."""
        return self.backwards.held and captured(self.gradients[index].parameter)

    def _enter(self) -> None:
        """Called first by every hook: if a new backward has begun, wait for its end."""
        if not self.backwards.entered:
            if self.backwards.lost:
                self.gradients.let_go()
                self.forget()
            self.backwards.enter(self)
        self._begin()

    def _begin(self) -> None:
        self.synchronized = False
        if not self.exchange.last.begun:
            self._notice_cleared()
            self.exchange.begin()

    def _finished(self, gradient: Gradient) -> None:
        """The gradient's last backward pass is done: send the bucket if it is complete."""
        observer, trace = self.exchange.observer, self.session.trace
        if observer is not None and gradient.parameter.grad is not None:
            observer.ready(gradient.spec.name, gradient.parameter.grad)
        if trace is not None:
            trace.gradient(self.exchange.name)
        bucket = gradient.bucket
        if bucket is not None:
            bucket.waiting -= 1
            if bucket.complete and not (observer is not None and observer.holds):
                self._submit(bucket)

    def _submit(self, bucket: GradientBucket) -> None:
        bucket.bind()
        self.exchange.submit(bucket, bucket.skip)

    def replayed(self) -> None:
        """A graph that captured backwards has written its gradients anew; see ``Followed.replayed``."""
        with self._lock:
            self.gradients.replayed()
            self.synchronized = False

    # when the step is over

    @property
    def declared(self) -> bool:
        """Whether all gradients are in a layout."""
        return self.exchange.declared == len(self.exchange.specs)

    def backward_over(self) -> bool:
        """Count a backward that is over. True if it completes a step."""
        with self._lock:
            counts = self.backwards.end(self.exchange.last.begun)
            watch = self._watch()
            if counts and watch is not None:
                watch()
            return counts and self.backwards.complete

    def synchronize(self) -> None:
        """Send the remaining buckets, wait for the means, and store them in p.grad. Does nothing if no gradient has come since the last time."""
        if self.synchronized:
            return
        self.session.check()
        if self.paused:
            self.synchronized = True
            return
        if self.backwards.lost:
            raise UsageError(f"the last backward {LOST} before the next one")
        self.send()
        self.receive()

    def send(self) -> None:
        """Send the buckets that have not left yet."""
        exchange = self.exchange
        if exchange.observer is not None:
            exchange.observer.leaving()
        with self._lock:
            self._begin()
            self.gradients.look_again(self.backwards.late)
            exchange.pay(self.gradients)
            if not self.declared:
                self._declare()
            for bucket in exchange.buckets:
                if bucket.ticket is None:
                    self._submit(bucket)

    def _declare(self) -> None:
        """Declare the gradients that are in no layout yet, and wait until every rank has."""
        exchange = self.exchange
        fresh, order = self.gradients.fresh(exchange.declared)
        specs, parameters = tuple(gradient.spec for gradient in fresh), [gradient.parameter for gradient in fresh]
        for layout in exchange.declare(specs, parameters, order, order):
            exchange.buckets += GradientBucket.all_of(layout, fresh)

    def receive(self) -> None:
        """Wait for the submitted buckets, and store their means in p.grad."""
        exchange = self.exchange
        exchange.wait()
        with self._lock:
            for bucket in exchange.buckets:
                bucket.deliver()
            self.gradients.reset()
            self.backwards.begin_step()
            exchange.last.deliver()
            self.synchronized = True
        speed.look(self.session)
        if exchange.observer is not None:
            exchange.observer.delivered()

    # what becomes of the result

    def end_step(self, applied: bool) -> None:
        """Note that step() has applied the last result, or that it was not and is to be put back."""
        ended = self.exchange.last.end(applied)
        if ended:
            report_of(self.session).step_over(self.exchange.name)
        self.gradients.note_step()
        self.synchronized = False
        if ended and self.exchange.observer is not None:
            self.exchange.observer.stepped()

    def put_back(self) -> None:
        """The last result goes back into the residuals; so it does already after a backward that raised. Raises UsageError if there is none."""
        if self.exchange.last.outcome in ("settled", "put back"):
            raise UsageError(
                "put_back(): no averaged gradients wait for step(); call it in place of step(), after backward() and before zero_grad()"
            )
        self.end_step(applied=False)

    def _leave_to_script(self) -> None:
        if self.exchange.last.leave():
            report_of(self.session).left_to_script(self.exchange.name)

    def _notice_cleared(self) -> None:
        """Where the last result was cleared without psgc's knowledge, by module.zero_grad() or p.grad = None, it was the script's."""
        if not self.gradients.keeps_mean:
            self._leave_to_script()

    def forget(self) -> None:
        """zero_grad is about to run: drop the accumulated gradients. Raises UsageError if some of them may be in flight."""
        with self._lock:
            begun = next((gradient for gradient in self.gradients if gradient.passes >= self.backwards.passes), None)
            if begun is not None and not self.backwards.lost:
                raise UsageError(
                    f"zero_grad() while the gradient of {begun.spec.name!r} is under way; call it after step() or synchronize(), or before backward()"
                )
            raised = begun is not None and bool(self.exchange.buckets)
            if raised:
                self._skip_the_rest()
            self.gradients.reset()
            for bucket in self.exchange.buckets:
                bucket.reset()
            self.backwards.forget()
            self.exchange.last.give_up(raised)
            self._leave_to_script()
            self.gradients.note_step()
            self.synchronized = raised  # this rank has taken part in the step

    def _skip_the_rest(self) -> None:
        """Skip the buckets that have not left: a backward raised after some had, and the other ranks wait for the rest of the step."""
        buckets = self.exchange.buckets
        for bucket in buckets:
            if bucket.ticket is None:
                bucket.bind_nothing()
                self.exchange.submit(bucket, skip=True)
        self.session.wait([bucket.ticket for bucket in buckets if bucket.ticket is not None])
        for bucket in buckets:
            bucket.buffer.arrive()  # whatever becomes of these gradients now comes after what is still written to them

    def set_passes(self, passes: int) -> None:
        """Change how many backwards make a step. Raises UsageError between a backward and its step."""
        if self.backwards.some or self.gradients.begun:
            raise UsageError("set_backward_passes_per_step() between backward() and step(); call it after step()")
        self.backwards.passes = passes
