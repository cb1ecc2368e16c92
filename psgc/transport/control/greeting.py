"""Finds out, by a plain socket, what a peer is that refuses every handshake with the scheduler's clients, because ZeroMQ does not tell.

A ZeroMQ peer opens with a greeting of 64 bytes that names its security mechanism (ZMTP 3, rfc.zeromq.org/spec/23): CURVE if the scheduler
has a token, NULL if it has none. Any other program sends something else, or nothing.
"""

from __future__ import annotations

import socket
import time
from typing import Final

from psgc.processes.addresses import endpoint, split
from psgc.transport.security.handshake import OF_SERVER

OPENING: Final = b"\xff" + bytes(8) + b"\x7f" + b"\x03"  # ZMTP's signature and major version; the peer answers with its whole greeting
GREETING_BYTES: Final = 64
MECHANISM: Final = slice(12, 32)
ASKED_S: Final = 1.0  # longer than a round trip over the slowest link
SAME: Final = "set the same PSGC_TOKEN and PSGC_JOB everywhere"
OTHER_PORT: Final = "check DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT"


def greeting(host: str, port: int, patience_s: float = ASKED_S) -> bytes:
    """The first bytes that the peer sends, at most a greeting's; none if it sends none or cannot be reached. Waits for at most ``patience_s``."""
    said, until = b"", time.monotonic() + patience_s
    try:
        with socket.create_connection((host, port), patience_s) as peer:
            peer.sendall(OPENING)
            while len(said) < GREETING_BYTES and (left := until - time.monotonic()) > 0:
                peer.settimeout(left)
                if not (more := peer.recv(GREETING_BYTES - len(said))):
                    break
                said += more
    except OSError:
        pass  # the bytes that came before that are enough
    return said


def why_refused(address: str, has_token: bool, hung_up: bool) -> tuple[str, bool]:
    """Why the peer at ``address`` (tcp://host:port) refuses this member, in a sentence that says how to mend it, empty if it does not tell; and whether that
    holds for itself. If not, handshakes must fail again and the answer be the same: whoever ended those before may not have been this peer.
    hung_up: they were ended, not just left unanswered. Takes up to a second."""
    host, port = split(address)
    said = greeting(host, port)
    if said.startswith(OPENING[:1]) and len(said) == GREETING_BYTES:
        guarded = said[MECHANISM].rstrip(b"\0") == b"CURVE"
        if guarded and has_token:  # or it has no time
            return (f"the scheduler at {address} does not take this member's token: {SAME}" if hung_up else ""), False
        if guarded:
            return f"the scheduler at {address} asks for a token, and this member has none: {SAME}", True
        if has_token:
            return f"the scheduler at {address} has no token, and this member has one: {SAME}", True
        return "", True
    if not said:
        return "", True  # a proxy whose scheduler is not up yet does so, too
    where = endpoint(host, port)
    if said.startswith(OF_SERVER):
        return f"what listens at {where} is a server of a job and not its scheduler: {OTHER_PORT}", True
    return f"what listens at {where} is no scheduler of psgc ({_in_words(said)}): {OTHER_PORT}", True


def _in_words(said: bytes) -> str:
    return f"it says {said.decode('latin1').splitlines()[0][:40]!r}"
