"""What users import: ``import psgc.torch as psgc``. Names and meanings follow BytePS and Horovod; docstrings say where psgc differs."""

from typing import TYPE_CHECKING

from psgc.processes.checkpoints import saving
from psgc.torch.ddp.data_parallel import DistributedDataParallel
from psgc.torch.ddp.hook import ddp_hook
from psgc.torch.elastic.elastic import Elastic
from psgc.torch.elastic.members import Members, on_membership
from psgc.torch.fsdp.hook import fsdp_hook
from psgc.torch.gradients.profiler import profile_model
from psgc.torch.optimizers.cross_barrier import CrossBarrier
from psgc.torch.optimizers.demo import DeMo
from psgc.torch.optimizers.distributed import DistributedOptimizer
from psgc.torch.optimizers.onebit_adam import OneBitAdam
from psgc.torch.optimizers.zero_one_adam import ZeroOneAdam
from psgc.torch.rarely.decoupled import Decoupled
from psgc.torch.rarely.diloco import DiLoCo, local_sgd
from psgc.torch.session import horovod as _horovod
from psgc.torch.session.api import (
    barrier,
    current_session,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    resume,
    shutdown,
    size,
    suspend,
)  # fmt: skip
from psgc.torch.session.callbacks import lightning_callback, log_metrics, log_with_trainer
from psgc.torch.session.metrics import metrics
from psgc.torch.session.speed import get_pushpull_speed
from psgc.torch.state.checkpointing import load_state_dict, state_dict
from psgc.torch.state.folder import Checkpoints
from psgc.torch.tensors.among import reduce
from psgc.torch.tensors.broadcast import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from psgc.torch.tensors.compression import Compression
from psgc.torch.tensors.functions import register_functions
from psgc.torch.tensors.group import push_pull_group, push_pull_group_sync_inplace, set_num_grads
from psgc.torch.tensors.held import HeldTensors
from psgc.torch.tensors.push_pull import (
    declare,
    poll,
    push_pull,
    push_pull_async,
    push_pull_async_inplace,
    push_pull_inplace,
    synchronize,
)  # fmt: skip
from psgc.torch.tensors.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Checkpoints",
    "Compression",
    "CrossBarrier",
    "DeMo",
    "Decoupled",
    "DiLoCo",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "Elastic",
    "HeldTensors",
    "Members",
    "OneBitAdam",
    "SyncBatchNorm",
    "ZeroOneAdam",
    "barrier",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "current_session",
    "ddp_hook",
    "declare",
    "fsdp_hook",
    "get_pushpull_speed",
    "init",
    "is_initialized",
    "lightning_callback",
    "load_state_dict",
    "local_rank",
    "local_sgd",
    "local_size",
    "log_metrics",
    "log_with_trainer",
    "metrics",
    "on_membership",
    "poll",
    "profile_model",
    "push_pull",
    "push_pull_async",
    "push_pull_async_inplace",
    "push_pull_group",
    "push_pull_group_sync_inplace",
    "push_pull_inplace",
    "rank",
    "reduce",
    "register_functions",
    "resume",
    "saving",
    "set_num_grads",
    "shutdown",
    "size",
    "state_dict",
    "suspend",
    "synchronize",
]

if not TYPE_CHECKING:  # else every name would be known to type checkers

    def __getattr__(name: str) -> None:
        raise _horovod.missing(name)
