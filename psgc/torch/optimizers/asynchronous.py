"""DistributedOptimizer in asynchronous training: each rank steps on its own gradients and pushes what the step has changed; servers hold the weights.

Owns the optimizer's methods, what is pushed, and what is refused; ``tensors/held.py`` has the servers' tensors. The optimizer's state (momenta, Adam's moments)
stays on its rank.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, TypeVar, cast

import torch

from psgc.errors import UsageError
from psgc.layout import TensorSpec
from psgc.layout.update_rule import UNBOUNDED, UpdateRule
from psgc.torch.optimizers.refusals import refuse_foreign
from psgc.torch.plans.choice import Choice
from psgc.torch.plans.rules import codec_by_rule
from psgc.torch.session import api
from psgc.torch.session.run_report import report_of, run_logger
from psgc.torch.state import saved
from psgc.torch.state.residuals import Kept, check_sizes
from psgc.torch.tensors.buffers import dtype_name
from psgc.torch.tensors.held import HeldTensors, one_way
from psgc.worker.residuals.residual import LayoutMemory
from psgc.worker.session import Session

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)
WEIGHTS: Final = {
    "float32": torch.float32,
    "bfloat16": torch.float32,
    "float16": torch.float32,
    "float64": torch.float64,
}  # as servers hold them
logger = logging.getLogger(__name__)


def make_asynchronous(optimizer: Optimizer, session: Session, names: dict[torch.Tensor, str], choice: Choice) -> Optimizer:
    """Make ``optimizer`` an AsyncDistributed of its own class. Raises UsageError for plans and ``auto``, and for parameters that cannot be
    held; CodecError for codecs that changes cannot travel by."""
    if choice.plan is not None or choice.awaited or choice.auto:
        raise UsageError("PSGC_ASYNC=1: plans and auto are of synchronous gradients; name a codec or a rule for what is pushed")
    for parameter, name in names.items():
        _held_dtype(parameter, name)
    choice.check(names)
    for codec in choice.codecs(names):
        one_way(codec)
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (AsyncDistributed, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    made = cast("AsyncDistributed", optimizer)
    made._psgc_session, made._psgc_names, made._psgc_choice = session, names, choice
    made._psgc_name = f"optimizer{api.next_number(session, 'optimizer')}"
    made._psgc_held, made._psgc_waiting = [], LayoutMemory()
    return optimizer


@dataclass(slots=True)
class _Held:
    """Parameters that were first held at the same step, and travel by the same codec. versions: of each as it was when the servers' value was written."""

    tensors: HeldTensors
    parameters: dict[str, torch.Tensor]
    versions: dict[str, int] = field(default_factory=dict)

    def take(self) -> None:
        """Write the servers' values to the parameters."""
        for name, parameter in self.parameters.items():
            parameter.copy_(self.tensors.values[name])
            self.versions[name] = parameter._version

    def put(self) -> None:
        """Have ``values`` hold how far each parameter has moved from the servers' value, as the parameter's dtype rounds that."""
        for name, parameter in self.parameters.items():
            value = self.tensors.values[name]
            before = value if parameter.dtype == value.dtype else value.to(parameter.dtype).to(value.dtype)
            torch.sub(parameter.detach().to("cpu", value.dtype), before, out=value)

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


