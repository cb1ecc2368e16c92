"""``CrossBarrier``: DistributedOptimizer without a barrier at the end of a step. A layer's forward waits for that layer's gradients alone.

Owns the optimizer's methods and what is refused; ``gradients/unbarriered.py`` synchronizes, and ``partial_step`` applies updates.
Source: Peng et al. 2019 (ByteScheduler), section 3.4, and BytePS's ``cross_barrier``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import torch

from psgc.errors import UsageError
from psgc.torch.ddp import amp
from psgc.torch.gradients.buckets import GradientBucket
from psgc.torch.gradients.exchange import GradientExchange
from psgc.torch.gradients.linearity import CodecAdvice
from psgc.torch.gradients.unbarriered import UnbarrieredGradients
from psgc.torch.optimizers.averaging import Distributed
from psgc.torch.optimizers.demo import refuse_exchanging
from psgc.torch.optimizers.partial_step import PartialSteps
from psgc.torch.optimizers.refusals import refuse_foreign
from psgc.torch.optimizers.wrapping import (
    become,
    check_count,
    check_passes,
    named_parameters_of,
    names_of,
    parameter_spec,
    refuse_copy,
    refuse_replaced_step,
    trained,
)
from psgc.torch.plans.choice import Given, chosen
from psgc.torch.session import api
from psgc.torch.session.backup import refuse_backup
from psgc.torch.session.replaceable import refuse_replaceable
from psgc.torch.session.uncompiled import uncompiled
from psgc.torch.tensors.broadcast import refuse_lbfgs

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)
USE: Final = "use DistributedOptimizer for it"


def CrossBarrier(  # noqa: N802 - BytePS's name
    model: torch.nn.Module, optimizer: Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None, compression: Given = None,
    backward_passes_per_step: int = 1, num_steps: int = 10**6, gradient_as_bucket_view: bool = False,
) -> Optimizer:  # fmt: skip
    """Make ``optimizer`` average its gradients over all workers, each layer's until that layer's next forward: communication overlaps with the rest of backward
    and with the next forward, and what forward needs first has the highest priority. Returns the same object, now of a subclass of its class.

        optimizer = psgc.CrossBarrier(model, torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        for x, y in data:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()             # returns at once

    The losses are those of ``DistributedOptimizer``, bit for bit, where the codec is exact or does not depend on how tensors are fused.
    model:      whose layers wait: before their forward, also under ``no_grad``, and before ``state_dict()`` and ``load_state_dict()``. Whoever reads a
                parameter otherwise after step(), or copies the model, calls ``optimizer.synchronize()`` before.
    optimizer:  SGD, Adam, AdamW, or any other whose step treats each parameter by itself. An update uses the options (learning rates) of its own step.
    named_parameters, compression, backward_passes_per_step, gradient_as_bucket_view: as of ``DistributedOptimizer``; no "auto".
    num_steps:  the last step, which ends with all updates applied.

    step() sets p.grad to None, as zero_grad() does, because gradients are under way. What needs all gradients of a step at once is refused by UsageError:
    clipping (at step()), GradScaler, closures. So are parameters that two layers share, parameters of the optimizer that are not the model's, those that are
    unfrozen later (at step()), LBFGS, and optimizers whose steps change more than the parameters' own state (at the first update).
    """
    refuse_lbfgs(optimizer, "CrossBarrier")
    if isinstance(optimizer, Distributed | CrossBarriered):
        raise UsageError(
            f"CrossBarrier: this {type(optimizer).__name__} averages gradients already; give CrossBarrier the optimizer itself"
        )
    if not isinstance(model, torch.nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"CrossBarrier(model, optimizer): got {type(model).__name__} and {type(optimizer).__name__}")
    refuse_exchanging(optimizer, "CrossBarrier")
    refuse_replaced_step(optimizer, "CrossBarrier")
    check_passes(backward_passes_per_step)
    check_count("CrossBarrier: num_steps", num_steps)
    session = api.current_session()
    refuse_replaceable(session, "CrossBarrier")
    refuse_backup(session, "CrossBarrier")
    choice = chosen(session, compression, "CrossBarrier")
    if choice.auto or session.config.profile:
        raise UsageError(
            "CrossBarrier: auto and PSGC_PROFILE observe DistributedOptimizer, whose steps end together; name a codec, a rule or a plan here"
        )
    names = names_of(optimizer, named_parameters)
    if named_parameters is None:
        names |= {parameter: name for name, parameter in model.named_parameters() if parameter in names}
    refuse_foreign(optimizer, names)
    choice.check(trained(names))
    amp.install()
    specs = {p: parameter_spec(p, names[p]) for _, _, p in named_parameters_of(optimizer) if p.requires_grad}
    number = api.next_number(session, "crossing")
    exchange: GradientExchange[GradientBucket] = GradientExchange(session, f"crossing{number}", choice, whole=True, turn=number)
    updates = PartialSteps(optimizer, "CrossBarrier updates each parameter when it is needed", "DistributedOptimizer")
    gradients = UnbarrieredGradients(exchange, backward_passes_per_step, model, specs, updates.apply, gradient_as_bucket_view)
    gradients.advice = CodecAdvice()
    crossing = become(optimizer, CrossBarriered)
    crossing._psgc_crossing, crossing._psgc_updates, crossing._psgc_last, crossing._psgc_names = gradients, updates, num_steps, names
    return optimizer


class CrossBarriered(torch.optim.Optimizer):
    """What CrossBarrier adds to an optimizer's class; first in its method resolution order."""

    _psgc_crossing: UnbarrieredGradients
    _psgc_updates: PartialSteps
    _psgc_last: int  # the number of the step that ends with all updates applied
    _psgc_names: dict[torch.Tensor, str]  # of the parameters that it was wrapped with

    __getstate__ = refuse_copy

    @uncompiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Send what backward has not sent yet, and return: each parameter is updated before its layer's next forward."""
        if closure is not None:
            raise UsageError(f"CrossBarrier: step(closure) has to see its updates at once; {USE}")
        gradients = self._psgc_crossing
        self._psgc_refuse_new()
        gradients.prepare()
        gradients.advise(self)
        gradients.wait()  # with the options of the last step
        self._psgc_updates.keep_options()
        if gradients.take() >= self._psgc_last:
            gradients.wait()

    step = torch.optim.Optimizer.profile_hook_step(step)  # hooks registered on the optimizer run once a step
    step.hooked = True  # type: ignore[attr-defined]

    def synchronize(self) -> None:
        """On return all updates of the steps so far have been applied."""
        self._psgc_crossing.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. Raises UsageError between backward and step(), when gradients are under way."""
        if self._psgc_crossing.gradients.under_way():
            raise UsageError("zero_grad() while gradients are under way; call it after step(), or before backward()")
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, after all updates have been applied."""
        self.synchronize()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, after all updates have been applied."""
        self.synchronize()
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not possible here: raises UsageError."""
        raise UsageError(f"CrossBarrier: parameters cannot be added to an optimizer whose layers wait already; add them before, or {USE}")

    def _psgc_refuse_new(self) -> None:
        """Raise UsageError for a parameter that requires a gradient only since it was wrapped: no layer waits for it, so it would never be updated."""
        for _, name, parameter in named_parameters_of(self, self._psgc_names):
            if parameter.requires_grad and not self._psgc_crossing.knows(parameter):
                raise UsageError(
                    f"CrossBarrier: parameter {name!r} requires a gradient only since CrossBarrier was called, so no layer waits for it; unfreeze or add it "
                    f"before, or {USE}"
                )

    def _psgc_refuse_scaler(self) -> None:
        raise UsageError(
            f"CrossBarrier: GradScaler looks at all gradients before a step, which are still under way; train in bfloat16 without a scaler, or {USE}"
        )
