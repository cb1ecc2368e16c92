"""Running figures of a worker's steps, which it reports to the scheduler: a few additions a step."""

from __future__ import annotations

import statistics
from collections import deque
from typing import Final, NamedTuple

from psgc.observe.lately import LastSteps

RECENT_STEPS: Final = 64
LONG_S: Final = 2.0  # a step that takes so much longer than the last ones already is told of


class Spent(NamedTuple):
    """Seconds of the training thread so far: that it has waited for psgc, in all; of these, while this rank's own encoding or decoding was under way; and while
    a device had not computed yet what was to leave."""

    waited: float = 0.0
    coding: float = 0.0
    device: float = 0.0


class Figures:
    """steps: the steps that optimizers have applied. exchange_s: time from each step's first submission to its last mean; waited_s: the part of it in which
    the training thread waited. Both leave out each optimizer's first step, which declares tensors and may compile kernels.

    Written by the executor's threads: encoded_at, when an encode that waits for no other rank was last over; made_at, the same on a device, where its kernels
    cannot be told from the model's; arrived_at, when something of other ranks last came."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.steps = 0
        self.exchange_s = self.waited_s = 0.0
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._submitted = 0.0  # when the first bucket of the step under way left; 0.0: none has
        self._waiting = 0.0  # since when the training thread waits for the step under way; 0.0: it does not
        self.plan_version = 0  # layouts that optimizers have had
        self.travels = ""  # the last of these, in words
        self.encoded_at = self.made_at = self.arrived_at = 0.0
        self._elsewhere_s = 0.0  # waited for means, but not in the session's waits
        self._coding_s = self._device_s = 0.0
        self._last = LastSteps()  # of each: computing, coding, waiting
        self._over, self._spent = began, Spent()  # when the last step was over, and what was spent until then

    def submitted(self, now: float) -> None:
        """Note that a bucket is submitted."""
        if not self._submitted:
            self._submitted = now

    def means_came(self, waited_s: float, now: float, counts: bool, rested: bool = True) -> None:
        """Note that all means have come. waited_s: how long the training thread has waited for them; counts: this is not the optimizer's first step; rested:
        it has done so in the session's waits."""
        if self._submitted and counts:
            self.exchange_s += now - self._submitted
            self.waited_s += min(waited_s, now - self._submitted)
        self._submitted = self._waiting = 0.0
        if not rested:
            self._elsewhere_s += waited_s
        began = now - waited_s
        made = min(now, max(began, self.made_at))  # until then, what it waited for was computed on a device
        encoded = min(now, max(made, self.encoded_at))
        self._device_s += made - began
        self._coding_s += encoded - made
        if self.arrived_at:
            self._coding_s += now - max(encoded, min(now, self.arrived_at))

    def waits(self, now: float, counts: bool) -> None:
        """Note that the training thread begins to wait for means. counts: as of ``means_came``."""
        self._waiting = now if counts else 0.0

    def laid_out(self, travels: str) -> None:
        """Note that gradients have got a layout. travels: how they travel by it, in words."""
        self.plan_version += 1
        self.travels = travels

    def so_far(self, now: float) -> tuple[float, float]:
        """exchange_s and waited_s with the wait that is under way: a rank that waits for long is seen to."""
        submitted, waiting = self._submitted, self._waiting
        if not submitted or not waiting:
            return self.exchange_s, self.waited_s
        return self.exchange_s + max(0.0, now - submitted), self.waited_s + max(0.0, now - max(submitted, waiting))

    def spent(self, rested_s: float) -> Spent:
        """What the training thread has spent so far. rested_s: in the session's waits."""
        return Spent(rested_s + self._elsewhere_s, self._coding_s, self._device_s)

    def step_over(self, duration_s: float | None, now: float = 0.0, spent: Spent = Spent(), before: Spent = Spent()) -> None:  # noqa: B008
        """Note that the trainer has applied a step. duration_s: the time since it applied the step before; spent, before: until this step and that one."""
        self.steps += 1
        if duration_s is not None:
            self._recent.append(duration_s)
            self._last.add(now, _split(duration_s, spent, before))
        self._over, self._spent = now, spent

    def lately(self, now: float, rested_s: float) -> list[float]:
        """Of the last steps, in seconds: how long the training thread computes, waits for this rank's own encoding and decoding, and waits in all. None while
        there are too few steps. A step that takes much longer already is that long."""
        found = self._last.medians(now)
        if not found:
            return []
        computes, _, waits = _split(now - self._over, self.spent(rested_s), self._spent)
        if computes + waits < found[0] + found[2] + LONG_S:
            return found
        return [max(found[0], computes), found[1], max(found[2], waits)]

    @property
    def step_s(self) -> float:
        """The median of the last steps."""
        recent = list(self._recent)
        return statistics.median(recent) if recent else 0.0


def _split(duration_s: float, spent: Spent, before: Spent) -> tuple[float, float, float]:
    """A step's time: computing, coding, waiting."""
    waited, coding, device = (now - then for now, then in zip(spent, before, strict=True))
    waits = min(duration_s, max(0.0, waited - device))
    return duration_s - waits, coding, waits
