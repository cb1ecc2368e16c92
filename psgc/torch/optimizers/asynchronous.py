"""DistributedOptimizer in asynchronous training: each rank steps on its own gradients and pushes what the step has changed; servers hold the weights.

Owns the optimizer's methods, and what is refused; ``gradients/changes.py`` exchanges the changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch

from psgc.errors import UsageError
from psgc.torch.gradients.changes import Changes
from psgc.torch.optimizers.refusals import refuse_foreign
from psgc.torch.optimizers.wrapping import become, named_parameters_of, refuse_copy, trained
from psgc.torch.plans.choice import Choice
from psgc.torch.session import api
from psgc.torch.session.uncompiled import uncompiled
from psgc.torch.tensors.held import held_dtype, one_way
from psgc.worker.session import Session

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


def make_asynchronous(optimizer: Optimizer, session: Session, names: dict[torch.Tensor, str], choice: Choice) -> Optimizer:
    """Make ``optimizer`` an AsyncDistributed of its own class. Raises UsageError for plans and ``auto``, and for parameters that cannot be
    held; CodecError for codecs that changes cannot travel by."""
    if choice.plan is not None or choice.awaited or choice.auto:
        raise UsageError("PSGC_ASYNC=1: plans and auto are of synchronous gradients; name a codec or a rule for what is pushed")
    now = trained(names)
    for parameter, name in now.items():
        held_dtype(parameter, name)
    choice.check(now)
    for codec in choice.codecs(now):
        one_way(codec)
    made = become(optimizer, AsyncDistributed)
    made._psgc_names, made._psgc_changes = names, Changes(session, f"optimizer{api.next_number(session, 'optimizer')}", choice)
    return optimizer


class AsyncDistributed(torch.optim.Optimizer):
    """What asynchronous training adds to an optimizer's class; first in its method resolution order."""

    _psgc_names: dict[torch.Tensor, str]
    _psgc_changes: Changes

    __getstate__ = refuse_copy

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step on this rank's own gradients; then the parameters are the servers', with this step's changes among them. In the first step, rank
        0's parameters become the servers'. Raises UsageError for a parameter that was changed since the last step; JobFailed."""
        self._psgc_hold()
        self._psgc_changes.check_untouched()
        result = super().step() if closure is None else super().step(closure)
        self._psgc_changes.push()
        return result

    # torch wraps a step() that is not marked so to run the hooks registered on the optimizer: super().step() does that.
    step.hooked = True  # type: ignore[attr-defined]

    def pull(self) -> None:
        """Make the parameters what the servers hold now: before the last evaluation, for instance, behind ``psgc.barrier()``. Counts as no step."""
        self._psgc_changes.pull()

    def synchronize(self) -> None:
        """Does nothing: gradients are this rank's own."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Changes nothing."""
        yield

    no_sync = skip_synchronize

    def replayed(self) -> None:
        """Does nothing: gradients that a CUDA graph's replay has written are this rank's own, as all are, and step() applies them."""

    def discard(self) -> None:
        """Do without the gradients in p.grad, in place of step(): the same as ``zero_grad()``. Nothing of them has been sent."""
        self.zero_grad()

    put_back = discard  # no other rank has taken part in them

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes nothing: gradients add up on this rank until step()."""

    def switch_plan(self, plan: Any) -> NoReturn:
        """Raises UsageError."""
        raise UsageError("switch_plan: plans are of synchronous gradients; PSGC_ASYNC=1 has none")

    def residual_state_dict(self) -> dict[str, Any]:
        """What codecs have kept of this rank's changes, by parameter name: a file for each rank, beside the model's and the optimizer's ``state_dict()``.
        No rank waits for another. Raises JobFailed."""
        return self._psgc_changes.state()

    def load_residual_state_dict(self, states: Any) -> None:
        """Go on from ``residual_state_dict()``: this rank's own, or a list of all ranks' where the number of workers is another now. What was not sent yet goes
        with the next changes. Call it on every rank before the first step. Raises UsageError after it, and for what does not fit."""
        self._psgc_changes.go_on(states)

    @uncompiled
    def _psgc_hold(self) -> None:
        """Have servers hold parameters that are new, or require a gradient only now. Waits until every rank does."""
        if self._psgc_changes.exchange.session.config.solo:
            return
        refuse_foreign(self, self._psgc_names)
        named = [(name, parameter) for _, name, parameter in named_parameters_of(self, self._psgc_names)]
        self._psgc_names |= {parameter: name for name, parameter in named}
        self._psgc_changes.hold((name, parameter) for name, parameter in named if parameter.requires_grad)
