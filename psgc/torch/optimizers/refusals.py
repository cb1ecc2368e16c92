"""Parameters that DistributedOptimizer must leave alone, because something else synchronises them or holds only a piece of each.

Owns the error messages, which name what to use instead. A model may be wrapped after its optimizer, so the check is repeated before each
synchronization.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Final

import torch

from psgc.errors import UsageError
from psgc.torch.ddp import wrappers
from psgc.torch.ddp.told import models_made, models_of
from psgc.torch.optimizers.wrapping import named_parameters_of
from psgc.torch.tensors.shards import sharded_by

WITH_DDP: Final = (
    "DistributedDataParallel averages it already; use the optimizer as it is and psgc under DDP, with "
    "model.register_comm_hook(None, psgc.torch.ddp_hook(codec)), or leave DistributedDataParallel out"
)
WITH_OWN_DDP: Final = (
    "psgc.torch.DistributedDataParallel averages it already, in backward; use torch's optimizer as it is, or leave that wrapper out"
)
SHARDED: Final = (
    "DistributedOptimizer averages whole gradients, not those of sharded parameters; with FSDP2 (fully_shard) use the optimizer as it is and "
    "psgc.torch.fsdp_hook(model, codec), else leave FSDP out"
)


# optimizer -> how many wrappers there had been, and how many parameters it had, when all was last found in order
_checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int, int]] = weakref.WeakKeyDictionary()


def refuse_foreign(optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> None:
    """Raise UsageError, naming the first parameter of the optimizer that DDP reduces, torch's or psgc's, or that FSDP or a DTensor holds in pieces. Costs
    nothing while no model has been wrapped and no parameter added since the last time."""
    wrappers.watch()
    state = wrappers.made(), models_made(), sum(len(group["params"]) for group in optimizer.param_groups)
    if _checked.get(optimizer) == state:
        return
    reduced = {id(p) for wrapper in wrappers.all_wrappers() for p in wrappers.reduced(wrapper).values()}
    averaging = models_of(optimizer)
    for _, name, parameter in named_parameters_of(optimizer, names):
        if id(parameter) in reduced:
            raise UsageError(f"parameter {name!r}: {WITH_DDP}")
        if any(exchange.knows(parameter) for exchange in averaging):
            raise UsageError(f"parameter {name!r}: {WITH_OWN_DDP}")
        if what := sharded_by(parameter):
            raise UsageError(f"parameter {name!r} is {what}: {SHARDED}")
    _checked[optimizer] = state
