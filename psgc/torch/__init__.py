"""What users import: ``import psgc.torch as psgc``. Names and meanings follow BytePS and Horovod; docstrings say where psgc differs."""

from psgc.checkpoints import saving
from psgc.torch.adam import OneBitAdam, ZeroOneAdam
from psgc.torch.api import barrier, current_session, init, is_initialized, local_rank, local_size, rank, shutdown, size
from psgc.torch.broadcast import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from psgc.torch.compression import Compression
from psgc.torch.ddp import ddp_hook
from psgc.torch.functions import register_functions
from psgc.torch.optimizer import DistributedOptimizer
from psgc.torch.profiler import profile_model
from psgc.torch.push_pull import (
    declare,
    poll,
    push_pull,
    push_pull_async,
    push_pull_async_inplace,
    push_pull_inplace,
    synchronize,
)  # fmt: skip

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "OneBitAdam",
    "ZeroOneAdam",
    "barrier",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "current_session",
    "ddp_hook",
    "declare",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "poll",
    "profile_model",
    "push_pull",
    "push_pull_async",
    "push_pull_async_inplace",
    "push_pull_inplace",
    "rank",
    "register_functions",
    "saving",
    "shutdown",
    "size",
    "synchronize",
]
