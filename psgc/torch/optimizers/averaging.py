"""Optimizers that average their gradients over the job before they apply them: what DistributedOptimizer makes of any torch optimizer, and what ``adam`` is.

Owns the methods that users call; ``gradients/in_backward.py`` synchronizes the gradients.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from psgc.plan.model.plan import Plan
from psgc.torch.ddp import amp
from psgc.torch.ddp.told import add_optimizer, has_applied
from psgc.torch.gradients.buckets import GradientBucket
from psgc.torch.gradients.exchange import GradientExchange
from psgc.torch.gradients.front_end import Parameters
from psgc.torch.gradients.in_backward import BackwardGradients
from psgc.torch.optimizers.completing import Completing
from psgc.torch.optimizers.left_out import leave_out
from psgc.torch.optimizers.refusals import refuse_foreign
from psgc.torch.optimizers.wrapping import check_passes, named_parameters_of, parameter_spec, refuse_copy, trained
from psgc.torch.plans.choice import Choice, switched
from psgc.torch.session import api
from psgc.worker.session import Session


class Distributed(torch.optim.Optimizer):
    """What DistributedOptimizer adds to an optimizer's class; first in its method resolution order."""

    _psgc_gradients: BackwardGradients
    _psgc_names: dict[torch.Tensor, str]
    _psgc_completing: Completing
    _psgc_updated: int = 0  # so many of the next updates have been made already, in another rank's state (psgc.torch.Elastic)
    _psgc_raised: Callable[[], None] | None = None  # called where an update has raised: no hook after it runs then (psgc.torch.Elastic)

    __getstate__ = refuse_copy

    def _psgc_join(
        self, session: Session, names: dict[torch.Tensor, str], choice: Choice, passes: int,
        rates: Callable[[], tuple[float, ...]] | None = None, late: bool | None = None, as_views: bool = False,
        sparse: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        """Become one of the session's optimizers. names: of parameters; those without one are called param.GROUP.INDEX.
        sparse: names of those whose gradients are."""
        late = session.config.late_synchronization if late is None else late
        number = api.next_number(session, "optimizer")
        amp.install()
        self._psgc_names = names
        session.expect_names(f"{kind}.{name}" for kind in ("Gradient", "Parameter") for name in sorted(names.values()))
        exchange: GradientExchange[GradientBucket] = GradientExchange(
            session, f"optimizer{number}", choice, rates, turn=number, sparse=sparse
        )
        self._psgc_gradients = BackwardGradients(exchange, passes, late, self._psgc_parameters, as_views)
        self._psgc_completing = Completing(self._psgc_gradients)
        add_optimizer(self._psgc_gradients)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronize, unless that was done since the last backward, and apply. closure: the wrapped optimizer runs it, as often as it likes, and after
        each run its gradients are synchronized; it returns the loss."""
        if closure is None:
            self._psgc_completing.complete()
        else:
            self._psgc_completing.complete_begun()
            # LBFGS decides by the loss when to stop
            closure = self._psgc_completing.after(closure, averages_loss=isinstance(self, torch.optim.LBFGS))
        if self._psgc_updated:
            leave_out(self)
            self._psgc_updated -= 1
            result = None
        else:
            try:
                result = self._psgc_apply(closure)
            except BaseException:
                if self._psgc_raised is not None:
                    self._psgc_raised()
                raise
        self._psgc_gradients.end_step(has_applied(self))
        return result

    # torch wraps a step() that is not marked so to run the hooks registered on the optimizer: super().step() does that.
    step.hooked = True  # type: ignore[attr-defined]

    def _psgc_apply(self, closure: Callable[[], Any] | None) -> Any:
        """Apply the averaged gradients: the wrapped optimizer's own step. Returns what that does. closure: one that synchronizes."""
        return super().step() if closure is None else super().step(closure)

    def synchronize(self) -> None:
        """Wait until every p.grad holds the mean over all ranks. Where it does already, as after backward, does nothing; where other tensors have been put
        into p.grad since, averages these.

        Raises UsageError after a backward that raised: zero_grad() is then to be called first."""
        self._psgc_gradients.synchronize(by_hand=True)

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, backwards add to this rank's own p.grad and nothing is sent. The next backward outside sends the sum, or step() does;
        zero_grad() throws it away. Every rank must do the same."""
        return self._psgc_gradients.backwards.holding()

    def replayed(self) -> None:
        """Call it right after each ``replay()`` of a CUDA graph that captured a backward inside ``no_sync()``: p.grad, which the replay has written, is then
        sent by ``synchronize()`` or ``step()``. Every rank must do the same. Raises UsageError if no backward was captured."""
        self._psgc_gradients.replayed()

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Inside, step() applies without synchronizing; call ``synchronize()`` before."""
        return self._psgc_completing.left_to_script()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backwards make a step, between two steps."""
        check_passes(passes)
        gradients = self._psgc_gradients
        gradients.backwards.set_passes(passes, begun=gradients.gradients.under_way() is not None)

    def switch_plan(self, plan: str | os.PathLike[str] | Plan) -> None:
        """From the next step on, gradients travel by this plan, its file (of which rank 0's is enough) or a codec's text; what codecs keep of the gradients
        goes along, so that nothing is lost or applied twice. Call it on every rank between the same two steps: after step(), before the next
        backward(). Where ``auto`` chose until now, it ends. Raises UsageError in the middle of a step and for a plan that cannot be run; CodecError."""
        choice = switched(self._psgc_gradients.session, plan)
        choice.check(trained(self._psgc_names))
        self._psgc_gradients.switch(choice)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. Raises UsageError while gradients are under way. When they are synchronized, and step() did not follow, they were the script's to
        use or to discard, as under DistributedDataParallel."""
        self._psgc_gradients.forget()
        super().zero_grad(set_to_none)
        if not set_to_none:
            self._psgc_gradients.gradients.note_zeros()

    def discard(self) -> None:
        """Do without the averaged gradients in p.grad, in place of step(): the same as ``zero_grad()``. What codecs have not sent of them stays in the
        residuals, and comes with later steps."""
        self.zero_grad()

    def put_back(self) -> None:
        """Put the averaged gradients in p.grad off, in place of step(): they go back into the residuals of codecs with error feedback, and come with
        later steps; p.grad is cleared. Without error feedback this is ``discard()``. Call it on every rank, also on one whose backward raised. Raises
        UsageError if no averaged gradients are there."""
        self._psgc_completing.complete_begun()
        self._psgc_gradients.put_back()
        self.zero_grad()

    def residual_state_dict(self) -> dict[str, Any]:
        """What codecs keep on this rank, and this rank's share of what they keep on the servers, by parameter name, to be saved with
        torch.save: a file for each rank, beside the ``state_dict()`` that is the same on all. Call it between two steps, on every rank."""
        return self._psgc_gradients.state()

    def load_residual_state_dict(self, states: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from ``residual_state_dict()``: this rank's own, or a list of all ranks' where the number of workers is another now. With
        as many workers, the same codec and the same sizes of buckets and parts the job goes on bit for bit; else nothing is lost in the sum.
        Call it on every rank, between two steps, after ``load_state_dict()``. Raises UsageError for what does not fit."""
        self._psgc_gradients.go_on(states)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Every rank must add the same; the parameters are declared at the next synchronization."""
        super().add_param_group(param_group)
        self._psgc_gradients.watch()

    def _psgc_parameters(self) -> Parameters:
        """Those that may be new, or require a gradient only now. Raises UsageError for those that something else averages."""
        refuse_foreign(self, self._psgc_names)
        apart = self._psgc_gradients.exchange.last.follows_rates
        for group, name, parameter in named_parameters_of(self, self._psgc_names):
            if parameter.requires_grad and not self._psgc_gradients.knows(parameter):
                self._psgc_gradients.exchange.choice.check({parameter: name})
                yield parameter, parameter_spec(parameter, name, group if apart else 0)
