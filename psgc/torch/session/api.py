"""This process's membership of the job: init, shutdown, rank and size. Owns the current session.

Knows no tensors: ``push_pull``, ``broadcast`` and the optimizers build on ``current_session``.
"""

from __future__ import annotations

import atexit
import functools
import gc
import logging
import os
import sys
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from psgc.config import Config
from psgc.diagnostics.lines import joined, log_own
from psgc.errors import PsgcError, UsageError
from psgc.processes.checkpoints import SAVES
from psgc.torch.collectives.groups import job_groups
from psgc.torch.session import ending, run_report, without_effect
from psgc.torch.session.embedded import Embedded, await_services, forget_services, left_in_order
from psgc.torch.session.exporting import export_figures, stop_exporting
from psgc.torch.session.mesh import of_dimension
from psgc.torch.session.uncompiled import uncompiled
from psgc.worker.connect import open_session
from psgc.worker.session import Session

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger(__name__)

_session: Session | None = None
_left = False  # this process has been in a job, and has left it
_suspended = False  # between suspend() and resume()
_opened = 0  # how many jobs it has begun to join
_ours = False  # this process has joined itself: a forked child (a data loader's) inherits the session but must neither use nor end it


class Member(ABC):
    """What lives in a session, and may go on in another one: an optimizer's front end. It is held weakly."""

    @property
    @abstractmethod
    def session(self) -> Session: ...

    @abstractmethod
    def check_leaving(self) -> None:
        """Raise UsageError where it cannot leave its session now."""

    def leave(self) -> None:  # noqa: B027 - nothing is to be done for what never leaves
        """The session ends: take along what codecs keep."""

    def rejoin(self, session: Session) -> None:  # noqa: B027
        """Go on in this session, perhaps with another number of workers."""


_members: Final[weakref.WeakSet[Member]] = weakref.WeakSet()
_leavers: Final[list[Member]] = []  # between suspend() and resume()
_numbers: Final[weakref.WeakKeyDictionary[Session, Counter[str]]] = weakref.WeakKeyDictionary()  # of each kind, how many were made
_carriers: Final[list[Callable[[Session, Session], None]]] = [without_effect.carry_over]
_before: list[Session] = []  # between suspend() and resume(), the session that was left


def add_member(member: Member) -> None:
    """Have it called by suspend() and resume() from now on."""
    _members.add(member)


def next_number(session: Session, kind: str) -> int:
    """The number of the session's next optimizer or wrapped model, from 0. After ``resume`` numbers go on, because those made before keep their names."""
    numbers = _numbers.setdefault(session, Counter())
    numbers[kind] += 1
    return numbers[kind] - 1


def carry_over(call: Callable[[Session, Session], None]) -> None:
    """Have ``call`` called by resume(), with the session that was left and the new one."""
    _carriers.append(call)


def init(lazy: bool = True, *, mesh: DeviceMesh | None = None, dim: str | None = None) -> None:
    """Join the job that the environment describes (docs/env.md), or be alone where it describes none.

    Returns once every member is there. Again while joined: does nothing. After ``shutdown`` it joins the next job at the environment's address, any number
    of times: `psgc run` keeps its scheduler and servers for it; others must have been started anew, as for BytePS. ``lazy`` is accepted
    for BytePS's sake and has no effect. Python's thread switch interval becomes PSGC_SWITCH_INTERVAL (default 0.5 ms), so that the network
    thread gets its turn beside a busy main thread.

    mesh, dim: a DeviceMesh of all ranks, and the name of one of its dimensions: psgc is then among the ranks of this rank's group along it, as if they were
    a job of their own. ``rank()`` and ``size()`` are those of the group, means are over it, and groups do not wait for each other, except in ``barrier()``,
    which is of the whole job. So the replicas of a model that is cut along the other dimensions average it piece by piece.
    Raises ConfigError; UsageError where this process cannot join any more; JobFailed saying who is missing.
    """
    if is_initialized():
        if mesh is not None:
            raise UsageError(
                "init(mesh=...): this process has joined its job before; call it first, before hooks and optimizers do by themselves"
            )
        return
    _refuse_to_join()
    if _ours:
        gc.collect()  # the last job's session is part of cycles, and has descriptors that are open until then
    _prepare_for_the_end()
    ending.install(_own_session, _awaited)
    _join(Config.from_env(), mesh, dim)


