"""ZeroOneAdam: the variance freezes by and by, and then ranks take local steps between meetings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from psgc.torch.optimizers.adam import FrozenVarianceAdam, Parameters
from psgc.torch.optimizers.adam_step import Options, decay, denominator_of, kept_by, momentum_of, step_size
from psgc.torch.optimizers.wrapping import check_count
from psgc.torch.state.saved import share_apart
from psgc.torch.tensors.buffers import real_of


class ZeroOneAdam(FrozenVarianceAdam):
    """0/1 Adam (Lu et al. 2022): the variance freezes by and by, then ranks take local steps and meet ever more rarely.

    Until ``warmup_steps`` the variance is updated, from averaged gradients, in ``variance_updates`` steps in a row, then as often in
    every second step, then in every fourth, and so on; in between momenta travel compressed. From then on the variance is frozen and
    ranks take local steps: they meet in every step at first, and the interval doubles every ``local_growth`` steps up to
    ``max_local_steps``. What travels then is how far each rank has moved since, by its learning rates; the mean of it becomes the step
    that all take from where they last met, and the momentum. Its residual is in units of the parameters.

    Between two meetings the ranks' parameters differ: call ``synchronize_parameters()`` on all ranks before you validate or save them.
    The other arguments, and what happens to gradients, are OneBitAdam's. Where the paper's ranks exchange both, a step with averaged
    gradients needs no momenta here: these are the same on all ranks.
    """

    def __init__(
        self, params: Parameters, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, *, warmup_steps: int, local_growth: int, max_local_steps: int = 16, variance_updates: int = 16,
        codec: str = "onebit", warmup_codec: str = "none", decoupled_weight_decay: bool = True, backward_passes_per_step: int = 1,
    ) -> None:  # fmt: skip
        counts = {
            "warmup_steps": warmup_steps, "local_growth": local_growth, "max_local_steps": max_local_steps,
            "variance_updates": variance_updates,
        }  # fmt: skip
        for name, value in counts.items():
            check_count(f"ZeroOneAdam: {name}", value)
        self._warmup_steps, self._variance_updates = warmup_steps, variance_updates
        self._local_growth, self._max_local_steps = local_growth, max_local_steps
        super().__init__(
            params, lr, betas, eps, weight_decay, decoupled_weight_decay, codec, warmup_codec, backward_passes_per_step
        )  # fmt: skip

    def synchronize_parameters(self) -> None:
        """Average parameters and momenta now, so that all ranks hold the same. Every rank must call it between the same two steps."""
        with torch.no_grad():
            moving = self._moving()
            if any("anchor" in self.state[parameter] for _, parameter in moving):
                self._meet(moving, lambda index: self.state[moving[index][1]]["moved"])

    def residual_state_dict(self) -> dict[str, Any]:
        """As DistributedOptimizer's, and where the ranks' parameters and momenta differ, which ``state_dict()`` has of its own rank only."""
        apart = {
            self._psgc_names[parameter]: {field: tensor.clone() for field, tensor in self._apart(parameter).items()}
            for parameter in self._moved()
        }
        return super().residual_state_dict() | {"apart": apart}

    @torch.no_grad()
    def load_residual_state_dict(self, states: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """As DistributedOptimizer's; after the model's and the optimizer's own ``load_state_dict()``, which must be of the same step."""
        moved = {self._psgc_names[parameter]: parameter for parameter in self._moved()}
        session = self._momenta.session
        apart = share_apart(states, session.rank, session.size, {name: self._apart(p) for name, p in moved.items()}, session.part)
        super().load_residual_state_dict(states)
        for name, values in apart.items():
            for field, tensor in self._apart(moved[name]).items():
                tensor.copy_(values[field])

    def _moved(self) -> list[torch.Tensor]:
        """The parameters that have taken local steps since the ranks last exchanged."""
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        return [parameter for parameter in parameters if "anchor" in self.state.get(parameter, {})]

    def _apart(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state = self.state[parameter]
        return {"parameter": parameter.detach(), "exp_avg": state["exp_avg"], "moved": state["moved"]}

    def _averages_gradients(self, step: int) -> bool:
        if step >= self._warmup_steps:
            return False
        # Stage e begins at step variance_updates * (2**e - 1) and has variance_updates updates, 2**e steps apart.
        interval = 1 << (step // self._variance_updates + 1).bit_length() - 1
        return (step - self._variance_updates * (interval - 1)) % interval == 0

    def _meets(self, step: int) -> bool:
        """Whether ranks exchange in this compressed step."""
        since = step - self._warmup_steps
        if since < 0:
            return True
        interval = min(1 << min(since // self._local_growth, 62), self._max_local_steps)
        return (since + 1) % interval == 0

    def _compressed_step(self) -> None:
        moving = self._moving()
        if self._meets(self.steps):
            self._meet(moving, lambda index: self._move(*moving[index], local=False))
        else:
            for group, parameter in moving:
                self._move(group, parameter, local=True)

    def _move(self, group: Options, parameter: torch.Tensor, *, local: bool) -> torch.Tensor:
        """Take this rank's local step and record it; returns how far the parameter has moved since ranks last met, without weight decay.

        State, between two meetings: ``anchor``, the parameter when ranks last met, ``moved``, ``rates``, the sum of its step sizes, and
        ``kept``, the product of what weight decay left; tensors are real (``real_of``). local: False: ranks are about to meet, the parameter
        itself need not move.
        """
        update, _ = self._own_update(parameter, group)
        state = self.state[parameter]
        if "anchor" not in state:
            state.update(anchor=real_of(parameter).clone(), moved=torch.zeros_like(update), rates=0.0, kept=1.0)
        size = step_size(state, group)
        state["moved"].add_(update, alpha=size)
        state["rates"] += size
        state["kept"] *= kept_by(group)
        if local and parameter.requires_grad:
            decay(parameter, kept_by(group))
            real_of(parameter).sub_(update, alpha=size)
        return state["moved"]  # type: ignore[no-any-return]

    def _meet(self, moving: list[tuple[Options, torch.Tensor]], moved: Callable[[int], torch.Tensor]) -> None:
        """Average how far ranks have moved, take that step from the anchors, and make the momenta of it."""
        self._average(moving, moved)
        for group, parameter in moving:
            state = self.state[parameter]
            if "anchor" not in state:  # it has no elements
                continue
            if state["rates"]:  # a learning rate of 0 moves nothing: the momentum waits for the next meeting
                torch.mul(state["moved"], denominator_of(state, group) / state["rates"], out=momentum_of(state))
            if parameter.requires_grad:
                real_of(parameter).copy_(decay(state["anchor"], state["kept"]).sub_(state["moved"]))
            for name in ("anchor", "moved", "rates", "kept"):
                del state[name]
