"""The carrier of all other groups: ranks on any hosts, over TCP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from psgc.torch.device.engine import Engine
from psgc.transport.tcp import TRANSPORT
from psgc.worker.session import Session

if TYPE_CHECKING:
    from psgc.worker.collectives.socket_group import SocketGroup


class Sockets:
    """A ``Carrier``, which takes all members: a group of one has no connections."""

    name, on_gpus = "sockets", False

    def takes(self, session: Session, members: tuple[int, ...], name: str, engine: Engine | None) -> bool:
        return True

    def connect(self, session: Session, members: tuple[int, ...], name: str, engine: Engine | None) -> SocketGroup:
        from psgc.worker.collectives.connections import connect
        from psgc.worker.collectives.socket_group import SocketGroup  # has a kernel, which most jobs do without

        return SocketGroup(session, connect(session, members, f"sockets {name}", TRANSPORT))
