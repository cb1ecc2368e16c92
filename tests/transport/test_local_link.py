"""A peer on this host that passes something else than sealed memory ends its own connection, and nothing else; no descriptor is left over."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from psgc.errors import RemoteProtocolError
from psgc.transport.memory.arena import Arena
from psgc.transport.memory.segment import Segment
from psgc.transport.security.handshake import ServerProof, WorkerProof, worker_key
from psgc.transport.shm import LOCATOR, MAX_PACKET_BYTES, MAX_SEGMENTS, LocalLink, LocalListener
from psgc.wire.frames import Flag, Header, Kind, pack_header

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


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


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
    before = open_descriptors()
    with pytest.raises(RemoteProtocolError, match="segment of"):
        list(host.receive())
    assert open_descriptors() == before, "the descriptor that was passed is closed"
    os.close(fd)


def test_a_segment_without_a_descriptor_or_with_several_is_refused(pair: Any) -> None:
    client, host = pair
    fd = memory(PAGE, SEALED)
    announced(client, [], PAGE)
    with pytest.raises(RemoteProtocolError, match="with 0 descriptors"):
        list(host.receive())
    before = open_descriptors()
    announced(client, [fd, fd, fd], PAGE)
    with pytest.raises(RemoteProtocolError):
        list(host.receive())
    assert open_descriptors() == before
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
    before = open_descriptors()
    for place in places * 2:
        client.send(Header(Kind.PUSH, payload_bytes=place.bytes.size), place=place)
    assert [payload.tobytes() for _, payload in host.receive()] == [place.bytes.tobytes() for place in places] * 2
    assert open_descriptors() == before
    places[0].bytes[:] = 7
    client.send(Header(Kind.PUSH, payload_bytes=3), place=places[0])
    assert [bytes(payload) for _, payload in host.receive()] == [b"\x07" * 3], "read where it lies"
    arena.close()
