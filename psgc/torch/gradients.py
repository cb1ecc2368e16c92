"""A parameter's gradient between two synchronizations, and the buckets that gradients travel in.

Owns what is known of one gradient (did its hook run, is it still what the hook saw) and of one bucket. Decides nothing about when:
``exchange`` does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from psgc.errors import UsageError
from psgc.layout import Bucket, Layout, TensorSpec
from psgc.torch.buffers import TensorsBuffer, staging_dtype
from psgc.worker.session import Ticket


@dataclass(slots=True, eq=False)
class Gradient:
    """One parameter, and what is known of its gradient since the last synchronization.

    passes: backwards that have added to it. seen, version: p.grad when it was last looked at; None while it takes no part.
    zero, zero_version: p.grad as zero_grad(set_to_none=False) left it.
    """

    parameter: torch.Tensor
    spec: TensorSpec
    passes: int = 0
    seen: torch.Tensor | None = None
    version: int = 0
    zero: torch.Tensor | None = None
    zero_version: int = 0
    bucket: GradientBucket | None = None

    def look(self, grad: torch.Tensor) -> None:
        """This gradient takes part in the coming step. Raises UsageError for one that psgc cannot carry."""
        if grad.layout != torch.strided:
            raise UsageError(f"gradient of {self.spec.name!r} is sparse; psgc carries dense gradients: use sparse=False in its layer")
        if tuple(grad.shape) != self.spec.shape:
            raise UsageError(
                f"gradient of {self.spec.name!r} is of shape {list(grad.shape)}, but it was declared as {list(self.spec.shape)}; "
                f"build a new DistributedOptimizer when parameters change their shape"
            )
        self.seen, self.version, self.zero = grad, grad._version, None

    def look_again(self) -> None:
        """Before the step leaves: take p.grad along if it holds anything, and see that nobody has changed what the hook saw."""
        grad = self.parameter.grad
        if not self.passes:
            if grad is not None and not (grad is self.zero and grad._version == self.zero_version):
                self.look(grad)
        elif grad is not self.seen or grad is None or grad._version != self.version:
            raise UsageError(
                f"gradient of {self.spec.name!r} was changed between backward and its synchronization, when it may be under way; "
                f"call optimizer.synchronize() before changing gradients (clipping, for instance)"
            )

    def note_zero(self) -> None:
        """zero_grad has filled p.grad with zeros: until it changes it takes no part."""
        self.zero = self.parameter.grad
        self.zero_version = 0 if self.zero is None else self.zero._version

    def reset(self) -> None:
        self.passes, self.seen = 0, None


@dataclass(slots=True, eq=False)
class GradientBucket:
    """One bucket of a declared layout. waiting: gradients that backward has yet to finish before the bucket may leave."""

    layout: Layout
    bucket: Bucket
    gradients: tuple[Gradient, ...]
    buffer: TensorsBuffer
    waiting: int
    ticket: Ticket | None = None

    @classmethod
    def of(cls, layout: Layout, bucket: Bucket, declared: list[Gradient]) -> GradientBucket:
        """declared: the gradients of the layout's tensors, in its order."""
        gradients = tuple(declared[i] for i in bucket.tensors)
        buffer = TensorsBuffer([g.spec.shape for g in gradients], staging_dtype(bucket.codec, bucket.dtype))
        made = cls(layout, bucket, gradients, buffer, len(gradients))
        for gradient in gradients:
            gradient.bucket = made
        return made

    @property
    def group(self) -> int:
        """The parameter group of all its gradients."""
        return self.gradients[0].spec.group

    @property
    def skip(self) -> bool:
        """No gradient of this rank takes part."""
        return all(gradient.seen is None for gradient in self.gradients)

    def bind(self) -> None:
        """Hand the gradients to the buffer for the step that is about to be submitted."""
        parameters = [gradient.parameter for gradient in self.gradients]
        self.buffer.bind([parameter.grad for parameter in parameters], parameters)

    def deliver(self) -> None:
        """The step is done: gradients that did not exist get made, unless every rank skipped or the parameter was frozen."""
        if not self.buffer.skipped:
            for gradient, made in zip(self.gradients, self.buffer.made, strict=True):
                gradient.zero = None
                if made is not None and gradient.parameter.requires_grad:
                    gradient.parameter.grad = made
        self.reset()

    def reset(self) -> None:
        """Wait for all gradients anew."""
        self.ticket, self.waiting = None, len(self.gradients)
