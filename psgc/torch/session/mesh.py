"""``init(mesh=..., dim=...)``: psgc among the ranks of one dimension of a device mesh; those of the others are apart, each group by itself.

Owns the checks of the mesh.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from psgc.errors import UsageError
from psgc.worker.part_session import PartSession
from psgc.worker.session import Session

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def of_dimension(session: Session, mesh: DeviceMesh, dim: str | None) -> Session:
    """The session of this rank's group along a dimension of the mesh; the job's own, if that has all ranks. Raises UsageError for a mesh that does not
    have each of the job's ranks once, a dimension that it lacks, and a job that cannot be parted."""
    distributed = sys.modules.get("torch.distributed.device_mesh")
    if distributed is None or not isinstance(mesh, distributed.DeviceMesh):
        raise UsageError(
            f"init(mesh=...): expected a DeviceMesh of torch.distributed, got a {type(mesh).__name__}; init_device_mesh makes one"
        )
    import torch.distributed as dist

    names, ranks = mesh.mesh_dim_names or (), sorted(mesh.mesh.flatten().tolist())
    if (dist.get_rank(), dist.get_world_size()) != (session.rank, session.size):
        raise UsageError(
            f"init(mesh=...): this is rank {dist.get_rank()} of {dist.get_world_size()} to torch.distributed, and {session.rank} of {session.size} to psgc; "
            f"start every worker by psgc run, psgc-launch or torchrun"
        )
    if ranks != list(range(session.size)):
        raise UsageError(
            f"init(mesh=...): the mesh has {len(ranks)} ranks and the job {session.size}; expected a mesh of all ranks, of which dim names a dimension"
        )
    if dim is None and mesh.ndim > 1:
        raise UsageError(
            f"init(mesh=...): the mesh has {mesh.ndim} dimensions; say which one psgc carries, as in dim={(names or ('dp_replicate',))[0]!r}"
        )
    if dim is not None and dim not in names:
        has = ", ".join(map(repr, names)) or "no names: give init_device_mesh mesh_dim_names"
        raise UsageError(f"init(mesh=...): dim is {dim!r}; the mesh's dimensions have {has}")
    members = tuple(sorted(range(session.size) if dim is None else mesh[dim].mesh.flatten().tolist()))
    if len(members) == session.size:
        return session
    config = session.config
    if config.async_mode or config.wire != "psgc" or config.on_worker_loss != "stop" or session.incarnation > 1:
        asked = (
            "PSGC_ASYNC=1"
            if config.async_mode
            else f"PSGC_WIRE={config.wire}"
            if config.wire != "psgc"
            else f"PSGC_ON_WORKER_LOSS={config.on_worker_loss}"
        )
        raise UsageError(f"init(mesh=...): {asked} is of a job as a whole; unset it, or leave the mesh out")
    places = zip(names, (mesh.mesh == session.rank).nonzero()[0].tolist(), mesh.mesh.shape, strict=True)
    part = {name: [place, size] for name, place, size in places if name != dim and size > 1}
    return PartSession(session, members, f"dimension {dim!r} of the mesh", part)
