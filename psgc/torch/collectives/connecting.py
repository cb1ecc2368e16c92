"""Connects process groups: over the job's own rendezvous, and never by torch.distributed.init_process_group, which is the script's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import distributed as dist
from torch._C._distributed_c10d import Store, TCPStore  # which torch.distributed passes on untyped

from psgc.errors import GroupError
from psgc.transport.host import local_address_for
from psgc.worker.session import Session


def address_of(session: Session) -> str:
    """The address of this machine at which the other workers reach it: the one that it reaches the scheduler from, or DMLC_NODE_HOST."""
    config = session.config
    return config.node_host or local_address_for(config.root_host)


class PublishedStore(Store):
    """What gloo finds its peers by: a store over the job's own scheduler, which is authenticated. Its keys are set once, which is all that gloo needs.
    ``prefix`` tells apart what has other keys."""

    def __init__(self, session: Session, prefix: str) -> None:
        super().__init__()
        self._session, self._prefix = session, prefix
        self._known: dict[str, bytes] = {}  # gloo waits for each key, and then reads it

    def set(self, key: str, value: str | bytes) -> None:
        self._session.publish(self._prefix + key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Waits for the key. Raises JobFailed."""
        if key not in self._known:
            self._known[key] = self._session.lookup(self._prefix + key)
        return self._known[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """The scheduler limits how long a key is waited for."""
        for key in keys:
            self.get(key)


def process_group(session: Session, members: tuple[int, ...], prefix: str) -> Any:
    """A process group of these members, each of which calls this, too. prefix: of the names that they publish for each other. Raises GroupError, or
    what gloo raises."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=session.config.step_timeout_s)
    options._threads = 1  # one collective at a time
    options._devices = [_device(address_of(session))]
    return gloo(PublishedStore(session, prefix), members.index(session.rank), len(members), options)


def meeting_store(session: Session, members: tuple[int, ...], name: str) -> Any:
    """A store of the first member's, at which all of them meet: NCCL sets, waits for and deletes keys of its own there. name: unique among the job's published
    values. Raises what torch raises."""
    timeout = timedelta(seconds=session.config.step_timeout_s)
    if members[0] == session.rank:
        address = address_of(session)
        store = TCPStore(address, 0, None, True, timeout, wait_for_workers=False)
        session.publish(name, f"{address}:{store.port}".encode())
        return store
    address, _, port = bytes(session.lookup(name)).decode().rpartition(":")
    return TCPStore(address, int(port), None, False, timeout, wait_for_workers=False)


def _device(address: str) -> Any:
    """What gloo listens with. Raises GroupError where this machine has no such address."""
    gloo: Any = dist.ProcessGroupGloo
    try:
        return gloo.create_device(hostname=address)
    except RuntimeError as error:
        raise GroupError(f"gloo cannot listen at {address} ({reason(error)}); set DMLC_NODE_HOST to an address of this machine") from None


def reason(error: BaseException) -> str:
    """What gloo says, in one line and without the places in its sources."""
    text = re.sub(r"^\[[^\]]*\.cc:\d+\] ", "", " ".join(str(error).split()))
    return text.split(" This is typically", 1)[0].rstrip(".")
