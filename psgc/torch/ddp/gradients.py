"""The gradients of one model that torch's DistributedDataParallel (DDP) has wrapped.

DDP hands over one flat bucket after the other, in an order that is the same on all ranks, and makes new buckets after the first step. So psgc's
layout is of the tensors, declared once, when the first backward has brought all of them. From then on a bucket of psgc's leaves when DDP has handed over the
last of its buckets that share a tensor with it. The mean is written to DDP's buckets, whose futures complete in order. A step is over with DDP's last bucket. A
residual stays with its tensor, however DDP rebuilds its buckets.

Owns the mapping from DDP's buckets to psgc's. ``amp`` reports each step's loss scale, and whether the trainer applied or dropped its result.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from psgc.errors import UsageError
from psgc.layout import TensorSpec
from psgc.torch.ddp.completions import Completer, Completion
from psgc.torch.ddp.parameters import ModelParameters, NextBackward
from psgc.torch.ddp.told import add_exchange
from psgc.torch.gradients.buckets import SentBucket, buffer_of
from psgc.torch.gradients.exchange import GradientExchange
from psgc.torch.gradients.last_step import StepFlags
from psgc.torch.gradients.skips import Skips
from psgc.torch.plans.choice import Choice
from psgc.torch.session import api
from psgc.torch.session.run_report import report_of
from psgc.torch.state import saved
from psgc.torch.tensors.buffers import dtype_name
from psgc.worker.session import Session

GRADIENTS: Final = "gradients"  # the kind of residuals, as in an optimizer's state


@dataclass(slots=True, eq=False)
class Arrival:
    """One of DDP's buckets in one step. gradients: each parameter's, as DDP has laid them out in the bucket's memory."""

    parameters: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor]
    completion: Completion
    last: bool


@dataclass(slots=True, eq=False)
class DdpBucket(SentBucket):
    """gradients: of this step, so far, by their index; takes_part: whether any of them does."""

    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    takes_part: bool = False

    @property
    def complete(self) -> bool:
        return len(self.gradients) == len(self.bucket.tensors)

    def reset(self) -> None:
        self.gradients, self.takes_part, self.ticket = {}, False, None


