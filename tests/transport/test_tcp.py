"""Payload connections over real sockets: every message arrives whole and in order, however it is cut, and nothing blocks."""

from __future__ import annotations

import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import zmq

from psgc.config import Config
from psgc.errors import ConfigError, PsgcError, RemoteProtocolError
from psgc.transport.control.dealer import set_common_options
from psgc.transport.link_set import LinkSet
from psgc.transport.security.encryption import require
from psgc.transport.security.handshake import ServerProof, WorkerProof, worker_key
from psgc.transport.tcp import STAGE_BYTES, TRANSPORT, TcpLink, TcpListener, set_options
from psgc.transport.watch import Watch
from psgc.wire.frames import HEADER_BYTES, MAX_PAYLOAD_BYTES, Header, Kind, pack_header

KEY = worker_key(bytes(32), 0, 1)
PATIENCE_S = 60.0
SIZES = (0, 1, 63, 64, 65, STAGE_BYTES - 1, STAGE_BYTES, STAGE_BYTES + 1, 100_003, (4 << 20) + 5)


@pytest.fixture(params=[False, True], ids=["plain", "encrypted"])
def pair(request: Any) -> Iterator[tuple[TcpLink, TcpLink]]:
    """A worker's end and a server's, proved."""
    encrypt = request.param
    if encrypt:
        pytest.importorskip("cryptography", reason="the extra `encrypt` is not installed")
    listener = TcpListener("127.0.0.1", 0, dead_s=30)
    proof = WorkerProof("tcp", 0, 1, 0, KEY, "h", b"w" * 32, encrypt=encrypt)
    client = TcpLink.connect(socket.AF_INET, ("127.0.0.1", listener.port), proof, dead_s=30)
    host = until(lambda: accepted(listener, encrypt))
    until(lambda: bool(host.prove()) & bool(client.prove()))
    yield client, host
    for each in (client, host, listener):
        each.close()


def accepted(listener: TcpListener, encrypt: bool) -> Any:
    try:
        return listener.accept(ServerProof("tcp", 0, 1, 1, lambda _: KEY, b"s" * 32, encrypt=encrypt))
    except BlockingIOError:
        return None


def waiting(link: TcpLink, nbytes: int) -> bytes:
    """What has come and is not received yet: nothing, perhaps, though it was sent."""
    try:
        return link.socket.recv(nbytes, socket.MSG_PEEK)
    except BlockingIOError:
        return b""


