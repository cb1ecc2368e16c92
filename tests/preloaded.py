"""Processes that begin with psgc and torch imported already: forked from a server that has imported them once.

Four fifths of a short job's time would go into imports. Each process still has a pid, an environment, a session and files of its own; only
what lies before the script's first line is shared. The Python processes that it starts in turn, as a launcher does, are forked from it in
the same manner (`Forking`): same parent, same process group, same signals, without the exec. Others see its command line and environment in
/proc, as if they had been exec's. What a fresh interpreter does is the business of tests that start one.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import multiprocessing
import multiprocessing.connection
import multiprocessing.resource_tracker
import os
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from psgc.transport.security import curve

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess

IMPORTED = (
    "psgc.torch", "psgc.server.loop", "psgc.scheduler.loop", "psgc.launch.job.bpslaunch", "psgc.launch.cli", "psgc.worker.cluster", "psgc.transport.tcp",
    "psgc.transport.shm", "psgc.torch.gradients.auto", "psgc.torch.optimizers.asynchronous", "psgc.compat.byteps.torch",
    *(f"psgc.codecs.{name}" for name in ("none", "momentum", "cast", "int8", "int4", "onebit", "topk", "powersgd", "shared")),
    "torch._dynamo", "torch.profiler._cupti_monitor",  # which the first optimizer of a process imports
    "sklearn.datasets", "pydantic.type_adapter", "typer._adapters", "encodings.idna",
    "tests.preloaded",
)  # fmt: skip
FIXED_BY_IMPORTS = ("NUMBA_", "OMP_", "PYTHON", "XDG_")  # settings that are read when a library is imported
AS_IMPORTED = {"OMP_NUM_THREADS": "1"}  # with which the server imports
ROOM = {"TESTS_ROOM": "." * (16 << 10)}  # of the server's own environment, in whose place that of a process is shown
TETHER = "psgc/launch/supervision/tether.py"
DERIVED = "TESTS_DERIVED_ROOT"  # of a job's keys: its number, what is derived, and its token
_Popen = subprocess.Popen


def derived_root(job: str, token: str) -> str:
    """The value of DERIVED: each member of a job would otherwise take 40 ms to derive the same."""
    return f"{job} {curve.root_of(int(job), token).hex()} {token}"


def _know_keys(derived: str) -> None:
    """Use what was derived, where a process has this job and token."""
    job, root, token = derived.split(" ", 2)
    derive = curve.root_of
    curve.root_of = lambda *asked: bytes.fromhex(root) if asked == (int(job), token) else derive(*asked)


def fixed_by_imports(env: Mapping[str, str]) -> bool:
    """Whether a process with these settings has to import everything itself."""
    return any(name.startswith(FIXED_BY_IMPORTS) and name != "PYTHONPATH" and AS_IMPORTED.get(name) != value for name, value in env.items())


class Preloaded(_Popen[str]):
    """``subprocess.Popen`` for ``python COMMAND...``, with text. mark: a descriptor that it and all that it forks keep open."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], mark: int | None = None, **options: Any) -> None:
        self._mark, self._readers, self._said = mark, [], {}  # type: ignore[var-annotated]
        super().__init__([sys.executable, *command], env=env, text=True, encoding="utf-8", errors="replace", **options)

    def _execute_child(
        self, args: list[str], executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any, startupinfo: Any,
        creationflags: Any, shell: Any, p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int, errread: int, errwrite: int, *rest: Any,
    ) -> None:  # fmt: skip
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(IMPORTED))
        given = [own if fd == -1 else fd for own, fd in enumerate((p2cread, c2pwrite, errwrite))]
        if self._mark is not None:
            given.append(self._mark)
        files = [multiprocessing.connection.Connection(os.dup(fd)) for fd in given]
        start_new_session = rest[5]  # after restore_signals, gid, gids, uid and umask
        process = context.Process(target=_run, args=(args[1:], dict(env), cwd, files, start_new_session), daemon=False)
        with _environment_of_the_server():
            process.start()
        for file in files:
            file.close()
        self._process: ForkServerProcess = process
        self.pid = int(process.pid or 0)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            self.returncode = self._process.exitcode
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        self._process.join(timeout)
        if (status := self._internal_poll()) is None:
            raise subprocess.TimeoutExpired("python", timeout or 0)
        return status

    def communicate(self, input: Any = None, timeout: float | None = None) -> tuple[Any, Any]:
        """Everything that it says from here on, once it has ended; what was read before a time-out is kept for the next call."""
        assert input is None
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._readers:
            self._readers = [
                threading.Thread(target=self._read, args=(stream,), daemon=True)
                for stream in (self.stdout, self.stderr)
                if stream is not None
            ]
            for reader in self._readers:
                reader.start()
        for reader in self._readers:
            reader.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired("python", timeout or 0)
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return self._said.get(self.stdout), self._said.get(self.stderr)

    def _read(self, stream: Any) -> None:
        with stream:
            self._said[stream] = stream.read()