def _join(config: Config, mesh: DeviceMesh | None = None, dim: str | None = None) -> None:
    global _session, _ours, _suspended
    _set_up_logging(config)
    logger.info("configuration %s", config)
    if not config.launcher and not (
        config.torchrun and config.local_rank
    ):  # else it has told of them, or its node's first worker does, once for all
        for note in config.notes:
            logger.warning("%s", note)
    sys.setswitchinterval(config.switch_interval_s)
    _session, _ours, _suspended = _open(config), True, False
    _session.groups_of = functools.partial(job_groups, _session)
    joined(_session.rank)
    export_figures(_session)
    without_effect.tell_start(config)
    if mesh is not None:
        _session, _ours = of_dimension(_session, mesh, dim), True


def _open(config: Config) -> Session:
    """Join the job that ``config`` names, or that the workers start themselves."""
    global _opened
    if config.solo or not config.embedded:
        return open_session(config)
    embedded, _opened = Embedded(config, _opened), _opened + 1
    try:
        session = open_session(embedded.start())
    except PsgcError as error:
        embedded.fail(str(error))
        raise
    embedded.close()
    return session


def suspend() -> None:
    """Leave the job, to go on in another one of another size: with ``resume``. Call it on every worker of the job between two steps; the job then
    ends in order, and with it its scheduler and its servers. What codecs keep on this rank, and its share of what they keep on servers, goes along
    and is sent with the first gradient after ``resume``. Raises UsageError in the middle of a step, and where something cannot go on (ddp_hook, fsdp_hook,
    OneBitAdam and ZeroOneAdam once they have sent a momentum, DeMo, DiLoCo, HeldTensors, auto, PSGC_PROFILE, PSGC_BACKUP_WORKERS, asynchronous training, one
    dimension of a mesh, the loop of an Elastic); nothing has been left then.
    """
    global _session, _left, _suspended
    session = current_session()
    session.check()
    if session.whole is not session:
        raise UsageError(
            "suspend(): psgc was initialized for one dimension of a mesh, whose ranks are fixed; go on from a checkpoint in a new job"
        )
    _leavers[:] = [member for member in _members if member.session is session]
    for member in _leavers:
        member.check_leaving()
    for member in _leavers:
        member.leave()
    session.barrier()  # servers answer until everybody has asked for its share
    _before[:] = [session]
    _session, _left, _suspended = None, True, True
    stop_exporting(session.whole)
    session.close()
    left_in_order()
    run_report.tell_end(session)


def resume(
    num_workers: int, num_servers: int, global_rank: int | None = None, context: Any = None, *,
    root_uri: str | None = None, root_port: int | None = None,
) -> None:  # fmt: skip
    """Go on after ``suspend`` in a job of so many worker machines and servers, whose scheduler and servers have been started anew. Optimizers, wrapped
    models and names stay as they are. Parameters are not broadcast: do so if workers are new, as they do after their ``init()``.

    global_rank: this worker's rank from now on; None: by DMLC_WORKER_ID. root_uri, root_port: the new scheduler's address; None: as the
    environment has it now. context: without effect. Returns once every member is there. Raises UsageError without ``suspend``, ConfigError,
    JobFailed.
    """
    if not _suspended:
        raise UsageError("resume() goes on after suspend(), which this process has not called; call init() to join a job")
    given: dict[str, Any] = {"nodes": num_workers, "servers": num_servers, "world_size": 0}
    given |= {name: value for name, value in (("root_host", root_uri), ("root_port", root_port)) if value is not None}
    if global_rank is not None:
        local = Config.from_env(nodes=max(num_workers, 1), node=0)
        node, local_rank = divmod(global_rank, local.local_size)
        if local_rank != local.local_rank:
            raise UsageError(
                f"resume: global_rank={global_rank} is local rank {local_rank} of a machine with {local.local_size}, but this is local rank "
                f"{local.local_rank}; ranks are numbered machine by machine"
            )
        given["node"] = node
    _join(Config.from_env(**given))
    for session in _before:
        _numbers[current_session()] = Counter(_numbers.get(session, {}))
        for carry in _carriers:
            carry(session, current_session())
    _before.clear()
    for member in _leavers:
        member.rejoin(current_session())
    _leavers.clear()