class AsyncDistributed(torch.optim.Optimizer):
    """What asynchronous training adds to an optimizer's class; first in its method resolution order."""

    _psgc_session: Session
    _psgc_names: dict[torch.Tensor, str]
    _psgc_choice: Choice
    _psgc_name: str
    _psgc_held: list[_Held]
    _psgc_waiting: LayoutMemory  # of parameters that are not held yet

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step on this rank's own gradients; then the parameters are the servers', with this step's changes among them. In the first step, rank
        0's parameters become the servers'. Raises UsageError for a parameter that was changed since the last step; JobFailed."""
        self._psgc_hold()
        with torch.no_grad():
            for held in self._psgc_held:
                held.check_untouched()
        result = super().step() if closure is None else super().step(closure)
        with torch.no_grad():
            for held in self._psgc_held:
                held.put()
        self._psgc_exchange_weights(pull=False)
        return result

    # torch wraps a step() that is not marked so to run the hooks registered on the optimizer: super().step() does that.
    step.hooked = True  # type: ignore[attr-defined]

    def pull(self) -> None:
        """Make the parameters what the servers hold now: before the last evaluation, for instance, behind ``psgc.barrier()``. Counts as no step."""
        self._psgc_exchange_weights(pull=True)

    def synchronize(self) -> None:
        """Does nothing: gradients are this rank's own."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Changes nothing."""
        yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Changes nothing."""
        yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes nothing: gradients add up on this rank until step()."""

    def switch_plan(self, plan: Any) -> NoReturn:
        """Raises UsageError."""
        raise UsageError("switch_plan: plans are of synchronous gradients; PSGC_ASYNC=1 has none")

    def residual_state_dict(self) -> dict[str, Any]:
        """What codecs have kept of this rank's changes, by parameter name: a file for each rank, beside the model's and the optimizer's ``state_dict()``.
        No rank waits for another. Raises JobFailed."""
        waiting = self._psgc_waiting
        memories = [held.tensors.remembered() for held in self._psgc_held]
        kept = Kept(dict(waiting.tensors))
        for memory in memories:
            kept.tensors |= memory.tensors
        steps = max([waiting.steps, *(memory.steps for memory in memories)])
        return saved.state_of(self._psgc_session, {saved.CHANGES: kept}) | {"steps": steps}

    def load_residual_state_dict(self, states: Any) -> None:
        """Go on from ``residual_state_dict()``: this rank's own, or a list of all ranks' where the number of workers is another now. What was not sent yet goes
        with the next changes. Call it on every rank before the first step. Raises UsageError after it, and for what does not fit."""
        if self._psgc_held:
            raise UsageError(
                "load_residual_state_dict: under PSGC_ASYNC=1 servers hold the weights from the first step on; load before it, as the model's state"
            )
        session = self._psgc_session
        checked = saved.check_states(states, session.rank, session.size)
        saved.check_kind(checked, saved.CHANGES)
        kept = saved.share_of(checked, saved.CHANGES, session.rank, session.size, mean=False)
        self._psgc_waiting = LayoutMemory(kept.tensors, steps=max(int(state.get("steps", 0)) for state in checked))

    def _psgc_exchange_weights(self, pull: bool) -> None:
        if not self._psgc_held:
            return
        report = report_of(self._psgc_session)
        for held in self._psgc_held:
            held.tensors.submit(pull)
        report.wait(self._psgc_name, [ticket for held in self._psgc_held for ticket in held.tensors.tickets])
        with torch.no_grad():
            for held in self._psgc_held:
                held.take()
        if not pull:
            report.step_over(self._psgc_name)

    def _psgc_hold(self) -> None:
        """Have servers hold parameters that are new, or require a gradient only now. Waits until every rank does."""
        session = self._psgc_session
        if session.config.solo:
            return
        refuse_foreign(self, self._psgc_names)
        waiting = self._psgc_waiting
        known = {parameter for held in self._psgc_held for parameter in held.parameters.values()}
        new: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)  # by codec
        for group, options in enumerate(self.param_groups):
            for index, parameter in enumerate(options["params"]):
                if parameter.requires_grad and parameter not in known:
                    name = self._psgc_names.setdefault(parameter, f"param.{group}.{index}")
                    rule = self._psgc_choice.rule
                    codec = self._psgc_choice.codec if rule is None else codec_by_rule(rule, name, parameter)
                    new[codec][name] = parameter
        if new:  # random streams and warm-ups go on alike on all ranks, which may have taken different numbers of steps
            told = f"steps of {self._psgc_name}.{len(self._psgc_held)}"
            if session.rank == 0:
                session.publish(told, b"%d" % waiting.steps)
            else:
                waiting.steps = int(session.lookup(told))
        for codec, parameters in new.items():
            started = {name: parameter.detach().to(_held_dtype(parameter, name)) for name, parameter in parameters.items()}
            name, memory = f"{self._psgc_name}.{len(self._psgc_held)}", self._psgc_memory(parameters)
            tensors = HeldTensors(started, name, _rule_of(session).canonical, codec, memory=memory)
            held = _Held(tensors, parameters)
            with torch.no_grad():
                held.take()
            self._psgc_held.append(held)
            if session.rank == 0:
                bound = session.config.staleness
                ahead = "any number of steps" if bound == UNBOUNDED else f"{bound} step(s)"
                run_logger.info(
                    "asynchronous training: %d server(s) hold %d tensors, changes travel by %s; a worker may be %s ahead of the slowest",
                    session.config.servers, len(parameters), codec, ahead,
                )  # fmt: skip

    def _psgc_memory(self, parameters: dict[str, torch.Tensor]) -> LayoutMemory:
        """What was loaded of these parameters. Raises UsageError for a residual of another size."""
        waiting = self._psgc_waiting
        memory = LayoutMemory({name: waiting.tensors.pop(name) for name in parameters if name in waiting.tensors}, steps=waiting.steps)
        check_sizes((TensorSpec(name, tuple(parameter.shape), "float32") for name, parameter in parameters.items()), memory)
        return memory


def _rule_of(session: Session) -> UpdateRule:
    return UpdateRule("add", staleness=session.config.staleness)


def _held_dtype(parameter: torch.Tensor, name: str) -> torch.dtype:
    """What servers hold a parameter as. Raises UsageError for dtypes that are no floats."""
    dtype = WEIGHTS.get(dtype_name(parameter, f"parameter {name!r}"))
    if dtype is None:
        raise UsageError(f"parameter {name!r} is {parameter.dtype}: asynchronous training holds float parameters only")
    return dtype
