"""Tells a scheduler, which may be on another machine, of a worker that has ended and will not register, for which the job would wait; and of a launcher that a
signal ends, without which the job would be started again.

If the scheduler is not running, nobody waits.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any, Final

from psgc.config import Config
from psgc.wire.frames import UNASSIGNED_SENDER, Header, Kind
from psgc.wire.messages import ErrorCode, Notice, encode_body

LINGER_MS: Final = 3000  # for the connection to be made and a small message to leave
POLL_MS: Final = 20


def tell_absence(config: Config, why: str) -> None:
    """config: the worker's. why: how it ended, in a line."""
    _tell(config, ErrorCode.ABSENT, f"node {config.node} ({socket.gethostname()}): {why}, before it joined the job")


def tell_end(config: Config, why: str) -> None:
    """config: of a member of the launcher. why: what ends the launcher, in a word. Returns when the scheduler has heard it, since it may be the launcher's own
    and the next to be ended; after PSGC_SILENCE_S at most, and at once where nobody listens."""
    _tell(config, ErrorCode.FINAL, f"a launcher on {socket.gethostname()} was ended by {why}", answered_s=config.silence_s)


def _tell(config: Config, code: ErrorCode, text: str, answered_s: float = 0.0) -> None:
    import zmq  # here: what ends a script, or launches one, need not load the network

    from psgc.transport.control.dealer import Dealer
    from psgc.transport.security.job_keys import JobKeys

    context: zmq.Context[Any] = zmq.Context()
    identity = b"absent-%s-%d" % (os.urandom(6).hex().encode(), os.getpid())
    dealer = Dealer(context, config.root_endpoint, identity, config.dead_s, JobKeys.of(config))
    body = encode_body(Notice(code, text))
    dealer.send(Header(Kind.FAULT, job=config.job, sender=UNASSIGNED_SENDER, payload_bytes=len(body)), body)
    until, linger_ms = time.monotonic() + answered_s, 0 if answered_s else LINGER_MS
    while (now := time.monotonic()) < until and not dealer.nobody_listens(now) and not dealer.socket.poll(POLL_MS):
        pass
    dealer.close(linger_ms)
    context.destroy(linger_ms)
