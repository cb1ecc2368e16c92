"""What became of the last step's result, and the flags that the next step carries because of it.

A result is delivered to p.grad; then an optimizer applies it, or it is put back into the residuals, or the script goes on without a step. A step's first
submission fixes its flags, so that all ranks send the same flags whenever their buckets leave. Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from psgc.errors import UsageError
from psgc.torch.gradients import loss_scale
from psgc.torch.gradients.skips import Skips
from psgc.worker.session import RAISED

NONE_WAIT: Final = (
    "put_back(): no averaged gradients wait for step(); call it in place of step(), after backward() and before zero_grad(), on every rank"
)
MAX_RESCALE: Final = 1e30  # the header carries a float32
Outcome = Literal["settled", "delivered", "put back", "raised"]


@dataclass(frozen=True, slots=True)
class StepFlags:
    """The flags of one step's submissions, the same on all ranks. rates: learning rate of each parameter group; empty if residuals
    do not follow it. forgets: what codecs have kept is forgotten before this step (``skips``)."""

    previous_skipped: int
    loss_scale: float
    rates: tuple[float, ...]
    forgets: bool = False

    def rescale(self, last: StepFlags | None, group: int) -> float:
        """The residual's unit in step ``last`` over its unit in this step. A residual is in units of the scaled gradient and, on request
        for SGD without momentum, of the learning rate times that."""
        if self.forgets:
            return 0.0
        if last is None:
            return 1.0
        factor = self.loss_scale / last.loss_scale if last.loss_scale else 1.0
        if group < min(len(last.rates), len(self.rates)):
            before, now = last.rates[group], self.rates[group]
            if before and now:
                factor *= before / now
        return max(-MAX_RESCALE, min(factor, MAX_RESCALE))


class LastStep:
    """See the module's text. rates: reads the parameter groups' learning rates as they are now; None: residuals do not follow them. scaled: what is sent may
    be gradients of a scaled loss, and is not what an optimizer has made of them.

    outcome: what became of the last step: still "delivered" in p.grad; "settled": an optimizer has applied it, or the script went on without, and used or
    discarded the gradients as it liked; or "put back" (the loss scaler skipped it, or put_back() was called), which the next step's flag tells the
    servers, so that it goes back into the residual. "raised": put back because this rank's backward raised after some of its gradients had left.
    flags: of the step under way; None between two steps. skips: counts of steps, and of results without one.
    """

    def __init__(self, rates: Callable[[], tuple[float, ...]] | None = None, scaled: bool = True) -> None:
        self.outcome: Outcome = "settled"
        self.flags: StepFlags | None = None
        self._sent: StepFlags | None = None  # of the last step
        self._loaded = False  # they were loaded, and no step has been taken since
        self.skips, self._forgets = Skips(), False
        self._rates, self._follows, self._scaled = rates or (lambda: ()), rates is not None, scaled
        self._loss_scale: Callable[[], float] | None = None

    @property
    def follows_rates(self) -> bool:
        """Whether residuals follow learning rates, so that tensors of two parameter groups need buckets of their own."""
        return self._follows

    @property
    def begun(self) -> bool:
        """Whether a step is under way."""
        return self.flags is not None

    @property
    def waits(self) -> bool:
        """Whether the last result is there, and nobody has said what becomes of it."""
        return self.outcome == "delivered" and not self.begun

    @property
    def was_put_back(self) -> bool:
        return self.outcome in ("put back", "raised")

    @property
    def forgets(self) -> bool:
        """Whether what codecs keep is forgotten before the next step."""
        return self._forgets

    @property
    def unsaved(self) -> bool:
        """Whether the last result is in no parameter: what is still in p.grad is not saved, and counts as put back, but in scripts that use it by hand."""
        return self.was_put_back or (self.outcome == "delivered" and not self.skips.by_hand)

    @property
    def units(self) -> StepFlags:
        """The flags of the last step that was sent: the units of its residuals. Raises UsageError in the middle of a step."""
        self.refuse_midway()
        return self._sent or StepFlags(False, self._scale(), self._rates())

    def refuse_midway(self, what: str = "residuals are saved and loaded") -> None:
        """Raise UsageError while a step is under way."""
        if self.begun:
            raise UsageError(f"{what} between two steps: after step(), before the next backward()")

    def refuse_none(self) -> None:
        """Raise UsageError unless averaged gradients wait for step(), or are put back because this rank's backward raised."""
        if self.outcome in ("settled", "put back"):
            raise UsageError(NONE_WAIT)

    def begin(self) -> None:
        """Fix the flags of the step that is about to be sent."""
        skipped = RAISED if self.outcome == "raised" else self.outcome == "put back"
        self.flags, self._forgets = StepFlags(skipped, self._scale(), self._rates(), self._forgets), False

    def _scale(self) -> float:
        if self._loss_scale is not None:
            return self._loss_scale()
        if not self._loaded or self._sent is None or self._sent.loss_scale == 1.0:
            return 1.0
        return loss_scale.latest(default=1.0)  # the scaler tells of itself after this backward

    def rescale(self, group: int = 0) -> float:
        """Of the step under way, for this parameter group's residuals."""
        assert self.flags is not None
        return self.flags.rescale(self._sent, group)

    def deliver(self) -> None:
        """The step under way is over: its result is in p.grad."""
        self._sent, self.flags, self._loaded, self.outcome = self.flags, None, False, "delivered"

    def give_up(self, raised: bool) -> None:
        """The step under way is not completed. raised: some of it had been sent when this rank's backward raised, and the rest was skipped."""
        if raised:
            self._sent, self.outcome = self.flags, "raised"
        self.flags = None

    def leave(self, used: bool) -> None:
        """The script goes on from a result that was delivered without a step: it was its to use or to discard, as in DDP. used: it was applied by hand."""
        self.outcome, self._forgets = "settled", self.skips.use() if used else self.skips.throw()

    def end(self, applied: bool) -> bool:
        """An optimizer has applied the last result, or it was not applied and is to be put back. With several optimizers, one that applies it is enough.
        Returns whether a result that was there has been applied."""
        delivered = self.outcome == "delivered"
        if applied and delivered:
            self.skips.step()
        if (applied or delivered) and self.outcome != "raised":  # of a step that was given up, step() has nothing to apply
            self.outcome = "settled" if applied else "put back"
        return applied and delivered

    def settle(self) -> None:
        """What was put back has been collected with the residuals, or is in another session."""
        self.outcome = "settled"

    def go_on(self, units: StepFlags, skips: Skips) -> None:
        """Go on from residuals of an earlier job, in these units, and from its counts. Raises UsageError in the middle of a step."""
        self.refuse_midway()
        self.skips = skips
        self._sent, self._loaded, self.outcome, self._forgets = units, True, "settled", False

    def told(self) -> dict[str, Any]:
        """What a process that takes the place of another rank's has to know before the next step, of plain types. Raises UsageError in the middle of a step,
        and where a result waits for it."""
        self.refuse_midway("a step of Elastic ends")
        if self.outcome not in ("settled", "put back"):
            raise UsageError(
                "a step of Elastic has averaged gradients and no optimizer's step; call step(), discard() or put_back() before the next one"
            )
        sent = None if self._sent is None else (self._sent.loss_scale, self._sent.rates)
        return {"put_back": self.was_put_back, "forgets": self._forgets, "sent": sent, "skips": self.skips.state()}

    def follow(self, told: Mapping[str, Any]) -> None:
        """Go on from what another rank has ``told``."""
        sent = told["sent"]
        self._sent, self._loaded = (None, False) if sent is None else (StepFlags(False, float(sent[0]), tuple(sent[1])), True)
        self.outcome, self._forgets = "put back" if told["put_back"] else "settled", bool(told["forgets"])
        self.skips = Skips.of(told["skips"])

    def rejoin(self) -> None:
        """Go on in another session."""
        self.outcome, self._forgets = "settled", False

    def scale_with(self, scale: Callable[[], float]) -> None:
        """From now on gradients are multiplied by ``scale()``. Earlier steps count as scaled by the same factor, except those of a loaded state."""
        if not self._scaled:
            return
        self._loss_scale, now = scale, scale()
        self.flags = None if self.flags is None else replace(self.flags, loss_scale=now)
        if self._sent is not None and not self._loaded:
            self._sent = replace(self._sent, loss_scale=now)
