"""The parts of a model that FSDP2 reduces at once, and the ranks that hold the same shard of them. The only file that looks into FSDP2's private objects.

A *unit* is a module that ``fully_shard`` was applied to, with those of its parameters that are no other unit's. FSDP reduce-scatters their gradients within
the shard group, as one flat tensor, and then calls the unit's hook with this rank's slice of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

from psgc.errors import UsageError
from psgc.torch.fsdp.reshard import Parameter
from psgc.torch.tensors.shards import local
from psgc.worker.session import Session

HOW = (
    "fully_shard(module, mesh=mesh), where mesh = init_device_mesh(device, (nodes, ranks of a node), mesh_dim_names=('replicate', 'shard'))"
)
_WHOLE = (torch.float32, torch.bfloat16)  # FSDP divides such gradients while it reduces them, and others before and after


@dataclass(frozen=True, slots=True)
class Slice:
    """What FSDP reduces of a unit while these of its parameters are trained: this rank's, and as much on every other. pieces: as of ``Unit``, not empty; dtype:
    what it reduces in."""

    pieces: tuple[tuple[str, tuple[int, ...]], ...]
    dtype: torch.dtype = field(compare=False)

    @property
    def numel(self) -> int:
        return sum(math.prod(shape) for _, shape in self.pieces)


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """module: which ``fully_shard`` was applied to; name: its name in the model; state: FSDP's own of the module's parameters; names: the model's, of
    parameters."""

    module: Any
    name: str
    state: Any
    names: Mapping[torch.Tensor, str]

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Those that are trained now, as the optimizer has them: sharded. A script may freeze some, and train others, between two steps."""
        return [each.sharded_param for each in self.state.fsdp_params if each.sharded_param.requires_grad]

    @property
    def pieces(self) -> list[tuple[str, tuple[int, ...]]]:
        """Of each of ``parameters`` the name, and the shape of a rank's slice, filled up to be equal on all ranks: so they follow one another in what FSDP
        reduces."""
        trained = (each for each in self.state.fsdp_params if each.sharded_param.requires_grad)
        return [(self.names[each.sharded_param], tuple(each.padded_sharded_param_size)) for each in trained]

    @property
    def whole(self) -> dict[str, Parameter]:
        """Of each of ``parameters`` by name: its shape, and its pieces'. Raises UsageError for one that is not cut along its first dimension."""
        shapes = {self.names[parameter]: tuple(parameter.shape) for parameter in self.parameters}
        for parameter in self.parameters:
            if any(not placement.is_replicate() and not placement.is_shard(0) for placement in getattr(parameter, "placements", ())):
                raise UsageError(
                    f"load_residual_state_dict: {self.names[parameter]!r} is not sharded along its first dimension; go on on a mesh of the same shape"
                )
        return {name: Parameter(shapes[name], piece) for name, piece in self.pieces}

    @property
    def everything(self) -> list[torch.nn.Parameter]:
        """As ``parameters``, those that are frozen now, too."""
        return [each.sharded_param for each in self.state.fsdp_params]

    def of(self, its: Slice) -> list[torch.Tensor]:
        """What of the parameters of a slice of its own is on this rank."""
        names = {name for name, _ in its.pieces}
        return [local(parameter) for parameter in self.everything if self.names[parameter] in names]

    def slice(self) -> Slice | None:
        """What FSDP reduces of it now; None where all of it is frozen. Known from the first forward on."""
        pieces = tuple(self.pieces)
        return Slice(pieces, self.dtype) if pieces else None

    @property
    def dtype(self) -> torch.dtype:
        """What FSDP reduces its gradients in: its MixedPrecisionPolicy's, which another unit may have another of. Known from the first forward on."""
        first = next(each for each in self.state.fsdp_params if each.sharded_param.requires_grad)
        found: torch.dtype = self.state._reduce_dtype or first.param_dtype or first.orig_dtype
        return found

    def hook(self, call: Callable[[torch.Tensor], None]) -> None:
        """Have FSDP call it with this rank's slice of the gradients, which it may write to."""
        self.module.set_all_reduce_hook(call)

    def check_mesh(self) -> None:
        """Raise UsageError unless FSDP shards over one dimension of a mesh, and over no more than one averages between replicas (HSDP)."""
        if self.is_elsewhere:
            raise UsageError(
                f"fsdp_hook: {self.name!r} is sharded over a mesh of {self.state.mesh_info.mesh.ndim} dimensions, not over one: {HOW}"
            )

    @property
    def is_elsewhere(self) -> bool:
        """Whether its mesh has more dimensions than one of shards and one of replicas."""
        info = self.state.mesh_info
        return info.mesh.ndim > 1 and not isinstance(info, HSDPMeshInfo)

    def refuse(self, _gradients: torch.Tensor) -> None:
        """The hook of a unit that was frozen when the others were hooked, and is not sharded as they are."""
        raise UsageError(
            f"fsdp_hook: {self.name!r} is trained now, and is not sharded over the mesh of the units that were trained when fsdp_hook was called; shard all "
            f"that is ever trained over one mesh: {HOW}"
        )

    def take_over(self) -> None:
        """Have FSDP not average between the replicas of a mesh of two dimensions (HSDP): psgc does. Parameters, and what is saved of them, stay on that mesh;
        only the group that reduces gradients is another."""
        state, info = self.state, self.state.mesh_info
        if isinstance(info, HSDPMeshInfo):
            assert info.mesh.mesh_dim_names is not None and info.shard_mesh_dim is not None
            state.mesh_info = FSDPMeshInfo(info.mesh[info.mesh.mesh_dim_names[info.shard_mesh_dim]], shard_mesh_dim=0)
            if hasattr(info, "reduce_scatter_process_group"):
                state.mesh_info.reduce_scatter_process_group = info.reduce_scatter_process_group
            if state.post_forward_mesh_info is info:  # where parameters are sharded again after forward: over the same ranks
                state.post_forward_mesh_info = state.mesh_info

    @property
    def sharded_over(self) -> tuple[int, ...]:
        """The ranks that hold the slices of one replica."""
        info = self.state.mesh_info
        return tuple(dist.get_process_group_ranks(info.shard_process_group))

    def waits(self, gradients: torch.Tensor) -> bool:
        """Whether the hook must not return before the mean is there: FSDP goes on to compute with it. Else it only makes p.grad of it, as views."""
        state = self.state
        if state._orig_dtype not in (None, gradients.dtype) or gradients.dtype not in _WHOLE or state.force_sum_reduction_for_comms:
            return True
        each = [one for one in state.fsdp_params if one.sharded_param.requires_grad]
        used = (one.sharded_param.grad is not None or getattr(one.sharded_param, "_post_accumulate_grad_hooks", None) for one in each)
        return any(one.offload_to_cpu for one in each) or any(used)

    @property
    def summed(self) -> bool:
        """Whether FSDP divides by a factor of the script's (``set_gradient_divide_factor``), so that replicas are to be summed and not averaged."""
        return self.state.gradient_divide_factor is not None

    def check(self, gradients: torch.Tensor, declared: Slice | None, summed: bool) -> None:
        """Raise UsageError for gradients that psgc would add up wrongly. declared: what this unit's bucket has; None: it has none. summed: whether replicas'
        are summed."""
        if self.summed != summed:
            called = "others and not on it" if summed else "it and not on others"
            raise UsageError(
                f"fsdp_hook: {self.name!r}: set_gradient_divide_factor was called on {called} when the first gradients came; call it on all modules, before "
                f"the first backward"
            )
        if declared is None or gradients.numel() > declared.numel:
            raise UsageError(
                f"fsdp_hook: FSDP reduced gradients of {self.name!r} of which some parameters are frozen now; freeze parameters between a step() and the "
                f"next forward, not before a backward"
            )
        if gradients.dtype != declared.dtype:
            raise UsageError(
                f"fsdp_hook: FSDP reduced gradients of {self.name!r} in {gradients.dtype}, and they were declared as {declared.dtype}; do not change its "
                f"MixedPrecisionPolicy once training has begun"
            )
        if gradients.numel() != declared.numel:
            raise UsageError(
                f"fsdp_hook: FSDP reduced {gradients.numel()} gradients of {self.name!r} on each rank, and its trained parameters are {declared.numel}: some "
                f"had no gradient in this backward; call model.set_reduce_scatter_unused_params(True), or freeze them"
            )


