"""``auto``: a running job's gradients travel uncompressed at first, and then by what is measured to be quickest.

Owns the switches of one exchange, which all ranks make after the same step. ``step_times`` measures steps, ``allowed`` says which codecs the gradients bear,
``candidates`` has the ranks agree on what to try, by ``costs``; ``psgc.plan.live.steering`` decides when to plan and what to keep, the same on every rank. The
table in which ranks tell each other their step times travels while the next step is taken; ranks wait for each other only while rank 0 plans.

What follows from a step is done as soon as the optimizer has stepped.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

from psgc.plan.live.steering import WINDOW, Steering
from psgc.torch.auto import measuring
from psgc.torch.auto.allowed import Allowed
from psgc.torch.auto.candidates import Candidates, turn_of
from psgc.torch.auto.costs import Costs
from psgc.torch.auto.step_times import STEPS_OF_FIRST_WINDOW, StepTimes
from psgc.torch.auto.stepping import Stepping
from psgc.torch.gradients.exchange import GradientExchange
from psgc.torch.plans.choice import Choice
from psgc.torch.session.run_report import run_logger
from psgc.torch.tensors.rank_table import RankTable


class AutoPlan(Stepping):
    """Observes an exchange and switches it; see the module's text. sample: any of the parameters. It has no lock: see ``observer.py``."""

    def __init__(self, exchange: GradientExchange[Any], sample: torch.Tensor) -> None:
        session, clocks = exchange.session, measuring.in_use()
        super().__init__(exchange, StepTimes(clocks, sample))
        self._steering = Steering()
        self._allowed, self._costs = Allowed(exchange, sample), Costs(exchange, clocks, sample)
        self.candidates = Candidates(exchange, self._allowed, self._costs, clocks.now_ns, self._say)
        # milliseconds of a step, and how much its error exceeds what is allowed
        self._table = RankTable(session, f"psgc.auto {exchange.name}", 2)
        self._said_held = False  # a line has told of an allowance that is used up
        self._known = 0  # parameters
        if session.rank == 0:
            session.at_end(functools.partial(_tell_end, weakref.ref(self)))

    @property
    def steps(self) -> int:
        """Steps so far."""
        return self._times.steps

    @property
    def trying(self) -> bool:
        """Whether candidates of the last plan are being tried."""
        return self._steering.trying

    def ready(self, name: str, gradient: torch.Tensor) -> None:
        super().ready(name, gradient)
        self._allowed.ready(name, gradient)

    def _warm(self) -> None:
        if self._times.warms_up:
            self._costs.time_gpu(self._allowed.carried)

    def _decide(self) -> None:
        """Act on what all ranks know by now. Every rank calls it after the same step."""
        if self._table.sent:
            self._take_table()
        if len(self._exchange.specs) != self._known:
            self._begin_again()
        times, steering = self._times, self._steering
        if times.window == WINDOW:
            step_ms = times.end_window()
            times.record_anew(steering.noting)
            self._table.send(step_ms, self._allowed.excess(self._costs.present_buckets()) if steering.checks else 0.0)
        elif not times.window:
            times.record_anew(steering.noting)
        self._allowed.sample_next(times.window == WINDOW - 1 and (times.noting or steering.checks))

    def _begin_again(self) -> None:
        """There are parameters that were not there before: what was measured, and a plan, are not of them."""
        before, self._known = self._known, len(self._exchange.specs)
        if before:
            self._say(f"{self._known - before} parameters were added: uncompressed again, and measuring anew")
            self._restart()

    def _give_up(self, error: float) -> None:
        """What the gradients travel by loses too much of them: the job goes uncompressed, and measures anew what it may choose without it."""
        self._allowed.give_up(self._costs.present_buckets())
        present = self.candidates.present
        self._say(f"{present} is given up: its relative error on the gradients is {error:.2g} now; uncompressed again, and measuring anew")
        self._restart()

    def _restart(self) -> None:
        self._steering, self.candidates.names = Steering(), []
        self._switch(Choice(auto=True))

    def _switch(self, choice: Choice) -> None:
        self._exchange.switch(choice)
        self._times.settle()

    def _take_table(self) -> None:
        slowest_ms, excess = self._table.rows().max(axis=0)
        step_ms = float(slowest_ms)  # a step waits for the slowest rank
        if excess:
            self._give_up(float(excess))
            return
        steering, candidates, before = self._steering, self.candidates, self._steering.reference_ms
        was_over, asked = steering.over, steering.asked
        verdict = steering.window(step_ms)
        if verdict == "plan":
            if was_over and not steering.rechecks:
                why = "coarser codecs may be tried by now" if asked else f"a step takes {step_ms:,.1f} ms instead of {before:,.1f}"
                self._say(f"{why}: planning again")
            verdict = "go on" if (found := self._plan(step_ms)) is None else steering.planned(*found)
        if verdict == "switch":
            self._switch(candidates.choices[steering.kept])
        if steering.over and not was_over and len(candidates.names) > 1:
            times = ", ".join(f"{name} {ms:,.1f}" for name, ms in zip(candidates.names, steering.measured_ms, strict=True))
            self._say(f"{candidates.names[steering.kept]} from now on; measured, in ms a step: {times}{candidates.predicted()}")
        if steering.held_back and not self._said_held:
            self._say(
                f"a step takes {step_ms:,.1f} ms instead of {steering.reference_ms:,.1f}, but it changes too often: {candidates.present} stays for the "
                f"time being, after {steering.switches} switches"
            )
        self._said_held = steering.held_back
        if self._allowed.widen(self.steps):
            steering.ask()
        self._times.noting = steering.noting

    def _plan(self, step_ms: float) -> tuple[list[float], float] | None:
        """Agree on candidates. How much each loses, and how long rank 0 took; None where another exchange is trying its own."""
        turn = turn_of(self._exchange.session)  # rank 0's counts
        found = self.candidates.agree(step_ms, self._times.iterations(), self._steering, turn.is_free_for(self))
        if found is None:
            self._steering.postponed()
        else:
            turn.take(self)
        return found

    def _say(self, text: str) -> None:
        if self._exchange.session.rank == 0:
            run_logger.info("%s: auto, step %d: %s", self._exchange.name, self.steps, text)

    def tell_end(self) -> None:
        """The job ends: say so where it has no verdict."""
        if self._exchange.session.failed or self._exchange.observer is not self:
            return
        if not self.candidates.names:
            self._say(
                f"the job ended before it was measured, which takes {STEPS_OF_FIRST_WINDOW} steps: {self.candidates.present} throughout"
            )
        elif self.trying:
            self._say(f"the job ended while {self.candidates.present} was tried")


def _tell_end(auto: weakref.ref[AutoPlan]) -> None:
    found = auto()
    if found is not None:
        found.tell_end()
