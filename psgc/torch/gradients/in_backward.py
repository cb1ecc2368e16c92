"""Gradients that are averaged in backward: an optimizer's, or those of a model that psgc wraps.

A bucket leaves as soon as its last gradient is ready. The mean goes to p.grad. A step is over when its last backward is, or late, when the trainer steps; that
sends what has not left. The first step declares the layout, in the order in which gradients became ready.

Owns when buckets leave and what a step's end does; ``optimizers/averaging.py`` and ``ddp/data_parallel.py`` have the methods that users call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from psgc.errors import UsageError
from psgc.torch.gradients.buckets import Gradient, GradientBucket
from psgc.torch.gradients.exchange import GradientExchange
from psgc.torch.gradients.followed import LOST
from psgc.torch.gradients.front_end import HookedFrontEnd, Parameters
from psgc.torch.gradients.replays import Replays
from psgc.torch.gradients.written import Written
from psgc.torch.session.uncompiled import uncompiled


class BackwardGradients(HookedFrontEnd):
    """See the module's text.

    paused: gradients stay local to this rank, and synchronizing does nothing. It is changed between two steps, on all ranks alike.
    synchronized: no gradient has come since the last step.
    parameters: the owner's method that gives those which may be new; the owner is held weakly. as_views: as of ``Followed``.
    """

    def __init__(
        self, exchange: GradientExchange[GradientBucket], passes: int, late: bool, parameters: Callable[[], Parameters], as_views: bool = False
    ) -> None:  # fmt: skip
        super().__init__(exchange, passes, late, as_views)
        self.synchronized = self.paused = False
        self._parameters, self._replays = weakref.WeakMethod(parameters), Replays()
        exchange.written = Written(self.gradients.parameters)

    def watch(self) -> None:
        """Follow the gradients of parameters that are new, or require one only now."""
        parameters = self._parameters()
        with self._lock:
            if parameters is not None and self.follow(parameters()):
                self.synchronized = False

    # when a bucket leaves

    def coming(self, index: int) -> None:
        gradient = self.gradients[index]
        if not self.stays(gradient):
            with self._lock:
                self.enter(gradient)
                gradient.mean.set_aside()

    def stays(self, gradient: Gradient) -> bool:
        return self.paused or (self.backwards.held and self._replays.captures(gradient))

    def enter(self, gradient: Gradient) -> None:
        """If a new backward has begun, wait for its end."""
        if not self.backwards.entered:
            if self.backwards.lost:
                self.gradients.let_go()
                self.forget()
            self.backwards.enter(self)
        self._begin()

    def _begin(self) -> None:
        self.synchronized = False
        if not self.exchange.last.begun:
            self.settle()
            self.exchange.begin()

    def replayed(self) -> None:
        """Graphs that captured backwards have written their gradients anew; see ``Replays.written``."""
        with self._lock:
            self.watch()
            self._replays.written(self.gradients.under_way())
            self.synchronized = False

    # when the step is over

    def backward_over(self) -> bool:
        """Count a backward that is over. True if it completes a step."""
        with self._lock:
            counts = self.backwards.end(self.exchange.last.begun)
            if counts:
                self.watch()
            return counts and self.backwards.complete

    @uncompiled
    def synchronize(self, by_hand: bool = False) -> None:
        """Send the remaining buckets, wait for the means, and store them in p.grad. Does nothing if no gradient has come since the last time. by_hand: where
        the last means are gone and all that p.grad holds was put there by hand, that is to be averaged."""
        self.watch()
        if self.synchronized and not (by_hand and not self.paused and self.gradients.set_anew):
            return
        self.session.check()
        if self.paused:
            self.synchronized = True
            return
        if self.backwards.lost:
            raise UsageError(f"the last backward {LOST} before the next one")
        self.send()
        self.receive()

    @property
    def due(self) -> bool:
        """Whether ``synchronize`` would send and receive."""
        self.watch()
        return not (self.synchronized or self.paused or self.backwards.lost)

    @uncompiled
    def synchronize_each(self, apply: Callable[[Sequence[torch.Tensor]], None]) -> None:
        """Where it is due: the same, but ``apply`` is called with each bucket's parameters as soon as the mean is in their p.grad, while others travel."""
        exchange = self.exchange
        self.session.check()
        self.send()
        with self._lock:
            exchange.deliver()  # before parameters are written: it is seen by that whether a step has applied the means
            for bucket in exchange.buckets:
                exchange.wait([bucket])
                bucket.deliver()
                if not bucket.buffer.skipped:
                    apply([gradient.parameter for gradient in bucket.gradients])
            self._over()

    def send(self) -> None:
        """Send the buckets that have not left yet."""
        exchange = self.exchange
        exchange.observer.leaving()
        with self._lock:
            self._begin()
            self.gradients.look_again(self.backwards.late)
            self._replays.check_told(self.gradients)
            if not self.declared:
                order = self.gradients.order(exchange.declared)
                self.declare(order, order)
            exchange.submit_rest()

    def receive(self) -> None:
        """Wait for the submitted buckets, and store their means in p.grad."""
        exchange = self.exchange
        exchange.wait()
        with self._lock:
            for bucket in exchange.buckets:
                bucket.deliver()
            exchange.deliver()
            self._over()
        exchange.observer.delivered()

    def _over(self) -> None:
        """All means are in p.grad."""
        self.gradients.reset()
        self.backwards.begin_step()
        self.synchronized = True

    @uncompiled
    def end_step(self, applied: bool) -> None:
        super().end_step(applied)
        self.gradients.note_step()
        self.synchronized = False

    @uncompiled
    def forget(self) -> None:
        """zero_grad is about to run: drop the accumulated gradients. Raises UsageError if some of them may be in flight."""
        with self._lock:
            under_way = self.gradients.under_way(self.backwards.passes)
            if under_way is not None and not self.backwards.lost:
                raise UsageError(
                    f"zero_grad() while the gradient of {under_way!r} is under way; call it after step() or synchronize(), or before backward()"
                )
            self.synchronized = self.exchange.give_up(taking_part=under_way is not None)
            self.gradients.reset()
            self.gradients.note_step()
            self.backwards.forget()
