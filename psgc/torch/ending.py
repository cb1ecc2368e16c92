"""What happens when the script dies of an error that nobody catches: who is told, and what is printed.

Told are the launcher that started this process and, through the scheduler, every other rank. Printed is the traceback; of psgc's own errors only
the user's frames and one line. That the job has failed elsewhere is printed by the launcher, once, where there is one.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from psgc.errors import ConfigError, JobFailed, PsgcError
from psgc.place import place, users_frames
from psgc.report import Launcher
from psgc.worker.session import Session

logger = logging.getLogger(__name__)
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def watch(session: Callable[[], Session | None], previous: Hook) -> Hook:
    """An excepthook in front of ``previous``. session: this process's, if it has one that it may speak for."""

    def on_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        where = place(trace)
        current = session()
        error = _behind(error, current)
        if _job_failure(error) is None:
            _tell(current, error, where)
        if not isinstance(error, PsgcError):
            previous(kind, error, trace)
        elif not isinstance(error, JobFailed):
            _print_short(error, trace, where)
        elif not error.told:
            sys.stderr.write(f"psgc: {_one_line(error)}\n")

    return on_uncaught


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
    """The failed job that an error is a consequence of: other libraries wrap what they catch."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, JobFailed):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def _tell(session: Session | None, error: BaseException, where: str) -> None:
    """This script is about to die: the launcher shall say why, and every other rank's next call."""
    if session is None or session.failed:
        return
    why = f"{type(error).__name__}: {_one_line(error)}".removesuffix(": ") + (f" ({where})" if where else "")
    Launcher(session.config.launcher).tell("died", why, session.rank)
    try:
        session.fail(f"rank {session.rank} ended with {why}")
    except Exception as second:  # the first error is what must be seen
        logger.warning("could not tell the other ranks: %s", second)


def _print_short(error: PsgcError, trace: TracebackType | None, where: str) -> None:
    """Wrong settings are no matter of the script; of other errors the user's own frames are shown."""
    frames = [] if isinstance(error, ConfigError) else users_frames(trace)
    if frames:
        sys.stderr.write("Traceback (most recent call last):\n" + "".join(traceback.format_list(frames)))
    sys.stderr.write(f"psgc: {_one_line(error)}" + (f" ({where})\n" if frames else "\n"))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
