"""A parameter's gradient between two synchronizations, and the buckets that gradients travel in.

Owns the state of one gradient (whether its hook ran, whether it is still what the hook saw) and of one bucket. ``exchange`` decides when
buckets leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.utils.weak import TensorWeakRef

from psgc.errors import UsageError
from psgc.layout import TensorSpec
from psgc.torch.gradients.layouts import Declared
from psgc.torch.tensors.buffers import TensorsBuffer
from psgc.torch.tensors.sent import SentBucket, buffer_of


@dataclass(frozen=True, slots=True, eq=False)
class Noted:
    """A p.grad as it was at one moment. tensor: itself, or a weak reference with which the trainer can free it."""

    tensor: torch.Tensor | TensorWeakRef
    version: int

    def same(self, grad: torch.Tensor | None) -> bool:
        """Whether ``grad`` is the same tensor, changed or not."""
        return grad is not None and grad is (self.tensor() if isinstance(self.tensor, TensorWeakRef) else self.tensor)

    def still(self, grad: torch.Tensor | None) -> bool:
        """Whether it is the same tensor, and unchanged."""
        return grad is not None and grad._version == self.version and self.same(grad)


@dataclass(slots=True, eq=False)
class Gradient:
    """One parameter, and the state of its gradient since the last synchronization.

    passes: backwards that have added to it, ``backward`` the last of them. repeats: one backward has added to it several times.
    seen: p.grad when it was last looked at; None while it takes no part.
    zero: p.grad as zero_grad(set_to_none=False) left it. mean: as the last synchronization, or the step on it, did, held weakly.
    kept: a mean that p.grad made room for, to be added to the next one.
    captured: p.grad as a backward that was captured in a CUDA graph made it, to which each replay writes.
    """

    parameter: torch.Tensor
    spec: TensorSpec
    passes: int = 0
    backward: int = -1
    repeats: bool = False
    seen: Noted | None = None
    zero: Noted | None = None
    mean: Noted | None = None
    kept: torch.Tensor | None = None
    captured: torch.Tensor | None = None
    bucket: GradientBucket | None = None

    def count_pass(self, most: int) -> int:
        """A backward has added to it. most: backwards that make a step. Returns how many have. Raises UsageError for one too many."""
        self.passes += 1
        if self.passes > most:
            raise UsageError(
                f"gradient of {self.spec.name!r} was computed {self.passes} times before step(), but backward_passes_per_step is {most}; "
                f"call step() after each backward, or raise backward_passes_per_step"
            )
        return self.passes

    def look(self, grad: torch.Tensor) -> None:
        """This gradient takes part in the coming step. Raises UsageError for one that psgc cannot carry."""
        if grad.layout != torch.strided:
            raise UsageError(f"gradient of {self.spec.name!r} is sparse; psgc carries dense gradients: use sparse=False in its layer")
        if tuple(grad.shape) != self.spec.shape:
            raise UsageError(
                f"gradient of {self.spec.name!r} is of shape {list(grad.shape)}, but it was declared as {list(self.spec.shape)}; "
                f"build a new DistributedOptimizer when parameters change their shape"
            )
        self.seen, self.zero = Noted(grad, grad._version), None

    def look_again(self, fixed: bool) -> None:
        """Just before the step is sent: let the gradient take part if p.grad holds a contribution of this rank. fixed: p.grad may already be
        in flight, if a hook has seen it; then check that it was not changed."""
        grad = self.parameter.grad
        if fixed and self.passes:
            if self.seen is None or not self.seen.still(grad):
                raise UsageError(
                    f"gradient of {self.spec.name!r} was changed between backward and its synchronization, when it may be under way; "
                    f"change gradients (clipping, for instance) after backward() has returned, under late synchronization after "
                    f"optimizer.synchronize()"
                )
        elif grad is None or (self.zero is not None and self.zero.still(grad)) or self.set_aside():
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

    def note_mean(self) -> None:
        """Remember p.grad as the mean that all ranks have."""
        grad = self.parameter.grad
        self.mean = None if grad is None else Noted(TensorWeakRef(grad), grad._version)

    def note_step(self) -> None:
        """The optimizer has stepped on the mean: the trainer's changes to it (clipping) are the same on all ranks, too."""
        if self.still_mean:
            self.note_mean()

    @property
    def still_mean(self) -> bool:
        """Whether p.grad is the tensor of the last mean, changed or not."""
        return self.mean is not None and self.mean.same(self.parameter.grad)

    @property
    def keeps_mean(self) -> bool:
        """Whether p.grad has the last mean in it, as it was or changed (clipped, for instance), but not zeroed."""
        grad = self.parameter.grad
        return grad is not None and self.mean is not None and (self.mean.still(grad) or (self.mean.same(grad) and bool(grad.any())))

    def set_aside(self) -> bool:
        """Set p.grad aside if it is the unchanged mean of the last synchronization, so that backward adds to an empty one. True if it was set aside."""
        grad = self.parameter.grad
        if self.mean is None or not self.mean.still(grad):
            return False
        self.kept, self.parameter.grad, self.mean = grad, None, None
        return True

    @torch.no_grad()
    def put_back(self) -> None:
        """Add what was set aside to p.grad again."""
        kept, self.kept, grad = self.kept, None, self.parameter.grad
        if kept is not None and grad is not None:
            self.parameter.grad = kept + grad if kept.requires_grad else kept.add_(grad)
        elif kept is not None:
            self.parameter.grad = kept
            self.note_mean()

    def note_replay(self) -> None:
        """A graph has written the captured gradient anew, which no version tells of."""
        self.parameter.grad, self.mean, self.zero, self.kept = self.captured, None, None, None

    @property
    def missed(self) -> bool:
        """Whether what looked like the mean of the last step, and was set aside, may be the gradient of a replay that nobody told of."""
        return self.captured is not None and self.kept is self.captured and self.seen is None

    def reset(self) -> None:
        self.passes, self.backward, self.seen = 0, -1, None
        self.put_back()


