"""Restart policy: a job that failed is started again, so many times."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping
from typing import Final

from psgc.errors import ConfigError

# Ends that nobody should repeat: in order, a user's mistake, and a signal to us.
FINAL: Final = {0, 2, *(128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))}


def restarts_of(env: Mapping[str, str]) -> int:
    """PSGC_RESTARTS. Raises ConfigError."""
    text = env.get("PSGC_RESTARTS", "").strip() or "0"
    if not text.isdigit():
        raise ConfigError(f"PSGC_RESTARTS={text!r}: expected how many times a job that failed is started again")
    return int(text)


def run_again(run: Callable[[dict[str, str]], int], most: int, program: str) -> int:
    """Call ``run`` until it ends in order, or ends for a reason that stays, or has been repeated ``most`` times; its last status.

    run: gets PSGC_RESTART, the number of restarts so far, for the processes that it starts.
    """
    for attempt in range(most + 1):
        status = run({"PSGC_RESTART": str(attempt)} if most else {})
        if status in FINAL or attempt == most:
            break
        print(
            f"{program}: the job failed with status {status}; restart {attempt + 1} of {most} (PSGC_RESTARTS)", file=sys.stderr, flush=True
        )
    return status
