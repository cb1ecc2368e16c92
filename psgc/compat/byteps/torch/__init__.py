"""BytePS's interface for PyTorch. Names and meanings are those of ``psgc.torch``, whose docstrings say where psgc differs."""

from psgc.compat.byteps.torch import ops as _ops
from psgc.compat.byteps.torch.ops import *  # noqa: F403 - all of them, as byteps.torch has them
from psgc.torch import (
    DistributedDataParallel,
    DistributedOptimizer,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    push_pull_async_inplace,
    push_pull_group_sync_inplace,
)

byteps_push_pull = push_pull_async_inplace
byteps_push_pull_group = push_pull_group_sync_inplace

__all__ = [
    "DistributedDataParallel",
    "DistributedOptimizer",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "byteps_push_pull",
    "byteps_push_pull_group",
]
__all__ += _ops.__all__
