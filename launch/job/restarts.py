"""Restart policy: a failed job is started again, up to a number of times."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Final

from psgc.config import Config
from psgc.errors import ConfigError
from psgc.launch.supervision.sink import Sink
from psgc.launch.supervision.supervisor import Unrepeated

# Ends that nobody should repeat: in order, and a user's mistake. One by a signal is a fault, where the signal was not to us.
FINAL: Final = {0, 2}
# The scheduler's port stays closed for so long before the scheduler starts again: by that the other machines see that the old job is over.
GAP_S: Final = 5.0
GAP_AWAITED_S: Final = 60.0  # a machine that has missed the gap goes on then
POLL_S: Final = 0.1


def await_the_end(config: Config, runs_scheduler: bool) -> None:
    """Return when members of the job's next start cannot meet the scheduler of the last one, which would tell them that the job has failed."""
    if runs_scheduler:
        time.sleep(GAP_S)
        return
    deadline = time.monotonic() + GAP_AWAITED_S
    while time.monotonic() < deadline and _listens(config.root_host, config.root_port):
        time.sleep(POLL_S)


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def restarts_of(env: Mapping[str, str]) -> int:
    """PSGC_RESTARTS. Raises ConfigError."""
    text = env.get("PSGC_RESTARTS", "").strip() or "0"
    if not text.isdigit():
        raise ConfigError(f"PSGC_RESTARTS={text!r}: expected how many times a job that failed is started again")
    return int(text)


def run_again(run: Callable[[dict[str, str]], int], most: int, program: str, between: Callable[[], None] = lambda: None) -> int:
    """Call ``run`` until it ends in order, or ends for a reason that stays, or has been repeated ``most`` times; its last status.

    run: gets PSGC_RESTART, the number of restarts so far, for the processes that it starts. between: called before it is repeated.
    """
    for attempt in range(most + 1):
        status = run({"PSGC_RESTART": str(attempt)} if most else {})
        if status in FINAL or isinstance(status, Unrepeated) or attempt == most:
            break
        text = f"{program}: the job failed with status {status}; restart {attempt + 1} of {most} (PSGC_RESTARTS)\n"
        Sink(sys.stderr, program).write(text.encode())  # a full disk is no reason not to start it
        between()
    return status