@dataclass(slots=True, eq=False)
class GradientBucket(SentBucket):
    """Of gradients in p.grad. waiting: gradients that backward has yet to finish before the bucket may leave."""

    buffer: TensorsBuffer
    gradients: tuple[Gradient, ...] = ()
    waiting: int = 0

    @property
    def complete(self) -> bool:
        """Whether all its gradients are final, as far as that is known before backward is over."""
        return not self.waiting and not any(gradient.repeats for gradient in self.gradients)

    @classmethod
    def all_of(cls, declared: Declared, gradients: Sequence[Gradient]) -> list[GradientBucket]:
        """The buckets of a layout. gradients: those that were to be declared."""
        layout, members, on_gpu = declared
        made = []
        for bucket in layout.buckets:
            own = tuple(gradients[members[i]] for i in bucket.tensors)
            made.append(cls(layout, bucket, buffer_of(layout, bucket, on_gpu, late=True), None, own, len(own)))
            for gradient in own:
                gradient.bucket = made[-1]
        return made

    def release(self) -> None:
        for gradient in self.gradients:
            gradient.bucket = None

    @property
    def skip(self) -> bool:
        return all(gradient.seen is None for gradient in self.gradients)

    def bind(self) -> None:
        parameters = [gradient.parameter for gradient in self.gradients]
        self.buffer.bind([gradient.parameter.grad for gradient in self.gradients], parameters)

    def bind_nothing(self) -> None:
        for gradient in self.gradients:
            gradient.seen = None
        self.buffer.bind([None] * len(self.gradients), [gradient.parameter for gradient in self.gradients])

    def arrive(self) -> None:
        self.buffer.arrive()

    def deliver(self) -> None:
        """The step is done: gradients that did not exist get made, unless every rank skipped or the parameter was frozen."""
        self.arrive()
        if not self.buffer.skipped:
            for gradient, made in zip(self.gradients, self.buffer.made, strict=True):
                gradient.zero = None
                if made is not None and gradient.parameter.requires_grad:
                    gradient.parameter.grad = made
                gradient.put_back()
                gradient.note_mean()
        self.reset()

    def reset(self) -> None:
        """Wait for all gradients anew."""
        self.ticket, self.waiting = None, len(self.gradients)
