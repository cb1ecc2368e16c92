"""The mean that a step left in a parameter's p.grad. It is the same on all ranks, and takes no part in a later step, to which only what is added to it belongs.

So before a backward adds to p.grad, a mean that is unchanged is set aside, and at the step's end it is put back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils.weak import TensorWeakRef


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

    def moved(self, grad: torch.Tensor | None, to: torch.Tensor) -> Noted:
        """The same of ``to``, to which ``grad`` has been copied, where it was noted of ``grad``."""
        if grad is None or not self.same(grad):
            return self
        tensor = TensorWeakRef(to) if isinstance(self.tensor, TensorWeakRef) else to
        return Noted(tensor, to._version - (grad._version != self.version))


class LastMean:
    """Of one parameter. aside: a mean that p.grad has made room for, to be added to what comes. view: the place in its bucket's memory that what comes is put
    into (``views``), if it has one. old: p.grad at a moment from which on it is not to be used; used_old: backward has added to it."""

    __slots__ = ("_noted", "_parameter", "aside", "old", "used_old", "view")

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = parameter
        self._noted: Noted | None = None  # as the last synchronization, or the step on it, left it, held weakly
        self.aside: torch.Tensor | None = None
        self.view: torch.Tensor | None = None
        self.old: Noted | None = None
        self.used_old = False

    def note(self) -> None:
        """Remember p.grad as the mean that all ranks have."""
        grad = self._parameter.grad
        self._noted = None if grad is None else Noted(TensorWeakRef(grad), grad._version)

    def note_old(self, old: bool) -> None:
        """What is in p.grad, if anything, belongs to the time before this moment. old: it is there, and to be seen if it is used."""
        grad = self._parameter.grad
        self.old, self.used_old = Noted(TensorWeakRef(grad), grad._version) if old and grad is not None else None, False

    @property
    def has_old(self) -> bool:
        """Whether p.grad has something in it since ``note_old``, or from then."""
        return self.used_old or (self.old is not None and self.old.still(self._parameter.grad))

    def note_step(self) -> None:
        """The optimizer has stepped on the mean: the trainer's changes to it (clipping) are the same on all ranks, too."""
        grad, noted = self._parameter.grad, self._noted
        if grad is not None and noted is not None and grad._version != noted.version and noted.same(grad):
            self.note()

    def forget(self) -> None:
        """What is in p.grad, or was set aside, is no mean."""
        self._noted = self.aside = None

    @property
    def is_there(self) -> bool:
        """Whether p.grad is the tensor of the mean, changed or not."""
        return self._noted is not None and self._noted.same(self._parameter.grad)

    @property
    def is_kept(self) -> bool:
        """Whether p.grad has the mean in it, as it was or changed (clipped, for instance), but not zeroed."""
        grad, noted = self._parameter.grad, self._noted
        return grad is not None and noted is not None and (noted.still(grad) or (noted.same(grad) and bool(grad.any())))

    def set_aside(self) -> bool:
        """Set p.grad aside if it is the unchanged mean, so that backward adds to an empty one. True if it was set aside."""
        grad = self._parameter.grad
        if self.old is not None and self.old.still(grad):
            self.used_old = True
        if grad is None or self._noted is None or not self._noted.still(grad):
            return False
        self.aside, self._parameter.grad, self._noted = grad.clone() if grad is self.view else grad, None, None
        return True

    def moved(self, to: torch.Tensor) -> None:
        """p.grad has been copied to ``to``, and is about to be that."""
        self._noted = None if self._noted is None else self._noted.moved(self._parameter.grad, to)

    def put_back(self) -> None:
        """Add what was set aside to p.grad again."""
        aside, self.aside, grad = self.aside, None, self._parameter.grad
        if aside is None:
            return  # as in nearly every step: what no_grad costs is a quarter of what psgc does for a small gradient
        if grad is None:
            self._parameter.grad = aside
            self.note()
            return
        with torch.no_grad():
            if aside.requires_grad:
                self._parameter.grad = aside + grad
            elif grad is self.view:
                grad.add_(aside)
            else:
                self._parameter.grad = aside.add_(grad)
