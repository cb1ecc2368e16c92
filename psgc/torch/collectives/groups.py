"""The groups of a job's session: made when they are asked for, closed when this process leaves the job, aborted when the job fails.

Which carrier a group uses is the table's (``carriers.py``): the first one that takes its members.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from psgc.errors import GroupError, UsageError
from psgc.program.checks import check_members
from psgc.program.groups import DeviceGroup, Group
from psgc.torch.collectives.carriers import CARRIERS
from psgc.torch.collectives.connecting import reason
from psgc.torch.device.elements import DeviceElements
from psgc.torch.device.engine import Engine
from psgc.worker.session import Session

CHECK_S: Final = 0.1  # how often a rank that waits for its peers to connect looks whether the job has failed
_of_sessions: dict[tuple[Session, str], JobGroups] = {}  # until they are closed
_lock = threading.Lock()


def job_groups(session: Session, name: str = "") -> JobGroups:
    """The groups of this session by this name, the same each time: groups of the same ranks under two names share no connection, so that two threads may
    issue collectives in orders of their own. Nothing is connected before ``group`` is called."""
    with _lock:
        known = _of_sessions.get((session, name))
        groups = _of_sessions[session, name] = known or JobGroups(session, name)
    if known is None:
        session.at_end(groups.close)
    return groups


class JobGroups:
    """See psgc.program.groups.Groups."""

    def __init__(self, session: Session, name: str = "") -> None:
        self._session, self._name = session, name
        self._lock = threading.Lock()
        self._making: dict[tuple[int, ...], threading.Lock] = {}  # two threads may make two groups at the same time, but not one
        self._groups: dict[
            tuple[tuple[int, ...], bool], Any
        ] = {}  # by members, and whether it is of their GPUs; None: they cannot have one
        self._closed = False

    def group(self, members: tuple[int, ...]) -> Group:
        group: Group = self._kept(members, None)
        return group

    def on_device(self, members: tuple[int, ...], device: object) -> DeviceGroup | None:
        assert isinstance(device, DeviceElements)
        group: DeviceGroup | None = self._kept(members, device.engine)
        return group

    def _kept(self, members: tuple[int, ...], engine: Engine | None) -> Any:
        check_members(members, self._session.rank, self._session.size)
        place = members, engine is not None
        with self._lock:
            making = self._making.setdefault(members, threading.Lock())
        with making:
            self._session.check()
            if self._closed:
                raise UsageError("the groups of this rank are closed")
            if place not in self._groups:
                made = self._made(members, engine)
                with self._lock:
                    self._groups[place] = made
                if made is not None and self._session.failed:
                    made.abort()
            return self._groups[place]

    def close(self) -> None:
        """Leave all groups. What is under way on them, after the job has failed, is ended. Idempotent."""
        with self._lock:
            self._closed = True
            groups = list(filter(None, self._groups.values()))
        with _lock:
            _of_sessions.pop((self._session, self._name), None)
        for group in groups:
            if self._session.failed:
                group.abort()
            else:
                group.close()

    def _made(self, members: tuple[int, ...], engine: Engine | None) -> Any:
        session, where = self._session, "" if engine is None else " gpu"
        name = hashlib.sha256(f"{self._name} {members}{where}".encode()).hexdigest()[:16]
        for carrier in CARRIERS:
            if carrier.on_gpus == (engine is not None) and carrier.takes(session, members, name, engine):
                return self._connected(members, partial(carrier.connect, session, members, name, engine))
        return None

    def _connected(self, members: tuple[int, ...], connecting: Callable[[], Any]) -> Any:
        """What ``connecting`` returns. A library cannot be interrupted while it connects, so a thread does it that is given up if the job fails meanwhile."""
        if len(members) == 1:
            return connecting()
        session, made = self._session, list[Any]()
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
