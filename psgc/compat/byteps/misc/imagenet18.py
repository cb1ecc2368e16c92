"""The optimizer of BytePS's imagenet18 training."""

from __future__ import annotations

from typing import Any

import torch

import psgc.torch as psgc
from psgc.compat.byteps.torch import ops as _ops
from psgc.compat.byteps.torch.ops import *  # noqa: F403 - all of them, as byteps.misc.imagenet18 has them
from psgc.errors import UsageError


def DistributedOptimizer(  # noqa: N802 - BytePS's name
    optimizer: torch.optim.Optimizer, named_parameters: Any = None, compression: Any = psgc.Compression.none, backward_passes_per_step: int = 1,
    half: bool = False, model: torch.nn.Module | None = None, fp16_params: Any = None, fp32_params: Any = None, loss_scale: float = 1024,
) -> torch.optim.Optimizer:  # fmt: skip
    """``psgc.torch.DistributedOptimizer``. Raises UsageError for half=True, BytePS's own loss scaling with a second copy of the parameters."""
    del model, fp16_params, fp32_params, loss_scale
    if half:
        raise UsageError(
            "imagenet18.DistributedOptimizer: half=True is not offered; train with torch.autocast and torch.amp.GradScaler, and compression='fp16'"
        )
    return psgc.DistributedOptimizer(optimizer, named_parameters, compression, backward_passes_per_step)


__all__ = ["DistributedOptimizer"]
__all__ += _ops.__all__
