"""OneBitAdam: plain AdamW at first, then momenta that travel compressed, under a variance that is frozen for good."""

from __future__ import annotations

import torch

from psgc.torch.optimizers.adam import FrozenVarianceAdam, Parameters
from psgc.torch.optimizers.adam_step import decay, kept_by, momentum_of, step_size
from psgc.torch.optimizers.wrapping import check_count
from psgc.torch.tensors.buffers import real_of


class OneBitAdam(FrozenVarianceAdam):
    """1-bit Adam (Tang et al. 2021): ``warmup_steps`` of plain AdamW, then the variance is frozen and momenta travel compressed.

    params:        ``model.named_parameters()``, parameters, or groups of either, the same on every rank.
    warmup_steps:  steps before the variance is frozen; the paper takes 15-20 % of the training, and past the learning rate's own warm-up.
    codec:         of the momentum, both ways or ``push/pull``; PSGC_CODEC has no say. Its residual does not follow the learning rate.
    warmup_codec:  of the gradients during the warm-up: ``none`` or ``bf16``.
    decoupled_weight_decay: True: AdamW's; False: L2 added to the gradient. The other arguments are AdamW's.
    backward_passes_per_step: as DistributedOptimizer's.

    Used like AdamW: there is nothing to wrap. Options must be the same on every rank. During the warm-up backward returns with averaged
    gradients (``synchronize()`` does so under PSGC_LATE_SYNCHRONIZATION); later gradients, and so clipping, are each rank's own. A
    parameter without a gradient in a compressed step counts as zeros. Raises UsageError for a parameter whose first gradient comes after
    the warm-up; CodecError where a codec cannot carry a parameter.
    """

    def __init__(
        self, params: Parameters, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, *, warmup_steps: int, codec: str = "onebit", warmup_codec: str = "none",
        decoupled_weight_decay: bool = True, backward_passes_per_step: int = 1,
    ) -> None:  # fmt: skip
        check_count("OneBitAdam: warmup_steps", warmup_steps)
        self._warmup_steps = warmup_steps
        super().__init__(
            params, lr, betas, eps, weight_decay, decoupled_weight_decay, codec, warmup_codec, backward_passes_per_step
        )  # fmt: skip

    def _averages_gradients(self, step: int) -> bool:
        return step < self._warmup_steps

    def _compressed_step(self) -> None:
        moving = self._moving()
        updates: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def outgoing(index: int) -> torch.Tensor:
            group, parameter = moving[index]
            updates[index] = self._own_update(parameter, group)
            return updates[index][0]

        self._average(moving, outgoing)
        for index, (update, denominator) in updates.items():
            group, parameter = moving[index]
            state = self.state[parameter]
            torch.mul(update, denominator, out=momentum_of(state))
            if parameter.requires_grad:
                decay(parameter, kept_by(group))
                real_of(parameter).add_(update, alpha=-step_size(state, group))