def units_of(model: torch.nn.Module) -> list[Unit]:
    """The model's, in its order, also those that are frozen now. Raises UsageError where all are, and for units that psgc cannot serve."""
    found: list[Unit] = []
    names: dict[torch.Tensor, str] = {parameter: name.replace("_orig_mod.", "") for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        if not hasattr(module, "set_all_reduce_hook"):
            continue
        state: Any = module._get_fsdp_state()
        states = getattr(state, "_fsdp_param_groups", None)
        if states is None:  # torch before 2.12
            states = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
        if len(states) > 1:
            raise UsageError(
                f"fsdp_hook: parameters of {name or 'model'!r} are sharded over several meshes; shard each module over one: {HOW}"
            )
        states = [
            each for each in states if not any(unit.state is each for unit in found)
        ]  # several modules may be one unit: fully_shard([a, b])
        units = [Unit(module, name.replace("_orig_mod.", "") or "model", each, names) for each in states]
        found += [unit for unit in units if unit.state.fsdp_params]
    if not any(unit.pieces for unit in found):
        raise UsageError("fsdp_hook: the model has no trained parameters that FSDP2 has sharded; apply torch's fully_shard to it first")
    for unit in found:
        if unit.pieces:
            unit.check_mesh()
    return found


def replicas_of(units: Sequence[Unit], session: Session) -> tuple[tuple[int, ...], ...]:
    """By shard, the ranks that hold it, ascending. Every rank must call it. Raises UsageError unless FSDP shards all units that are trained now within the same
    groups of ranks, all of them as large, and psgc numbers ranks as torch does."""
    if (dist.get_rank(), dist.get_world_size()) != (session.rank, session.size):
        raise UsageError(
            f"fsdp_hook: this is rank {dist.get_rank()} of torch.distributed's {dist.get_world_size()}, and rank {session.rank} of psgc's {session.size}; "
            f"start every worker of the script by `psgc run`, psgc-launch or torchrun, and take rank and world size from the environment"
        )
    meshes = {unit.sharded_over: unit.name for unit in units if unit.pieces}
    if len(meshes) > 1:
        first, second, *_ = ((name, ", ".join(map(str, ranks))) for ranks, name in meshes.items())
        raise UsageError(
            f"fsdp_hook: {first[0]!r} is sharded over ranks {first[1]}, and {second[0]!r} over ranks {second[1]}; shard all over one mesh: {HOW}"
        )
    own = next(iter(meshes))
    every: list[Any] = [None] * session.size
    dist.all_gather_object(every, own)
    groups = sorted(set(every))
    if sorted(rank for group in groups for rank in group) != list(range(session.size)) or len({len(group) for group in groups}) > 1:
        text = " and ".join(", ".join(map(str, group)) for group in groups)
        raise UsageError(
            f"fsdp_hook: models are sharded over ranks {text}; each rank must be in one such group, all of them as large: {HOW}"
        )
    if len(groups) == 1 and session.size > 1:
        raise UsageError(
            f"fsdp_hook: the model is sharded over all {session.size} ranks, so there are no replicas to average between; shard within nodes: {HOW}"
        )
    return tuple(zip(*groups, strict=True))


def parted(units: Sequence[Unit], replicas: Sequence[Sequence[int]]) -> tuple[list[Unit], list[Unit]]:
    """Those that are sharded as ``replicas_of`` has found, and those that are not, which are frozen now."""
    over = {tuple(ranks[node] for ranks in replicas) for node in range(len(replicas[0]))}
    fits = [not unit.is_elsewhere and unit.sharded_over in over for unit in units]
    return [unit for unit, fit in zip(units, fits, strict=True) if fit], [unit for unit, fit in zip(units, fits, strict=True) if not fit]
