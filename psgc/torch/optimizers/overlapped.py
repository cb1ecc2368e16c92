"""DistributedOptimizer(overlapped_step=True): step() updates each bucket's parameters as soon as their mean is there, while later buckets travel.

Owns when that may be: nothing reads the gradients between their synchronization and the update. Else the step is the whole one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torchs

from psgc.errors import UsageError
from psgc.torch.optimizers.averaging import Distributed
from psgc.torch.optimizers.partial_step import PartialSteps
from psgc.torch.optimizers.wrapping import become
from psgc.torch.plans.choice import Choice
from psgc.torch.session.uncompiled import uncompiled
from psgc.worker.session import Session

WHY: Final = "DistributedOptimizer(overlapped_step=True) updates each bucket's parameters when their mean is there"
WITHOUT: Final = "DistributedOptimizer without it"


def check_overlapped(session: Session, choice: Choice, late: bool | None) -> None:
    """Raise UsageError for what does not go together with overlapped steps."""
    if session.config.async_mode:
        raise UsageError("overlapped_step: under PSGC_ASYNC=1 a step waits for no mean; leave it out")
    if choice.auto or session.config.profile:
        raise UsageError(
            "overlapped_step: auto and PSGC_PROFILE observe steps whose means come together; name a codec, a rule or a plan, or leave it out"
        )
    if late is False:
        raise UsageError("overlapped_step=True is late synchronization, inside step(); leave late_synchronization=False out")


def overlapped(optimizer: Optimizer) -> Distributed:
    """Make it one."""
    updates = PartialSteps(optimizer, WHY, WITHOUT)
    made = become(optimizer, Overlapped)
    made._psgc_updates = updates
    return made


class Overlapped(Distributed):
    """What ``overlapped_step=True`` adds to an optimizer's class; first in its method resolution order."""

    _psgc_updates: PartialSteps

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronize and apply, bucket by bucket. A whole step where gradients are synchronized already, which is how one clips or unscales them, with a
        closure, and with hooks that are to run before the step."""
        if closure is not None or not self._psgc_completing.due or self._optimizer_step_pre_hooks or torchs._global_optimizer_pre_hooks:
            return super().step(closure)
        self._psgc_step_by_bucket()
        self._psgc_gradients.end_step(True)
        return None

    step.hooked = True  # type: ignore[attr-defined]

    @Optimizer.profile_hook_step
    @uncompiled
    def _psgc_step_by_bucket(self) -> None:
        updates = self._psgc_updates
        updates.keep_options()
        updated: set[torch.Tensor] = set()

        def apply(parameters: Sequence[torch.Tensor]) -> None:
            due = [parameter for parameter in parameters if parameter.grad is not None and parameter not in updated]
            updated.update(due)
            updates.apply(due, [parameter.grad for parameter in due if parameter.grad is not None])

        self._psgc_gradients.synchronize_each(apply)
        apply([parameter for group in self.param_groups for parameter in group["params"]])  # those that no rank had a gradient of
