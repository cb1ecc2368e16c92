"""``CrossBarrier``, and what a script that imports this module in place of ``byteps.torch`` calls."""

from psgc.compat.byteps.torch import ops as _ops
from psgc.compat.byteps.torch.ops import *  # noqa: F403 - all of them, as byteps.torch.cross_barrier has them
from psgc.torch import CrossBarrier, DistributedOptimizer, broadcast_object, broadcast_optimizer_state, broadcast_parameters

__all__ = [
    "CrossBarrier",
    "DistributedOptimizer",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]
__all__ += _ops.__all__
