"""Report a worker that ended before it joined to a scheduler on another machine; otherwise the job would wait for it to register.

The scheduler listens to members only, so the launcher registers in the worker's place and then reports the fault. It does not wait for an answer: if
the scheduler is not running, nobody waits for the worker.
"""

from __future__ import annotations

import os
import socket
from typing import Any, Final

from psgc import __version__
from psgc.config import Config
from psgc.wire.frames import UNASSIGNED_SENDER, Header, Kind
from psgc.wire.messages import Notice, Register, encode_body

LINGER_MS: Final = 3000  # for the connection to be made and three small messages to leave


def tell_absence(config: Config, pid: int, why: str) -> None:
    """config: the worker's. why: how it ended, in a line."""
    import zmq

    from psgc.transport.control.dealer import Dealer
    from psgc.transport.host import host_id
    from psgc.transport.security.curve import control_keys

    context: zmq.Context[Any] = zmq.Context()
    identity = b"launcher-%s-%d" % (os.urandom(6).hex().encode(), os.getpid())
    dealer = Dealer(context, config.root_endpoint, identity, config.dead_s, control_keys(config.job, config.token))
    host = socket.gethostname()
    register = Register(
        "worker", __version__, host_id(), host, pid, 0, config.nodes, config.servers, config.node, config.local_rank,
        config.local_size, encrypt=config.encrypt,
    )  # fmt: skip
    text = f"node {config.node} ({host}): {why}, before it joined the job"
    for kind, body in ((Kind.REGISTER, encode_body(register)), (Kind.FAULT, encode_body(Notice(0, text))), (Kind.BYE, b"")):
        dealer.send(Header(kind, job=config.job, sender=UNASSIGNED_SENDER, payload_bytes=len(body)), body)
    dealer.close(linger_ms=LINGER_MS)
    context.destroy(linger=LINGER_MS)
