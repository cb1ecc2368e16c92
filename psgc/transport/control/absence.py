"""Tells a scheduler, which may be on another machine, of a worker that has ended and will not register; otherwise the job would wait for it.

No answer is awaited: if the scheduler is not running, nobody waits for the worker.
"""

from __future__ import annotations

import os
import socket
from typing import Any, Final

from psgc.config import Config
from psgc.wire.frames import UNASSIGNED_SENDER, Header, Kind
from psgc.wire.messages import ErrorCode, Notice, encode_body

LINGER_MS: Final = 3000  # for the connection to be made and a small message to leave


def tell_absence(config: Config, why: str) -> None:
    """config: the worker's. why: how it ended, in a line."""
    import zmq  # here: what ends a script, or launches one, need not load the network

    from psgc.transport.control.dealer import Dealer
    from psgc.transport.security.job_keys import JobKeys

    context: zmq.Context[Any] = zmq.Context()
    identity = b"absent-%s-%d" % (os.urandom(6).hex().encode(), os.getpid())
    dealer = Dealer(context, config.root_endpoint, identity, config.dead_s, JobKeys.of(config))
    text = f"node {config.node} ({socket.gethostname()}): {why}, before it joined the job"
    body = encode_body(Notice(ErrorCode.ABSENT, text))
    dealer.send(Header(Kind.FAULT, job=config.job, sender=UNASSIGNED_SENDER, payload_bytes=len(body)), body)
    dealer.close(linger_ms=LINGER_MS)
    context.destroy(linger=LINGER_MS)
