"""The groups of a job's session: made when they are asked for, closed when this process leaves the job, aborted when the job fails.

Members that share memory exchange arrays through it, all others over gloo.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable
from typing import Final, TypeVar

from psgc.errors import ConfigError, GroupError, UsageError
from psgc.program.backends import Facts, backend_of
from psgc.program.checks import check_members
from psgc.torch.collectives.connecting import meeting_store, process_group
from psgc.torch.collectives.device_group import DeviceGroup, connected
from psgc.torch.collectives.gloo import GlooGroup, reason
from psgc.torch.device.elements import DeviceElements
from psgc.torch.device.engine import Engine
from psgc.transport.host import host_id
from psgc.worker.collectives.mesh import connect, share_memory
from psgc.worker.collectives.shared_group import SEGMENT_BYTES, SharedGroup
from psgc.worker.session import Session

logger = logging.getLogger(__name__)
CHECK_S: Final = 0.1  # how often a rank that waits for its peers to connect looks whether the job has failed
T = TypeVar("T")
JobGroup = GlooGroup | SharedGroup
_of_sessions: dict[tuple[Session, str], JobGroups] = {}  # until they are closed
_lock = threading.Lock()


def job_groups(session: Session, name: str = "") -> JobGroups:
    """The groups of this session by this name, the same each time: groups of the same ranks under two names share no connection, so that two threads may
    issue collectives in orders of their own. Nothing is connected before ``group`` is called.

    Raises ConfigError where the job's payloads are to be encrypted: gloo's connections are neither encrypted nor authenticated.
    """
    if session.config.encrypt and session.size > 1:
        raise ConfigError(
            "PSGC_ENCRYPT=1, but this plan has collectives between workers, which are neither encrypted nor authenticated; "
            "use a plan over servers alone, or unset PSGC_ENCRYPT where the network is trusted"
        )
    with _lock:
        known = _of_sessions.get((session, name))
        groups = _of_sessions[session, name] = known or JobGroups(session, name)
    if known is None:
        session.at_end(groups.close)
    return groups


def facts_of(session: Session, engine: Engine | None) -> Facts:
    """What this rank tells the others of where its gradients lie. engine: of their device, None for the CPU."""
    gpu, nccl = ("", "") if engine is None else (engine.runtime.gpu, engine.runtime.nccl)
    return Facts(host_id(), gpu, nccl, session.config.collectives)


class JobGroups:
    """See psgc.program.groups.Groups."""

    def __init__(self, session: Session, name: str = "") -> None:
        self._session, self._name = session, name
        self._lock = threading.Lock()
        self._making: dict[tuple[int, ...], threading.Lock] = {}  # two threads may make two groups at the same time, but not one
        self._groups: dict[tuple[int, ...], JobGroup] = {}
        self._on_device: dict[tuple[int, ...], DeviceGroup | None] = {}
        self._closed = False

    def group(self, members: tuple[int, ...]) -> JobGroup:
        check_members(members, self._session.rank, self._session.size)
        with self._lock:
            making = self._making.setdefault(members, threading.Lock())
        with making:
            self._session.check()
            if self._closed:
                raise UsageError("the groups of this rank are closed")
            if members not in self._groups:
                made = self._made(members)
                with self._lock:
                    self._groups[members] = made
                if self._session.failed:
                    made.abort()
            return self._groups[members]

    def on_device(self, members: tuple[int, ...], device: object) -> DeviceGroup | None:
        check_members(members, self._session.rank, self._session.size)
        assert isinstance(device, DeviceElements)
        with self._lock:
            making = self._making.setdefault(members, threading.Lock())
        with making:
            self._session.check()
            if self._closed:
                raise UsageError("the groups of this rank are closed")
            if members not in self._on_device:
                made = self._made_on(members, device.engine)
                with self._lock:
                    self._on_device[members] = made
                if made is not None and self._session.failed:
                    made.abort()
            return self._on_device[members]

    def _made_on(self, members: tuple[int, ...], engine: Engine) -> DeviceGroup | None:
        session, facts = self._session, facts_of(self._session, engine)
        name = hashlib.sha256(f"{self._name} {members} gpu".encode()).hexdigest()[:16]
        session.publish(f"gpu {name}: {session.rank}", facts.encode())
        told = {member: Facts.decode(bytes(session.lookup(f"gpu {name}: {member}"))) for member in members}
        backend = backend_of(told)
        where = "from GPU to GPU" if backend.on_device else "through the hosts' memory"
        logger.info("collectives of ranks %s go %s: %s", ", ".join(map(str, members)), where, backend.reason)
        if not backend.on_device:
            return None
        return self._connected(members, lambda: connected(session, members, engine, meeting_store(session, members, f"store {name}")))

    def close(self) -> None:
        """Leave all groups. What is under way on them, after the job has failed, is ended. Idempotent."""
        with self._lock:
            self._closed = True
            groups = [*self._groups.values(), *filter(None, self._on_device.values())]
        with _lock:
            _of_sessions.pop((self._session, self._name), None)
        for group in groups:
            if self._session.failed:
                group.abort()
            else:
                group.close()

    def _made(self, members: tuple[int, ...]) -> JobGroup:
        session = self._session
        name = hashlib.sha256(f"{self._name} {members}".encode()).hexdigest()[:16]
        if len(members) == 1:
            return GlooGroup(session, members, None)
        if share_memory(session, members):
            return SharedGroup(session, self._connected(members, lambda: connect(session, members, f"memory {name}", SEGMENT_BYTES)))
        return GlooGroup(session, members, self._connected(members, lambda: process_group(session, members, f"group {name}/")))

    def _connected(self, members: tuple[int, ...], connecting: Callable[[], T]) -> T:
        """What ``connecting`` returns. Gloo cannot be interrupted while it connects, so a thread does it that is given up if the job fails meanwhile."""
        session, made = self._session, list[T]()
        failed: list[BaseException] = []
        done = threading.Event()

        def run() -> None:
            try:
                made.append(connecting())
            except BaseException as error:
                failed.append(error)
            finally:
                done.set()

        threading.Thread(target=run, name="psgc-group", daemon=True).start()
        while not done.wait(CHECK_S):
            session.check()
        if failed:
            session.check()
            who = ", ".join(map(str, members))
            raise GroupError(f"rank {session.rank} cannot connect to the group of ranks {who}: {reason(failed[0])}") from None
        return made[0]
