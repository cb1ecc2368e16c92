"""Synchronizes the gradients of one model that torch's DistributedDataParallel (DDP) has wrapped.

Owns the layout, and the mapping from DDP's buckets to psgc's. DDP hands over one flat bucket after the other, in an order that is the same on
all ranks, and makes new buckets after the first step. So psgc's layout is of the tensors, declared once, when the first backward has brought
all of them. From then on a bucket of psgc's leaves when DDP has handed over the last of its buckets that share a tensor with it. A residual
stays with its tensor, however DDP rebuilds its buckets.

``amp`` reports each step's loss scale, and whether the trainer applied or dropped its result.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import torch

from psgc.errors import UsageError
from psgc.layout import Bucket, Declaration, Layout, TensorSpec
from psgc.torch.ddp.completions import Completer, Completion
from psgc.torch.device.engines import engine_of
from psgc.torch.gradients import loss_scale
from psgc.torch.gradients.observer import StepObserver
from psgc.torch.gradients.skips import Skips
from psgc.torch.gradients.step_flags import MAX_RESCALE
from psgc.torch.plans.choice import Choice, plan_for
from psgc.torch.plans.planned import declared_buckets, leave_for_trace, of_model, write_layout
from psgc.torch.plans.rules import buckets_by_rule
from psgc.torch.session import api
from psgc.torch.session.run_report import report_of
from psgc.torch.state import saved
from psgc.torch.state.residuals import Residuals
from psgc.torch.tensors.buffers import TensorsBuffer, dtype_name, staging_dtype, where_of
from psgc.worker.session import Session, Ticket

GRADIENTS: Final = "gradients"  # the kind of residuals, as in an optimizer's state


class StepExchange(Protocol):
    """An exchange whose optimizers are the user's own: it is told of their steps."""

    def knows(self, parameter: torch.Tensor) -> bool: ...

    def scale_with(self, scale: Callable[[], float]) -> None: ...

    def end_step(self, applied: bool) -> None: ...


_exchanges: weakref.WeakSet[StepExchange] = weakref.WeakSet()
_made = 0


def add_exchange(exchange: StepExchange) -> None:
    """Have it told of loss scalers' steps from now on. It is held weakly."""
    global _made  # noqa: PLW0603 - one count a process
    _exchanges.add(exchange)
    _made += 1


@dataclass(slots=True, eq=False)
class Arrival:
    """One of DDP's buckets in one step. gradients: each parameter's, as DDP has laid them out in the bucket's memory."""

    parameters: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor]
    completion: Completion
    last: bool


@dataclass(slots=True, eq=False)
class _Bucket:
    """One bucket of the layout. gradients: of this step, so far; takes_part: whether any of them does."""

    index: int
    tensors: tuple[int, ...]
    buffer: TensorsBuffer
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    takes_part: bool = False
    ticket: Ticket | None = None

    @classmethod
    def of(cls, layout: Layout, bucket: Bucket, on_gpu: bool) -> _Bucket:
        """on_gpu: whether gradients on a GPU may be encoded there, where the layout leaves that open."""
        shapes = [layout.tensors[i].shape for i in bucket.tensors]
        return cls(bucket.index, bucket.tensors, TensorsBuffer(shapes, staging_dtype(bucket.codec, bucket.dtype), where_of(bucket, on_gpu)))

    def reset(self) -> None:
        self.gradients, self.takes_part, self.ticket = {}, False, None


