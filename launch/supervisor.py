"""Processes that live and die together: started in groups of their own, their output prefixed, ended in order and without remains.

Knows processes; must not know what they compute. Single-threaded: one selector over pipes, exits, kept memory and signals.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Final

from psgc.launch.keeper import Keeper

PR_SET_PDEATHSIG: Final = 1
GRACE_S: Final = 6.0  # a failed job's processes have been told by the scheduler, and end by themselves within so long
TERM_S: Final = 2.0  # between SIGTERM and SIGKILL
COLOURS: Final = (36, 32, 33, 35, 34, 96, 92, 93)
_libc = ctypes.CDLL(None, use_errno=True)


def _die_with_parent() -> None:
    """Runs in the child before exec: the kernel kills it should the launcher die."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass(slots=True)
class Child:
    """One process. essential: its end with a failure fails the job. service: expected to end by itself after the others."""

    name: str
    popen: subprocess.Popen[bytes]
    service: bool
    keeper: Keeper | None = None
    tails: dict[int, bytes] = field(default_factory=dict)

    @property
    def running(self) -> bool:
        return self.popen.returncode is None

    def describe_end(self) -> str:
        code = self.popen.returncode
        how = f"ended with status {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        return f"{self.name} (pid {self.popen.pid}) {how}"


class Supervisor:
    """Start children, then ``run`` until all have ended; it returns the job's exit status. ``program`` prefixes its own lines."""

    def __init__(self, program: str, prefix: bool = True) -> None:
        self._program, self._prefix = program, prefix
        self.children: list[Child] = []
        self._selector = selectors.DefaultSelector()
        self._reason = ""
        self._signal: int | None = None
        self._ladder: list[tuple[float, int]] = []  # (when, signal) still to be sent to everyone left
        self._said: list[str] = []

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str], *, service: bool = False, keep_memory: bool = False,
              pass_fds: Sequence[int] = ()) -> Child:  # fmt: skip
        """Start one process in a session of its own. Raises OSError if the command cannot be run."""
        keeper = Keeper() if keep_memory else None
        fds, full = list(pass_fds), dict(env)
        if keeper is not None:
            fds.append(keeper.child_fd)
            full["PSGC_KEEPER_FD"] = str(keeper.child_fd)
        popen = subprocess.Popen(
            command, env=full, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - this process has no threads
            pass_fds=fds,
        )  # fmt: skip
        child = Child(name, popen, service, keeper)
        if keeper is not None:
            keeper.started()
            self._selector.register(keeper.socket, selectors.EVENT_READ, lambda: self._kept(keeper))
        for pipe, out in ((popen.stdout, sys.stdout), (popen.stderr, sys.stderr)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, self._reader(child, pipe, out))
        self.children.append(child)
        return child

    def run(self) -> int:
        """Watch until nothing is left. The last line on stderr says why a job failed."""
        wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(wake_r, selectors.EVENT_READ, lambda: _drain(wake_r))
        before = {n: signal.signal(n, self._signalled) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        old_fd = signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        try:
            while any(child.running for child in self.children):
                self._turn()
            self._flush()
        finally:
            signal.set_wakeup_fd(old_fd)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._sweep()
        if self._signal is not None:
            self._say(f"ended by {signal.Signals(self._signal).name}")
            return 128 + self._signal
        if self._reason:
            self._say(self._reason)
            return 1
        return 0

    def _turn(self) -> None:
        for key, _ in self._selector.select(timeout=0.1):
            key.data()
        for child in self.children:
            if child.running and child.popen.poll() is not None:
                self._ended(child)
        now = time.monotonic()
        while self._ladder and now >= self._ladder[0][0]:
            self._kill_all(self._ladder.pop(0)[1])

    def _ended(self, child: Child) -> None:
        running = [c for c in self.children if c.running]
        if child.popen.returncode != 0 and not self._reason and self._signal is None:
            self._reason = child.describe_end()
            if running:
                self._say(self._reason)
            self._end_rest(GRACE_S)
        elif not self._ladder and all(c.service for c in running):
            self._end_rest(GRACE_S)

    def _end_rest(self, grace_s: float) -> None:
        """Give the rest time to end by themselves, then insist."""
        now = time.monotonic()
        if not self._ladder:
            self._ladder = [(now + grace_s, signal.SIGTERM), (now + grace_s + TERM_S, signal.SIGKILL)]

    def _signalled(self, number: int, _frame: Any) -> None:
        if self._signal is not None:
            self._kill_all(signal.SIGKILL)
            return
        self._signal = number
        now = time.monotonic()
        workers = [c for c in self.children if c.running and not c.service]
        for child in workers or self.children:
            _send(child, signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        self._ladder = [(now + TERM_S, signal.SIGTERM), (now + 2 * TERM_S, signal.SIGKILL)]

    def _kill_all(self, number: int) -> None:
        for child in self.children:
            if child.running:
                _send(child, number)

    def _sweep(self) -> None:
        """Whatever children of our children are left in their groups goes, too."""
        for child in self.children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.popen.pid, signal.SIGKILL)
            if child.keeper is not None:
                child.keeper.close()
        self._selector.close()

    def _reader(self, child: Child, pipe: IO[bytes], out: IO[str]) -> Callable[[], None]:
        def read() -> None:
            try:
                data = os.read(pipe.fileno(), 1 << 16)
            except BlockingIOError:
                return
            if not data:
                self._selector.unregister(pipe)
                pipe.close()
            *lines, tail = (child.tails.get(id(pipe), b"") + data).replace(b"\r\n", b"\n").split(b"\n")
            child.tails[id(pipe)] = tail if data else b""
            for line in lines + ([tail] if not data and tail else []):
                self._print(child, line.rpartition(b"\r")[2], out)  # of a progress line, what is left standing

        return read

    def _print(self, child: Child, line: bytes, out: IO[str]) -> None:
        text = line.decode(errors="replace")
        if self._prefix:
            label = f"[{child.name}]"
            if out.isatty():
                label = f"\x1b[{COLOURS[self.children.index(child) % len(COLOURS)]}m{label}\x1b[0m"
            text = f"{label} {text}"
        out.write(text + "\n")
        out.flush()

    def _flush(self) -> None:
        """What is still in the pipes; a grandchild that holds one open does not hold us."""
        deadline = time.monotonic() + 0.5
        while len(self._selector.get_map()) > 1 and time.monotonic() < deadline:
            events = self._selector.select(timeout=0.05)
            if not events:
                return
            for key, _ in events:
                key.data()

    def _kept(self, keeper: Keeper) -> None:
        if not keeper.receive():
            self._selector.unregister(keeper.socket)

    def _say(self, text: str) -> None:
        sys.stdout.flush()
        sys.stderr.write(f"{self._program}: {text}\n")
        sys.stderr.flush()


def _send(child: Child, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.popen.pid, number)


def _drain(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.read(fd, 4096)
