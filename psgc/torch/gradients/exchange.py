"""One exchange with the other ranks of what an optimizer's steps need from them: what all front ends share.

Owns the buckets and their submissions, which all carry the flags of one step; the switch to another choice; and what codecs keep. A front end
(``front_end.py``) says when a bucket may leave, who takes the mean, and when a step is over:

    in_backward   DistributedOptimizer: as soon as backward has finished the bucket; p.grad; when the last backward is over, or when the trainer asks
    ddp.gradients DDP's hook: as soon as DDP has handed over all of it; DDP's own buckets; with DDP's last bucket
    unbarriered   CrossBarrier: as soon as backward has finished it; an update of its parameters; for each layer, before its next forward
    momenta       OneBitAdam and ZeroOneAdam: as soon as the optimizer has computed it; the optimizer's momenta; within its step
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

from psgc.errors import UsageError
from psgc.layout import BucketSpec, Declaration, Layout, TensorSpec
from psgc.torch.device.engines import engine_of
from psgc.torch.gradients.last_step import LastStep
from psgc.torch.gradients.layouts import Declared, Layouts, refuse_late
from psgc.torch.gradients.observer import UNOBSERVED, Observer
from psgc.torch.gradients.written import Written
from psgc.torch.plans.choice import Choice
from psgc.torch.session import speed
from psgc.torch.session.run_report import report_of
from psgc.torch.state.residuals import Kept, Residuals, among
from psgc.torch.tensors.sent import SentBucket
from psgc.worker.session import Session

B = TypeVar("B", bound=SentBucket)


class GradientExchange(Generic[B]):
    """See the module's text. rates: reads the parameter groups' learning rates as they are now; None: residuals do not follow them. choice, whole, turn,
    sparse: as of ``Layouts``. scaled: as of ``LastStep``.

    specs: of all tensors that are known so far. buckets: of the layouts by which they travel now.
    observer: who times this rank's steps; it is changed between two steps.
    written: by which it is seen whether the script has applied a result by itself; None where a result is applied as soon as it is there.
    """

    def __init__(
        self, session: Session, name: str, choice: Choice, rates: Callable[[], tuple[float, ...]] | None = None, whole: bool = False,
        turn: int = 0, sparse: frozenset[str] = frozenset(), scaled: bool = True,
    ) -> None:  # fmt: skip
        self.session, self.name = session, name
        self.specs: tuple[TensorSpec, ...] = ()
        self.buckets: list[B] = []
        self.last = LastStep(rates, scaled)
        self.observer: Observer = UNOBSERVED
        self._layouts = Layouts(session, name, choice, whole, turn, sparse)
        self.written: Written | None = None
        self._left = Kept(), 1  # what was taken along from a session that this process has left, and how many ranks that had

    @property
    def choice(self) -> Choice:
        """What gradients travel by now."""
        return self._layouts.choice

    @property
    def mean(self) -> bool:
        """Whether gradients are averaged, and not summed. It is changed before any are declared."""
        return self._layouts.mean

    @mean.setter
    def mean(self, mean: bool) -> None:
        self._layouts.mean = mean

    @property
    def backup(self) -> int:
        """How many ranks' gradients a step need not wait for. It is changed before any are declared."""
        return self._layouts.backup

    @backup.setter
    def backup(self, backup: int) -> None:
        self._layouts.backup = backup

    @property
    def sparse(self) -> frozenset[str]:
        """Names of the parameters whose gradients are sparse."""
        return self._layouts.sparse

    @property
    def residuals(self) -> Residuals:
        return self._layouts.residuals

    @property
    def declared(self) -> int:
        """How many of ``specs`` are in a layout now: the first ones."""
        return self._layouts.declared

    @property
    def declarations(self) -> int:
        """How many layouts have been declared in this session."""
        return self._layouts.count

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

    # a step

    def switch(self, choice: Choice) -> None:
        """From the next step on, gradients travel by this choice. Every rank must call it between the same two steps. What codecs keep goes along."""
        self._layouts.switch(choice)

    def redeclare(self) -> None:
        """In the next step, declare all gradients anew: they are others than were declared. As of ``switch``, to the same choice or to the one that is due."""
        self._layouts.redeclare()

    def begin(self) -> None:
        """A step begins, if none is under way: make a switch that is due, now that the outcome of the last step is known, and fix the step's flags."""
        if self.last.begun:
            return
        self.observer.begins()
        if self._layouts.take_next(self.last.was_put_back):
            self.last.settle()  # a result that was put back is in what has been collected
            self._give_up_layouts()
        self.last.begin()

    def check(self, specs: tuple[TensorSpec, ...], parameters: Sequence[torch.Tensor]) -> None:
        """Raise CodecError, naming the tensor, where the choice's codec could not carry these in this job. parameters: whose gradients they are to be."""
        self._layouts.check(specs, parameters)

    def declare(
        self, make: Callable[[Declared], list[B]], fresh: tuple[TensorSpec, ...], parameters: Sequence[torch.Tensor], order: tuple[int, ...],
        used: Sequence[int], fused: tuple[BucketSpec, ...] = (), awaited_singly: bool = False,
    ) -> None:  # fmt: skip
        """Declare those of ``specs`` that are in no layout yet; see ``Layouts.declare``. make: the buckets of each layout."""
        on_host = all(parameter.device.type == "cpu" and engine_of(parameter) is None for parameter in parameters)
        for layout in self._layouts.declare(fresh, parameters, order, used, fused, awaited_singly):
            made = make(layout)
            for bucket in made if on_host else ():
                bucket.lie_in(self.session.memory(bucket.layout, bucket.bucket.index))
            self.buckets += made

    def submit(self, bucket: B) -> None:
        """Send the bucket."""
        bucket.bind()
        self._send(bucket)

    def _send(self, bucket: B) -> None:
        assert self.last.flags is not None
        bucket.send(self.session, self.last.flags.previous_skipped, self.last.rescale(bucket.group))

    def submit_rest(self) -> None:
        """Send what has not left yet."""
        for bucket in self.buckets:
            if bucket.ticket is None:
                self.submit(bucket)

    def give_up(self, taking_part: bool) -> bool:
        """The step under way is not completed here. taking_part: a backward raised when some buckets may have left; the rest is then skipped, because the other
        ranks wait for it. Returns whether this rank has so taken part in the step."""
        raised = taking_part and bool(self.buckets)
        for bucket in self.buckets if raised else ():
            if bucket.ticket is None:
                bucket.bind_nothing()
                self._send(bucket)
        self.session.wait([bucket.ticket for bucket in self.buckets if raised and bucket.ticket is not None])
        for bucket in self.buckets:
            if raised:
                bucket.arrive()
            bucket.reset()
        self.last.give_up(raised)
        self.leave_to_script()
        return raised

    def wait(self, buckets: Sequence[B] | None = None) -> None:
        """Wait for what has been submitted of these buckets; None: of all. Raises what ended the job."""
        report_of(self.session).wait(self.name, [b.ticket for b in (self.buckets if buckets is None else buckets) if b.ticket is not None])
        speed.look(self.session)

    def deliver(self) -> None:
        """The step under way is over: its result is in p.grad."""
        self.last.deliver()
        if self.written is not None:
            self.written.note()

    def end_step(self, applied: bool = True) -> None:
        """An optimizer has run its step, or the last result is to be put back. With several optimizers, one that applies it is enough. A step that has
        written to no parameter has applied nothing: another optimizer may do so, or the script throws the result away. Nothing ends while a step is under way.
        """
        if self.last.begun or (applied and self.last.waits and self.written is not None and not self.written.by_step()):
            return
        if self.last.end(applied):
            report_of(self.session).step_over(self.name)
            self.observer.stepped()

    def leave_to_script(self) -> None:
        """The script goes on without a step: a result that was delivered was its to use or to discard."""
        if self.last.outcome == "delivered":
            self.last.leave(used=self._applied_by_hand)
            report_of(self.session).left_to_script(self.name)

    @property
    def _applied_by_hand(self) -> bool:
        return self.written is not None and self.written.since()

    # what codecs keep

    def kept(self, saved: bool = True) -> Kept:
        """What codecs keep between two steps. saved: for a state, which has nothing of p.grad, unless parameters have it already; else the script keeps
        p.grad."""
        last = self.last
        unsaved = last.was_put_back if not saved else last.unsaved and not (last.waits and self._applied_by_hand)
        return self.residuals.collect(unsaved, last.forgets)

    def restore(self, kept: Kept) -> None:
        """Go on from what an earlier job kept: existing layouts are dropped, and the next step declares new ones."""
        self.residuals.restore(kept)
        self._give_up_layouts()

    # of one session and the next

    def refuse_leaving(self) -> None:
        """Raise UsageError in the middle of a step, or where ``auto`` or a profile observes steps."""
        self.last.refuse_midway()
        refuse_late(self.backup, "suspend()")
        if self.observer is not UNOBSERVED:
            raise UsageError("suspend(): auto and PSGC_PROFILE observe the steps of one job; name a codec or a plan, or start a new job")

    def leave(self) -> None:
        """The session ends: take along what codecs keep."""
        self._left = self.kept(saved=False), self.session.size

    def rejoin(self, session: Session) -> None:
        """Go on in another session: all gradients are declared anew in the first step, and what was taken along is sent with them."""
        self.session = session
        self.last.rejoin()
        self._layouts.rejoin(session)
        self._give_up_layouts()
        self.residuals.bring(among(*self._left, session.size))

    def _give_up_layouts(self) -> None:
        for bucket in self.buckets:
            bucket.release()
        self._layouts.give_up()
        self.buckets = []