class DdpExchange:
    """See the module's text. names: of parameters, for messages and plans, in the model's order. choice: what gradients travel by; a plan must
    be of exactly these parameters. observer: who times this rank's steps, and may switch between two of them."""

    def __init__(
        self, session: Session, number: int, choice: Choice, names: Mapping[torch.Tensor, str], completer: Completer
    ) -> None:  # fmt: skip
        self.session, self.name, self.choice = session, f"ddp{number}", choice
        self._next: Choice | None = None  # from the next step on
        self.residuals = Residuals(session)
        self.steps = self.gradient_bytes = 0
        self._completer = completer
        self._names = list(names.values())
        self._parameters = [weakref.ref(parameter) for parameter in names]  # the model may be gone before the job is
        self._indices = {id(parameter): index for index, parameter in enumerate(names)}
        self.observer: StepObserver | None = None
        self._layout: Layout | None = None
        self._default: Declaration | None = None  # what was declared for it, but for what residuals ask for
        self._layouts = 0  # how many there have been
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, _Bucket] = {}
        self._held: list[Arrival] = []  # of the first step, until there is a layout
        self._open: list[tuple[Arrival, list[_Bucket]]] = []  # in order: not handed over yet, and the buckets that each waits for
        self._begun = False
        self._loss_scale: Callable[[], float] | None = None  # while no loss scaler is known, gradients count as scaled as they were
        self._last_scale = 1.0
        self._fresh_units = False  # of _last_scale: it was loaded, and no step has been taken since
        self._applied = self._dropped = False  # whether the last step was applied or dropped, if a loss scaler has reported it
        self._previous_skipped, self._rescale = False, 1.0
        self._skips, self._stepped = Skips(), False  # since the last result
        self._forgets = False  # what codecs keep is forgotten in the next step
        self._waits = False  # the last result is in p.grad, and nobody has said what became of it
        self._adds_up: bool | None = None  # whether the backward after it adds to it; None: not known yet
        self._watched: set[int] = set()  # indices of parameters whose hook finds that out
        self._backward_came = True  # false where DDP hands over zeros for a rank that has run out of batches (join)
        add_exchange(self)
        api.add_member(self)

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
        index = self._indices.get(id(parameter))
        return index is not None and self._parameters[index]() is parameter

    def is_of(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether these are exactly the exchange's parameters."""
        given = list(parameters)
        return len(given) == len(self._parameters) and all(map(self.knows, given))

    def take(self, arrival: Arrival) -> None:
        """DDP's next bucket. Returns once what is complete of psgc's buckets is on its way. Raises UsageError for gradients that psgc cannot
        carry."""
        if not self._begun:
            self._begin()
        if len(self._watched) < len(self._parameters):
            self._watch(arrival.parameters)
        if self.observer is not None:
            for parameter, gradient in zip(arrival.parameters, arrival.gradients, strict=True):
                self.observer.ready(self._names[self._index(parameter)], gradient)
        self.gradient_bytes += sum(gradient.numel() * gradient.element_size() for gradient in arrival.gradients)
        self._held.append(arrival)
        if self._layout is None and arrival.last:
            self._declare()
        if self._layout is not None:
            held, self._held = self._held, []
            for each in held:
                self._place(each)
        if arrival.last:
            self._finish()

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Of all gradients, once they have been declared."""
        return () if self._default is None else self._default.tensors

    @property
    def layouts(self) -> list[Layout]:
        """By which the gradients travel now."""
        return [] if self._layout is None else [self._layout]

    @property
    def on_gpu(self) -> bool:
        """Whether gradients on a GPU are encoded there where no plan says where."""
        return self.session.config.gpu_codecs

    def proposed(self, codec: str) -> Declaration:
        """What would be declared of all gradients by this codec."""
        assert self._default is not None, "a step has been taken"
        return replace(self._default, name=self.name, codec=codec, buckets=())

    def stepped(self) -> None:
        """An optimizer has stepped parameters of the model."""
        if self._waits:
            report_of(self.session).stepped(self.name)
        self._stepped, self._waits = True, False
        if self.observer is not None and not self._begun:
            self.observer.stepped()

    def scale_with(self, scale: Callable[[], float]) -> None:
        """A loss scaler is about to apply or drop the last step's result, which was multiplied by ``scale()``, as later ones will be."""
        self._loss_scale, self._last_scale = scale, scale()

    def end_step(self, applied: bool) -> None:
        """A loss scaler has let an optimizer apply the last result, or not. With several optimizers, one that applies it is enough."""
        self._applied, self._dropped, self._waits = self._applied or applied, self._dropped or not applied, False

    @property
    def waits(self) -> bool:
        """Whether the last result is there, and neither applied nor dropped."""
        return self._waits

    def put_back(self) -> None:
        """The last result, which ``waits``, goes back into the residuals, and is cleared. Every rank must do the same."""
        self.end_step(applied=False)
        self.clear()

    def clear(self) -> None:
        """Let go of the model's gradients. Raises UsageError in the middle of a backward."""
        self._refuse_midway("gradients are put back and discarded")
        for reference in self._parameters:
            parameter = reference()
            if parameter is not None:
                parameter.grad = None

    def _leave_to_script(self) -> None:
        """The script goes on without a step: the last result was its to use or to discard."""
        self._waits, self._forgets = False, self._skips.leave()

    def _left(self) -> bool:
        """Whether the last result was cleared without a step: it was the script's to use or to discard."""
        found = [parameter for reference in self._parameters if (parameter := reference()) is not None]
        return self._waits and not any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in found)

    def state(self) -> dict[str, Any]:
        """What codecs keep of these gradients, in ``saved``'s form. Every rank must ask, between two steps."""
        self._refuse_midway()
        if self._left():
            self._leave_to_script()
        unsaved = self._waits and not self._skips.by_hand  # what is still in p.grad is not saved
        kept = self.residuals.collect(unsaved or (self._dropped and not self._applied), self._forgets)
        header = {"format": saved.FORMAT, "rank": self.session.rank, "size": self.session.size}
        return {**header, "loss_scale": self._last_scale, "rates": [], **saved.pack({GRADIENTS: kept})}

    def go_on(self, states: Sequence[saved.State]) -> None:
        """Go on from the states of this rank, or of all ranks. Every rank must, between two steps. Raises UsageError for what does not fit."""
        self._refuse_midway()
        checked = saved.check_states(states, self.session.rank, self.session.size)
        self.residuals.restore(saved.share_of(checked, GRADIENTS, self.session.rank, self.session.size))
        self._last_scale, _ = saved.units_of(checked[0])
        self._fresh_units = True
        self._applied = self._dropped = self._waits = self._forgets = False
        self._give_up_layout()

    def switch(self, choice: Choice) -> None:
        """From the next step on, gradients travel by this choice. Every rank must call it between the same two steps. What codecs keep goes along."""
        self._refuse_midway("plans are switched")
        self._next = choice

    def _take_next(self) -> None:
        """Give up the layout: the tensors are declared anew when all gradients of this step have come."""
        if self._next is None:
            return
        self.choice, self._next = self._next, None
        if self._layout is not None:
            self.residuals.replace(self._dropped and not self._applied)
            self._applied = self._dropped = False  # a result that was dropped is in what has been collected
            self._give_up_layout()

    def _give_up_layout(self) -> None:
        self._layout, self._buckets, self._bucket_of = None, [], {}

    def _refuse_midway(self, what: str = "residuals are saved and loaded") -> None:
        if self._begun:
            raise UsageError(f"{what} between two steps: after step(), before the next backward()")

    def _begin(self) -> None:
        """The first bucket of a step fixes the flags of all its submissions, so that they are the same on all ranks."""
        self.session.check()
        if self.observer is not None:
            self.observer.begins()
        now = self._last_scale if self._loss_scale is None else self._loss_scale()
        if self._fresh_units and self._loss_scale is None:  # the scaler tells of itself after this backward
            now = loss_scale.latest(default=now)
        self._fresh_units = False
        self._take_next()
        self._previous_skipped = self._dropped and not self._applied
        self._rescale = max(-MAX_RESCALE, min(now / self._last_scale, MAX_RESCALE)) if self._last_scale else 1.0
        self._last_scale = now
        if self._stepped or self._applied:
            self._skips.step()
        elif self._waits and self._adds_up is False:
            self._leave_to_script()
        if self._forgets:
            self._rescale = 0.0
        self._waits = False
        self._applied = self._dropped = self._stepped = self._forgets = False
        self._begun = True

    def _watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """From the next backward on, see before it adds to these whether it adds to the last result."""
        for parameter in parameters:
            index = self._index(parameter)
            if index not in self._watched and parameter.requires_grad:
                self._watched.add(index)
                parameter.register_hook(functools.partial(_coming, weakref.ref(self), self._parameters[index]))  # type: ignore[no-untyped-call]

    def coming(self, parameter: torch.Tensor) -> None:
        """Backward is about to add to the parameter's gradient. Runs in autograd's thread."""
        self._backward_came = True
        if self._waits and self._adds_up is None:
            self._adds_up = parameter.grad is not None and bool(parameter.grad.any())

    def _declare(self) -> None:
        """All gradients have come: declare them, in the order in which they came, and wait until every rank has declared them."""
        specs: dict[int, TensorSpec] = {}
        used = []
        for arrival in self._held:
            for parameter, gradient in zip(arrival.parameters, arrival.gradients, strict=True):
                index = self._index(parameter)
                name = self._names[index]
                specs[index] = TensorSpec(name, tuple(gradient.shape), dtype_name(gradient, f"gradient of {name!r}"))
                if takes_part(parameter, gradient):
                    used.append(index)
        missing = [name for index, name in enumerate(self._names) if index not in specs]
        if missing:
            raise UsageError(
                f"DDP did not reduce the gradient of {missing[0]!r} in the first step; freeze parameters before DDP wraps the model"
            )
        config, tensors = self.session.config, tuple(specs[index] for index in range(len(self._names)))
        self._layouts += 1
        plan = plan_for(self.session, self.choice, f"plan {self._layouts} of {self.name}")
        plan = None if plan is None else of_model(plan, tensors, self.session)
        buckets = declared_buckets(plan, tensors, self.session) if plan is not None else ()
        if self.choice.rule is not None:
            parameters = {self._index(p): p for arrival in self._held for p in arrival.parameters}
            buckets = buckets_by_rule(self.choice.rule, tensors, [parameters[index] for index in range(len(tensors))], config.fuse_bytes)
        default = Declaration(
            name=self.name if self._layouts == 1 else f"{self.name}.{self._layouts}",
            kind="plan", tensors=tensors, codec=self.choice.codec, mean=True, order=tuple(specs), used=tuple(sorted(used)),
            part_bytes=config.part_bytes, fuse_bytes=config.fuse_bytes, min_compress_bytes=config.min_compress_bytes,
            buckets=buckets,
        )  # fmt: skip
        self._default = default
        declaration = self.residuals.declaration(default)
        self._layout = self.session.declare(declaration)
        on_gpu = config.gpu_codecs and (not buckets or self.choice.rule is not None)  # a plan itself says where
        on_device = on_gpu and all(engine_of(gradient) is not None for arrival in self._held for gradient in arrival.gradients)
        if config.layout_out and self.session.rank == 0 and self.name == "ddp0":
            write_layout(config.layout_out, self._layout, self.session, on_device)
        if self.name == "ddp0":
            leave_for_trace(self.session, plan, self._layout, on_device)
        report_of(self.session).laid_out(self._layout)
        self.residuals.add(self._layout, declaration)
        self._buckets = [_Bucket.of(self._layout, bucket, on_gpu) for bucket in self._layout.buckets]
        self._bucket_of = {index: bucket for bucket in self._buckets for index in bucket.tensors}

    def _index(self, parameter: torch.Tensor) -> int:
        if not self.knows(parameter):
            raise UsageError(
                f"{self.name}: DDP reduces a parameter of shape {list(parameter.shape)} that was not there in the first step; "
                f"wrap the model again after parameters were added"
            )
        return self._indices[id(parameter)]

    def _place(self, arrival: Arrival) -> None:
        """Put the arrival's gradients into psgc's buckets, and submit the buckets that are now complete."""
        touched: dict[int, _Bucket] = {}
        for parameter, gradient in zip(arrival.parameters, arrival.gradients, strict=True):
            index = self._index(parameter)
            bucket = self._bucket_of.get(index)
            if bucket is None:
                continue  # a tensor without elements is in none
            if index in bucket.gradients:
                raise UsageError(f"DDP reduced the gradient of {self._names[index]!r} twice in a step: did a backward end with an error?")
            bucket.gradients[index] = gradient
            bucket.takes_part = bucket.takes_part or takes_part(parameter, gradient)
            touched[bucket.index] = bucket
        for bucket in touched.values():
            if len(bucket.gradients) == len(bucket.tensors):
                self._submit(bucket)
        self._open.append((arrival, list(touched.values())))
        self._hand_over()

    def _submit(self, bucket: _Bucket) -> None:
        assert self._layout is not None
        bucket.buffer.bind([bucket.gradients[index] for index in bucket.tensors])
        bucket.ticket = self.session.submit(
            self._layout, bucket.index, bucket.buffer, skip=not bucket.takes_part, previous_skipped=self._previous_skipped,
            rescale=self._rescale,
        )  # fmt: skip

    def _hand_over(self) -> None:
        """Complete, in order, the futures of those of DDP's buckets whose tensors have all been sent, as soon as the results arrive."""
        while self._open and all(bucket.ticket is not None for bucket in self._open[0][1]):
            arrival, buckets = self._open.pop(0)
            tickets = [bucket.ticket for bucket in buckets if bucket.ticket is not None]
            then = functools.partial(self._over, time.monotonic()) if arrival.last else _nothing
            self._completer.complete_after(tickets, arrival.completion, then)

    def _over(self, left: float) -> None:
        """The step's last result has come. left: when DDP handed the last bucket over; the trainer has waited since then."""
        if self.observer is not None:
            self.observer.delivered()
        report = report_of(self.session)
        report.waited(self.name, time.monotonic() - left)
        report.step_over(self.name, untold=True)

    def _finish(self) -> None:
        """DDP has no more buckets in this step. Raises UsageError where one of psgc's is not complete, which would wait for ever."""
        for bucket in self._buckets:
            if bucket.ticket is None:
                absent = next(self._names[index] for index in bucket.tensors if index not in bucket.gradients)
                raise UsageError(f"DDP did not reduce the gradient of {absent!r} in this step, as it did in the first; psgc cannot go on")
            bucket.reset()
        if self.observer is not None:
            self.observer.leaving()
        self.steps += 1
        self._begun, self._waits, self._adds_up = False, self._backward_came, None
        self._stepped = not self._backward_came  # as the other ranks do
        self._backward_came = not self._watched


def _coming(exchange: weakref.ref[DdpExchange], parameter: weakref.ref[torch.Tensor], _gradient: torch.Tensor) -> None:
    found, of = exchange(), parameter()
    if found is not None and of is not None:
        found.coming(of)


def _nothing() -> None:
    """The callback of buckets other than the step's last."""


def takes_part(parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether this rank has a gradient. For a parameter that it did not use, DDP's bucket has zeros, but p.grad is None."""
    return parameter.grad is not None or bool(gradient.any())


def exchanges_made() -> int:
    """How many there have been so far."""
    return _made


def exchanges_of(optimizer: torch.optim.Optimizer) -> list[StepExchange]:
    """The exchanges that carry gradients of the optimizer's parameters."""
    return [
        exchange for exchange in _exchanges
        if any(exchange.knows(parameter) for group in optimizer.param_groups for parameter in group["params"])
    ]  # fmt: skip
