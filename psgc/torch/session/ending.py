"""Handles an uncaught error of the script: tells the launcher and the other ranks, and prints the traceback.

Told are the launcher that started this process and, through the scheduler, every other rank. Printed is the traceback; of psgc's own errors only
the user's frames and one line. That the job has failed elsewhere is printed by the launcher, once, where there is one; under torchrun, which says nothing, what
several workers of a node would say is said by one of them (once.py). Of Ctrl-C the launcher tells, too: beside that one rank says where it was.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from psgc.config import Config
from psgc.diagnostics.place import place, users_frames
from psgc.diagnostics.report import Launcher
from psgc.errors import ConfigError, JobFailed, PsgcError
from psgc.torch.session.once import first_to_say
from psgc.transport.control.absence import tell_absence
from psgc.worker.session import Session

logger = logging.getLogger(__name__)
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def install(session: Callable[[], Session | None], awaited: Callable[[], Config | None] = lambda: None) -> None:
    """Put the hook in front of what sys.excepthook is now, unless it is there already. Done on import, so that wrong calls before init() are
    told as those after it, and again by init(): the script may have set a hook of its own in between."""
    if not isinstance(sys.excepthook, _Watch):
        sys.excepthook = watch(session, sys.excepthook, awaited)


def raised() -> bool:
    """Whether an uncaught error has ended the script."""
    return _Watch._seen is not None


def tell_ranks(error: BaseException) -> None:
    """As the hook does, for whoever catches the script's error in its place: have the other ranks told, unless they have told us."""
    hook = sys.excepthook
    current = hook._session() if isinstance(hook, _Watch) else None
    error = _behind(error, current)
    if _job_failure(error) is None:
        _tell(current, error, place(error.__traceback__))


def watch(session: Callable[[], Session | None], previous: Hook, awaited: Callable[[], Config | None] = lambda: None) -> Hook:
    """An excepthook in front of ``previous``. session: this process's, if it has one that it may speak for. awaited: the configuration of the job that may
    await this process, where it is suspended."""

    return _Watch(session, previous, awaited)


class _Watch:
    """The hook itself."""

    _seen: BaseException | None = None  # by any of them: a script's hook between two of ours passes the error on

    def __init__(self, session: Callable[[], Session | None], previous: Hook, awaited: Callable[[], Config | None]) -> None:
        self._session, self._previous, self._awaited = session, previous, awaited

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if _Watch._seen is error:
            self._previous(kind, error, trace)
            return
        _Watch._seen = error
        where = place(trace)
        current = self._session()
        if kind is KeyboardInterrupt and current is not None and current.config.launcher:
            _print_interrupted(current, where)
            _tell(current, error, where)
            return
        error = _behind(error, current)
        if _job_failure(error) is None:
            _tell(current, error, where)
        if not isinstance(error, PsgcError):
            self._previous(kind, error, trace)
        elif not isinstance(error, JobFailed):
            _print_once(_short(error, trace))
        elif not error.told:
            _print_once(f"psgc: {_one_line(error)}\n")
        if current is None:
            _tell_scheduler(self._awaited, error, where)


def _behind(error: BaseException, session: Session | None) -> BaseException:
    """The job's failure, where another error only passes it on: a library raises its own from it, and C++ (DDP) a RuntimeError with the
    text of what its hook met."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, JobFailed):
            return cause
        cause = cause.__cause__
    if session is not None and isinstance(error, RuntimeError):
        try:
            session.check()
        except JobFailed as failure:
            if str(failure) in str(error):
                return failure
    return error


def _job_failure(error: BaseException | None) -> JobFailed | None:
    """The JobFailed that caused an error, found through the exceptions that libraries wrap it in; None if there is none."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, JobFailed):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def _why(error: BaseException, where: str) -> str:
    return f"{type(error).__name__}: {_one_line(error)}".removesuffix(": ") + (f" ({where})" if where else "")


def _tell_scheduler(awaited: Callable[[], Config | None], error: BaseException, where: str) -> None:
    """A suspended process ends: tell the scheduler of the job that awaits it, unless its launcher will."""
    try:
        config = awaited()
        if config is not None and not config.launcher and config.root_port:
            tell_absence(config, f"the worker ended with {_why(error, where)}")
    except PsgcError as second:  # the first error is what must be seen
        logger.warning("could not tell the scheduler: %s", second)


def _tell(session: Session | None, error: BaseException, where: str) -> None:
    """Tell the launcher and, through the scheduler, every other rank why this script ends."""
    if session is None or session.failed:
        return
    why = _why(error, where)
    Launcher(session.config.launcher).tell("died", why, session.whole.rank)
    try:
        session.fail(f"rank {session.whole.rank} ended with {why}")
    except Exception as second:  # the first error is what must be seen
        logger.warning("could not tell the other ranks: %s", second)


def _short(error: PsgcError, trace: TracebackType | None) -> str:
    """Wrong settings are no matter of the script; of other errors the user's own frames are shown, as Python shows them."""
    frames = [] if isinstance(error, ConfigError) else users_frames(trace)
    shown = "Traceback (most recent call last):\n" + "".join(traceback.format_list(frames)) if frames else ""
    return f"{shown}{type(error).__name__ if frames else 'psgc'}: {_one_line(error)}\n"


def _print_once(text: str) -> None:
    if first_to_say(text):
        sys.stderr.write(text)


def _print_interrupted(session: Session, where: str) -> None:
    if session.whole.rank == 0:
        sys.stderr.write("KeyboardInterrupt" + (f" ({where})\n" if where else "\n"))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
