"""The candidates of an exchange's last plan, the same on every rank: rank 0 finds them, by every rank's figures, and publishes them; the others wait for that.

Of several exchanges in a job one at a time tries its candidates: rank 0 has the others wait, because they all measure the same loop.
"""

from __future__ import annotations

import json
import statistics
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from psgc.errors import PsgcError
from psgc.layout import ITEM_BYTES
from psgc.plan.inputs.observed import LEAST_ITERATIONS, Iteration, profile_of
from psgc.plan.live.levels import loss_of
from psgc.plan.live.outlook import PLAN, PRESENT_PLAN, Outlook, loss_of_name, outlook, with_costs
from psgc.plan.live.steering import Steering
from psgc.plan.model.plan import Plan
from psgc.torch.auto.allowed import Allowed
from psgc.torch.auto.costs import Costs, timed
from psgc.torch.gradients.exchange import GradientExchange
from psgc.torch.gradients.layouts import FIRST
from psgc.torch.plans.choice import Choice
from psgc.torch.plans.planned import TRACED_CLUSTER, TRACED_PROFILE, leave_file
from psgc.torch.tensors.rank_table import RankTable
from psgc.worker.session import Session

AWAITED: Final = "rank 0's"  # the file of a plan that auto chose, on other ranks
MOST_WAITS: Final = 5  # windows without a step of the exchange that tries its candidates, after which another one need not wait for it
SLOWER: Final = 1.1  # a rank that computes for longer than rank 0 by this factor is named


@dataclass(slots=True)
class Turn:
    """On rank 0: whose turn it is to try candidates. steps: it had taken when another exchange asked last; waits: how often one has asked since then."""

    of: weakref.ref[Any] | None = None
    steps: int = 0
    waits: int = 0

    def is_free_for(self, one: object) -> bool:
        holder = None if self.of is None else self.of()
        if holder is None or holder is one or not holder.trying:
            return True
        self.waits = self.waits + 1 if holder.steps == self.steps else 0
        self.steps = holder.steps
        return self.waits > MOST_WAITS

    def take(self, one: object) -> None:
        self.of, self.waits = weakref.ref(one), 0


_turns: weakref.WeakKeyDictionary[Session, Turn] = weakref.WeakKeyDictionary()


def turn_of(session: Session) -> Turn:
    return _turns.setdefault(session, Turn())


class Compute(NamedTuple):
    """What a rank computes for in a step, in microseconds: from the first gradient until it asks for them, and everything before. rank: whose."""

    rank: int
    backward_us: float
    forward_us: float

    @property
    def us(self) -> float:
        return self.backward_us + self.forward_us

    @classmethod
    def of(cls, rank: int, iterations: Sequence[Iteration]) -> Compute:
        if len(iterations) < LEAST_ITERATIONS:
            return cls(rank, 0.0, 0.0)
        backward_us = statistics.median(each.backward_us + each.tail_us for each in iterations)
        return cls(rank, backward_us, statistics.median(each.forward_us for each in iterations))


