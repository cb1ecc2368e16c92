"""Processes that wait, with imports done, to take dead workers' places (``psgc run --spares``). Knows processes and pipes, not what they compute.

Invariant: a process is a spare or a worker, never both; it becomes a worker once.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from psgc.launch.supervision.child import Child
from psgc.launch.supervision.relay import Relay

MODULE: Final = "psgc.launch.job.spare"  # what a process that waits is started as
TITLE: Final = "psgc rank "  # what a process calls itself once it has taken a rank's place: what it was started with says nothing of that
PIPE_BYTES: Final = 1 << 20  # an environment is shorter: writing it waits for nobody


@dataclass(slots=True)
class Spares:
    """wanted: how many are to wait. begin: starts the one of this number."""

    wanted: int = 0
    begin: Callable[[int], Child] | None = None
    waiting: list[Child] = field(default_factory=list)
    _started: int = 0

    def fill(self) -> list[Child]:
        """Start those that are lacking. Raises OSError."""
        started: list[Child] = []
        while self.begin is not None and len(self.waiting) < self.wanted:
            child = self.begin(self._started)
            assert child.popen.stdin is not None
            fcntl.fcntl(child.popen.stdin.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            self._started += 1
            self.waiting.append(child)
            started.append(child)
        return started

    def ended(self) -> list[Child]:
        """Those that have ended while they waited; they are not started again, because the next would end, too."""
        ended = [child for child in self.waiting if child.has_ended()]
        self.waiting = [child for child in self.waiting if child not in ended]
        self.wanted -= len(ended)
        return ended

    def take(
        self, name: str, who: str, command: Sequence[str], env: Mapping[str, str], cores: Iterable[int], relays: tuple[Relay, Relay]
    ) -> Child | None:
        """Have one become this worker. command: begins with an interpreter. None: there is none."""
        task = {"words": list(command[1:]), "env": dict(env), "cores": list(cores)}
        for child in list(self.waiting):
            stdin = child.popen.stdin
            assert stdin is not None
            if stdin.closed:
                continue
            try:
                stdin.write(json.dumps(task).encode() + b"\n")
                stdin.close()
            except BrokenPipeError:  # it has ended just now: it stays among those that wait until ``ended`` finds it
                with contextlib.suppress(BrokenPipeError):
                    stdin.close()
                continue
            self.waiting.remove(child)
            child.name, child.who, child.was_spare = name, who or name, True
            child.relays = dict(zip(child.relays, relays, strict=True))
            return child
        return None
