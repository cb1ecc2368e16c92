"""A spare process that has died when its turn comes."""

from __future__ import annotations

import os
import sys

from psgc.launch.supervision.child import Child
from psgc.launch.supervision.relay import Relay
from psgc.launch.supervision.spares import Spares


def relays() -> tuple[Relay, Relay]:
    return Relay(None, sys.stdout.buffer), Relay(None, sys.stderr.buffer)


def begin(number: int) -> Child:
    """One that ends when its stdin does."""
    return Child.start(f"spare {number}", [sys.executable, "-c", "input()"], os.environ, relays(), stdin=-1)


def test_one_that_dies_just_before_its_turn_is_found_to_have_ended_like_any_other() -> None:
    spares = Spares(2, begin)
    dead, lives = spares.fill()
    try:
        dead.signal_group(9)
        os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
        assert spares.take("worker 1", "", [sys.executable, "x.py"], {}, (), relays()) is lives
        assert spares.take("worker 0", "", [sys.executable, "x.py"], {}, (), relays()) is None, "two workers die at once"
        assert spares.waiting == [dead]
        assert spares.ended() == [dead] and spares.waiting == [] and spares.wanted == 1
        assert dead.describe_end() == f"spare 0 was killed by SIGKILL (pid {dead.pid})"
    finally:
        for child in (dead, lives):
            child.signal_group(9)
            child.reap()
            child.close()