def _refuse_to_join() -> None:
    if _suspended:
        raise UsageError("init() after suspend(): call resume(num_workers, num_servers, global_rank)")
    if _session is not None and not _session.config.solo:
        raise UsageError(
            "init() in a process forked from one that had joined the job: only that one is a member; call init() in the training process "
            "alone (data loaders need none), or start processes by spawn instead of fork"
        )


def shutdown() -> None:
    """Leave the job for good, in order; runs by itself at exit. Does nothing where not joined."""
    global _session, _left
    if is_initialized():
        session = current_session()
        _session, _left = None, not session.config.solo
        stop_exporting(session.whole)
        session.close()
        if not session.failed:
            left_in_order()
        if not (session.failed or (session.config.solo and ending.raised())):
            run_report.tell_end(session)
            without_effect.tell_end(session)


def _forked() -> None:
    global _ours  # noqa: PLW0603
    _ours = False
    forget_services()


os.register_at_fork(after_in_child=_forked)


def is_initialized() -> bool:
    """Whether this process is a member of the job now."""
    return _session is not None and _ours


def current_session() -> Session:
    """This process's session. Raises UsageError before ``init``."""
    if _session is None or not is_initialized():
        if _suspended and _ours:
            raise UsageError("psgc is suspended in this process; call psgc.torch.resume(num_workers, num_servers, global_rank) first")
        if _left and _ours:
            raise UsageError("psgc has been shut down in this process, which has left its job; call psgc.torch.init() to join the next one")
        raise UsageError("psgc is not initialized in this process; call psgc.torch.init() first")
    return _session


def _place() -> Session:
    """The session that says which place this process has: the current one, or the one that is suspended."""
    return _before[0] if _suspended and _ours else current_session()


def rank() -> int:
    """This worker's number in the job, from 0. Between ``suspend`` and ``resume`` this and the next three answer as before ``suspend``."""
    return _place().rank


def size() -> int:
    """Workers in the job, or in this rank's group of it (``init(mesh=...)``)."""
    return _place().size


def local_rank() -> int:
    """This worker's number on its node, from 0."""
    return _place().local_rank


def local_size() -> int:
    """Workers on this node."""
    return _place().local_size


@uncompiled
def barrier() -> None:
    """Wait until every worker has called it as often as this one."""
    current_session().barrier()


def _set_up_logging(config: Config) -> None:
    """Obey PSGC_LOG_LEVEL and PSGC_LOG_FORMAT."""
    log_own(config)
    heard = config.log_level != "error"  # what a run tells of itself is no warning, and heard where warnings are
    run_report.run_logger.setLevel(logging.INFO if heard else logging.ERROR)


@functools.cache
def _prepare_for_the_end() -> None:
    """Once a process."""
    atexit.register(await_services)  # last of all
    atexit.register(SAVES.await_others)  # after ``shutdown``: what is registered last is called first
    atexit.register(shutdown)


def _awaited() -> Config | None:
    """Between suspend() and resume(): the configuration of the job that may await this process, by the environment as it is now."""
    if not (_suspended and _ours):
        return None
    return Config.from_env()


def _own_session() -> Session | None:
    """The session that this process may speak for."""
    return _session if is_initialized() else None


ending.install(_own_session, _awaited)  # on import: a call before init() is the likeliest wrong one
