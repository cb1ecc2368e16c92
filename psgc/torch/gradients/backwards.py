"""When a step is over: after how many backwards, and whether at the end of the last one or when the trainer asks.

Owns the count of backwards, in all and by gradient, and the awaited end of the one that hooks run in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from psgc.errors import UsageError
from psgc.torch.gradients import backward_end
from psgc.torch.gradients.backward_end import BackwardEnd
from psgc.torch.gradients.buckets import Gradient
from psgc.torch.gradients.finishing import Finisher, finish


class Backwards:
    """passes: backwards that add up to a step. late: a step is over when the trainer asks for its gradients, not at the end of backward. held: backwards only
    accumulate for now. number: of the backward that hooks run in."""

    def __init__(self, passes: int, late: bool) -> None:
        self.passes, self.late, self.held = passes, late, False
        self.number = 0
        self._over = 0  # those of this step
        self._end: BackwardEnd | None = None
        self._tells_end = backward_end.AVAILABLE  # late, too: that a backward has raised is told by an end that never comes
        if not self._tells_end:
            self._deliver_late("queue_callback is missing")

    @property
    def lost(self) -> bool:
        """Whether the last backward raised."""
        return self._end is not None and self._end.lost

    @property
    def entered(self) -> bool:
        """Whether nothing is to be awaited for the backward that hooks run in, because its end is awaited already or never told."""
        return not self._tells_end or (self._end is not None and self._end.ahead)

    def enter(self, waiter: Finisher) -> None:
        """A new backward has begun: when it is over, the waiter's step may be."""
        try:
            self._end = backward_end.await_end(waiter, finish)
        except (AttributeError, RuntimeError, TypeError) as error:
            self._end = None
            self._deliver_late(str(error))

    def _deliver_late(self, reason: str) -> None:
        """The end of backward cannot be detected: the trainer asks for its gradients from now on."""
        self._tells_end = False
        if not self.late:
            self.late = True
            backward_end.warn_once(reason)

    def count(self, gradient: Gradient) -> int:
        """A backward has added to the gradient. Returns how many have in this step; 0 if that does not count."""
        if self.held:
            return 0
        if gradient.backward == self.number and not self.late:
            gradient.note_repeat()
            return 0
        gradient.backward = self.number
        return gradient.count_pass(self.passes)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Inside, backwards only accumulate."""
        before, self.held = self.held, True
        try:
            yield
        finally:
            self.held = before

    def end(self, begun: bool) -> bool:
        """A backward is over. begun: whether a step is under way, which no hook has synchronized already. Returns whether it counts."""
        if self.late:
            return False
        self.number += 1
        if not begun or self.held:
            return False
        self._over += 1
        return True

    @property
    def complete(self) -> bool:
        """Whether all backwards of this step are over."""
        return self._over >= self.passes

    def set_passes(self, passes: int, begun: bool) -> None:
        """Change how many add up to a step. begun: whether one has added to a gradient of this step. Raises UsageError between a backward and its step."""
        if self._over or begun:
            raise UsageError("set_backward_passes_per_step() between backward() and step(); call it after step()")
        self.passes = passes

    def begin_step(self) -> None:
        """Count the next step's."""
        self._over = 0

    def forget(self) -> None:
        """What backwards have done so far is in no step."""
        self._end, self._over = None, 0
