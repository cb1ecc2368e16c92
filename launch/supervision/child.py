"""One supervised process: started in a session of its own, killed if the launcher dies, its output relayed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from psgc.launch.supervision.keeper import Keeper
from psgc.launch.supervision.relay import Relay

_SCRIPTS: Final = Path(__file__).parent
_BARE: Final = ("-I", "-S")  # no site packages: the scripts start in 10 ms


def script(name: str) -> list[str]:
    """The command that runs one of this folder's scripts."""
    return [sys.executable, *_BARE, str(_SCRIPTS / name)]


@dataclass(slots=True, eq=False)
class Child:
    """Made by ``start``. The leader is not reaped before its whole process group is gone, so that the group's number is not used again."""

    name: str
    popen: subprocess.Popen[bytes]
    who: str  # in sentences
    service: bool  # ends by itself once the others have
    keeper: Keeper | None
    start_again: Callable[[Keeper | None], Child] | None  # another process in its place, with what this one has left
    estate: list[IO[bytes] | socket.socket]  # what the next process would inherit: kept open until there is none
    relays: dict[IO[bytes], Relay] = field(default_factory=dict)
    status: int | None = None  # as Popen's returncode, once the leader has ended
    gone: bool = False  # no process of its group is left
    was_spare: bool = False  # it waited, with imports done, to take a place
    follows: bool = False  # serves those who work here until they have ended, whoever tells them to
    deliver: Callable[[int], bool] | None = (
        None  # passes a signal on to where the work is done, if it can; SIGKILL always goes to the process group
    )

    @classmethod
    def start(
        cls, name: str, command: Sequence[str], env: Mapping[str, str], relays: tuple[Relay, Relay], *, who: str = "",
        service: bool = False,
        keep_memory: bool = False, pass_fds: Iterable[int] = (), cores: Iterable[int] = (), stdin: int = subprocess.DEVNULL,
        keeper: Keeper | None = None, start_again: Callable[[Keeper | None], Child] | None = None,
        estate: Iterable[IO[bytes] | socket.socket] = (),
    ) -> Child:  # fmt: skip
        """Run ``command``. relays: of stdout and stderr. cores: stay on these. stdin: a descriptor. keeper: with what a former process has left. Raises OSError
        if no process can be made. estate: see the field."""
        keeper = Keeper() if keep_memory and keeper is None else keeper
        fds, full = list(pass_fds), dict(env)
        if keeper is not None:
            fds.append(keeper.child_fd)
            full["PSGC_KEEPER_FD"] = str(keeper.child_fd)
        tether = [*script("tether.py"), str(os.getpid()), ",".join(map(str, cores))]
        popen = subprocess.Popen(
            [*tether, *command], env=full, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True, pass_fds=fds,
        )  # fmt: skip
        if keeper is not None:
            keeper.started()
        child = cls(name, popen, who or name, service, keeper, start_again, list(estate))
        for pipe, relay in zip((popen.stdout, popen.stderr), relays, strict=True):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            child.relays[pipe] = relay
        return child

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def running(self) -> bool:
        return self.status is None

    def has_ended(self) -> bool:
        """Whether the leader has ended since the last call; notes its status."""
        if not self.running:
            return False
        info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info is None:
            return False
        self.status = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
        return True

    def signal_group(self, number: int) -> None:
        if self.deliver is not None and number != signal.SIGKILL and self.deliver(number):
            return
        if not self.gone:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def reap(self) -> None:
        """Reap the leader. Call it when the group has no other process left."""
        self.popen.wait()
        self.gone = True

    def read(self, pipe: IO[bytes]) -> bool:
        """Relay what one pipe holds; False at its end."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(pipe.fileno(), 1 << 16):
                self.relays[pipe].feed(data)
            self.relays[pipe].finish()
            return False
        return True

    def close(self) -> None:
        """Pass on unfinished lines and close all descriptors."""
        for pipe, relay in self.relays.items():
            relay.finish()
            pipe.close()
        if self.popen.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.popen.stdin.close()
        self.leave_nothing()
        if self.keeper is not None:
            self.keeper.close()

    def leave_nothing(self) -> None:
        """No process takes this one's place: nobody listens where it has listened."""
        while self.estate:
            self.estate.pop().close()

    @property
    def followable(self) -> bool:
        """Whether another process can take up what this one has left. Call it when it has ended."""
        if self.start_again is None:
            return False
        if self.keeper is None:
            return True
        self.keeper.receive()
        return self.keeper.followable

    @property
    def goes_on(self) -> str:
        """What happens when it is started again, for messages."""
        if self.keeper is None and not self.estate:
            return "another process takes its place"
        return f"it is started again and goes on from {'its journal' if self.estate else 'what it had committed'}"

    @property
    def unmet(self) -> str:
        """What a process did not come to that ends soon, for messages."""
        return "did not hear of everyone again" if self.estate else "completed no step"

    def describe_end(self) -> str:
        """Who ended and how: the signal, else the Python error with its place, else the status and the last line of stderr."""
        status = self.status or 0
        if status < 0:
            return f"{self.who} was killed by {_signal_name(-status)} (pid {self.pid})"
        assert self.popen.stderr is not None
        words = self.relays[self.popen.stderr].words
        if status == 1 and words.error:  # the status that Python gives to what nobody catches
            return f"{self.who} ended with {words.error}"
        said = words.line.removeprefix("psgc: ")
        return f"{self.who} ended with status {status}" + (f": {said}" if said and status else "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def live_groups() -> set[int]:
    """Process groups of this host that have a member which is not a zombie."""
    groups = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                state, _, group = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[:3]
                if state not in "ZX":
                    groups.add(int(group))
    return groups
