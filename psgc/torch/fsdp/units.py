"""The parts of a model that FSDP2 reduces at once, and the ranks that hold the same shard of them. The only file, beside ``tensors.shards``, that looks into
FSDP2's private objects.

A *unit* is a module that ``fully_shard`` was applied to, with those of its parameters that are no other unit's. FSDP reduce-scatters their gradients within
the shard group, as one flat tensor, and then calls the unit's hook with this rank's slice of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

from psgc.errors import UsageError
from psgc.torch.fsdp.reshard import Parameter
from psgc.torch.gradients.backward_end import BackwardEnd
from psgc.torch.session.uncompiled import uncompiled
from psgc.torch.tensors.declaring import plain_name
from psgc.torch.tensors.shards import check_replicated, local, reduced_at_once, reshard, sharding_modules
from psgc.worker.part_session import PartSession
from psgc.worker.session import Session

HOW = (
    "fully_shard(module, mesh=mesh), where mesh = init_device_mesh(device, (nodes, ranks of a node), mesh_dim_names=('replicate', 'shard'))"
)
JOIN = "join by psgc.init(mesh=mesh, dim=...) first, where dim names the dimension along which the model is replicated"
_CUTS = frozenset(
    {"pp", "pipe", "pipeline", "stage", "tp", "tensor", "model", "ep", "expert"}
)  # what dimensions that cut a model are called
_FINAL: Final = "_root_post_backward_final_callback"
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
    """module: which ``fully_shard`` was applied to; name: its name in the model; state: FSDP's own of the module's parameters; names: the model's, by FSDP's
    object of a parameter, which stays where ``to_empty`` and its like, or ``load_state_dict(assign=True)``, change the parameter."""

    module: Any
    name: str
    state: Any
    names: Mapping[Any, str]

    @property
    def trained(self) -> list[Any]:
        """FSDP's objects of the parameters that are trained now. A script may freeze some, and train others, between two steps."""
        return [each for each in self.state.fsdp_params if each.sharded_param.requires_grad]

    @property
    def pieces(self) -> list[tuple[str, tuple[int, ...]]]:
        """Of each parameter that is trained now the name, and the shape of a rank's slice, filled up to be equal on all ranks: so they follow one another in
        what FSDP reduces."""
        return [(self.names[each], tuple(each.padded_sharded_param_size)) for each in self.trained]

    @property
    def whole(self) -> dict[str, Parameter]:
        """Of each parameter that is trained now, by name: its shape, and its pieces'. Raises UsageError for one that is not cut along its first dimension."""
        shapes = {self.names[each]: tuple(each.sharded_param.shape) for each in self.trained}
        for each in self.trained:
            if any(
                not placement.is_replicate() and not placement.is_shard(0) for placement in getattr(each.sharded_param, "placements", ())
            ):
                raise UsageError(
                    f"load_residual_state_dict: {self.names[each]!r} is not sharded along its first dimension; go on on a mesh of the same shape"
                )
        return {name: Parameter(shapes[name], piece) for name, piece in self.pieces}

    @property
    def everything(self) -> list[torch.nn.Parameter]:
        """All parameters, as the optimizer has them: sharded."""
        return [each.sharded_param for each in self.state.fsdp_params]

    def of(self, its: Slice) -> list[torch.Tensor]:
        """What of the parameters of a slice of its own is on this rank."""
        names = {name for name, _ in its.pieces}
        return [local(each.sharded_param) for each in self.state.fsdp_params if self.names[each] in names]

    def slice(self) -> Slice | None:
        """What FSDP reduces of it now; None where all of it is frozen. Known from the first forward on."""
        pieces = tuple(self.pieces)
        return Slice(pieces, self.dtype) if pieces else None

    @property
    def dtype(self) -> torch.dtype:
        """What FSDP reduces its gradients in: its MixedPrecisionPolicy's, which another unit may have another of. Known from the first forward on."""
        first = self.trained[0]
        # What FSDP has reduced of a unit that is never cast becomes p.grad as it is, so that it must be the parameters' own:
        found: torch.dtype = first.orig_dtype if self.is_never_cast else self.state._reduce_dtype or first.param_dtype or first.orig_dtype
        return found

    @property
    def is_never_cast(self) -> bool:
        """Whether all of it was frozen in the first forward: FSDP then reduces its gradients in what they come in, and leaves them so."""
        return self.state._orig_dtype is None

    def hook(self, call: Callable[[torch.Tensor], None]) -> None:
        """Have FSDP call it with this rank's slice of the gradients, which it may write to."""
        self.module.set_all_reduce_hook(call)

    def await_end(self, finish: Callable[[], None]) -> BackwardEnd:
        """While no backward runs: FSDP reduces because it was told to, behind all backwards of a step, as by torch's pipelining. Whoever does that then calls
        what FSDP does at the end of a backward, in which it makes the current stream wait for what it has reduced. When that is over ``finish`` is called,
        and what it raises is raised there."""
        states, end = self.module._get_fsdp_state()._state_ctx.all_states, BackwardEnd()

        @uncompiled
        def final(before: Callable[[], None]) -> None:
            for state in states:
                vars(state).pop(_FINAL, None)
            before()
            end.came = True
            finish()

        for state in states:  # it is called of one, and the others have the same end
            setattr(state, _FINAL, partial(final, getattr(state, _FINAL)))
        end.carried_by(final)
        return end

    def check_mesh(self) -> None:
        """Raise UsageError unless FSDP shards over one dimension of a mesh, and over no more than one averages between replicas (HSDP)."""
        if not isinstance(self.state.mesh_info, FSDPMeshInfo):
            raise UsageError(
                f"fsdp_hook: torch's replicate() was applied to {self.name!r}, and shards nothing; leave it out, and use psgc.DistributedOptimizer, "
                f"psgc.DistributedDataParallel, or torch's DistributedDataParallel with psgc.ddp_hook; or shard within nodes: {HOW}"
            )
        if self.is_elsewhere:
            raise UsageError(
                f"fsdp_hook: {self.name!r} is sharded over a mesh of {self.state.mesh_info.mesh.ndim} dimensions, not over one: {HOW}"
            )

    @property
    def is_elsewhere(self) -> bool:
        """Whether its mesh has more dimensions than one of shards and one of replicas, or none of shards (``replicate``)."""
        info = self.state.mesh_info
        return not isinstance(info, FSDPMeshInfo) or (info.mesh.ndim > 1 and not isinstance(info, HSDPMeshInfo))

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
    def replicated_over(self) -> tuple[int, ...] | None:
        """The ranks that FSDP itself would average between (HSDP), before ``take_over``; None where its mesh does not say."""
        info = self.state.mesh_info
        return tuple(dist.get_process_group_ranks(info.replicate_process_group)) if isinstance(info, HSDPMeshInfo) else None

    @property
    def is_cut_otherwise(self) -> bool:
        """Whether it was cut before FSDP sharded it, as tensor parallelism does."""
        return any(each.is_dtensor for each in self.state.fsdp_params)

    @property
    def other_dimensions(self) -> list[str]:
        """Of the mesh that its mesh is a part of, those in which ranks differ that do not shard it: of replicas, or of something else."""
        mesh = self.state.mesh_info.mesh
        if hasattr(mesh, "_get_root_mesh"):
            root = mesh._get_root_mesh()
        else:  # torch before 2.9
            from torch.distributed.device_mesh import _mesh_resources

            root = _mesh_resources.get_root_mesh(mesh)
        own, ranks = set(self.sharded_over), root.mesh
        names: Sequence[str] = root.mesh_dim_names or [str(dim) for dim in range(ranks.ndim)]
        place = (ranks == dist.get_rank()).nonzero()[0].tolist()
        along = [ranks[tuple(slice(None) if each == dim else at for each, at in enumerate(place))] for dim in range(ranks.ndim)]
        return [name for name, of in zip(names, along, strict=True) if not own.issuperset(of.tolist())]

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
        each = self.trained
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
        if gradients.dtype != declared.dtype and self.is_never_cast:
            raise UsageError(
                f"fsdp_hook: all parameters of {self.name!r} were frozen in the first forward, so that FSDP casts no gradients of it: they came in "
                f"{gradients.dtype}, and the parameters have {declared.dtype}; freeze it after the first forward"
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


def in_backward() -> bool:
    """Whether this thread is in a backward, whose end autograd tells of."""
    return bool(torch._C._current_graph_task_id() != -1)


def units_of(model: torch.nn.Module) -> list[Unit]:
    """The model's, in its order, also those that are frozen now. Raises UsageError where all are, and for units that psgc cannot serve."""
    found: list[Unit] = []
    reshard(sharding_modules(model))  # after a forward without a backward, modules may have their whole parameters still
    names = {parameter: plain_name(name) for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        if not hasattr(module, "set_all_reduce_hook"):
            continue
        states = reduced_at_once(module)
        if len(states) > 1:
            raise UsageError(
                f"fsdp_hook: parameters of {name or 'model'!r} are sharded over several meshes; shard each module over one: {HOW}"
            )
        states = [
            each for each in states if not any(unit.state is each for unit in found)
        ]  # several modules may be one unit: fully_shard([a, b])
        units = [
            Unit(module, plain_name(f"{name}.")[:-1] or "model", each, {one: names[one.sharded_param] for one in each.fsdp_params})
            for each in states
        ]
        found += [unit for unit in units if unit.state.fsdp_params]
    if not any(unit.pieces for unit in found):
        raise UsageError("fsdp_hook: the model has no trained parameters that FSDP2 has sharded; apply torch's fully_shard to it first")
    for unit in found:
        if unit.pieces:
            unit.check_mesh()
    return found


class ShardedParameters:
    """The parameters of the units, as FSDP has them now. Neither they nor references to them are kept beyond a step: torch does not swap what is referred to
    weakly, as ``to_empty`` does, and another may take the place of one."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._known: dict[int, Any] = {}  # FSDP's object of a parameter, by the parameter's id
        self._trained: list[Any] = []  # FSDP's objects of those that are trained in the step
        self.look()

    def look(self) -> None:
        """A step begins."""
        self._known = {id(each.sharded_param): each for unit in self._units for each in unit.state.fsdp_params}
        self._trained = [each for unit in self._units for each in unit.trained]

    def knows(self, parameter: torch.Tensor) -> bool:
        found = self._known.get(id(parameter))
        return found is not None and found.sharded_param is parameter

    def present(self) -> list[torch.Tensor]:
        return [parameter for unit in self._units for parameter in unit.everything]

    @property
    def hold_gradients(self) -> bool:
        """Whether any p.grad that the last step was of holds something other than zeros here. What an earlier one left in a parameter that was frozen since is
        no part of it. Replicas have the same in theirs, and see the same."""
        grads = (each.sharded_param.grad for each in self._trained)
        return any(grad is not None and bool(local(grad).any()) for grad in grads)

    def clear(self) -> None:
        """Let go of their gradients."""
        for parameter in self.present():
            parameter.grad = None


def replicas_of(units: Sequence[Unit], session: Session) -> tuple[tuple[int, ...], ...]:
    """By shard, the ranks that hold it, ascending; of a session that is a mesh's dimension, its own ranks. Every rank must call it. Raises UsageError where
    these cannot be known, unless FSDP shards all units that are trained now within the same groups of ranks, all of them as large, and psgc numbers ranks as
    torch does."""
    job, trained = session.whole, [unit for unit in units if unit.pieces]
    if (dist.get_rank(), dist.get_world_size()) != (job.rank, job.size):
        raise UsageError(
            f"fsdp_hook: this is rank {dist.get_rank()} of torch.distributed's {dist.get_world_size()}, and rank {job.rank} of psgc's {job.size}; "
            f"start every worker of the script by `psgc run`, psgc-launch or torchrun, and take rank and world size from the environment"
        )
    if isinstance(session, PartSession):
        for unit in trained:
            _check_part(unit, session)
        return (tuple(range(session.size)),)
    for unit in trained:
        _check_whole(unit)
    meshes = {unit.sharded_over: unit.name for unit in trained}
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
    replicas = tuple(zip(*groups, strict=True))
    for unit in trained:
        own = next(ranks for ranks in replicas if session.rank in ranks)
        _check_native(unit, own, "in a job without a mesh it takes all groups of ranks that shard a model for replicas")
    return replicas


def _check_part(unit: Unit, session: PartSession) -> None:
    """Raise UsageError unless the ranks of the session hold the same pieces of the unit."""
    for each in unit.state.fsdp_params:
        check_replicated(each.sharded_param, unit.names[each], session, "fsdp_hook")
    _check_native(unit, session.members, "init(mesh=...) says otherwise")


def _check_native(unit: Unit, peers: Sequence[int], why: str) -> None:
    """Raise UsageError where FSDP averages the unit between other ranks than psgc would."""
    native = unit.replicated_over
    if native is not None and sorted(native) != sorted(peers):
        raise UsageError(
            f"fsdp_hook: FSDP averages {unit.name!r} between ranks {_listed(native)}, and psgc would between {_listed(peers)}: {why}; {JOIN}"
        )


def _check_whole(unit: Unit) -> None:
    """Raise UsageError for a unit of which other ranks may hold other pieces, or other parts of the model, than FSDP's."""
    if unit.is_cut_otherwise:
        raise UsageError(
            f"fsdp_hook: {unit.name!r} was cut before FSDP sharded it (DTensor, as of tensor parallelism), and which ranks hold the same pieces is not "
            f"known; {JOIN}"
        )
    others = [] if unit.is_elsewhere or unit.replicated_over is not None else unit.other_dimensions
    cuts = [name for name in others if "replica" not in name and _CUTS.intersection(name.lower().split("_"))]
    if len(others) > 1 or cuts:
        raise UsageError(
            f"fsdp_hook: {unit.name!r} is sharded over a mesh beside which there are the dimensions {', '.join(map(repr, others))}, and which of them has "
            f"replicas is not known; {JOIN}"
        )


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def parted(units: Sequence[Unit], replicas: Sequence[Sequence[int]], session: Session) -> tuple[list[Unit], list[Unit]]:
    """Those that are sharded as ``replicas_of`` has found, and those that are not, which are frozen now."""
    over = {tuple(ranks[node] for ranks in replicas) for node in range(len(replicas[0]))}

    def fits(unit: Unit) -> bool:
        if unit.is_elsewhere:
            return False
        if not isinstance(session, PartSession):
            return unit.sharded_over in over and not unit.is_cut_otherwise
        try:
            _check_part(unit, session)
        except UsageError:
            return False
        return True

    fit = [fits(unit) for unit in units]
    return [unit for unit, does in zip(units, fit, strict=True) if does], [unit for unit, does in zip(units, fit, strict=True) if not does]
