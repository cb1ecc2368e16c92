"""The groups of a job's session: made when they are asked for, closed when this process leaves the job, aborted when the job fails."""

from __future__ import annotations

import hashlib
import threading
from datetime import timedelta
from typing import Any, Final

from torch import distributed as dist

from psgc.errors import ConfigError, GroupError, UsageError
from psgc.program.checks import check_members
from psgc.torch.collectives.gloo import GlooGroup, reason
from psgc.torch.collectives.store import PublishedStore
from psgc.transport.host import local_address_for
from psgc.worker.session import Session

CHECK_S: Final = 0.1  # how often a rank that waits for its peers to connect looks whether the job has failed
_of_sessions: dict[tuple[Session, str], GlooGroups] = {}  # until they are closed
_lock = threading.Lock()


def job_groups(session: Session, name: str = "") -> GlooGroups:
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
        groups = _of_sessions[session, name] = known or GlooGroups(session, name)
    if known is None:
        session.at_end(groups.close)
    return groups


class GlooGroups:
    """See psgc.program.groups.Groups."""

    def __init__(self, session: Session, name: str = "") -> None:
        self._session, self._name = session, name
        self._lock = threading.Lock()
        self._making: dict[tuple[int, ...], threading.Lock] = {}  # two threads may make two groups at the same time, but not one
        self._groups: dict[tuple[int, ...], GlooGroup] = {}
        self._closed = False

    def group(self, members: tuple[int, ...]) -> GlooGroup:
        check_members(members, self._session.rank, self._session.size)
        with self._lock:
            making = self._making.setdefault(members, threading.Lock())
        with making:
            self._session.check()
            if self._closed:
                raise UsageError("the groups of this rank are closed")
            if members not in self._groups:
                made = GlooGroup(self._session, members, self._connected(members) if len(members) > 1 else None)
                with self._lock:
                    self._groups[members] = made
                if self._session.failed:
                    made.abort()
            return self._groups[members]

    def close(self) -> None:
        """Leave all groups. What is under way on them, after the job has failed, is ended. Idempotent."""
        with self._lock:
            self._closed = True
            groups = list(self._groups.values())
        with _lock:
            _of_sessions.pop((self._session, self._name), None)
        for group in groups:
            if self._session.failed:
                group.abort()
            else:
                group.close()

    def _connected(self, members: tuple[int, ...]) -> Any:
        """A process group of these members. Gloo cannot be interrupted while it connects, so it does so in a thread that is given up if the job
        fails meanwhile."""
        session, made = self._session, []
        failed: list[BaseException] = []
        done = threading.Event()

        def connect() -> None:
            try:
                made.append(_process_group(session, members, self._name))
            except BaseException as error:
                failed.append(error)
            finally:
                done.set()

        threading.Thread(target=connect, name="psgc-group", daemon=True).start()
        while not done.wait(CHECK_S):
            session.check()
        if failed:
            session.check()
            who = ", ".join(map(str, members))
            raise GroupError(f"rank {session.rank} cannot connect to the group of ranks {who}: {reason(failed[0])}") from None
        return made[0]


def address_of(session: Session) -> str:
    """The address of this machine at which the other workers reach it: the one that it reaches the scheduler from, or DMLC_NODE_HOST."""
    config = session.config
    return config.node_host or local_address_for(config.root_host)


def _process_group(session: Session, members: tuple[int, ...], purpose: str) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=session.config.step_timeout_s)
    options._threads = 1  # one collective at a time
    options._devices = [_device(address_of(session))]
    name = hashlib.sha256(f"{purpose} {members}".encode()).hexdigest()[:16]
    store = PublishedStore(session, f"group {name}/")
    return gloo(store, members.index(session.rank), len(members), options)


def _device(address: str) -> Any:
    """What gloo listens with. Raises GroupError where this machine has no such address."""
    gloo: Any = dist.ProcessGroupGloo
    try:
        return gloo.create_device(hostname=address)
    except RuntimeError as error:
        raise GroupError(f"gloo cannot listen at {address} ({reason(error)}); set DMLC_NODE_HOST to an address of this machine") from None
