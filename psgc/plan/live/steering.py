"""Decides when a running job plans, which candidates it tries, and which one it keeps. Pure, and the same on every rank.

Every rank has one Steering and feeds it the same numbers: the job's step time in each window of steps. So all ranks switch at the same step. There
are three phases:

    measuring   The first window runs with what the job began with. Then a plan is made, which gives candidates.
    trying      Candidates take turns (``trials``). One that loses more is kept only if it is quicker by a margin, and beyond what is noise.
    watching    If several windows in a row depart from the kept candidate's step time, a plan is made again. If the kept candidate loses something, the
                job is tried uncompressed, too: when the step has become somewhat quicker, and from time to time, because a link may have become faster.
                If its relative error on the job's gradients grows beyond the level's limit, it is given up.

So the candidate that is kept was measured to be quicker, not only predicted. Three rules keep a job from switching back and forth. After a plan that
changes nothing, or that comes soon after another one, more windows must depart before the next plan, until the job has been steady for a while. A
plan's trials need an allowance of switches, which grows with the windows that pass. And trials without compression in a steady job take a small share
of its time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal

from psgc.plan.live.trials import MOST_WINDOWS, Trials

WINDOW: Final = 5  # steps; their median is one figure
SETTLING: Final = 2  # steps after a switch that are in no window: the one that declares, and the next
DRIFT: Final = 0.25  # a window departs if its step time differs from the kept one by more than this share
QUICKER: Final = 0.08  # a window counts as quicker if its step time is below the kept one by more than this share
QUICKER_WINDOWS: Final = 10  # quicker windows in a row after which the job is tried uncompressed
PATIENCE: Final = 2  # windows in a row that must depart before a new plan, at first
MOST_PATIENCE: Final = 64
CALM: Final = 200  # windows: a plan within so many of the one before comes soon; after so many without a departure patience is halved
MOST_SWITCHES: Final = 52  # that a job may save up
REFILL: Final = 50  # windows that bring one more
ROUND: Final = MOST_WINDOWS  # the most switches of one plan's trials: to each window but the first, and to the one that is kept
LEAST_RECHECK: Final = 100  # windows until a steady job is tried uncompressed; the number doubles each time that this is not quicker
MOST_RECHECK: Final = 3200
RECHECK_SHARE: Final = 0.01  # of the job's time: such a trial, and rank 0's predictions for it, wait until they take no more
TRIAL_STEPS: Final = WINDOW + 2 * SETTLING  # of a window of such a trial, and until the job has settled after it
CHECKS: Final = 20  # windows between two looks at the kept candidate's relative error

Verdict = Literal["go on", "plan", "switch"]


class Steering:
    """kept:     the job's present candidate, 0 for the one that it had when the last plan was made. reference_ms: its step time.
    rechecks:    whether the plan that is being made is not for a departure, but to try the job uncompressed.
    tries_plain: whether the job is tried uncompressed whatever is predicted. The link takes too small a part of a short, compressed step for a prediction.
    asked:       whether a plan is made after the next window, whatever the step takes.
    held_back:   whether windows depart, but the allowance of switches is used up.
    """

    def __init__(self) -> None:
        self.kept = 0
        self._trials = Trials((0,), 0.0)
        self._step_ms = 0.0  # of the last window
        self.reference_ms = 0.0
        self.patience = PATIENCE
        self.switches = 0
        self.allowance = MOST_SWITCHES
        self.rechecks = self.tries_plain = self.held_back = self.asked = False
        self._losses: Sequence[float] = (0,)
        self._phase: Literal["measuring", "planning", "trying", "watching"] = "measuring"
        self._departed = self._quicker = 0  # windows in a row
        self._windows = 0
        self._planned_at = -CALM  # the window of the last plan that a departure made
        self._calm = 0  # windows in a row without a departure
        self._recheck = LEAST_RECHECK
        self._recheck_at = 0  # the window
        self._spent_ms = 0.0  # what a trial without compression takes: as the last one did
        self._cost_ms = 0.0  # of the last plan, if it was one that rechecks

    def window(self, step_ms: float) -> Verdict:
        """Take the job's step time in one more window. Returns "plan" if ``planned`` or ``postponed`` must be called next, "switch" if the job must
        switch to candidate ``kept``."""
        self._windows += 1
        self._step_ms = step_ms
        if self._windows % REFILL == 0:
            self.allowance = min(self.allowance + 1, MOST_SWITCHES)
        if self._phase == "measuring":
            return self._plan(step_ms)
        if self._phase == "trying":
            self._trials.take(step_ms)
            return self._next()
        return self._watch(step_ms)

    def planned(self, losses: Sequence[float], cost_ms: float = 0.0) -> Verdict:
        """Take a new plan's candidates, the job's present one first. losses: a number for each that grows with its loss; 0: none. cost_ms: the time in
        which rank 0 made the plan; the same number on every rank."""
        self._losses, self.kept = losses, 0
        self._trials = Trials(losses, self._step_ms)
        self._phase = "trying"
        self._cost_ms = cost_ms if self.rechecks else 0.0
        return self._next()

    def ask(self) -> None:
        """More may be tried than before: plan after the next window, whatever the step takes. Does nothing while candidates are tried."""
        self.asked = True

    def postponed(self) -> None:
        """The plan is not made now; the next window asks for one again."""
        self._phase = "measuring"

    @property
    def over(self) -> bool:
        """Whether the last plan's candidates have all been tried."""
        return self._phase == "watching"

    @property
    def trying(self) -> bool:
        """Whether they are being tried."""
        return self._phase == "trying"

    @property
    def noting(self) -> bool:
        """Whether a plan may be made from the present window, so that the times at which its gradients become ready must be noted."""
        return self._phase == "measuring" or (self._phase == "watching" and (self._departed > 0 or self.asked or self._recheck_is_due(1)))

    @property
    def checks(self) -> bool:
        """Whether the relative error of what the gradients travel by is looked at in the present window."""
        return self._phase == "watching" and self._losses[self.kept] > 0 and self._windows % CHECKS == 0

    @property
    def measured_ms(self) -> list[float]:
        """The step of each candidate of the last plan."""
        return [self._trials.figure_ms(candidate) for candidate in range(len(self._losses))]

    def _watch(self, step_ms: float) -> Verdict:
        departs = abs(step_ms - self.reference_ms) > DRIFT * self.reference_ms
        self._departed = self._departed + 1 if departs else 0
        self._calm = 0 if departs else self._calm + 1
        self._quicker = self._quicker + 1 if step_ms < (1 - QUICKER) * self.reference_ms else 0
        if self._calm and self._calm % CALM == 0:
            self.patience = max(PATIENCE, self.patience // 2)
        due = self._departed >= self.patience
        self.held_back = due and self.allowance < ROUND
        if (due or self.asked) and self.allowance >= ROUND:
            return self._plan(step_ms)
        if not departs and self._recheck_is_due(0) and self.allowance >= ROUND:
            return self._plan(step_ms, rechecks=True)
        return "go on"

    def _recheck_is_due(self, later: int) -> bool:
        """Whether it may be time, so many windows from now, to try the job uncompressed."""
        passed = self._windows + later >= self._recheck_at or self._quicker + later >= QUICKER_WINDOWS
        return passed and self._losses[self.kept] > 0

    def _plan(self, step_ms: float, rechecks: bool = False) -> Verdict:
        self._phase, self._departed, self.asked = "planning", 0, False
        self._quicker, self._calm = 0, self._calm if rechecks else 0
        self.rechecks, self.tries_plain = rechecks, rechecks or step_ms < self.reference_ms
        return "plan"

    def _next(self) -> Verdict:
        before = self.kept
        if self._trials.over:
            self.kept = self._trials.best
            self._keep()
        else:
            self.kept = self._trials.next
        if self.kept == before:
            return "go on"
        self.switches += 1
        self.allowance -= 1
        return "switch"

    def _keep(self) -> None:
        """The trials are over: determine how soon the next plan may come."""
        self._phase = "watching"
        kept_ms = self._trials.figure_ms(self.kept)
        stays = self.rechecks and not self.kept  # then the reference must not follow a step that grows slowly
        self.reference_ms = min(kept_ms, self.reference_ms) if stays else kept_ms
        if not self.rechecks:
            soon = self._windows - self._planned_at < CALM
            self.patience = PATIENCE if self.kept and not soon else min(2 * self.patience, MOST_PATIENCE)
            self._planned_at = self._windows
        self._recheck = min(2 * self._recheck, MOST_RECHECK) if stays else LEAST_RECHECK
        if not all(self._losses):
            self._spent_ms = self._plain_trials_ms()
        affordable = (self._cost_ms + self._spent_ms) / (RECHECK_SHARE * WINDOW * self.reference_ms) if self.reference_ms else 0.0
        self._recheck_at = self._windows + max(self._recheck, math.ceil(affordable))

    def _plain_trials_ms(self) -> float:
        """What the last trials' steps without losses took beyond the kept candidate's; after a plan that does not recheck, what one window of them takes."""
        kept_ms, spent_ms = self._trials.figure_ms(self.kept), 0.0
        for candidate, loss in enumerate(self._losses):
            if not loss:
                windows = self._trials.windows_of(candidate) if self.rechecks else 1
                spent_ms += TRIAL_STEPS * windows * max(0.0, self._trials.figure_ms(candidate) - kept_ms)
        return spent_ms
