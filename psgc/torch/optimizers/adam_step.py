"""One step of AdamW, or of Adam with L2, of one parameter: as torch does it, operation for operation, and in pieces for steps whose variance is frozen.

State of a parameter: ``exp_avg``, ``exp_avg_sq``, ``step`` (updates of the first), ``variance_steps`` (of the second). As in torch, the real and the imaginary
parts of a complex parameter are elements by themselves: its state is complex, but all arithmetic is on ``real_of``. Knows no ranks.
Source: Loshchilov & Hutter 2019 (AdamW), Algorithm 2.
"""

from __future__ import annotations

from typing import Any

import torch

from psgc.errors import UsageError
from psgc.torch.tensors.buffers import real_of, resolved

Options = dict[str, Any]  # of a parameter group
State = dict[str, Any]  # of a parameter


def check_options(by: str, lr: float, betas: tuple[float, float], eps: float) -> None:
    """Raise UsageError, naming ``by``, for an option that is out of its range."""
    for name, value, limit in (("lr", lr, float("inf")), ("betas[0]", betas[0], 1), ("betas[1]", betas[1], 1), ("eps", eps, 1)):
        if not 0 <= value < limit:
            raise UsageError(f"{by}: {name} is {value!r}, expected a number from 0 to below {limit}")


def take_over(state: State) -> int:
    """Make the state of torch's Adam one of ours, if it is. Returns the steps it has taken."""
    state["step"] = int(state["step"])
    state.setdefault("variance_steps", state["step"])
    return int(state["step"])


def adam_step(parameter: torch.Tensor, state: State, group: Options) -> None:
    """Update the parameter, which has a gradient, and its state, which may be empty."""
    if not state:
        state["step"] = state["variance_steps"] = 0
        state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    gradient = gradient_of(parameter, group)
    decay(parameter, kept_by(group))
    state["step"] += 1
    state["variance_steps"] += 1
    beta1, beta2 = group["betas"]
    momentum = momentum_of(state)
    momentum.lerp_(gradient, 1 - beta1)
    real_of(state["exp_avg_sq"]).mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    real_of(parameter).addcdiv_(momentum, denominator_of(state, group), value=-step_size(state, group))


def own_update(parameter: torch.Tensor, state: State, group: Options, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Add this rank's gradient (none counts as zeros) to its momentum; the momentum over the denominator, clipped to what Adam could make, and the
    denominator. Both are real."""
    beta1, beta2 = group["betas"]
    momentum = momentum_of(state)
    if parameter.grad is None:
        momentum.mul_(beta1)
    else:
        momentum.lerp_(gradient_of(parameter, group), 1 - beta1)
    state["step"] += 1
    denominator = denominator_of(state, group)
    limit = max(1.0, (1 - beta1) / (1 - beta2) ** 0.5) * ranks**0.5
    return (momentum / denominator).clamp_(-limit, limit), denominator


def gradient_of(parameter: torch.Tensor, group: Options) -> torch.Tensor:
    """The gradient, real, with L2 where weight decay is not decoupled. Raises UsageError for a sparse one."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.layout != torch.strided:
        raise UsageError(
            "this optimizer takes dense gradients: use sparse=False in embedding layers, or DistributedOptimizer(torch.optim.SparseAdam(...), "
            "sparse=[names])"
        )
    gradient = real_of(resolved(gradient))
    if group["weight_decay"] and not group["decoupled_weight_decay"]:
        return gradient.add(real_of(parameter), alpha=group["weight_decay"])
    return gradient


def momentum_of(state: State) -> torch.Tensor:
    """Real, in the state's own memory."""
    return real_of(state["exp_avg"])


def kept_by(group: Options) -> float:
    """The factor that one step of decoupled weight decay multiplies a parameter with."""
    return 1 - float(group["lr"]) * float(group["weight_decay"]) if group["decoupled_weight_decay"] else 1.0


def decay(parameter: torch.Tensor, kept: float) -> torch.Tensor:
    return parameter if kept == 1.0 else parameter.mul_(kept)


def denominator_of(state: State, group: Options) -> torch.Tensor:
    """Real."""
    correction = 1 - group["betas"][1] ** state["variance_steps"]
    return (real_of(state["exp_avg_sq"]).sqrt() / correction**0.5).add_(group["eps"])  # type: ignore[no-any-return]


def step_size(state: State, group: Options) -> float:
    return float(group["lr"]) / (1 - float(group["betas"][0]) ** int(state["step"]))