class DdpGradients:
    """See the module's text. names: of parameters, for messages and plans, in the model's order. choice: what gradients travel by; a plan must
    be of exactly these parameters."""

    def __init__(
        self, session: Session, number: int, choice: Choice, names: Mapping[torch.Tensor, str], completer: Completer
    ) -> None:  # fmt: skip
        self.exchange: GradientExchange[DdpBucket] = GradientExchange(session, f"ddp{number}", choice, whole=True)
        self.parameters = ModelParameters(self.exchange.name, names)
        self.steps = self.gradient_bytes = 0
        self._completer = completer
        self._next = NextBackward(self.exchange.last, self.parameters)
        self._bucket_of: dict[int, DdpBucket] = {}
        self._held: list[Arrival] = []  # of the first step, until there is a layout
        self._open: list[tuple[Arrival, list[DdpBucket]]] = []  # in order: not handed over yet, and the buckets that each waits for
        add_exchange(self)
        api.add_member(self)

    @property
    def session(self) -> Session:
        return self.exchange.session

    def check_leaving(self) -> None:
        """Raise UsageError: torch.distributed's process group has one size."""
        raise UsageError(
            "suspend(): a model under torch's DistributedDataParallel cannot go on in a job of another size; use psgc.torch's own"
        )

    def leave(self) -> None:
        """Never called."""

    def rejoin(self, session: Session) -> None:
        """Never called."""

    def knows(self, parameter: torch.Tensor) -> bool:
        return self.parameters.knows(parameter)

    def coming(self) -> None:
        """Backward is about to add to a gradient. Runs in autograd's thread."""
        self._next.coming()

    def take(self, arrival: Arrival) -> None:
        """DDP's next bucket. Returns once what is complete of psgc's buckets is on its way. Raises UsageError for gradients that psgc cannot
        carry."""
        exchange = self.exchange
        if not exchange.last.begun:
            self._begin()
        self._next.watch(arrival.parameters)
        if exchange.observer is not None:
            for parameter, gradient in zip(arrival.parameters, arrival.gradients, strict=True):
                exchange.observer.ready(self.parameters.name(parameter), gradient)
        self.gradient_bytes += sum(gradient.numel() * gradient.element_size() for gradient in arrival.gradients)
        self._held.append(arrival)
        if not exchange.declared and arrival.last:
            self._declare()
        if exchange.declared:
            held, self._held = self._held, []
            for each in held:
                self._place(each)
        if arrival.last:
            self._finish()

    def _begin(self) -> None:
        """The first bucket of a step has come."""
        self.session.check()
        if self.exchange.observer is not None:
            self.exchange.observer.begins()
        if self._next.adds_up is False:
            self.exchange.last.leave()
        self.exchange.begin()

    def _declare(self) -> None:
        """All gradients have come: declare them, in the order in which they came, and wait until every rank has declared them."""
        exchange, names = self.exchange, self.parameters.names
        specs: dict[int, TensorSpec] = {}
        parameters: dict[int, torch.Tensor] = {}
        used = []
        for arrival in self._held:
            for parameter, gradient in zip(arrival.parameters, arrival.gradients, strict=True):
                index = self.parameters.index(parameter)
                specs[index] = TensorSpec(names[index], tuple(gradient.shape), dtype_name(gradient, f"gradient of {names[index]!r}"))
                parameters[index] = parameter
                if takes_part(parameter, gradient):
                    used.append(index)
        missing = [name for index, name in enumerate(names) if index not in specs]
        if missing:
            raise UsageError(
                f"DDP did not reduce the gradient of {missing[0]!r} in the first step; freeze parameters before DDP wraps the model"
            )
        everything = range(len(names))
        exchange.specs = tuple(specs[index] for index in everything)
        for layout, _, on_gpu in exchange.declare(exchange.specs, [parameters[index] for index in everything], tuple(specs), used):
            exchange.buckets += [DdpBucket(layout, bucket, buffer_of(layout, bucket, on_gpu, late=False)) for bucket in layout.buckets]
        self._bucket_of = {index: bucket for bucket in exchange.buckets for index in bucket.bucket.tensors}

    def _place(self, arrival: Arrival) -> None:
        """Put the arrival's gradients into psgc's buckets, and send the buckets that are now complete."""
        touched: dict[DdpBucket, None] = {}
        for parameter, gradient in zip(arrival.parameters, arrival.gradients, strict=True):
            index = self.parameters.index(parameter)
            bucket = self._bucket_of.get(index)
            if bucket is None:
                continue  # a tensor without elements is in none
            if index in bucket.gradients:
                raise UsageError(
                    f"DDP reduced the gradient of {self.parameters.names[index]!r} twice in a step: did a backward end with an error?"
                )
            bucket.gradients[index] = gradient
            bucket.takes_part = bucket.takes_part or takes_part(parameter, gradient)
            touched[bucket] = None
        for bucket in touched:
            if bucket.complete:
                bucket.buffer.bind([bucket.gradients[index] for index in bucket.bucket.tensors])
                self.exchange.submit(bucket, skip=not bucket.takes_part)
        self._open.append((arrival, list(touched)))
        self._hand_over()

    def _hand_over(self) -> None:
        """Complete, in order, the futures of those of DDP's buckets whose tensors have all been sent, as soon as the results arrive."""
        while self._open and all(bucket.ticket is not None for bucket in self._open[0][1]):
            arrival, buckets = self._open.pop(0)
            tickets = [bucket.ticket for bucket in buckets if bucket.ticket is not None]
            then = functools.partial(self._over, time.monotonic()) if arrival.last else _nothing
            self._completer.complete_after(tickets, arrival.completion, then)

    def _over(self, left: float) -> None:
        """The step's last result has come. left: when DDP handed the last bucket over; the trainer has waited since then."""
        if self.exchange.observer is not None:
            self.exchange.observer.delivered()
        report = report_of(self.session)
        report.waited(self.exchange.name, time.monotonic() - left)
        report.step_over(self.exchange.name, untold=True)

    def _finish(self) -> None:
        """DDP has no more buckets in this step. Raises UsageError where one of psgc's is not complete, which would wait for ever."""
        exchange = self.exchange
        for bucket in exchange.buckets:
            if bucket.ticket is None:
                absent = next(self.parameters.names[index] for index in bucket.bucket.tensors if index not in bucket.gradients)
                raise UsageError(f"DDP did not reduce the gradient of {absent!r} in this step, as it did in the first; psgc cannot go on")
            bucket.reset()
        if exchange.observer is not None:
            exchange.observer.leaving()
        self.steps += 1
        exchange.last.deliver()
        if not self._next.came:  # this rank has run out of batches (join), and the others step
            exchange.last.end(applied=True)
        self._next.reset()

    # what becomes of the result

    def scale_with(self, scale: Callable[[], float]) -> None:
        """A loss scaler is about to apply or drop the last step's result, which was multiplied by ``scale()``, as later ones will be."""
        self.exchange.last.scale_with(scale)

    def end_step(self, applied: bool) -> None:
        """An optimizer has applied the last result, or dropped it. With several optimizers, one that applies it is enough."""
        last, observer = self.exchange.last, self.exchange.observer
        if not last.begun and last.end(applied):
            report_of(self.session).stepped(self.exchange.name)
            if observer is not None:
                observer.stepped()

    def put_back(self) -> None:
        """The last result, which waits, goes back into the residuals, and is cleared. Every rank must do the same."""
        self.end_step(applied=False)
        self.clear()

    def clear(self) -> None:
        """Let go of the model's gradients. Raises UsageError in the middle of a backward."""
        self.exchange.last.refuse_midway("gradients are put back and discarded")
        for parameter in self.parameters.present():
            parameter.grad = None

    def state(self) -> dict[str, Any]:
        """What codecs keep of these gradients, in ``saved``'s form. Every rank must ask, between two steps."""
        last = self.exchange.last
        units = last.units
        if last.waits and not self.parameters.hold_gradients:
            last.leave()
        return saved.state_of(self.session, {GRADIENTS: self.exchange.kept()}, units.loss_scale, skips=last.skips.state())

    def go_on(self, states: Sequence[saved.State]) -> None:
        """Go on from the states of this rank, or of all ranks. Every rank must, between two steps. Raises UsageError for what does not fit."""
        self.exchange.last.refuse_midway()
        checked = saved.check_states(states, self.session.rank, self.session.size)
        self.exchange.residuals.restore(saved.share_of(checked, GRADIENTS, self.session.rank, self.session.size))
        self.exchange.go_on(StepFlags(False, *saved.units_of(checked[0])), Skips.of(saved.skips_of(checked[0])))

    def switch(self, choice: Choice) -> None:
        """From the next step on, gradients travel by this choice. Every rank must call it between the same two steps. What codecs keep goes along."""
        self.exchange.last.refuse_midway("plans are switched")
        self.exchange.switch(choice)
        self.exchange.observer = None


def _nothing() -> None:
    """The callback of buckets other than the step's last."""


def takes_part(parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether this rank has a gradient. For a parameter that it did not use, DDP's bucket has zeros, but p.grad is None."""
    return parameter.grad is not None or bool(gradient.any())
