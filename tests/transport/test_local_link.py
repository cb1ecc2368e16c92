"""A peer on this host that passes something else than sealed memory ends its own connection, and nothing else; no descriptor is left over."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from psgc.errors import LocalProtocolError, RemoteProtocolError
from psgc.transport.memory.arena import Arena
from psgc.transport.memory.segment import Place, Segment
from psgc.transport.security.handshake import ServerProof, WorkerProof, worker_key
from psgc.transport.shm import LOCATOR, MAX_PACKET_BYTES, MAX_SEGMENTS, LocalLink, LocalListener
from psgc.wire.frames import HEADER_BYTES, Flag, Header, Kind, pack_header
from tests.descriptors import descriptors_of

KEY = worker_key(bytes(32), 0, 1)
PAGE = 4096


@pytest.fixture
def pair() -> Iterator[tuple[LocalLink, LocalLink]]:
    listener = LocalListener(f"psgc-test/{os.getpid()}/{os.urandom(4).hex()}")
    client = LocalLink.connect(listener.name, WorkerProof("unix", 0, 1, 0, KEY, "h", b"w" * 32))
    host = listener.accept(ServerProof("unix", 0, 1, 1, lambda _: KEY, b"s" * 32))
    assert all([link.prove() for _ in range(3) for link in (host, client)][-2:])
    yield client, host
    for each in (client, host, listener):
        each.close()


def memory(nbytes: int, seals: int) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def announced(client: LocalLink, fds: list[int], nbytes: int, number: int = 1) -> None:
    socket.send_fds(client.socket, [pack_header(Header(Kind.SEGMENT, key=number, payload_bytes=nbytes))], fds)


SEALED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
CASES: dict[str, tuple[Any, int]] = {
    "a pipe": (lambda: os.pipe()[0], PAGE),
    "a socket": (lambda: socket.socket().detach(), PAGE),
    "a file": (lambda: os.open(__file__, os.O_RDONLY), os.path.getsize(__file__)),
    "a directory": (lambda: os.open("/", os.O_RDONLY), PAGE),
    "memory that can shrink": (lambda: memory(PAGE, 0), PAGE),
    "memory of another size": (lambda: memory(PAGE, SEALED), 2 * PAGE),
    "no bytes": (lambda: memory(0, SEALED), 0),
    "more than an address space": (lambda: memory((1 << 62), SEALED), 1 << 62),
    "memory that cannot be written": (lambda: memory(PAGE, SEALED | fcntl.F_SEAL_WRITE), PAGE),
}


@pytest.mark.parametrize("what", CASES)
def test_what_is_no_sealed_memory_of_the_size_told_is_refused(pair: Any, what: str) -> None:
    client, host = pair
    make, nbytes = CASES[what]
    try:
        fd = make()
    except OSError:
        pytest.skip(f"{what} cannot be made here")
    announced(client, [fd], nbytes)
    before = descriptors_of(fd)
    with pytest.raises(RemoteProtocolError, match="segment of"):
        list(host.receive())
    assert descriptors_of(fd) == before, "the descriptor that was passed is closed"
    os.close(fd)


def test_a_segment_without_a_descriptor_or_with_several_is_refused(pair: Any) -> None:
    client, host = pair
    fd = memory(PAGE, SEALED)
    announced(client, [], PAGE)
    with pytest.raises(RemoteProtocolError, match="with 0 descriptors"):
        list(host.receive())
    before = descriptors_of(fd)
    announced(client, [fd, fd, fd], PAGE)
    with pytest.raises(RemoteProtocolError):
        list(host.receive())
    assert descriptors_of(fd) == before
    os.close(fd)


def test_one_peer_passes_only_so_many_segments(pair: Any) -> None:
    client, host = pair
    segment = Segment.create("test", PAGE)
    for number in range(MAX_SEGMENTS):
        announced(client, [segment.fd], PAGE, number)
        assert list(host.receive()) == []
    announced(client, [segment.fd], PAGE, 0)  # one that is known is replaced
    assert list(host.receive()) == []
    announced(client, [segment.fd], PAGE, MAX_SEGMENTS)
    with pytest.raises(RemoteProtocolError, match=f"at most {MAX_SEGMENTS}"):
        list(host.receive())
    segment.close()


@pytest.mark.parametrize(
    ("segment", "offset", "nbytes"), [(9, 0, 1), (1, PAGE, 1), (1, 0, PAGE + 1), (1, (1 << 64) - 1, 1), (1, 0, (1 << 64) - 1)]
)
def test_a_locator_outside_what_was_passed_is_refused(pair: Any, segment: int, offset: int, nbytes: int) -> None:
    client, host = pair
    memory_ = Segment.create("test", PAGE)
    announced(client, [memory_.fd], PAGE)
    header = Header(Kind.PUSH, flags=Flag.LOCATED, payload_bytes=nbytes)
    client.socket.send(pack_header(header) + LOCATOR.pack(segment, offset))
    with pytest.raises(RemoteProtocolError):
        list(host.receive())
    memory_.close()


@pytest.mark.parametrize("packet", [b"x", b"\xff" * 64, bytes(MAX_PACKET_BYTES), pack_header(Header(Kind.PUSH, payload_bytes=5)) + b"1234"])
def test_a_packet_that_is_no_message_is_refused(pair: Any, packet: bytes) -> None:
    client, host = pair
    client.socket.setblocking(True)
    client.socket.send(packet)
    with pytest.raises(RemoteProtocolError):
        list(host.receive())


def test_a_segment_is_passed_once_and_before_the_first_message_that_lies_in_it(pair: Any) -> None:
    client, host = pair
    arena = Arena("test")
    places = [arena.cut(nbytes) for nbytes in (5, PAGE, 8 << 20)]  # the last has a segment of its own
    for value, place in enumerate(places):
        place.bytes[:] = value
    segments = [place.segment.fd for place in places if place.segment is not None]
    before = [descriptors_of(fd) for fd in segments]
    for place in places * 2:
        client.send(Header(Kind.PUSH, payload_bytes=place.bytes.size), place=place)
    client.flush()
    assert [payload.tobytes() for _, payload in host.receive()] == [place.bytes.tobytes() for place in places] * 2
    assert [descriptors_of(fd) for fd in segments] == before and len(segments) == 3
    places[0].bytes[:] = 7
    client.send(Header(Kind.PUSH, payload_bytes=3), place=places[0])
    client.flush()
    assert [bytes(payload) for _, payload in host.receive()] == [b"\x07" * 3], "read where it lies"
    arena.close()


def test_messages_that_are_queued_leave_in_one_packet_and_come_in_order(pair: Any) -> None:
    client, host = pair
    place = Arena("psgc-test").cut(PAGE)
    place.bytes[:] = 7
    said = [
        Header(Kind.ACK, key=1),
        Header(Kind.RESULT, key=2, payload_bytes=PAGE),
        Header(Kind.ERROR, key=3, payload_bytes=5),
        Header(Kind.ACK, key=4),
    ]
    for header in said:
        if header.kind == Kind.RESULT:
            host.send(header, place=place)
        else:
            host.send(header, b"12345" if header.payload_bytes else None)
    host.flush()
    assert not host.queued
    received = list(client.receive())
    assert [header for header, _ in received] == said
    assert [None if payload is None else bytes(payload) for _, payload in received] == [None, bytes([7]) * PAGE, b"12345", None]
    for header in said[1:]:
        host.send(header, place=place) if header.kind == Kind.RESULT else host.send(header, b"12345" if header.payload_bytes else None)
    host.flush()
    packet = client.socket.recv(MAX_PACKET_BYTES)
    assert len(packet) == 3 * HEADER_BYTES + LOCATOR.size + 5


def test_a_turn_that_ends_amid_a_packet_goes_on_there(pair: Any) -> None:
    client, host = pair
    for key in range(1000):
        host.send(Header(Kind.ACK, key=key))
    host.flush()
    keys: list[int] = []
    while len(keys) < 1000:
        turn = [header.key for header, _ in client.receive(messages=7)]
        assert 0 < len(turn) <= 7
        keys += turn
        assert client.more or len(keys) == 1000
    assert keys == list(range(1000))


@pytest.mark.parametrize(
    ("packet", "why"),
    [
        (pack_header(Header(Kind.ACK)) + b"more", "header of 4 bytes"),
        (pack_header(Header(Kind.ERROR, payload_bytes=9)) + b"short", "body of 5 bytes"),
        (pack_header(Header(Kind.RESULT, flags=Flag.LOCATED, payload_bytes=9)) + b"short", "locator of 5 bytes"),
        (pack_header(Header(Kind.ACK)) + pack_header(Header(Kind.SEGMENT)), "SEGMENT amid other messages"),
        (b"PSGC", "header of 4 bytes"),
    ],
)
def test_a_packet_that_is_cut_or_mixed_is_refused_after_the_messages_before(pair: Any, packet: bytes, why: str) -> None:
    client, host = pair
    host.socket.send(pack_header(Header(Kind.ACK, key=1)) + packet if packet != b"PSGC" else packet)
    received = client.receive()
    if packet != b"PSGC":
        assert next(received)[0].key == 1
    with pytest.raises(RemoteProtocolError, match=why):
        list(received)


def test_a_payload_outside_of_shared_memory_is_not_sent(pair: Any) -> None:
    with pytest.raises(LocalProtocolError, match="a payload outside of shared memory cannot be told to a peer"):
        pair[0].send(Header(Kind.PUSH, payload_bytes=5), place=Place(None, 0, np.zeros(5, np.uint8)))
