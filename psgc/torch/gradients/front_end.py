"""What every front end of an exchange is to its session, to loss scalers and to states that are saved; and what those have in common that hooks call.

A front end knows when a bucket may leave, who takes the mean, and when a step is over. Everything else is its exchange's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic

import torch

from psgc.errors import UsageError
from psgc.layout import BucketSpec, TensorSpec
from psgc.torch.gradients.backwards import Backwards
from psgc.torch.gradients.buckets import Gradient, GradientBucket
from psgc.torch.gradients.exchange import B, GradientExchange
from psgc.torch.gradients.followed import Followed
from psgc.torch.gradients.last_step import StepFlags
from psgc.torch.gradients.linearity import CodecAdvice
from psgc.torch.gradients.observer import UNOBSERVED
from psgc.torch.gradients.skips import Skips
from psgc.torch.plans.choice import Choice
from psgc.torch.session import api
from psgc.torch.session.uncompiled import uncompiled
from psgc.torch.state import saved
from psgc.torch.state.residuals import Kept, check_sizes
from psgc.worker.session import Session

Parameters = Iterable[tuple[torch.Tensor, TensorSpec]]


class FrontEnd(api.Member, Generic[B]):
    """See the module's text. kinds: what states have of it, by ``saved``'s kinds: its own exchange, and others of the same optimizer. advice: on its codec;
    None: none is given."""

    def __init__(self, exchange: GradientExchange[B], kind: str = saved.GRADIENTS) -> None:
        self.exchange = exchange
        self.kinds: dict[str, GradientExchange[Any]] = {kind: exchange}
        self.advice: CodecAdvice | None = None
        self._lock = threading.RLock()  # backward may run hooks in a thread for each device
        api.add_member(self)

    @property
    def session(self) -> Session:
        return self.exchange.session

    @property
    def keeps_mean(self) -> bool:
        """Whether some p.grad has the last mean in it. Asked while a result waits."""
        raise NotImplementedError

    def settle(self) -> None:
        """See what has become of the last result, before the next step begins or what codecs keep is read: one that was cleared without psgc's knowledge, by
        module.zero_grad() or p.grad = None, was the script's."""
        if self.exchange.last.waits and not self.keeps_mean:
            self.exchange.leave_to_script()

    @uncompiled
    def end_step(self, applied: bool) -> None:
        """An optimizer has applied the last result, or it was not applied and is to be put back."""
        self.exchange.end_step(applied)

    def put_back(self) -> None:
        """The last result goes back into the residuals; so it does already after a backward that raised. Every rank must do the same. Raises UsageError if
        there is none."""
        self.exchange.last.refuse_none()
        self.end_step(applied=False)

    def switch(self, choice: Choice) -> None:
        """From the next step on, gradients travel by this choice. Every rank must call it between the same two steps. What codecs keep goes along. Where
        ``auto`` chose until now, it ends."""
        if self.exchange.last.begun:
            raise UsageError("switch_plan() in the middle of a step; call it after step(), before the next backward()")
        self.exchange.switch(choice)
        if not self.exchange.observer.holds:
            self.exchange.observer = UNOBSERVED
        if self.advice is not None:
            self.advice.look_anew()

    def knows(self, parameter: torch.Tensor) -> bool:
        """Whether it carries this parameter's gradient."""
        return False

    def advise(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped on the gradients."""
        if self.advice is not None:
            self.advice.look(optimizer, lambda: self.exchange.layouts)

    def check_leaving(self) -> None:
        self.exchange.refuse_leaving()

    def leave(self) -> None:
        self.settle()
        self.exchange.leave()

    def rejoin(self, session: Session) -> None:
        with self._lock:
            self.exchange.rejoin(session)

    def scale_with(self, scale: Callable[[], float]) -> None:
        """From now on gradients are multiplied by ``scale()``. What a loss scaler applies or drops has been already."""
        with self._lock:
            self.exchange.last.scale_with(scale)

    def state(self) -> dict[str, Any]:
        """What codecs keep, in ``saved``'s form. Every rank must ask. Raises UsageError in the middle of a step."""
        last = self.exchange.last
        units = last.units
        self.settle()
        kept = {kind: of.kept() for kind, of in self.kinds.items()}
        return saved.state_of(self.session, kept, units.loss_scale, units.rates, last.skips.state())

    def go_on(self, states: saved.State | Sequence[saved.State]) -> None:
        """Go on from the state of this rank, or those of all ranks. Every rank must. Raises UsageError in the middle of a step, and for what does not fit."""
        (first, *_), shares = self.shares(states)
        for kept in shares.values():
            check_sizes(self.exchange.specs, kept)
        self.exchange.last.go_on(StepFlags(False, *saved.units_of(first)), Skips.of(saved.skips_of(first)))
        for kind, of in self.kinds.items():
            of.restore(shares[kind])

    def shares(
        self, states: saved.State | Sequence[saved.State], mean: bool = True, by: str = ""
    ) -> tuple[list[saved.State], dict[str, Kept]]:
        """The states in rank order, and this rank's share of each kind. mean: as of ``saved.share_of``; by: of ``saved.check_states``. Raises UsageError for
        what does not fit."""
        rank, size = self.session.rank, self.session.size
        checked = saved.check_states(states, rank, size, self.session.part, by)
        saved.check_kind(checked, next(iter(self.kinds)))
        return checked, {kind: saved.share_of(checked, kind, rank, size, mean) for kind in self.kinds}


class HookedFrontEnd(FrontEnd[GradientBucket]):
    """Of gradients in p.grad, which autograd's hooks tell of. gradients: those that are followed, ``as_views`` or not. backwards: see there."""

    def __init__(self, exchange: GradientExchange[GradientBucket], passes: int, late: bool, as_views: bool = False) -> None:
        super().__init__(exchange)
        self.gradients, self.backwards = Followed(as_views, exchange.sparse), Backwards(passes, late)

    @property
    def declared(self) -> bool:
        """Whether all gradients are in a layout."""
        return self.exchange.declared == len(self.exchange.specs)

    @property
    def keeps_mean(self) -> bool:
        return self.gradients.keeps_mean

    def follow(self, parameters: Parameters) -> bool:
        """From now on, follow the gradients of those that require one and are not followed yet. Returns whether there were any."""
        if not self.gradients.add(self, parameters):
            return False
        self.exchange.specs = self.gradients.specs
        return True

    def parameter(self, index: int) -> torch.Tensor:
        return self.gradients[index].parameter

    def knows(self, parameter: torch.Tensor) -> bool:
        return self.gradients.knows(parameter)

    def coming(self, index: int) -> None:
        """Backward is about to add to a gradient. Runs in autograd's thread."""

    def ready(self, index: int) -> None:
        """Backward has added to a gradient. Runs in autograd's thread: counts, and sends the bucket that is complete."""
        gradient = self.gradients[index]
        grad = gradient.parameter.grad
        if grad is None or self.stays(gradient):  # None: another hook has taken it
            return
        with self._lock:
            self.enter(gradient)
            grad = gradient.resolve()
            assert grad is not None
            gradient.look(grad)
            passes = self.backwards.count(gradient)
            if passes and index >= self.exchange.declared:
                self.gradients.note_ready(index)
            if passes == self.backwards.passes:
                self._finished(gradient, grad)

    def stays(self, gradient: Gradient) -> bool:
        """Whether what backward does now is no part of a step."""
        return False

    def enter(self, gradient: Gradient) -> None:
        """Called by every hook before anything else, under the lock."""

    def _finished(self, gradient: Gradient, grad: torch.Tensor) -> None:
        """Backward has finished this gradient for this step: send its bucket if that is complete."""
        exchange, bucket = self.exchange, gradient.bucket
        trace = exchange.session.trace
        exchange.observer.ready(gradient.spec.name, grad)
        if trace is not None:
            trace.gradient(exchange.name)
        if bucket is not None:
            bucket.waiting -= 1
            if bucket.complete and not exchange.observer.holds:
                exchange.submit(bucket)

    def declare(self, order: Sequence[int], used: Sequence[int], fused: tuple[BucketSpec, ...] = (), awaited_singly: bool = False) -> None:
        """Declare the gradients that are in no layout yet, and wait until every rank has. order, used, fused, awaited_singly: see ``Layouts.declare``."""
        fresh = self.gradients.fresh(self.exchange.declared)
        specs, parameters = tuple(gradient.spec for gradient in fresh), [gradient.parameter for gradient in fresh]
        self.exchange.declare(
            lambda layout: GradientBucket.all_of(layout, fresh, self.gradients.as_views), specs, parameters, tuple(order), used, fused, awaited_singly
        )  # fmt: skip
