"""Horovod's names that psgc does not have, and what does the same here: for the error that a script gets which asks for one. docs/byteps.md has the table."""

from __future__ import annotations

from typing import Final

IN_TORCH: Final = "torch.distributed has it: init_process_group() needs no arguments under psgc's launchers"
INSTEAD: Final = {
    "allreduce": "use push_pull(tensor, average=True)",
    "allreduce_": "use push_pull_inplace(tensor, average=True)",
    "allreduce_async": "use push_pull_async(tensor, average=True)",
    "allreduce_async_": "use push_pull_async_inplace(tensor, average=True)",
    "grouped_allreduce": "use push_pull_group(tensors)",
    "broadcast": "use broadcast_parameters({name: tensor}, root_rank), which overwrites the tensor",
    "broadcast_": "use broadcast_parameters({name: tensor}, root_rank)",
    "Average": "use average=True of push_pull; DistributedOptimizer always averages",
    "Sum": "use average=False of push_pull; DistributedOptimizer always averages",
    "Adasum": "psgc averages and sums",
    "Min": IN_TORCH,
    "Max": IN_TORCH,
    "Product": IN_TORCH,
    "allgather": IN_TORCH,
    "allgather_object": IN_TORCH,
    "alltoall": IN_TORCH,
    "reducescatter": IN_TORCH,
    "join": "every rank must run the same number of steps",
}


def missing(name: str) -> AttributeError:
    """The error for a name that ``psgc.torch`` does not have."""
    instead = f", a name of Horovod's: {INSTEAD[name]} (docs/byteps.md, From Horovod)" if name in INSTEAD else ""
    return AttributeError(f"psgc.torch has no {name!r}{instead}")
