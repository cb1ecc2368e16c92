"""When an optimizer that averages applies gradients, every p.grad holds the mean: before its step, and after each run of a step's closure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from psgc.errors import UsageError
from psgc.torch.gradients.in_backward import BackwardGradients
from psgc.torch.session.uncompiled import uncompiled
from psgc.torch.tensors.push_pull import push_pull_inplace


class Completing:
    """Of one optimizer's gradients."""

    def __init__(self, gradients: BackwardGradients) -> None:
        self._gradients = gradients
        self._by_script = False

    @uncompiled
    def complete(self) -> None:
        """Have every p.grad hold the mean. Raises UsageError where that was left to the script, which has not done it."""
        if not self._by_script:
            self._gradients.synchronize()
        elif not self._gradients.synchronized:
            raise UsageError("step() inside skip_synchronize(), but gradients were not synchronized since; call synchronize() first")

    @property
    def due(self) -> bool:
        """Whether ``complete`` would send and receive."""
        return not self._by_script and self._gradients.due

    @uncompiled
    def complete_begun(self) -> None:
        """The same for a step that is under way."""
        if self._gradients.exchange.last.begun:
            self.complete()

    @contextmanager
    def left_to_script(self) -> Iterator[None]:
        """Inside, the script synchronizes."""
        self._by_script = True
        try:
            yield
        finally:
            self._by_script = False

    def after(self, closure: Callable[..., Any], averages_loss: bool) -> Callable[..., Any]:
        """The closure, after each run of which every p.grad holds the mean. averages_loss: it returns the mean of the ranks' losses, as an optimizer needs that
        decides by the loss when to stop: all ranks then evaluate equally often."""

        def evaluate(*args: Any, **kwargs: Any) -> Any:
            with torch.enable_grad():
                loss = closure(*args, **kwargs)
            self.complete()
            if averages_loss:
                mean = torch.as_tensor(loss).detach().to("cpu", torch.float64, copy=True).reshape(1)
                return push_pull_inplace(mean, name=f"{self._gradients.exchange.name}.loss")[0]
            return loss

        return evaluate