def run_preloaded(
    *command: str, env: Mapping[str, str], cwd: str | None = None, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` of ``python COMMAND...``: what it said on stdout and on stderr, and its status."""
    with Preloaded(command, env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return subprocess.CompletedProcess(list(command), process.returncode, out, err)


def popen_preloaded(command: Sequence[str], *, env: Mapping[str, str] | None = None, text: bool = True, **options: Any) -> Preloaded:
    """``subprocess.Popen``, for a module under test that starts this Python's commands by it."""
    assert command[0] == sys.executable and text
    return Preloaded(command[1:], os.environ if env is None else env, stdin=subprocess.DEVNULL, **options)


@contextlib.contextmanager
def _environment_of_the_server() -> Iterator[None]:
    """The server takes its environment from here when the first process starts it."""
    before = {name: os.environ.get(name) for name in (*AS_IMPORTED, *ROOM)}
    os.environ.update(AS_IMPORTED | ROOM)
    try:
        yield
    finally:  # a test may end here at its limit: on a busy machine the server imports for long
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Forking(_Popen[Any]):
    """``subprocess.Popen`` in a preloaded process: this Python's commands are forked, others are started as ever."""

    mark: int | None = None  # a descriptor that every process inherits

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Iterable[int], cwd: Any, env: Any, startupinfo: Any,
        creationflags: Any, shell: Any, p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int, errread: int, errwrite: int, *rest: Any,
    ) -> None:  # fmt: skip
        env = dict(os.environ if env is None else env)
        if shell or preexec_fn or isinstance(args, str) or not _can_be_forked(list(args), env):
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, p2cread, p2cwrite, c2pread,
                c2pwrite, errread, errwrite, *rest,
            )  # fmt: skip
            return
        sys.stdout.flush()
        sys.stderr.flush()
        before = _descriptors()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                # What a library has opened in the child, as libuv does, it will close by number at the next fork, whoever has the number then.
                libraries = {fd for fd, what in _descriptors().items() if before.get(fd) != what}
                _become_child(list(args), env, cwd, (p2cread, c2pwrite, errwrite), {*pass_fds}, libraries, rest[5])
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(255)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def _can_be_forked(args: list[str], env: Mapping[str, str]) -> bool:
    """Whether it is this interpreter, with its environment, that a command runs, in the end."""
    if any(env.get(name) != os.environ.get(name) for name in {*env, *os.environ} if name.startswith(("NUMBA_", "XDG_"))):
        return False
    if not env.get("PYTHONPATH", "").endswith(os.environ.get("PYTHONPATH", "")):  # folders may be added in front
        return False
    if args[1:3] == ["-I", "-S"]:
        return args[3].endswith(TETHER) and _can_be_forked(args[6:], env)
    found = shutil.which(args[0], path=env.get("PATH"))
    ours = found is not None and os.path.dirname(os.path.abspath(found)) == os.path.dirname(sys.executable)
    return ours and os.path.realpath(str(found)) == os.path.realpath(sys.executable) and _is_script(args[1:])


def _is_script(command: Sequence[str]) -> bool:
    """Whether it has no options of the interpreter but -u."""
    command = _without_u(command)
    return bool(command) and (command[0] in ("-m", "-c") or not command[0].startswith("-"))


def _without_u(command: Sequence[str]) -> Sequence[str]:
    return command[1:] if list(command[:1]) == ["-u"] else command


def _descriptors() -> dict[int, str]:
    """This process's, and what each is of."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # of the listing itself
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


class _Exec(BaseException):
    """In place of replacing the process by a command that this interpreter runs."""

    def __init__(self, command: list[str]) -> None:
        self.command = command


def _become_child(
    args: list[str],
    env: Mapping[str, str],
    cwd: str | None,
    files: Sequence[int],
    pass_fds: set[int],
    libraries: set[int],
    start_new_session: bool,
) -> NoReturn:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if start_new_session:
        os.setsid()
    for own, fd in enumerate(files):
        if fd != -1:
            os.dup2(fd, own)
    kept = sorted({0, 1, 2, *pass_fds, *libraries} | ({Forking.mark} if Forking.mark is not None else set()))
    for fd, following in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(fd + 1, following)
    for fd in pass_fds:
        os.set_inheritable(fd, True)
    tracker: Any = multiprocessing.resource_tracker._resource_tracker  # type: ignore[attr-defined]
    tracker._fd = tracker._pid = None  # its descriptor is closed
    if args[1:3] == ["-I", "-S"]:
        args = _tethered(args[3:])
    _become(args[1:], env, cwd)


def _tethered(script: list[str]) -> list[str]:
    """The command that this runs once it has done what comes before the exec."""

    def execute(_: str, command: list[str]) -> NoReturn:
        raise _Exec(command)

    before, sys.argv = (sys.argv, os.execvp), script
    os.execvp = execute  # type: ignore[assignment]
    try:
        runpy.run_path(script[0], run_name="__main__")
    except _Exec as called:
        return called.command
    finally:
        sys.argv, os.execvp = before  # type: ignore[assignment]
    raise AssertionError("tether.py runs its command")


def _run(
    command: Sequence[str],
    env: Mapping[str, str],
    cwd: str | None,
    files: list[multiprocessing.connection.Connection],
    start_new_session: bool,
) -> None:
    """In the process that the server has forked."""
    gc.freeze()  # what is imported stays: each process's collector would look at all of it, and so copy its pages
    if start_new_session:
        os.setsid()
    for fd, file in enumerate(files[:3]):
        os.dup2(file.fileno(), fd)
        file.close()
    if len(files) > 3:
        Forking.mark = os.dup(files[3].fileno())
        files[3].close()
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("Popen") is _Popen:  # subprocess, and what has it from there, as torchrun's agent
            module.Popen = Forking  # type: ignore[attr-defined]
    _become(command, env, cwd)


def _become(command: Sequence[str], env: Mapping[str, str], cwd: str | None) -> NoReturn:
    """Be ``python COMMAND...`` from here to the end."""
    # What was to be finalized at exit is the parent's, as its temporary folders are; Numba's code alone would take 40 ms.
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    if DERIVED in env:
        _know_keys(env[DERIVED])
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # as Python begins
        signal.signal(number, signal.SIG_IGN)
    if cwd is not None:
        os.chdir(cwd)
    unbuffered = bool(env.get("PYTHONUNBUFFERED")) or command[0] == "-u"
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _text(1, unbuffered)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _text(2, True)  # type: ignore[misc]
    os.environ.clear()
    os.environ.update(env)
    _show_in_proc(command, env)
    sys.path[:0] = [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder and folder not in sys.path]
    status = _status_of(_without_u(command))
    threading._shutdown()  # type: ignore[attr-defined]  # as an interpreter ends: other threads, then what is registered, then the streams
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)


def _show_in_proc(command: Sequence[str], env: Mapping[str, str]) -> None:
    """Have /proc/PID/cmdline and /proc/PID/environ show these: psgc and its tests find a job's processes by them.

    They show memory of the process, which the server's own arguments and environment have filled; nothing reads it any more.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()  # from the third on
    arguments, environment = (slice(int(start), int(end)) for start, end in (fields[45:47], fields[47:49]))
    variables = [f"{name}={value}" for name, value in env.items()]
    for place, texts in ((arguments, [sys.executable, *command]), (environment, variables)):
        size = place.stop - place.start
        shown = "".join(f"{text}\0" for text in texts).encode(errors="surrogateescape")
        if place is arguments:
            shown = shown[: size - 1]
        assert len(shown) <= size, f"an environment of {len(shown)} bytes does not fit into {size}"
        ctypes.memmove(place.start, shown.ljust(size, b"\0"), size)


def _text(fd: int, unbuffered: bool) -> io.TextIOWrapper:
    """A standard stream: at a terminal by lines, else, unless unbuffered, by blocks."""
    return io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(fd, "w", closefd=False)), encoding="utf-8", errors="backslashreplace" if fd == 2 else "strict",
        line_buffering=fd == 2 or os.isatty(fd), write_through=unbuffered,
    )  # fmt: skip


def _status_of(command: Sequence[str]) -> int:
    try:
        if command[0] == "-m":
            sys.argv = [command[1], *command[2:]]
            sys.path.insert(0, os.getcwd())
            sys.modules.pop(command[1], None)
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            of_text = command[0] == "-c"
            sys.argv = ["-c", *command[2:]] if of_text else list(command)
            sys.path.insert(0, "" if of_text else os.path.dirname(os.path.abspath(command[0])))
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            if not of_text:
                main.__file__ = command[0]
            code = command[1] if of_text else Path(command[0]).read_text()
            exec(compile(code, "<string>" if of_text else command[0], "exec"), main.__dict__)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)  # which the script may have replaced
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0
