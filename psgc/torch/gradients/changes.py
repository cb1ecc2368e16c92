"""What an asynchronous optimizer's steps have changed: servers hold the weights, and ranks push their changes.

All buckets leave when the optimizer has taken a step of its own. The parameters take what comes back: the servers' values, with every rank's changes so far. A
step is over when these are there; ranks need not take as many. Gradients, and the optimizer's state, stay on their rank.

Owns which parameters servers hold, and what has been kept of them; ``tensors/held.py`` has the servers' tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from psgc.errors import UsageError
from psgc.layout.update_rule import UpdateRule
from psgc.torch.gradients.exchange import GradientExchange
from psgc.torch.gradients.front_end import FrontEnd
from psgc.torch.plans.choice import Choice
from psgc.torch.session.run_report import report_of
from psgc.torch.session.uncompiled import uncompiled
from psgc.torch.state import saved
from psgc.torch.state.residuals import Kept, check_sizes
from psgc.torch.tensors.declaring import spec_of
from psgc.torch.tensors.held import HeldBucket, HeldTensors, held_dtype, rounded
from psgc.worker.residuals.residual import LayoutMemory
from psgc.worker.session import Session


@dataclass(slots=True)
class _Held:
    """Parameters that were first held at the same step, and travel by the same codec. versions: of each as it was when the servers' value was written."""

    tensors: HeldTensors
    parameters: dict[str, torch.Tensor]
    versions: dict[str, int] = field(default_factory=dict)

    @torch.no_grad()
    def take(self) -> None:
        """Write the servers' values to the parameters."""
        for name, parameter in self.parameters.items():
            parameter.copy_(self.tensors.values[name])
            self.versions[name] = parameter._version

    @torch.no_grad()
    def put(self) -> None:
        """Have ``values`` hold how far each parameter has moved from the servers' value, as the parameter's dtype rounds that."""
        for name, parameter in self.parameters.items():
            value = self.tensors.values[name]
            torch.sub(parameter.detach().to("cpu", value.dtype), rounded(value, parameter.dtype), out=value)

    @torch.no_grad()
    @uncompiled
    def check_untouched(self) -> None:
        """Raise UsageError for a parameter that has another value than the servers' had."""
        for name, parameter in self.parameters.items():
            if parameter._version == self.versions[name]:
                continue
            value = self.tensors.values[name].to(parameter.dtype)
            if not torch.equal(parameter.detach().cpu().nan_to_num(), value.nan_to_num()):
                raise UsageError(
                    f"parameter {name!r} was changed between two steps (load_state_dict, clipping of weights?), but under PSGC_ASYNC=1 servers hold "
                    f"its value: load before the first step, and put back what you change for an evaluation"
                )
            self.versions[name] = parameter._version


class Changes(FrontEnd[HeldBucket]):
    """name: of the optimizer. choice: the codec or rule that changes travel by."""

    def __init__(self, session: Session, name: str, choice: Choice) -> None:
        super().__init__(GradientExchange(session, name, choice, scaled=False), saved.CHANGES)
        self._held: list[_Held] = []
        self._waiting = LayoutMemory()  # of parameters that are not held yet

    @uncompiled
    def check_untouched(self) -> None:
        """Raise UsageError for a parameter that was changed since the last step."""
        for held in self._held:
            held.check_untouched()

    @uncompiled
    def push(self) -> None:
        """The optimizer has stepped: exchange what that has changed for the servers' values."""
        for held in self._held:
            held.put()
        self._run(pull=False)

    def pull(self) -> None:
        """Make the parameters what the servers hold now."""
        self._run(pull=True)

    def _run(self, pull: bool) -> None:
        if not self._held:
            return
        exchange = self.exchange
        for bucket in exchange.buckets:
            bucket.pulls, bucket.ticket = pull, None
        exchange.begin()
        exchange.submit_rest()
        exchange.wait()
        for held in self._held:
            held.take()
        exchange.deliver()
        if not pull:
            exchange.end_step()

    def hold(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Have servers hold those of these parameters that they do not yet. Waits until every rank does."""
        exchange, waiting = self.exchange, self._waiting
        session, rank = self.session, self.session.rank
        known = {parameter for held in self._held for parameter in held.parameters.values()}
        new: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)  # by codec
        for name, parameter in named:
            if parameter not in known:
                new[exchange.choice.codec_of(name, parameter)][name] = parameter
        if new:  # random streams and warm-ups go on alike on all ranks, which may have taken different numbers of steps
            told = f"steps of {exchange.name}.{len(self._held)}"
            if rank == 0:
                session.publish(told, b"%d" % waiting.steps)
            else:
                waiting.steps = int(session.lookup(told))
        for codec, parameters in new.items():
            started = {name: parameter.detach().to(held_dtype(parameter, name)) for name, parameter in parameters.items()}
            memory = LayoutMemory({name: waiting.tensors.pop(name) for name in parameters if name in waiting.tensors}, steps=waiting.steps)
            check_sizes((spec_of(parameter, name, name) for name, parameter in parameters.items()), memory)
            rule = UpdateRule("add", staleness=session.config.staleness).canonical
            self._held.append(_Held(HeldTensors(started, f"{exchange.name}.{len(self._held)}", rule, codec, memory=memory), parameters))
            self._held[-1].take()
            exchange.buckets += self._held[-1].tensors.buckets
            report_of(session).held(len(parameters), codec)

    def state(self) -> dict[str, Any]:
        """What codecs have kept of this rank's changes, in ``saved``'s form."""
        memories = [self._waiting, *(held.tensors.remembered() for held in self._held)]
        kept = Kept({name: values for memory in memories for name, values in memory.tensors.items()})
        return saved.state_of(self.session, {saved.CHANGES: kept}) | {"steps": max(memory.steps for memory in memories)}

    def go_on(self, states: saved.State | Sequence[saved.State]) -> None:
        """Go on from the state of this rank, or those of all ranks, before the first step. Raises UsageError after it, and for what does not fit."""
        if self._held:
            raise UsageError(
                "load_residual_state_dict: under PSGC_ASYNC=1 servers hold the weights from the first step on; load before it, as the model's state"
            )
        checked, shares = self.shares(states, mean=False)
        self._waiting = LayoutMemory(shares[saved.CHANGES].tensors, steps=max(int(state.get("steps", 0)) for state in checked))
