"""Processes that begin with psgc and torch imported already: forked from a server that has imported them once.

Four fifths of a short job's time would go into imports. Each process still has a pid, an environment, a session and files of its own; only
what lies before the script's first line is shared. What a fresh interpreter does is the business of the tests of the launcher.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess

IMPORTED = ("psgc.torch", "psgc.server.loop", "psgc.scheduler.loop", "psgc.codecs.registry")


class Preloaded:
    """What the tests use of ``subprocess.Popen``, for ``python COMMAND...`` with text output, stderr among stdout, no input, and a
    session of its own."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(IMPORTED))
        read, write = os.pipe()
        ours = multiprocessing.connection.Connection(write, readable=False)
        self._process: ForkServerProcess = context.Process(target=run, args=(list(command), dict(env), ours), daemon=False)
        with _threads_of_one(), ours:
            self._process.start()
        self.stdout = os.fdopen(read, encoding="utf-8", errors="replace")
        self._said: list[str] = []
        self._reader: threading.Thread | None = None
        self.pid = int(self._process.pid or 0)

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired("python", timeout or 0)
        return status

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Everything that it says from here on, once it has ended; what was read before a time-out is kept for the next call."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._reader is None:
            self._reader = threading.Thread(target=lambda: self._said.append(self.stdout.read()), daemon=True)
            self._reader.start()
        self._reader.join(timeout)
        if self._reader.is_alive():
            raise subprocess.TimeoutExpired("python", timeout or 0)
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return "".join(self._said), None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


@contextlib.contextmanager
def _threads_of_one() -> Iterator[None]:
    """The server takes its environment from here when the first process starts it."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    yield
    if before is None:
        del os.environ["OMP_NUM_THREADS"]
    else:
        os.environ["OMP_NUM_THREADS"] = before


def run(command: Sequence[str], env: Mapping[str, str], output: multiprocessing.connection.Connection) -> None:
    """Become ``python COMMAND...``: in the process forked for it."""
    os.setsid()
    for fd in (1, 2):
        os.dup2(output.fileno(), fd)
    output.close()
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", buffering=1, closefd=False)
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc]
    os.environ.clear()
    os.environ.update(env)
    status = _status_of(command)
    threading._shutdown()  # type: ignore[attr-defined]  # as an interpreter ends: other threads, then what is registered, then the streams
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)


def _status_of(command: Sequence[str]) -> int:
    try:
        if command[0] == "-m":
            sys.argv = [command[1], *command[2:]]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(command)
            sys.path.insert(0, os.path.dirname(command[0]))
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            main.__file__ = command[0]
            exec(compile(Path(command[0]).read_text(), command[0], "exec"), main.__dict__)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        return -signal.SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())  # which the script may have replaced
        return 1
    return 0
