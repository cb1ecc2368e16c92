"""This process's membership of the job: init, shutdown, rank and size. Owns the current session.

Knows no tensors: ``push_pull``, ``broadcast`` and the optimizers build on ``current_session``.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys

from psgc.checkpoints import SAVES
from psgc.config import Config
from psgc.errors import UsageError
from psgc.torch.collectives.groups import job_groups
from psgc.torch.session import ending, run_report, unheeded
from psgc.worker.connect import open_session
from psgc.worker.session import Session

logger = logging.getLogger(__name__)

_session: Session | None = None
_left = False  # this process, or the one it was forked from, was in a job over the network and has left it
_owner_pid = 0  # a forked child (a data loader's) inherits the session but must neither use nor end it


def init(lazy: bool = True) -> None:
    """Join the job that the environment describes (docs/env.md), or be alone where it describes none.

    Returns once every member is there. Again while joined: does nothing. A job is joined once: after ``shutdown`` it is over, and neither
    this process nor a child that it forks can join another; only one that is alone may call init after shutdown. ``lazy`` is accepted
    for BytePS's sake and has no effect. Python's thread switch interval becomes PSGC_SWITCH_INTERVAL (default 0.5 ms), so that the network
    thread gets its turn beside a busy main thread.
    Raises ConfigError; UsageError where this process cannot join any more; JobFailed saying who is missing.
    """
    global _session, _owner_pid
    if is_initialized():
        return
    _refuse_to_join_again()
    _prepare_for_the_end()
    ending.install(_own_session)
    config = Config.from_env()
    _set_up_logging(config)
    logger.info("configuration %s", config)
    if not config.launcher:  # else it has told of them, once for all
        for note in config.notes:
            logger.warning("%s", note)
    sys.setswitchinterval(config.switch_interval_s)
    _session, _owner_pid = open_session(config), os.getpid()
    _session.groups_of = functools.partial(job_groups, _session)
    unheeded.tell_start(config)


def _refuse_to_join_again() -> None:
    if _left or (_session is not None and not _session.config.solo):
        if _owner_pid != os.getpid():
            raise UsageError(
                "init() in a process forked from one that had joined the job: only that one is a member; call init() in the training process "
                "alone (data loaders need none), or start processes by spawn instead of fork"
            )
        raise UsageError(
            "init() after shutdown(): this process has left its job, which is over once its workers leave it; call shutdown() once, at the end, "
            "and start all of the job's processes anew for another"
        )


def shutdown() -> None:
    """Leave the job for good, in order; runs by itself at exit. Does nothing where not joined."""
    global _session, _left
    if is_initialized():
        session = current_session()
        _session, _left = None, not session.config.solo
        session.close()
        if not session.failed:
            run_report.tell_end(session)
            unheeded.tell_end(session)


def is_initialized() -> bool:
    """Whether this process is a member of the job now."""
    return _session is not None and _owner_pid == os.getpid()


def current_session() -> Session:
    """This process's session. Raises UsageError before ``init``."""
    if _session is None or not is_initialized():
        if _left and _owner_pid == os.getpid():
            raise UsageError("psgc has been shut down in this process, which has left its job")
        raise UsageError("psgc is not initialized in this process; call psgc.torch.init() first")
    return _session


def rank() -> int:
    """This worker's number in the job, from 0."""
    return current_session().rank


def size() -> int:
    """Workers in the job."""
    return current_session().size


def local_rank() -> int:
    """This worker's number on its node, from 0."""
    return current_session().local_rank


def local_size() -> int:
    """Workers on this node."""
    return current_session().local_size


def barrier() -> None:
    """Wait until every worker has called it as often as this one."""
    current_session().barrier()


def _set_up_logging(config: Config) -> None:
    """Obey PSGC_LOG_LEVEL; write to stderr only where the script has set up no logging."""
    root = logging.getLogger("psgc")
    root.setLevel(config.log_level.upper())
    heard = config.log_level != "error"  # what a run tells of itself is no warning, and heard where warnings are
    run_report.run_logger.setLevel(logging.INFO if heard else logging.ERROR)
    if not root.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root.addHandler(handler)


@functools.cache
def _prepare_for_the_end() -> None:
    """Once a process."""
    atexit.register(SAVES.await_others)  # after ``shutdown``: what is registered last is called first
    atexit.register(shutdown)


def _own_session() -> Session | None:
    """The session that this process may speak for."""
    return _session if is_initialized() else None


ending.install(_own_session)  # on import: a call before init() is the likeliest wrong one
