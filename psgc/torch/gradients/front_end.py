"""What every front end of an exchange is to its session, to loss scalers and to states that are saved; and what those have in common that hooks call.

A front end knows when a bucket may leave, who takes the mean, and when a step is over. Everything else is its exchange's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic

import torch

from psgc.layout import BucketSpec
from psgc.torch.gradients.backwards import Backwards
from psgc.torch.gradients.buckets import Gradient, GradientBucket
from psgc.torch.gradients.exchange import B, GradientExchange
from psgc.torch.gradients.followed import Followed
from psgc.torch.gradients.last_step import StepFlags
from psgc.torch.gradients.skips import Skips
from psgc.torch.session import api
from psgc.torch.state import saved
from psgc.torch.state.residuals import check_sizes
from psgc.worker.session import Session

Others = Mapping[str, GradientExchange[Any]]  # of the same optimizer, by the kind of what it sends


class FrontEnd(Generic[B]):
    """See the module's text. A member of its session: see ``api.Member``."""

    def __init__(self, exchange: GradientExchange[B]) -> None:
        self.exchange = exchange
        self._lock = threading.RLock()  # backward may run hooks in a thread for each device
        api.add_member(self)

    @property
    def session(self) -> Session:
        return self.exchange.session

    def settle(self) -> None:
        """What codecs keep is about to be read, between two steps: see what has become of the last result."""

    def check_leaving(self) -> None:
        """Raise UsageError where this front end cannot leave its session now."""
        self.exchange.refuse_leaving()

    def leave(self) -> None:
        """The session ends: take along what codecs keep."""
        self.settle()
        self.exchange.leave()

    def rejoin(self, session: Session) -> None:
        """Go on in another session: tensors are declared anew in the first step."""
        with self._lock:
            self.exchange.rejoin(session)

    def scale_with(self, scale: Callable[[], float]) -> None:
        """From now on gradients are multiplied by ``scale()``. What a loss scaler applies or drops has been already."""
        with self._lock:
            self.exchange.last.scale_with(scale)

    def state(self, others: Others | None = None) -> dict[str, Any]:
        """What codecs keep, in ``saved``'s form. Every rank must ask. Raises UsageError in the middle of a step."""
        last = self.exchange.last
        units = last.units
        self.settle()
        kinds = {saved.GRADIENTS: self.exchange, **(others or {})}
        return saved.state_of(
            self.session, {kind: of.kept() for kind, of in kinds.items()}, units.loss_scale, units.rates, last.skips.state()
        )

    def go_on(self, states: saved.State | Sequence[saved.State], others: Others | None = None) -> None:
        """Go on from the state of this rank, or those of all ranks. Every rank must. Raises UsageError in the middle of a step, and for what does not fit."""
        rank, size = self.session.rank, self.session.size
        checked = saved.check_states(states, rank, size)
        saved.check_kind(checked, saved.GRADIENTS)
        kinds = {saved.GRADIENTS: self.exchange, **(others or {})}
        shares = {kind: saved.share_of(checked, kind, rank, size) for kind in kinds}
        for kept in shares.values():
            check_sizes(self.exchange.specs, kept)
        self.exchange.last.go_on(StepFlags(False, *saved.units_of(checked[0])), Skips.of(saved.skips_of(checked[0])))
        for kind, of in kinds.items():
            of.restore(shares[kind])


class HookedFrontEnd(FrontEnd[GradientBucket]):
    """Of gradients in p.grad, which autograd's hooks tell of. gradients: those that are followed. backwards: see there."""

    def __init__(self, exchange: GradientExchange[GradientBucket], passes: int, late: bool) -> None:
        super().__init__(exchange)
        self.gradients, self.backwards = Followed(), Backwards(passes, late)

    def parameter(self, index: int) -> torch.Tensor:
        return self.gradients[index].parameter

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
            gradient.look(grad)
            passes = self.backwards.count(gradient)
            if passes and index >= self.exchange.declared:
                self.gradients.note_ready(index)
            if passes == self.backwards.passes:
                self.finished(gradient)

    def stays(self, gradient: Gradient) -> bool:
        """Whether what backward does now is no part of a step."""
        return False

    def enter(self, gradient: Gradient) -> None:
        """Called by every hook before anything else, under the lock."""

    def finished(self, gradient: Gradient) -> None:
        """Backward has finished this gradient for this step: send its bucket if that is complete."""
        exchange, bucket = self.exchange, gradient.bucket
        observer, trace = exchange.observer, exchange.session.trace
        if observer is not None and gradient.parameter.grad is not None:
            observer.ready(gradient.spec.name, gradient.parameter.grad)
        if trace is not None:
            trace.gradient(exchange.name)
        if bucket is not None:
            bucket.waiting -= 1
            if bucket.complete and not (observer is not None and observer.holds):
                exchange.submit(bucket)

    def declare(self, order: Sequence[int], used: Sequence[int], fused: tuple[BucketSpec, ...] = (), awaited_singly: bool = False) -> None:
        """Declare the gradients that are in no layout yet, and wait until every rank has. order, used, fused, awaited_singly: see ``Layouts.declare``."""
        fresh = self.gradients.fresh(self.exchange.declared)
        specs, parameters = tuple(gradient.spec for gradient in fresh), [gradient.parameter for gradient in fresh]
        self.exchange.declare(
            lambda layout: GradientBucket.all_of(layout, fresh), specs, parameters, tuple(order), used, fused, awaited_singly
        )  # fmt: skip
