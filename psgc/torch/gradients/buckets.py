"""A parameter's gradient between two synchronizations, and the buckets that gradients travel in.

Owns the state of one gradient (whether its hook ran, whether it is still what the hook saw) and of one bucket. ``exchange`` decides when
buckets leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from psgc.errors import UsageError
from psgc.layout import TensorSpec
from psgc.torch.gradients.last_mean import LastMean, Noted
from psgc.torch.gradients.layouts import Declared
from psgc.torch.gradients.rows import HOW_SPARSE, RowsBuffer, check_sparse, is_rows
from psgc.torch.gradients.views import move_into_views, move_out
from psgc.torch.tensors.buffers import Array, TensorsBuffer, resolved, shape_of
from psgc.torch.tensors.sent import SentBucket, buffer_of


@dataclass(slots=True, eq=False)
class Gradient:
    """One parameter, and the state of its gradient since the last synchronization.

    rows: it is sparse. passes: backwards that have added to it, ``backward`` the last of them. repeats: one backward has added to it several times.
    seen: p.grad when it was last looked at; None while it takes no part.
    zero: p.grad as zero_grad(set_to_none=False) left it. mean: what the last step left in it.
    """

    parameter: torch.Tensor
    spec: TensorSpec
    rows: bool = False
    passes: int = 0
    backward: int = -1
    repeats: bool = False
    seen: Noted | None = None
    zero: Noted | None = None
    bucket: GradientBucket | None = None
    mean: LastMean = field(init=False)

    def __post_init__(self) -> None:
        self.mean = LastMean(self.parameter)

    def count_pass(self, most: int) -> int:
        """A backward has added to it. most: backwards that make a step. Returns how many have. Raises UsageError for one too many."""
        self.passes += 1
        if self.passes > most:
            raise UsageError(
                f"gradient of {self.spec.name!r} was computed {self.passes} times before step(), but backward_passes_per_step is {most}; "
                f"call step() after each backward, or raise backward_passes_per_step"
            )
        return self.passes

    def resolve(self) -> torch.Tensor | None:
        """p.grad, once it is computed: backward may leave a conjugate (or a negation) that is not yet, in whose memory no mean could be put."""
        grad = self.parameter.grad
        if grad is not None and (computed := resolved(grad)) is not grad:
            self.parameter.grad = grad = computed
        return grad

    def look(self, grad: torch.Tensor) -> None:
        """This gradient, which ``resolve`` gave, takes part in the coming step. Raises UsageError for one that psgc cannot carry."""
        if self.rows:
            check_sparse(self.spec.name, grad)
        elif grad.layout != torch.strided:
            raise UsageError(f"gradient of {self.spec.name!r} is sparse: {HOW_SPARSE}")
        if shape_of(grad) != self.spec.shape:
            raise UsageError(
                f"gradient of {self.spec.name!r} is of shape {list(shape_of(grad))}, but it was declared as {list(self.spec.shape)}; "
                f"build a new DistributedOptimizer when parameters change their shape"
            )
        if grad.dtype != self.parameter.dtype:
            raise UsageError(
                f"gradient of {self.spec.name!r} is {grad.dtype}, and its parameter {self.parameter.dtype}, as which it was declared; leave the parameter's "
                f"grad_dtype as it was"
            )
        self.seen, self.zero = Noted(grad, grad._version), None

    def look_again(self, fixed: bool, changed: str) -> None:
        """Just before the step is sent: let the gradient take part if p.grad holds a contribution of this rank. fixed: p.grad may already be
        in flight, if a hook has seen it; UsageError with ``changed`` is then raised if it was changed."""
        grad = self.resolve()
        if fixed and self.passes:
            if self.seen is None or not self.seen.still(grad):
                raise UsageError(changed.format(name=self.spec.name))
        elif grad is None or self.zeroed or self.mean.set_aside():
            self.seen = None
        else:
            self.look(grad)

    def note_repeat(self) -> None:
        """One backward adds to it again: from now on its bucket leaves only when backward is over. Raises UsageError if it has left."""
        self.repeats = True
        if self.bucket is not None and self.bucket.ticket is not None:
            raise UsageError(
                f"gradient of {self.spec.name!r} was added to in several parts of one backward (reentrant checkpoints that share "
                f"a parameter), in this step for the first time, when it was under way; checkpoint with use_reentrant=False, or run "
                f"backward inside `with optimizer.no_sync():` and call optimizer.synchronize() after it"
            )

    def note_zero(self) -> None:
        """zero_grad has filled p.grad with zeros: until it changes it takes no part."""
        grad = self.parameter.grad
        self.zero = None if grad is None else Noted(grad, grad._version)

    @property
    def zeroed(self) -> bool:
        """Whether p.grad is as zero_grad(set_to_none=False) left it."""
        return self.zero is not None and self.zero.still(self.parameter.grad)

    def replace(self, grad: torch.Tensor) -> None:
        """Have p.grad be ``grad``, to which it has been copied."""
        before = self.parameter.grad
        self.seen, self.zero = (None if noted is None else noted.moved(before, grad) for noted in (self.seen, self.zero))
        self.mean.moved(grad)
        self.parameter.grad = grad

    def reset(self) -> None:
        self.passes, self.backward, self.seen = 0, -1, None
        self.mean.put_back()


@dataclass(slots=True, eq=False)
class GradientBucket(SentBucket):
    """Of gradients in p.grad. waiting: gradients that backward has yet to finish before the bucket may leave. as_views: p.grad are to be views of its
    memory."""

    buffer: TensorsBuffer | RowsBuffer
    gradients: tuple[Gradient, ...] = ()
    waiting: int = 0
    as_views: bool = False

    @property
    def complete(self) -> bool:
        """Whether all its gradients are final, as far as that is known before backward is over."""
        return not self.waiting and not any(gradient.repeats for gradient in self.gradients)

    @classmethod
    def all_of(cls, declared: Declared, gradients: Sequence[Gradient], as_views: bool = False) -> list[GradientBucket]:
        """The buckets of a layout. gradients: those that were to be declared."""
        layout, members, on_gpu = declared
        made = []
        for bucket in layout.buckets:
            own = tuple(gradients[members[i]] for i in bucket.tensors)
            buffer = RowsBuffer(layout, bucket) if is_rows(bucket) else buffer_of(layout, bucket, on_gpu, late=True)
            made.append(cls(layout, bucket, buffer, None, own, len(own), as_views))
            for gradient in own:
                gradient.bucket = made[-1]
        return made

    def release(self) -> None:
        move_out(self.gradients)
        for gradient in self.gradients:
            gradient.bucket = None

    def lie_in(self, memory: Array | None) -> None:
        several = len(self.gradients) > 1
        if not self.as_views:
            if memory is not None and several:
                self.buffer.lie_in(memory)
        elif memory is not None or several:  # else the gradient itself is the bucket
            views = self.buffer.give_views([gradient.parameter for gradient in self.gradients], memory)
            for gradient, view in zip(self.gradients, views, strict=True):
                gradient.mean.view = view

    @property
    def skip(self) -> bool:
        if isinstance(self.buffer, RowsBuffer):
            return False  # rows tell of themselves whether there is a gradient
        return all(gradient.seen is None for gradient in self.gradients)

    def bind(self) -> None:
        move_into_views(self.gradients)
        parameters = [gradient.parameter for gradient in self.gradients]
        grads = [gradient.parameter.grad for gradient in self.gradients]
        if isinstance(self.buffer, RowsBuffer) and self.gradients[0].seen is None:
            grads = [None]  # p.grad has the last mean, or zeros
        self.buffer.bind(grads, parameters)

    def bind_nothing(self) -> None:
        for gradient in self.gradients:
            gradient.seen = None
        self.buffer.bind([None] * len(self.gradients), [gradient.parameter for gradient in self.gradients])

    def arrive(self) -> None:
        self.buffer.arrive()

    def deliver(self) -> None:
        """The step is done: gradients that did not exist get made, unless every rank skipped or the parameter was frozen. Where a rank has one of its own in a
        step that was taken without it, and that all others skipped, it is dropped."""
        self.arrive()
        if self.buffer.skipped:
            for gradient in self.gradients:
                if gradient.seen is not None:
                    gradient.parameter.grad = None
        else:
            for gradient, made in zip(self.gradients, self.buffer.made, strict=True):
                gradient.zero = None
                if made is not None and gradient.parameter.requires_grad:
                    gradient.parameter.grad = made
                gradient.mean.put_back()
                gradient.mean.note()
        self.reset()

    def reset(self) -> None:
        """Wait for all gradients anew."""
        self.ticket, self.waiting = None, len(self.gradients)
