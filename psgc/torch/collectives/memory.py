"""The carrier of groups whose members share memory: the workers of one host."""

from __future__ import annotations

from psgc.torch.device.engine import Engine
from psgc.worker.collectives.mesh import connect, share_memory
from psgc.worker.collectives.shared_group import SEGMENT_BYTES, SharedGroup
from psgc.worker.session import Session


class SharedMemory:
    """A ``Carrier``."""

    name, on_gpus = "memory", False

    def takes(self, session: Session, members: tuple[int, ...], name: str, engine: Engine | None) -> bool:
        return len(members) > 1 and share_memory(session, members)

    def connect(self, session: Session, members: tuple[int, ...], name: str, engine: Engine | None) -> SharedGroup:
        return SharedGroup(session, connect(session, members, f"memory {name}", SEGMENT_BYTES))