class Candidates:
    """names, choices: of all candidates, the first of which is what the job had when it planned; none before the first plan. say: tells of the run."""

    def __init__(
        self, exchange: GradientExchange[Any], allowed: Allowed, costs: Costs, now_ns: Callable[[], int], say: Callable[[str], None]
    ) -> None:  # fmt: skip
        self._exchange, self._allowed, self._costs, self._now_ns, self._say = exchange, allowed, costs, now_ns, say
        self._figures = RankTable(exchange.session, f"psgc.auto {exchange.name}, compute", 2 + len(allowed.tried))
        self._plans = 0
        self._predicted: Mapping[str, float] = {}  # on rank 0: milliseconds of a step, by candidate, when it planned last
        self.names: list[str] = []
        self.choices: list[Choice] = []

    @property
    def present(self) -> str:
        """What gradients travel by now."""
        choice = self._exchange.choice
        return choice.codec if choice.plan is None and not choice.awaited else PRESENT_PLAN

    def agree(
        self, step_ms: float, iterations: Sequence[Iteration], steering: Steering, may_try: bool
    ) -> tuple[list[float], float] | None:  # fmt: skip
        """Make a plan. Every rank calls it after the same step. step_ms: of the slowest rank; iterations: this rank's, of the last window; may_try: on rank 0,
        whether it is this exchange's turn. Returns how much each candidate loses, and how many milliseconds rank 0 took; None where it is not."""
        exchange, session, began = self._exchange, self._exchange.session, self._now_ns()
        self._plans += 1
        self._figures.send(*Compute.of(session.rank, iterations)[1:], *self._allowed.own_errors())
        rows = self._figures.rows()
        computes = [Compute(rank, float(row[0]), float(row[1])) for rank, row in enumerate(rows)]
        self._allowed.take_errors(rows[:, 2:])
        if self._plans == 1:
            self._costs.tell_facts()
        name, plan, told = f"auto {self._plans} of {exchange.name}", None, None
        if session.rank == 0:
            if may_try:
                found = self._find(step_ms, iterations, computes, steering)
                names, plan = ((), None) if found is None else (found.tried, found.plan)
                losses = [loss_of(self._costs.present_buckets()), *(loss_of_name(each, plan) for each in names)]
                told = {"tried": names, "losses": losses, "ms": (self._now_ns() - began) * 1e-6}
            session.publish(name, json.dumps(told).encode())
        agreed = json.loads(session.lookup(name))
        if agreed is None:
            return None
        tried = [str(each) for each in agreed["tried"]]
        self.names = [self.present, *tried]
        self.choices = [exchange.choice, *(_choice(each, plan) for each in tried)]
        return [float(each) for each in agreed["losses"]], float(agreed["ms"])

    def predicted(self) -> str:
        """On rank 0: what was predicted of the candidates that have been tried, in words."""
        told = ", ".join(f"{name} {self._predicted[name]:,.1f}" for name in self.names[1:] if name in self._predicted)
        return f"; predicted: {told}" if told else ""

    def _find(
        self, step_ms: float, iterations: Sequence[Iteration], computes: Sequence[Compute], steering: Steering
    ) -> Outlook | None:  # fmt: skip
        """On rank 0: what is worth a trial; None where nothing can be said."""
        if len(iterations) < LEAST_ITERATIONS:
            self._say("this rank computed too few gradients to plan by; nothing is changed")
            return None
        mine, slowest = computes[0], max(computes, key=lambda each: each.us)
        try:
            found = self._outlook(step_ms, [_as_of(each, mine, slowest) for each in iterations if each.ready_us], steering)
        except PsgcError as error:
            self._say(f"nothing is changed: {error}")
            return None
        self._tell(
            step_ms, found, f"; rank {slowest.rank} computes for {slowest.us / 1e3:,.1f} ms of it" if slowest.us > SLOWER * mine.us else ""
        )
        return found

    def _outlook(self, step_ms: float, ready: Sequence[Iteration], steering: Steering) -> Outlook:
        exchange, costs = self._exchange, self._costs
        used = {name for layout in exchange.layouts for name in (tensor.name for tensor in layout.tensors if tensor.numel)}
        specs = [spec for spec in exchange.specs if spec.name in used]
        numel = {spec.name: spec.numel for spec in specs}
        itemsizes = {spec.name: ITEM_BYTES[spec.dtype] for spec in specs}
        profile = profile_of(
            ready, numel, model=exchange.name, shapes={spec.name: tuple(spec.shape) for spec in specs}, itemsizes=itemsizes
        )
        codecs = self._allowed.codecs()
        costs.measure(codecs)
        codecs = [codec for codec in codecs if self._allowed.allows(codec)]
        profile = costs.completed(profile, codecs)
        layouts = {codec: buckets for codec in codecs if (buckets := costs.buckets_by(codec)) is not None and timed(profile, buckets)}
        machines, present_codec = costs.machines(), "" if exchange.choice.plan is not None else exchange.choice.codec
        nbytes = sum(spec.numel * itemsizes[spec.name] for spec in specs)
        worth = nbytes >= exchange.session.config.min_compress_bytes  # else a step is hardly the link's
        plans = len({(spec.group, spec.dtype) for spec in specs}) == 1 and worth and not steering.rechecks
        present = costs.present_buckets()
        found = outlook(profile, machines, step_ms, present, layouts, present_codec, plans, steering.tries_plain and loss_of(present) > 0)
        self._predicted = found.predicted_ms
        folder = exchange.session.config.trace_folder
        if folder and exchange.name in FIRST:
            leave_file(folder, TRACED_PROFILE, json.dumps(with_costs(profile).to_json()))
            leave_file(folder, TRACED_CLUSTER, machines.cluster(found.gbps).to_toml())
        return found

    def _tell(self, step_ms: float, found: Outlook, slowest: str) -> None:
        predicted = ", ".join(f"{name} {ms:,.1f}" for name, ms in sorted(found.predicted_ms.items(), key=lambda one: one[1]))
        costs, refused = self._costs, self._allowed.refused()
        within = f" (within nodes {costs.within_gbps:,.3g}, by what copies and sums take here)" if costs.within_gbps else ""
        links = f"as over links of {found.gbps:,.3g} Gbit/s{within}"
        figures = (
            f"a step takes {step_ms:,.1f} ms by {self.present}, {links}; predicted, in ms: {predicted or 'nothing else'}{slowest}{costs.told}"
            f"{costs.collectives()}"
        )
        figures += f"; relative error too large for quality=safe: {', '.join(refused)}" if refused else ""
        if found.tried:
            self._say(f"trying {', '.join(found.tried)}: {figures}")
        else:
            self._say(f"{self.present} stays, since nothing else would save 5 %: {figures}")


def _choice(name: str, plan: Plan | None) -> Choice:
    if name != PLAN:
        return Choice(name)
    return Choice(awaited=AWAITED, auto=True) if plan is None else Choice(plan=plan, auto=True)


def _as_of(iteration: Iteration, mine: Compute, slowest: Compute) -> Iteration:
    """This rank's iteration, as if it computed for as long as the slowest rank does: each takes that rank's medians, because this rank's own noise, scaled up
    to a rank that computes for ten times as long, would be taken for the links'."""
    backward_us = iteration.backward_us + iteration.tail_us
    if slowest.rank == mine.rank or not (backward_us and slowest.us):
        return iteration
    factor = slowest.backward_us / backward_us
    return Iteration({name: us * factor for name, us in iteration.ready_us.items()}, iteration.tail_us * factor, slowest.forward_us)
