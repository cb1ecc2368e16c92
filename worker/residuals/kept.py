"""What a bucket keeps between steps, by tensor, so that it can be saved, and loaded in a job with other buckets and options.

Owns saving and loading, and what is inherited; which residual changes when is ``feedback.py``'s. Numbers only. Invariant: what is inherited is added to a
gradient before its parts begin, and is applied once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psgc.errors import UsageError
from psgc.layout import Bucket, Layout, Part
from psgc.worker.device import DeviceBucket
from psgc.worker.executor.control import Agreement
from psgc.worker.residuals.feedback import Feedback, PlacedState
from psgc.worker.residuals.inherited import Inherited
from psgc.worker.residuals.residual import F32, ExactResidual, TensorMemory


class EncodingPlace(NamedTuple):
    """A place of the bucket that encodes. elements: which; agreement: of its part; leads: this rank answers for it, of those that keep the same."""

    elements: slice
    feedback: Feedback
    agreement: Agreement
    leads: bool = True
    state: PlacedState | None = None


class Kept:
    """places: those of all parts. alone: each place has its elements alone, and goes on from what was kept of them under another layout; else, several slots
    of an option and several ranks keep a part of it each, and all of it is added to the first gradient. server_parts: the keys of which servers keep a
    residual, element by element; exact_place: where a saved state has what ``exact`` gives. goes_back: a step that the trainer does not apply goes back into
    residuals, with what was inherited."""

    def __init__(
        self, layout: Layout, bucket: Bucket, places: Sequence[EncodingPlace], alone: bool, server_parts: Sequence[Part], exact_place: str, goes_back: bool
    ) -> None:  # fmt: skip
        self.layout, self.bucket, self.server_parts, self.exact_place = layout, bucket, server_parts, exact_place
        self._alone, self._goes_back, self._places = alone, goes_back, places
        self.inherited: Inherited | None = None

    @property
    def name(self) -> str:
        return f"{self.layout.name}/{self.bucket.index}"

    @property
    def keeps_residual(self) -> bool:
        """Whether encoding keeps an error for the next step."""
        return any(place.feedback.value is not None for place in self._places)

    def tensor_places(self) -> Iterator[tuple[str, slice]]:
        """Where each tensor's elements lie in the bucket."""
        return self.layout.places(self.bucket)

    # a step

    def begin(self, previous_skipped: int, rescale: float) -> None:
        """A step starts. Both are as in ``Session.submit``."""
        if self.inherited is not None and not self.inherited.begin(previous_skipped and not self._goes_back, rescale):
            self.inherited = None

    def add_inherited(self, array: NDArray[Any] | None, device: DeviceBucket | None, slices: Iterable[tuple[int, int]]) -> None:
        """Add these slices of it, each from its first element on, to the gradient, which lies on the host or on the device."""
        for lo, numel in slices if self.inherited is not None else ():
            assert self.inherited is not None
            if device is not None:
                device.add(lo, self.inherited.take(lo, lo + numel))
            elif array is not None:
                self.inherited.add_to(array[lo : lo + numel], lo)

    def ratio(self, gradient: NDArray[Any]) -> float | None:
        """The norm of what encoding has left out so far over that of the gradient of the step that starts; None: nothing is kept on the host, or one of the
        two is not finite, or the gradient is zero."""
        if gradient.dtype != np.float32 or not self.keeps_residual:
            return None
        of_residual = 0.0
        for _, feedback, _, _, _ in self._places:
            if feedback.value is not None and feedback.device is None:
                of_residual += _square(feedback.value.load()) * feedback.rescale**2
        of_gradient = _square(gradient)
        found = math.sqrt(of_residual / of_gradient) if 0 < of_gradient < math.inf and of_residual < math.inf else math.inf
        return found if found < math.inf else None

    # between steps

    def remembered(self, dropped: bool = False) -> dict[str, TensorMemory]:
        """The state between steps, by tensor. None of the bucket's steps may be under way. dropped: the trainer did not apply the last result, and servers have
        not been told so yet."""
        residual, velocity = np.full(self.bucket.numel, -0.0, np.float32), np.zeros(self.bucket.numel, np.float32)  # -0.0 + x is x
        factors: dict[str, F32] = {}
        has_velocity = False
        for elements, feedback, agreement, leads, state in self._places:
            if leads and feedback.value is not None:
                kept, rescale = feedback.kept(dropped or agreement.unapplied)
                residual[elements] += kept.load() * np.float32(rescale)
            if state is None:
                continue
            state.to_host()
            if (saved := state.state.saved) is not None:
                velocity[elements], has_velocity = saved * np.float32(feedback.rescale), True
            factors |= {self.layout.tensor_at(self.bucket, elements.start + first): q for first, q in state.state.factors.items()}
        if self.inherited is not None:
            residual += self.inherited.left(dropped and not self._goes_back)
        has_residual = self.keeps_residual or self.inherited is not None
        memories = {
            name: TensorMemory(
                residual[place].copy() if has_residual else None, velocity[place].copy() if has_velocity else None, factors.get(name)
            )
            for name, place in self.tensor_places()
        }
        return {name: memory for name, memory in memories.items() if any(values is not None for values in memory)}

    def remember(self, memories: Mapping[str, TensorMemory]) -> None:
        """Go on from what was remembered of these tensors; the bucket's other tensors start without state. A residual that has no place of its own is
        inherited: it is added to the first gradient."""
        residual, velocity = np.zeros(self.bucket.numel, np.float32), np.zeros(self.bucket.numel, np.float32)
        factors: dict[int, F32] = {}
        for name, place in self.tensor_places():
            memory = memories.get(name, TensorMemory())
            if memory.residual is not None:
                residual[place] = memory.residual
            if memory.velocity is not None:
                velocity[place] = memory.velocity
            if memory.factors is not None:
                factors[place.start] = memory.factors
        taken = self._alone and self.keeps_residual
        self.inherited = Inherited(residual) if residual.any() and not taken else None
        for elements, feedback, _, _, state in self._places if self._alone else ():
            if feedback.value is not None:
                feedback.value.keep(residual[elements])
            feedback.restored()
            if state is not None:
                if state.state.saved is not None:
                    state.state.restore(velocity[elements])
                own = {first - elements.start: q for first, q in factors.items() if elements.start <= first < elements.stop}
                state.state.restore_factors(own)
                state.from_host()

    def exact(self, dropped: bool = False) -> dict[int, ExactResidual]:
        """Of each place, by number, what it keeps to the last bit, where ``remembered`` gives a sum or rounds."""
        found: dict[int, ExactResidual] = {}
        for number, (_, feedback, agreement, _, state) in enumerate(self._places if self.inherited is None else ()):
            if feedback.value is None:
                continue
            kept, rescale = feedback.kept(dropped or agreement.unapplied)
            if self._alone and feedback.dtype == "float32" and rescale == 1.0:
                continue
            if state is not None:
                state.to_host()
            found[number] = ExactResidual(rescale, kept.bytes.copy(), None if state is None else state.state.saved)
        return found

    def set_exact(self, residuals: Mapping[int, ExactResidual]) -> None:
        """Go on from the ``exact`` of one with the same places, in place of what it inherits; called after ``remember``. Raises UsageError if they differ."""
        values = {number: place.feedback.value for number, place in enumerate(self._places) if place.feedback.value is not None}
        differ = [n for n, exact in residuals.items() if n not in values or values[n].bytes.size != exact.bytes.size]
        if differ and self._alone:
            raise UsageError(f"the saved residual of slice {differ[0]} of {self.name} is another codec's; is it another job's state?")
        if not residuals or differ or not (self._alone or residuals.keys() == values.keys()):
            return
        self.inherited = None
        for number, exact in residuals.items():
            _, feedback, _, _, state = self._places[number]
            values[number].keep_bytes(exact.bytes)
            feedback.restored(exact.rescale)
            if exact.velocity is not None and state is not None and state.state.saved is not None:
                state.state.restore(exact.velocity)
                state.from_host()


def _square(values: NDArray[Any]) -> float:
    """Of the norm; infinity where float32 cannot have it."""
    with np.errstate(over="ignore"):
        return float(np.dot(values, values))
