"""An update that another rank has made already, in the state that this process goes on from: it is left out, and only what hooks do beside it is done.

Hooks of the optimizer's step may count, or keep a moving average in a buffer, which this rank has as of the step's beginning. What they change of the optimizer
and of its parameters is in the other rank's state already, so that is put back: before the hooks after the step, which see the update as it was at its
end, and after them.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, Final

from torch.optim import Optimizer
from torch.optim import optimizer as torchs

OURS: Final = "psgc.torch."  # the modules whose hooks change neither parameters nor the optimizer


def leave_out(optimizer: Optimizer) -> None:
    """Run the hooks of one step."""
    if not any(_is_a_users(hook) for hook in _hooks(optimizer)):
        _run_hooks(optimizer, lambda: None)  # without a copy, for which memory may lack
        return
    put_back = _kept(optimizer)
    _run_hooks(optimizer, put_back)
    put_back()


def _kept(optimizer: Optimizer) -> Callable[[], None]:
    """Keep the optimizer and its parameters as they are. Returns what puts them back."""
    parameters = [(parameter, parameter.detach().clone()) for group in optimizer.param_groups for parameter in group["params"]]
    options = [{name: deepcopy(value) for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    state = {parameter: deepcopy(kept) for parameter, kept in optimizer.state.items()}

    def put_back() -> None:
        for parameter, kept in parameters:
            parameter.detach().copy_(kept)
        for group, had in zip(optimizer.param_groups, options, strict=True):
            own = group["params"]
            group.clear()
            group.update({"params": own, **deepcopy(had)})
        optimizer.state.clear()
        optimizer.state.update({parameter: deepcopy(kept) for parameter, kept in state.items()})

    return put_back


def _run_hooks(optimizer: Optimizer, update: Callable[[], None]) -> None:
    """With the arguments of a step without closure, and ``update`` between those before it and those after it."""

    @Optimizer.profile_hook_step
    def step(_optimizer: Optimizer) -> None:
        update()

    step(optimizer)


def _hooks(optimizer: Optimizer) -> list[Any]:
    of_all = (*torchs._global_optimizer_pre_hooks.values(), *torchs._global_optimizer_post_hooks.values())
    return [*of_all, *optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]


def _is_a_users(hook: Any) -> bool:
    return not str(getattr(hook, "__module__", "")).startswith(OURS)
