"""Operations on tensors, and the process's place in the job."""

from psgc.torch import (
    Compression,
    declare,
    get_pushpull_speed,
    init,
    is_initialized,
    local_rank,
    local_size,
    poll,
    push_pull,
    push_pull_async,
    push_pull_async_inplace,
    push_pull_group,
    push_pull_group_sync_inplace,
    push_pull_inplace,
    rank,
    set_num_grads,
    shutdown,
    size,
    synchronize,
)  # fmt: skip

byteps_torch_set_num_grads = set_num_grads

__all__ = [
    "Compression",
    "byteps_torch_set_num_grads",
    "declare",
    "get_pushpull_speed",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "poll",
    "push_pull",
    "push_pull_async",
    "push_pull_async_inplace",
    "push_pull_group",
    "push_pull_group_sync_inplace",
    "push_pull_inplace",
    "rank",
    "set_num_grads",
    "shutdown",
    "size",
    "synchronize",
]
