"""Who may send messages to the scheduler: keys of the control connections, derived from the job's token, and the scheduler's check of them.

With a token, control connections use CURVE, which encrypts them and proves both ends' identity; the token itself never travels. Without a
token, anybody who reaches the scheduler's port may send to it. Owns the keys and the thread that answers ZeroMQ's requests (ZAP).
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from psgc.transport.security.refusals import SAID_S, Refusals

logger = logging.getLogger(__name__)
ROUNDS: Final = 100_000  # of PBKDF2: the price of each guess for an attacker who has recorded a handshake and guesses tokens
ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
# The scheduler's event for a wrong key. A peer that ended in the middle of a handshake gives EVENT_HANDSHAKE_FAILED_NO_DETAIL.
WRONG_KEY: Final = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
# A member's events for it: it only sees that the scheduler hung up.
HUNG_UP: Final = int(WRONG_KEY | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)


@dataclass(frozen=True, slots=True, repr=False)
class ControlKeys:
    """One job's keys, in ZeroMQ's format (Z85 text)."""

    scheduler_public: bytes
    scheduler_secret: bytes
    member_public: bytes
    member_secret: bytes


@cache
def root_of(job: int, token: str) -> bytes:
    """What the job's keys are derived from; slow on purpose."""
    return hashlib.pbkdf2_hmac("sha256", token.encode(), b"psgc/1 control, job %d" % job, ROUNDS)


@cache
def control_keys(job: int, token: str) -> ControlKeys | None:
    """The job's keys; None without a token."""
    if not token:
        return None
    root = root_of(job, token)
    secrets = [z85.encode(hmac.digest(root, whose, "sha256")) for whose in (b"scheduler", b"member")]
    scheduler, member = (zmq.curve_public(secret) for secret in secrets)
    return ControlKeys(scheduler, secrets[0], member, secrets[1])


def guard_scheduler(socket: zmq.Socket[Any], keys: ControlKeys) -> None:
    """Make the scheduler's socket accept only peers that hold the keys. Call it before the socket is bound, and after ``Doorkeeper`` was made."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.scheduler_secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, b"psgc")


def prove_membership(socket: zmq.Socket[Any], keys: ControlKeys) -> None:
    """Make a member's socket prove that it holds the token, and send only to a scheduler that holds it. Call it before the socket is connected."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.scheduler_public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.member_public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.member_secret)


class Doorkeeper:
    """Tells ZeroMQ whether a peer's key is the members' (``admit``), and logs refused peers. It runs in a thread, so that it never waits for the loop."""

    def __init__(self, context: zmq.Context[Any], keys: Iterable[ControlKeys]) -> None:
        self.admit(keys)
        self._zap = context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind(ZAP_ENDPOINT)
        self._stop, self._stopped = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._stop.bind("inproc://psgc-doorkeeper")
        self._stopped.connect("inproc://psgc-doorkeeper")
        self._monitor: Any = None
        self._refusals = Refusals(logger, "control connections")
        self._thread = threading.Thread(target=self._serve, name="psgc-doorkeeper", daemon=True)

    def admit(self, keys: Iterable[ControlKeys]) -> None:
        """From now on, members under any of these are let in."""
        self._publics = [z85.decode(each.member_public) for each in keys]

    def watch(self, socket: zmq.Socket[Any]) -> None:
        """Begin, for this socket."""
        self._monitor = socket.get_monitor_socket(WRONG_KEY)
        self._thread.start()

    def _serve(self) -> None:
        poller = zmq.Poller()
        for each in (self._zap, self._monitor, self._stopped):
            poller.register(each, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(int(SAID_S * 1000)))
            if self._stopped in ready:
                break
            if self._zap in ready:
                self._answer(self._zap.recv_multipart())
            if self._monitor in ready:
                recv_monitor_message(self._monitor, zmq.NOBLOCK)
                text = "control connection refused: it does not hold this job's token (PSGC_TOKEN and PSGC_JOB, the same everywhere)"
                self._refusals.note("token", text, time.monotonic())
            self._refusals.tick(time.monotonic())
        for each in (self._zap, self._stopped):
            each.close(0)

    def _answer(self, request: list[bytes]) -> None:
        version, number, _, address, _, mechanism, *credentials = request
        known = (
            mechanism == b"CURVE" and len(credentials) == 1 and any(hmac.compare_digest(credentials[0], public) for public in self._publics)
        )
        if not known:
            logger.debug("unknown key from %r", address)
        status, text = (b"200", b"OK") if known else (b"400", b"not a member")
        self._zap.send_multipart([version, number, status, text, b"member" if known else b"", b""])

    def close(self) -> None:
        """Call it after the watched socket's monitor was disabled, or the socket was closed."""
        if self._thread.is_alive():
            self._stop.send(b"")
            self._thread.join()
        if self._monitor is not None:
            self._monitor.close(0)
        self._stop.close(0)