def until(call: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (result := call()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return result


def exchange(sender: TcpLink, receiver: TcpLink, said: list[tuple[Header, Any]], **budget: int) -> list[tuple[Header, Any]]:
    """Send all, by polling as a loop does, and return what arrives."""
    links, watch = LinkSet(), Watch()
    for link in (sender, receiver):
        links.add(link)
    for header, payload in said:
        sender.send(header, payload)
    links.touch(sender)
    heard: list[tuple[Header, Any]] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(heard) < len(said):
        assert time.monotonic() < deadline, f"only {len(heard)} messages of {len(said)} have come"
        links.flush()
        watch.wait([(links, 1)], 0.0 if links.pending else 1.0)
        for link in links.ready():
            heard += link.receive(**budget)
            links.received(link)
    links.close()
    return heard


def made(rng: random.Random, count: int, sizes: tuple[int, ...] = SIZES) -> list[tuple[Header, Any]]:
    content = np.random.default_rng(7).integers(0, 256, max(sizes), np.uint8)
    messages = []
    for step in range(count):
        size = rng.choice(sizes)
        messages.append((Header(Kind.PUSH, key=rng.getrandbits(60), step=step, payload_bytes=size), content[:size] if size else None))
    return messages


def same(heard: list[tuple[Header, Any]], sent: list[tuple[Header, Any]]) -> None:
    assert [header for header, _ in heard] == [header for header, _ in sent]
    for (_, got), (header, want) in zip(heard, sent, strict=True):
        assert (got is None) == (header.payload_bytes == 0)
        if got is not None:
            assert got.tobytes() == want.tobytes(), header


def test_messages_of_every_size_arrive_whole_and_in_order_in_both_directions(pair: Any) -> None:
    client, host = pair
    for sender, receiver in ((client, host), (host, client)):
        sent = made(random.Random(1), 60)
        same(exchange(sender, receiver, sent), sent)
        assert sender.unsent == 0
        assert not sender.queued


def test_a_turn_is_bounded_and_what_is_left_comes_at_the_next(pair: Any) -> None:
    client, host = pair
    sent = made(random.Random(2), 300, sizes=(0, 1, 64, 1000))
    same(exchange(client, host, sent, messages=7), sent)
    for header, payload in sent:
        client.send(header, payload)
    client.flush()
    until(lambda: waiting(host, 1 << 20))
    assert len(list(host.receive(messages=5))) == 5
    assert host.more, "polling would not tell of what has been read already"
    assert len(list(host.receive(messages=1000, nbytes=1500))) < 10


def test_bytes_that_come_one_by_one_are_the_same_message(pair: Any) -> None:
    client, host = pair
    for step in range(3):
        client.send(Header(Kind.PUSH, step=step, payload_bytes=3), b"abc")
    stream = b"".join(bytes(piece) for piece in client._pieces()[0])
    heard = []
    for place in range(len(stream)):
        client.socket.send(stream[place : place + 1])
        until(lambda: waiting(host, 1))
        heard += list(host.receive())
    assert [(header.step, payload.tobytes()) for header, payload in heard] == [(step, b"abc") for step in range(3)]


def test_what_the_kernel_does_not_take_waits_in_the_queue_and_is_counted(pair: Any) -> None:
    client, host = pair
    payload = np.zeros(16 << 20, np.uint8)
    for step in range(4):
        client.send(Header(Kind.PUSH, step=step, payload_bytes=len(payload)), payload)
        client.send(Header(Kind.PULL, step=step))
    assert client.unsent == 4, "send only queues"
    client.flush()
    assert client.unsent > 0, "a reader that does not read holds up nobody: flush returns"
    assert client.queued
    seen = []
    while len(seen) < 8:
        client.flush()
        seen += [header.step for header, _ in host.receive()]
    assert seen == [0, 0, 1, 1, 2, 2, 3, 3]
    assert client.unsent == 0


def test_a_link_that_closes_lets_go_of_the_memory_that_it_was_to_send(pair: Any) -> None:
    client, _ = pair
    payload = bytearray(64 << 20)
    client.send(Header(Kind.PUSH, payload_bytes=len(payload)), np.frombuffer(payload, np.uint8))
    client.flush()
    assert client.unsent == 1
    client.close()
    assert client.unsent == 0
    payload.clear()  # raises BufferError while somebody holds a view


def test_an_end_of_the_stream_is_told_and_what_came_before_it_is_heard(pair: Any) -> None:
    client, host = pair
    client.send(Header(Kind.BYE))
    client.flush()
    client.close()
    heard: list[Any] = []
    until(lambda: (heard.extend(host.receive()), host.closed)[1])
    assert [header.kind for header, _ in heard] == [Kind.BYE]
    assert host.why == "closed by the peer"


def test_a_reset_is_an_end_too(pair: Any) -> None:
    client, host = pair
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    until(lambda: (list(host.receive()), host.closed)[1])
    host.send(Header(Kind.ACK))
    host.flush()


def test_who_is_seen_off_hears_everything_although_it_has_not_read_what_was_said_before(pair: Any) -> None:
    client, host = pair
    host.send(Header(Kind.ACK))  # lies unread at the client's end: closing would reset the connection
    host.flush()
    payload = np.arange(1 << 20, dtype=np.uint32).view(np.uint8)
    client.send(Header(Kind.PUSH, payload_bytes=len(payload)), payload)
    client.send(Header(Kind.BYE))
    import threading

    heard: list[Any] = []

    def listen() -> None:
        until(lambda: (heard.extend(host.receive()), host.closed)[1])
        host.close()

    listener = threading.Thread(target=listen)
    listener.start()
    client.see_off(PATIENCE_S)
    client.close()
    listener.join()
    assert [header.kind for header, _ in heard] == [Kind.PUSH, Kind.BYE]
    assert heard[0][1].tobytes() == payload.tobytes()


@pytest.mark.parametrize("size", [MAX_PAYLOAD_BYTES + 1, 1 << 40, (1 << 64) - 1])
def test_a_length_beyond_the_most_is_refused_before_anything_is_kept_for_it(pair: Any, size: int) -> None:
    client, host = pair
    client.socket.send(pack_header(Header(Kind.PUSH, payload_bytes=size)))
    until(lambda: waiting(host, HEADER_BYTES))
    with pytest.raises(RemoteProtocolError, match="at most"):
        list(host.receive())


def test_nobody_there_is_told_and_a_port_in_use_is_named() -> None:
    listener = TcpListener("127.0.0.1", 0, dead_s=30)
    with pytest.raises(PsgcError, match=rf"127\.0\.0\.1:{listener.port}.*in use"):
        TcpListener("127.0.0.1", listener.port, dead_s=30)
    listener.close()
    link = TcpLink.connect(socket.AF_INET, ("127.0.0.1", listener.port), WorkerProof("tcp", 0, 1, 0, KEY, "h", b"w" * 32), dead_s=30)
    until(lambda: link.prove() or link.closed)
    assert link.why == "Connection refused"
    link.close()


def test_a_path_that_carries_nothing_ends_the_connection_and_a_slow_one_does_not(pair: Any) -> None:
    """What the kernel was asked for; that it does so is the kernel's business."""
    for link in pair:
        options = {
            name: link.socket.getsockopt(level, getattr(socket, name))
            for level, name in (
                (socket.IPPROTO_TCP, "TCP_NODELAY"),
                (socket.SOL_SOCKET, "SO_KEEPALIVE"),
                (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT"),
            )
        }
        assert options == {"TCP_NODELAY": 1, "SO_KEEPALIVE": 1, "TCP_USER_TIMEOUT": 30_000}
        assert not link.socket.get_inheritable()


def encrypted(pair: Any) -> bool:
    return bool(pair[0].proof.encrypted)


def test_what_travels_encrypted_shows_no_payload_and_the_same_twice_looks_different(pair: Any) -> None:
    client, _ = pair
    if not encrypted(pair):
        return
    for _ in range(2):
        client.send(Header(Kind.PUSH, payload_bytes=1000), bytes(1000))
    head, first, again, second = map(bytes, client._pieces()[0])
    assert (len(head), len(first)) == (HEADER_BYTES, 1016)
    assert head == again
    assert first != second
    assert bytes(8) not in first


@pytest.mark.parametrize("what", ["payload", "tag", "header", "repeated", "left out", "reflected"])
def test_what_is_altered_repeated_left_out_or_sent_back_on_the_way_ends_the_connection(pair: Any, what: str) -> None:
    client, host = pair
    if not encrypted(pair):
        return
    for step in range(2):
        client.send(Header(Kind.PUSH, step=step, payload_bytes=5), b"12345")
    head, body, *second = (bytearray(piece) for piece in client._pieces()[0])
    if what in ("payload", "tag", "header"):
        spoilt = {"payload": body, "tag": body, "header": head}[what]
        spoilt[{"payload": 0, "tag": -1, "header": 32}[what]] ^= 1  # 32: the step
    stream = {"repeated": head + body + head + body, "left out": b"".join(second), "reflected": head + body}.get(what, head + body)
    sender, receiver = (host, client) if what == "reflected" else (client, host)
    sender.socket.send(stream)
    until(lambda: waiting(receiver, len(stream)))
    with pytest.raises(RemoteProtocolError, match="altered"):
        list(receiver.receive())


def test_an_encrypted_payload_is_never_received_where_it_is_wanted(pair: Any) -> None:
    """Whoever wants it there may read it before it has been found to be forged."""
    client, host = pair
    encrypted, asked = client.proof.encrypted, []
    sent = made(random.Random(3), 4, sizes=((4 << 20) + 5,))
    links = LinkSet(posted=lambda _, header: asked.append(header))
    links.add(host)
    heard: list[tuple[Header, Any]] = []
    for header, payload in sent:
        client.send(header, payload)
    deadline = time.monotonic() + PATIENCE_S
    while len(heard) < len(sent) and time.monotonic() < deadline:
        client.flush()
        heard += host.receive()
    links.close()
    same(heard, sent)
    assert asked == ([] if encrypted else [header for header, _ in sent])


def test_without_the_package_the_option_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"PSGC_ENCRYPT=1 needs the package cryptography.*pip install 'psgc\[encrypt\]'"):
        require()


def test_connections_are_made_from_the_address_that_the_worker_is_given_to_the_one_that_the_server_announces() -> None:
    """Loopback has many addresses; so have machines with several network interfaces."""
    for own, server in (("127.0.0.3", "127.0.0.2"), ("127.0.0.2", "127.0.0.3"), ("", "127.0.0.4"), ("192.0.2.1", "127.0.0.1")):
        listener = TRANSPORT.listen(Config(root_host="127.0.0.1", node_host=server, dead_s=30))
        assert listener.address == f"tcp://{server}:{listener.port}"  # type: ignore[attr-defined]
        dial = TRANSPORT.dialer(listener.address, Config(node_host=own, dead_s=30))
        client = dial(WorkerProof("tcp", 0, 1, 0, KEY, "h", b"w" * 32))
        host = until(lambda: accepted(listener, False))  # noqa: B023
        assert client.peer == f"{server}:{listener.port}"  # type: ignore[attr-defined]
        expected = {"": "127.0.0.", "192.0.2.1": "127.0.0.1"}.get(own, own)  # no address of this machine is left to the route
        assert host.source.startswith(expected), (own, host.source)
        for each in (client, host, listener):
            each.close()


@pytest.mark.parametrize("dead_s", [0.1, 60, 645, 1e4, 1e9])
def test_any_time_of_silence_may_be_set(dead_s: float) -> None:
    with socket.socket() as sock, zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        set_options(sock, dead_s)
        set_common_options(dealer, dead_s)
