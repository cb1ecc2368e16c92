"""A job of two machines with a worker each, of which one is lost: its launcher is killed, and its worker's process ends with it."""

from __future__ import annotations

import subprocess
from typing import Any

from tests.launch.killing import Pace, until_gone
from tests.ports import free_port


class TwoMachines:
    """command: of each machine's worker, which goes by ``pace``, and says "rank R step S ... PID". env: of every member."""

    def __init__(self, launched: Any, pace: Pace, command: tuple[str, ...], env: dict[str, str]) -> None:
        at = {"DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(free_port())}
        self._launched, self._pace, self._command, self._env = launched, pace, command, at | env | pace.env
        self.services = [launched.psgc_launch(DMLC_ROLE=role, **self._env) for role in ("scheduler", "server")]

    def node(self, number: int) -> subprocess.Popen[str]:
        launcher: subprocess.Popen[str] = self._launched.psgc_launch(
            *self._command, DMLC_ROLE="worker", DMLC_WORKER_ID=str(number), **self._env
        )
        return launcher

    def lose_the_second(self) -> subprocess.Popen[str]:
        """Start both, and lose the second in its third step; the job goes by nothing any more. Returns the first one's launcher."""
        first, lost = self.node(0), self.node(1)
        said = self._launched.read_until(lost, "rank 1 step 3 ")
        lost.kill()
        lost.communicate()
        until_gone(int(said.split()[-1]))
        self._pace.over()
        return first
