"""Attacks by somebody without the job's token who can reach its ports and has read PROTOCOL.md. Each function returns when its attack is over."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from psgc import __version__
from psgc.transport.control.dealer import Dealer
from psgc.transport.host import host_id, pid_started
from psgc.transport.security.handshake import ANSWER, CHALLENGE, WorkerProof, worker_key
from psgc.transport.security.job_keys import JobKeys
from psgc.wire.frames import SERVER_SENDER, Flag, Header, Kind, pack_header
from psgc.wire.messages import Register, encode_body
from tests.proxy import Proxy

WAIT_S = 60.0
Told = bytes  # what a stranger heard


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)


def rest(sock: socket.socket) -> Told:
    """All that is said until the end of the connection."""
    told = b""
    with contextlib.suppress(ConnectionError):
        while data := sock.recv(65536):
            told += data
    sock.close()
    return told


def exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := sock.recv(count - len(data))):
        data += more
    return data


def pushes(job: int, numel: int) -> bytes:
    """What would replace a sum, if it were heard: contributions of 1e9 to many steps of the first key of the first layouts."""
    payload = np.full(numel, 1e9, np.float32).tobytes()
    stream = pack_header(Header(Kind.HELLO, job=job, epoch=1, sender=0))
    for step in range(1, 200):
        header = Header(Kind.PUSH, Flag.WANT_RESULT, job, 1, 1, 1 << 48, step, sender=0, payload_bytes=len(payload))
        stream += pack_header(header) + payload
    return stream


def answer_of(port: int, rank: int, key: bytes, then: bytes = b"", epoch: int = 1) -> Told:
    """Claim a rank under a key, and go on as if that had been believed."""
    sock = connected(port)
    proof = WorkerProof("tcp", 0, epoch, rank, key, "somewhere", os.urandom(32))
    with contextlib.suppress(ConnectionError):
        sock.sendall(proof.receive(exactly(sock, CHALLENGE.size)) + then)
    return rest(sock)


def claims_to_be_rank_0(port: int, job: int) -> Told:
    return answer_of(port, 0, os.urandom(32), pushes(job, 5000))


def uses_the_proof_of_another_rank_or_epoch(port: int, job: int) -> Told:
    """Keys are derived: whoever guessed a data key of zeros, or took a rank's key for another's."""
    return b"".join(answer_of(port, 0, worker_key(bytes(32), rank, epoch), epoch=1) for rank, epoch in ((0, 1), (1, 1), (0, 2)))


def takes_over_by_name(port: int, job: int) -> Told:
    """As it was once done: a ZeroMQ DEALER under the name of the worker, which ROUTERs hand over to whoever claims it."""
    context: zmq.Context[Any] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.IDENTITY, b"worker-0-%d" % os.getpid())
    dealer.connect(f"tcp://127.0.0.1:{port}")
    dealer.send_multipart([pack_header(Header(Kind.HELLO, job=job, epoch=1, sender=0))])
    told = dealer.recv() if dealer.poll(500) else b""
    context.destroy(0)
    return bytes(told)


def speaks_nonsense(port: int, job: int) -> Told:
    told = b""
    for said in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", os.urandom(4096), b"\x16\x03\x01" + bytes(512), pushes(job, 100)):
        sock = connected(port)
        with contextlib.suppress(ConnectionError):
            sock.sendall(said)
        told += rest(sock)
    return told


def announces_exabytes(port: int, job: int) -> Told:
    sock = connected(port)
    with contextlib.suppress(ConnectionError):
        sock.sendall(pack_header(Header(Kind.PUSH, job=job, payload_bytes=(1 << 64) - 1)) + bytes(1 << 20))
    return rest(sock)


def sends_back_what_it_hears(port: int, job: int) -> Told:
    sock = connected(port)
    heard = exactly(sock, CHALLENGE.size)
    with contextlib.suppress(ConnectionError):
        sock.sendall(heard)
    return rest(sock)


def never_ends_its_hello(port: int, job: int) -> Told:
    """A byte now and then, until it is cut off."""
    sock = connected(port)
    with contextlib.suppress(ConnectionError):
        for byte in b"PSGw\1" + bytes(ANSWER.size):
            sock.sendall(bytes([byte]))
            time.sleep(0.2)
    return rest(sock)


def floods(port: int, count: int) -> Told:
    """Connections that say nothing, as many at a time as descriptors allow."""
    told, held = b"", []
    for _ in range(count):
        with contextlib.suppress(OSError):
            held.append(connected(port))
        if len(held) == 400:
            for sock in held:
                sock.close()
            held.clear()
    for sock in held:
        sock.close()
    return told


def replays(port: int, recorded: bytes) -> Told:
    """What a worker has said, once more."""
    sock = connected(port)
    with contextlib.suppress(ConnectionError):
        sock.sendall(recorded)
    return rest(sock)


def comes_as_another_user(address: str) -> bool:
    """Whether a process of user 65534 gets so much as a challenge over the server's Unix socket. Needs root."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        result = b"?"
        with contextlib.suppress(OSError):
            os.setuid(65534)
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.settimeout(WAIT_S)
            sock.connect("\0" + address)
            result = b"1" if sock.recv(4096) else b"0"
        os.write(writer, result)
        os._exit(0)
    os.waitpid(child, 0)
    told = os.read(reader, 1)
    os.close(reader)
    os.close(writer)
    return told == b"1"


