"""What one peer can cost the other end: memory, time, and other peers' places."""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from psgc.config import Config
from psgc.transport.link_set import LinkSet
from psgc.transport.security.gate import MOST, Gate
from psgc.transport.security.handshake import ServerProof, WorkerProof, worker_key
from psgc.transport.server_link import connect_server
from psgc.transport.shm import LocalLink, LocalListener
from psgc.transport.socket_link import MOST_KEPT_BYTES, SocketLink
from psgc.transport.tcp import TcpLink, TcpListener
from psgc.wire.frames import Header, Kind
from psgc.wire.messages import ServerAddress

DATA_KEY = bytes(32)
WAIT_S = 60.0


def server_proof(label: str) -> ServerProof:
    return ServerProof(label, 0, 1, 4, lambda rank: worker_key(DATA_KEY, rank, 1), secrets.token_bytes(32))


def until(done: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline


@pytest.fixture(params=["tcp", "unix"])
def ends(request: Any) -> Iterator[tuple[SocketLink, SocketLink]]:
    """A worker's and a server's, proved."""
    proof = WorkerProof(request.param, 0, 1, 0, worker_key(DATA_KEY, 0, 1), "h", secrets.token_bytes(32))
    listener: Any
    if request.param == "tcp":
        listener = TcpListener("127.0.0.1", 0, 30)
        client: SocketLink = TcpLink.connect(socket.AF_INET, ("127.0.0.1", listener.port), proof, 30)
    else:
        listener = LocalListener(f"psgc-test/{os.getpid()}/{secrets.token_hex(4)}")
        client = LocalLink.connect(listener.name, proof)
    found: list[SocketLink] = []

    def accepted() -> bool:
        try:
            found.append(listener.accept(server_proof(request.param)))
        except BlockingIOError:
            return False
        return True

    until(accepted)
    until(lambda: bool(client.prove()) & bool(found[0].prove()))
    yield client, found[0]
    for each in (client, *found, listener):
        each.close()


def test_a_peer_that_never_reads_is_cut_off_before_its_answers_take_much_memory(ends: tuple[SocketLink, SocketLink]) -> None:
    _, host = ends
    body = bytes(60_000)
    sent = 0
    while not host.closed:
        host.send(Header(Kind.ERROR, payload_bytes=len(body)), body)
        host.flush()
        sent += len(body)
        assert sent < MOST_KEPT_BYTES + (64 << 20), "what the kernel takes comes on top"
    assert "it does not read what it is sent" in host.why


def test_a_peer_that_reads_is_answered_for_ever(ends: tuple[SocketLink, SocketLink]) -> None:
    client, host = ends
    body, got = bytes(60_000), 0
    links = LinkSet()
    links.add(client)
    for _ in range(2 * MOST_KEPT_BYTES // (len(body) * 50)):
        for _ in range(50):
            host.send(Header(Kind.ERROR, payload_bytes=len(body)), body)
        deadline = time.monotonic() + WAIT_S
        while host.queued:
            assert time.monotonic() < deadline
            host.flush()
            got += sum(1 for _ in client.receive())
    assert not host.closed
    assert got
    links.close()


def test_bytes_from_a_server_that_are_no_message_close_the_connection_and_end_nothing() -> None:
    """An altered message, under encryption, is such bytes, too."""
    listener, links = TcpListener("127.0.0.1", 0, 30), LinkSet()
    address = ServerAddress(0, "elsewhere", listener.address, "")
    link = connect_server(address, links, Config(transport="tcp"), rank=0, epoch=1, key=worker_key(DATA_KEY, 0, 1))
    gate = Gate([listener], lambda transport: server_proof(transport.label))
    hosts: list[Any] = []
    happened: list[str] = []

    def turn() -> None:
        hosts.extend(gate.serve())
        for ready in links.ready():
            assert list(ready.owner.receive()) == []
        happened.extend(link.events())

    until(lambda: (turn(), "up" in happened and hosts)[-1])
    hosts[0].socket.send(b"\xff" * 64)
    until(lambda: (turn(), happened == ["up", "down", "up"])[-1])
    link.close(0)
    gate.close()
    for host in hosts:
        host.close()
    links.close()


def test_who_floods_a_server_with_connections_keeps_out_nobody_from_elsewhere() -> None:
    """The flood comes from one address before, while and after a worker from another proves itself, slowly."""
    listener = TcpListener("", 0, 30)
    nonces = itertools.count()
    gate = Gate(
        [listener],
        lambda transport: ServerProof(transport.label, 0, 1, 4, lambda rank: worker_key(DATA_KEY, rank, 1), b"%032d" % next(nonces)),
    )
    flood: list[socket.socket] = []

    def strangers(count: int) -> None:
        for _ in range(count):
            flood.append(socket.create_connection(("127.0.0.1", listener.port), timeout=WAIT_S))
            gate.serve()

    strangers(MOST)
    sock = socket.socket()
    sock.bind(("127.0.0.2", 0))
    sock.connect(("127.0.0.1", listener.port))
    worker = TcpLink(sock, WorkerProof("tcp", 0, 1, 2, worker_key(DATA_KEY, 2, 1), "h", secrets.token_bytes(32)), "server", 30)
    until(lambda: (gate.serve(), len(gate) == MOST)[-1])
    strangers(MOST + 50)
    assert len(gate) <= MOST
    inside: list[Any] = []
    until(lambda: (inside.extend(gate.serve()), worker.prove() and inside)[-1])
    assert inside[0].proof.rank == 2
    for each in (worker, *inside, *flood):
        each.close()
    gate.close()
