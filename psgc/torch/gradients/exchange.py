"""One exchange of gradients with the other ranks: what all front ends share.

Owns the buckets and their submissions, which all carry the flags of one step; the switch to another choice; and what codecs keep. A front end says
when a bucket may leave, who takes the mean, and when a step is over:

    in_backward   DistributedOptimizer: as soon as backward has finished the bucket; p.grad; when the last backward is over, or when the trainer asks
    ddp.gradients DDP's hook: as soon as DDP has handed over all of it; DDP's own buckets; with DDP's last bucket
    unbarriered   CrossBarrier: as soon as backward has finished it; an update of its parameters; for each layer, before its next forward
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

import torch

from psgc.layout import BucketSpec, Declaration, Layout, TensorSpec
from psgc.torch.gradients.buckets import Gradient, SentBucket
from psgc.torch.gradients.last_step import LastStep, StepFlags
from psgc.torch.gradients.layouts import Declared, Layouts
from psgc.torch.gradients.observer import Observer
from psgc.torch.gradients.skips import Skips
from psgc.torch.plans.choice import Choice
from psgc.torch.session.run_report import report_of
from psgc.torch.state.carried import CarriedResiduals, add_carried
from psgc.torch.state.residuals import Kept, Residuals
from psgc.worker.session import Session

B = TypeVar("B", bound=SentBucket)


class GradientExchange(Generic[B]):
    """See the module's text. rates: reads the parameter groups' learning rates as they are now; None: residuals do not follow them.
    choice, whole: as of ``Layouts``.

    specs: of all gradients that are known so far. buckets: of the layouts by which they travel now.
    observer: who times this rank's steps; None between two steps ends it.
    """

    def __init__(
        self, session: Session, name: str, choice: Choice, rates: Callable[[], tuple[float, ...]] | None = None, whole: bool = False
    ) -> None:
        self.session, self.name = session, name
        self.specs: tuple[TensorSpec, ...] = ()
        self.buckets: list[B] = []
        self.last = LastStep(rates)
        self.observer: Observer | None = None
        self._layouts = Layouts(session, name, choice, whole)
        self._carried = CarriedResiduals()  # of a session that this process has left

    @property
    def choice(self) -> Choice:
        """What gradients travel by now."""
        return self._layouts.choice

    @property
    def residuals(self) -> Residuals:
        return self._layouts.residuals

    @property
    def declared(self) -> int:
        """How many of ``specs`` are in a layout now: the first ones."""
        return self._layouts.declared

    @property
    def layouts(self) -> list[Layout]:
        """By which the gradients travel now."""
        return list({bucket.layout.name: bucket.layout for bucket in self.buckets}.values())

    @property
    def on_gpu(self) -> bool:
        """Whether gradients on a GPU are encoded there where no plan says where."""
        return self.session.config.gpu_codecs

    def proposed(self, codec: str) -> Declaration:
        """What would be declared of all gradients by this codec, in the order of the present layouts."""
        names = {spec.name: index for index, spec in enumerate(self.specs)}
        order = [names[bucket.layout.tensors[i].name] for bucket in self.buckets for i in bucket.bucket.tensors]
        return self._layouts.proposed(self.specs, codec, tuple(order))

    def switch(self, choice: Choice) -> None:
        """From the next step on, gradients travel by this choice. Every rank must call it between the same two steps. What codecs keep goes along."""
        self._layouts.switch(choice)

    def begin(self) -> None:
        """A step begins, if none is under way: make a switch that is due, now that the outcome of the last step is known, and fix the step's flags."""
        if self.last.begun:
            return
        if self._layouts.take_next(self.last.was_put_back):
            self.last.settle()  # a result that was put back is in what has been collected
            self._give_up_layouts()
        self.last.begin()

    def declare(
        self, fresh: tuple[TensorSpec, ...], parameters: Sequence[torch.Tensor], order: tuple[int, ...], used: Sequence[int],
        fused: tuple[BucketSpec, ...] = (), awaited_singly: bool = False,
    ) -> Iterator[Declared]:  # fmt: skip
        """Declare those of ``specs`` that are in no layout yet; see ``Layouts.declare``."""
        return self._layouts.declare(fresh, parameters, order, used, fused, awaited_singly)

    def submit(self, bucket: B, skip: bool) -> None:
        """Send the bucket, to whose buffer this step's gradients are bound. skip: this rank has none of them."""
        assert self.last.flags is not None
        bucket.ticket = self.session.submit(
            bucket.layout, bucket.bucket.index, bucket.buffer, skip=skip, previous_skipped=self.last.flags.previous_skipped,
            rescale=self.last.rescale(bucket.group),
        )  # fmt: skip

    def wait(self) -> None:
        """Wait for all that has been submitted. Raises what ended the job."""
        report_of(self.session).wait(self.name, [bucket.ticket for bucket in self.buckets if bucket.ticket is not None])

    def kept(self, saved: bool = True) -> Kept:
        """What codecs keep of the gradients between two steps. saved: for a state, which has nothing of p.grad; else the script keeps p.grad."""
        return self.residuals.collect(self.last.unsaved if saved else self.last.was_put_back, self.last.forgets)

    def go_on(self, units: StepFlags, skips: Skips) -> None:
        """Resume from residuals of an earlier job, in these units, and from its counts: existing layouts are dropped, and the next step declares new ones.
        Raises UsageError in the middle of a step."""
        self.last.go_on(units, skips)
        self._give_up_layouts()

    def leave(self) -> None:
        """The session ends: take along what codecs keep."""
        kept = self.kept(saved=False)
        self._carried.take(kept.tensors, kept.servers, self.session.size)

    def pay(self, gradients: Iterable[Gradient]) -> None:
        """In the first step after ``rejoin``, add what is carried along to the gradients."""
        for gradient in gradients if self._carried else ():
            carried = self._carried.pop(gradient.spec.name, self.session.size, self.last.rescale(gradient.spec.group))
            if carried is not None:
                gradient.look(add_carried(gradient.parameter, carried))

    def rejoin(self, session: Session) -> None:
        """Go on in another session: all gradients are declared anew in the first step."""
        self.session = session
        self.last.rejoin()
        self._layouts.rejoin(session)
        self._give_up_layouts()

    def _give_up_layouts(self) -> None:
        for bucket in self.buckets:
            bucket.release()
        self._layouts.give_up()
        self.buckets = []