def local_address(job: int) -> str:
    """Of the job's server; anybody on the host can read it."""
    return re.search(rf"@(psgc/{job:x}/\S+)", Path("/proc/net/unix").read_text())[1]  # type: ignore[index]


def speaks_to_the_scheduler(port: int, job: int, token: str) -> list[Any]:
    """Register, end the job, leave in somebody's place, under keys of another token (or none): what the scheduler says to it before it hangs up."""
    context: zmq.Context[Any] = zmq.Context()
    dealer = Dealer(context, f"tcp://127.0.0.1:{port}", b"worker-0-%d" % os.getpid(), 15, JobKeys(job, (token,)) if token else None)
    register = Register("worker", __version__, host_id(), "x", os.getpid(), pid_started(os.getpid()), 1, 1)
    for kind, body in (
        (Kind.REGISTER, encode_body(register)),
        (Kind.FAULT, b'{"code":0,"text":"boo"}'),
        (Kind.ABORT, b'{"code":0,"text":"boo"}'),
        (Kind.BYE, b""),
        (Kind.OBSERVE, b""),
    ):
        for sender in (0, SERVER_SENDER):
            dealer.send(Header(kind, job=job, epoch=1, sender=sender, payload_bytes=len(body)), body)
    heard, deadline = list[Any](), time.monotonic() + WAIT_S
    while not dealer.refused and time.monotonic() < deadline:
        dealer.monitor.poll(100)
        list(dealer.events())
        heard += dealer.receive()
    assert dealer.refused, "the scheduler neither answers nor hangs up"
    dealer.close()
    context.destroy(0)
    return heard


class Recorder(Proxy):
    """Keeps what each client says first."""

    def __init__(self, target: int) -> None:
        self._said: dict[int, bytearray] = {}
        super().__init__(target)

    @property
    def said(self) -> bytes:
        """On the first connection that has said a handshake and some frames; nothing before that."""
        return next((bytes(said) for _, said in sorted(self._said.items()) if len(said) >= ANSWER.size + 20_000), b"")

    def passed(self, number: int, from_client: bool, data: bytes) -> tuple[bytes, bool]:
        said = self._said.setdefault(number, bytearray())
        if from_client and len(said) < 1 << 20:
            said += data
        return data, True


ATTACKS: tuple[Callable[[int, int], Told], ...] = (
    claims_to_be_rank_0, uses_the_proof_of_another_rank_or_epoch, takes_over_by_name, speaks_nonsense, announces_exabytes,
    sends_back_what_it_hears, never_ends_its_hello,
)  # fmt: skip
