"""``CrossBarrier``, and what a script that imports this module in place of ``byteps.torch`` calls."""

from psgc.torch import (
    Compression,
    CrossBarrier,
    DistributedOptimizer,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    declare,
    init,
    local_rank,
    local_size,
    poll,
    push_pull,
    rank,
    shutdown,
    size,
    synchronize,
)  # fmt: skip

__all__ = [
    "Compression",
    "CrossBarrier",
    "DistributedOptimizer",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "declare",
    "init",
    "local_rank",
    "local_size",
    "poll",
    "push_pull",
    "rank",
    "shutdown",
    "size",
    "synchronize",
]
