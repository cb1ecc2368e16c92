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
from collections.abc import Mapping

import torch

from psgc.errors import UsageError
from psgc.torch.ddp.completions import Arrival, Completer, InOrder
from psgc.torch.ddp.parameters import ModelParameters, NextBackward, takes_part
from psgc.torch.ddp.told import add_model
from psgc.torch.gradients.exchange import GradientExchange
from psgc.torch.gradients.front_end import FrontEnd
from psgc.torch.gradients.written import Written
from psgc.torch.plans.choice import Choice
from psgc.torch.session.run_report import report_of
from psgc.torch.tensors.declaring import spec_of
from psgc.torch.tensors.sent import FilledBucket
from psgc.worker.session import Session


class DdpGradients(FrontEnd[FilledBucket]):
    """See the module's text. names: of parameters, for messages and plans, in the model's order. choice: what gradients travel by; a plan must
    be of exactly these parameters."""

    def __init__(
        self, session: Session, number: int, choice: Choice, names: Mapping[torch.Tensor, str], completer: Completer
    ) -> None:  # fmt: skip
        super().__init__(GradientExchange(session, f"ddp{number}", choice, whole=True, turn=number))
        self.parameters = ModelParameters(self.exchange.name, names)
        self.steps = self.gradient_bytes = 0
        self._next = NextBackward(self.exchange.last, self.parameters)
        self._bucket_of: dict[int, FilledBucket] = {}
        self._held: list[Arrival] = []  # of the first step, until there is a layout
        self._order = InOrder(completer)
        self.exchange.written = Written(self.parameters.present)
        add_model(self)

    def check_leaving(self) -> None:
        """Raise UsageError: torch.distributed's process group has one size."""
        raise UsageError(
            "suspend(): a model under torch's DistributedDataParallel cannot go on in a job of another size; use psgc.torch's own"
        )

    def knows(self, parameter: torch.Tensor) -> bool:
        return self.parameters.knows(parameter)

    def take(self, arrival: Arrival) -> None:
        """DDP's next bucket. Returns once what is complete of psgc's buckets is on its way. Raises UsageError for gradients that psgc cannot
        carry."""
        exchange = self.exchange
        if not exchange.last.begun:
            self._begin()
        self._next.watch(arrival.parameters)
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
        if self._next.adds_up is False:
            self.exchange.leave_to_script()
        self.exchange.begin()

    def _declare(self) -> None:
        """All gradients have come: declare them, in the order in which they came, and wait until every rank has declared them."""
        names, exchange = self.parameters.names, self.exchange
        found = {self.parameters.index(each[0]): each for arrival in self._held for each in arrival.pairs()}
        for index, name in enumerate(names):
            if index not in found:
                raise UsageError(
                    f"DDP did not reduce the gradient of {name!r} in the first step; freeze parameters before DDP wraps the model"
                )
        exchange.specs = tuple(spec_of(found[index][1], name, f"gradient of {name!r}") for index, name in enumerate(names))
        used = [index for index, pair in found.items() if takes_part(*pair)]
        parameters = [found[index][0] for index in range(len(names))]
        exchange.declare(lambda made: FilledBucket.all_of(made.layout, made.on_gpu), exchange.specs, parameters, tuple(found), used)
        self._bucket_of = {index: bucket for bucket in exchange.buckets for index in bucket.bucket.tensors}

    def _place(self, arrival: Arrival) -> None:
        """Put the arrival's gradients into psgc's buckets, and send the buckets that are now complete."""
        touched: dict[FilledBucket, None] = {}
        for parameter, gradient in arrival.pairs():
            index = self.parameters.index(parameter)
            bucket = self._bucket_of.get(index)
            if bucket is None:
                continue  # a tensor without elements is in none
            if index in bucket.tensors:
                raise UsageError(
                    f"DDP reduced the gradient of {self.parameters.names[index]!r} twice in a step: did a backward end with an error?"
                )
            self.exchange.observer.ready(self.parameters.names[index], gradient)
            self.gradient_bytes += gradient.numel() * gradient.element_size()
            bucket.put(index, gradient, takes_part(parameter, gradient))
            touched[bucket] = None
        for bucket in touched:
            if bucket.complete:
                self.exchange.submit(bucket)
        if arrival.last:
            self.exchange.observer.leaving()  # before the results can be there: another thread tells of those
        self._order.add(arrival, list(touched), functools.partial(self._arrived, arrival.last, time.monotonic()))

    def _arrived(self, last: bool, left: float) -> None:
        """Results have come. last: all of the step. left: when DDP handed the bucket over; for the last one the trainer has waited since then."""
        if last:
            self.exchange.observer.delivered()
            report_of(self.session).means_came(self.exchange.name, time.monotonic() - left)

    def _finish(self) -> None:
        """DDP has no more buckets in this step. Raises UsageError where one of psgc's is not complete, which would wait for ever."""
        exchange = self.exchange
        for bucket in exchange.buckets:
            if bucket.ticket is None:
                absent = next(self.parameters.names[index] for index in bucket.bucket.tensors if index not in bucket.tensors)
                raise UsageError(f"DDP did not reduce the gradient of {absent!r} in this step, as it did in the first; psgc cannot go on")
            bucket.reset()
        self.steps += 1
        exchange.deliver()
        self._next.result_came()

    # what becomes of the result

    def clear(self) -> None:
        """Let go of the model's gradients. Raises UsageError in the middle of a backward."""
        self.exchange.last.refuse_midway("gradients are put back and discarded")
        self.parameters.clear()

    @property
    def keeps_mean(self) -> bool:
        return self.parameters.hold_gradients
