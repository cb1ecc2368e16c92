"""Parameters of which each rank holds a piece: DTensors, as FSDP2 and tensor parallelism make them, and FSDP1's flat ones.

Looks at imported modules only: without them no tensor can be sharded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Final

import torch

from psgc.errors import UsageError
from psgc.worker.part_session import PartSession
from psgc.worker.session import Session

PEERS: Final = "init_device_mesh(device, (sites, ranks of a site), mesh_dim_names=('dp_replicate', 'dp_shard'))"


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What of a sharded tensor is on this rank; another tensor itself."""
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def sharding_modules(model: torch.nn.Module) -> list[Any]:
    """The model's modules that FSDP2 (``fully_shard``) was applied to."""
    kinds = tuple(
        kind
        for module in ("torch.distributed.fsdp", "torch.distributed._composable.fsdp")
        if (kind := getattr(sys.modules.get(module), "FSDPModule", None)) is not None
    )
    return [module for module in model.modules() if isinstance(module, kinds)] if kinds else []


def reduced_at_once(module: Any) -> list[Any]:
    """FSDP2's own objects of what it reduces at once of a module that it was applied to: one, but for a module without parameters, or over several meshes."""
    state = module._get_fsdp_state()
    found: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if found is None:  # torch before 2.12
        found = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return found


def reshard(modules: Iterable[Any]) -> None:
    """Have modules of FSDP2's let go of whole parameters. By default the outermost has its own from a forward until a backward, so after an evaluation
    they are what the model registers and computes with: not what an optimizer has, and stale once its pieces are written."""
    for module in modules:
        module.reshard()


def sharded_by(parameter: torch.Tensor) -> str:
    """What shards the parameter (FSDP, DTensor), or ""."""
    for module, name, what in (
        ("torch.distributed.tensor", "DTensor", "a DTensor"),
        ("torch.distributed._tensor", "DTensor", "a DTensor"),
        ("torch.distributed.fsdp._flat_param", "FlatParameter", "FSDP's FlatParameter"),
    ):
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(parameter, kind):
            return what
    # With use_orig_params FSDP leaves plain parameters, which it marks.
    return "part of FSDP's FlatParameter" if getattr(parameter, "_fsdp_flattened", False) else ""


def refuse_pieces(parameter: torch.Tensor, name: str, by: str, instead: str) -> None:
    """Raise UsageError for a parameter that is sharded. by: who cannot take it."""
    if what := sharded_by(parameter):
        raise UsageError(f"{by}: parameter {name!r} is {what}, and {by} takes whole parameters; {instead}")


def check_replicated(parameter: torch.Tensor, name: str, session: Session, by: str) -> None:
    """Raise UsageError unless all ranks of the session, as ``init(mesh=..., dim=...)`` has it, hold the same piece of the parameter. by: who needs that."""
    what = sharded_by(parameter)
    if not what:
        return
    if what != "a DTensor":
        raise UsageError(f"{by}: parameter {name!r} is {what}, whose pieces it does not know; shard the model by FSDP2 (fully_shard)")
    peers, mesh, placements = _peers(session), parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    for dim, placement in enumerate(placements):
        if placement.is_partial():
            raise UsageError(f"{by}: parameter {name!r} is a DTensor of sums that are not made yet; redistribute it first")
        if not placement.is_replicate() and peers & set(torch.distributed.get_process_group_ranks(mesh.get_group(dim))):
            raise UsageError(
                f"{by}: parameter {name!r} is a DTensor of which the ranks that exchange hold different pieces; join by psgc.init(mesh=mesh, "
                f"dim='dp_replicate') first, with mesh = {PEERS}, and shard over mesh['dp_shard']"
            )


def refuse_averaged(model: torch.nn.Module, session: Session, by: str) -> None:
    """Raise UsageError where FSDP2 itself averages gradients of what is trained between ranks of the session in every backward: over a mesh of two
    dimensions (HSDP), or after torch's ``replicate``. by: who is to exchange in its place."""
    peers, names = _peers(session), {module: name for name, module in model.named_modules()}
    for module in sharding_modules(model):
        trained = [each for each in reduced_at_once(module) if any(one.sharded_param.requires_grad for one in each.fsdp_params)]
        for info in (each.mesh_info for each in trained):
            replicas = getattr(info, "replicate_process_group", None)
            if replicas is not None and peers & set(torch.distributed.get_process_group_ranks(replicas)):
                is_sharded = hasattr(info, "shard_process_group")
                instead = "shard over mesh['dp_shard'], not over mesh (HSDP)" if is_sharded else "leave torch's replicate() out"
                raise UsageError(
                    f"{by}: FSDP averages the gradients of {names[module] or 'model'!r} between the ranks that exchange, in every backward; {instead}"
                )


def _peers(session: Session) -> set[int]:
    """The session's other ranks, as the job numbers them."""
    peers = set(session.members) if isinstance(session, PartSession) else set(range(session.size))
    return peers - {session.whole.rank}
