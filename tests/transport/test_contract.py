"""What worker and server rely on, of every transport that the registry has: one test a promise of psgc/transport/link.py.

A transport that is added is held to these without a line here.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psgc.config import Config
from psgc.transport import registry, selection
from psgc.transport.link import IN_PLACE_BYTES, Link, Listener, Transport, Trouble
from psgc.transport.link_set import LinkSet
from psgc.transport.memory.arena import Arena
from psgc.transport.memory.segment import Place
from psgc.transport.security.handshake import Refused, ServerProof, WorkerProof, worker_key
from psgc.transport.watch import Watch
from psgc.wire.frames import Header, Kind
from psgc.wire.messages import RESIDUAL_NUMEL

DATA_KEY = bytes(32)
PATIENCE_S = 60.0
CONFIG = Config(root_host="127.0.0.1", root_port=1, dead_s=30.0)
NAMES = [*registry.MODULES, "within"]


class Ends:
    """A listener and links to it, at a worker and at a server, each in the LinkSet of its own thread."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.listener: Listener = transport.listen(CONFIG)
        self.dial = transport.dialer(self.listener.address, CONFIG)
        self.worker, self.server = LinkSet(), LinkSet()
        self.arena, self.watch = Arena("test"), Watch()
        self._made: list[Link] = []

    def connect(self, rank: int = 0, key: bytes | None = None) -> tuple[Link, Link]:
        """Both ends, that have not proved themselves."""
        label = self.transport.label
        own = worker_key(DATA_KEY, rank, 1) if key is None else key
        client = self.dial(WorkerProof(label, 0, 1, rank, own, "host", secrets.token_bytes(32)))
        proof = ServerProof(label, 0, 1, 4, lambda number: worker_key(DATA_KEY, number, 1), secrets.token_bytes(32))
        self.until(lambda: bool(self.watch.wait([(self.listener, 1)], 0.1)))
        host = self.listener.accept(proof)
        self._made += [client, host]
        return client, host

    def proved(self, rank: int = 0) -> tuple[Link, Link]:
        client, host = self.connect(rank)
        self.until(lambda: bool(client.prove()) & bool(host.prove()))
        self.worker.add(client)
        self.server.add(host)
        return client, host

    def until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline

    def received(self, links: LinkSet, link: Link, count: int, **limits: int) -> list[tuple[Header, Any]]:
        """So many messages, as a loop receives them: it sleeps until the LinkSet is ready."""
        found: list[tuple[Header, Any]] = []

        def turn() -> bool:
            self.worker.flush()
            self.server.flush()
            self.watch.wait([(self.worker, 1), (self.server, 1)], 0.0 if links.pending else 1.0)
            ready_ones = {each: each.ready() for each in (self.worker, self.server)}  # which makes room known to what waits to be sent, too
            for ready in ready_ones[links]:
                assert ready is link
                for header, payload in ready.receive(**limits):
                    found.append((header, None if payload is None else bytes(payload)))
                links.received(ready)
            return len(found) >= count

        self.until(turn)
        return found

    def close(self) -> None:
        for link in self._made:
            link.close()
        for each in (self.listener, self.worker, self.server, self.arena):
            each.close()


@pytest.fixture(params=NAMES)
def ends(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr(selection, "MODULES", {**registry.MODULES, "within": "within_process"})
    made = Ends(selection.transport(request.param))
    yield made
    made.close()


def test_an_address_is_a_url_of_the_transports_name_and_reaches_from_its_own_host(ends: Ends) -> None:
    assert ends.listener.address.startswith(f"{ends.transport.name}://")
    assert ends.listener.transport is ends.transport
    assert ends.transport.reaches(ends.listener.address, True)
    assert 1 <= len(ends.transport.label) <= 8
    assert ends.transport.label.isascii()


def test_both_ends_prove_themselves_and_the_server_knows_the_rank(ends: Ends) -> None:
    client, host = ends.proved(rank=3)
    assert client.proof.done
    assert (host.proof.done, host.proof.rank) == (True, 3)
    assert client.reached
    assert client.proof.keys == host.proof.keys[::-1]


def test_a_worker_without_the_key_is_refused(ends: Ends) -> None:
    client, host = ends.connect(key=b"x" * 32)
    with pytest.raises(Refused, match="cannot prove it"):
        ends.until(lambda: bool(client.prove()) | bool(host.prove()))
    assert not client.proof.done


def test_messages_arrive_whole_and_in_order_both_ways(ends: Ends) -> None:
    client, host = ends.proved()
    sizes = [0, 1, 64, 4 * RESIDUAL_NUMEL, 3 << 20, 5, 0]
    for sending, own, receiving, others in ((client, ends.worker, host, ends.server), (host, ends.server, client, ends.worker)):
        places = [ends.arena.cut(max(1, size)) for size in sizes]
        wanted = []
        for number, (size, place) in enumerate(zip(sizes, places, strict=True)):
            place.bytes[:] = np.random.default_rng(number).integers(0, 256, place.bytes.size, np.uint8)
            header = Header(Kind.PUSH, key=number, payload_bytes=size)
            if size <= 4 * RESIDUAL_NUMEL and number % 2:  # a body: so large at most
                sending.send(header, place.bytes[:size].tobytes())
            else:
                sending.send(header, place=place if size else None)
            wanted.append((number, place.bytes[:size].tobytes() or None))
        own.touch(sending)
        found = ends.received(others, receiving, len(sizes))
        assert [(header.key, payload) for header, payload in found] == wanted
        assert (sending.unsent, sending.queued) == (0, False)


def test_a_payload_is_as_long_as_its_header_says_though_its_place_is_longer(ends: Ends) -> None:
    client, host = ends.proved()
    place = ends.arena.cut(1000)
    place.bytes[:] = 7
    client.send(Header(Kind.PUSH, payload_bytes=10), place=place.part(100, 500))
    ends.worker.touch(client)
    assert ends.received(ends.server, host, 1)[0][1] == b"\x07" * 10


def test_a_transport_that_copies_carries_payloads_from_anywhere_to_where_large_ones_are_wanted(ends: Ends) -> None:
    client, host = ends.proved()
    if not ends.transport.copies:
        return
    payloads = [np.full(size, number, np.uint8) for number, size in enumerate((IN_PLACE_BYTES, IN_PLACE_BYTES - 1, IN_PLACE_BYTES))]
    posted, asked = np.zeros(IN_PLACE_BYTES, np.uint8), []

    def post(link: Link, header: Header) -> Any:
        asked.append((link, header.key))
        return posted if header.key == 0 else None

    host.posted = post
    for number, payload in enumerate(payloads):
        client.send(Header(Kind.PUSH, key=number, payload_bytes=payload.size), place=Place(None, 0, payload))
    ends.worker.touch(client)
    assert [payload for _, payload in ends.received(ends.server, host, 3)] == [bytes(payload) for payload in payloads]
    assert asked == [(host, 0), (host, 2)], "a small payload is not worth asking"
    assert bytes(posted) == bytes(payloads[0])


def test_one_turn_receives_a_limited_number_and_the_rest_is_not_forgotten(ends: Ends) -> None:
    client, host = ends.proved()
    for number in range(10):
        client.send(Header(Kind.ACK, key=number))
    ends.worker.touch(client)
    ends.worker.flush()
    ends.until(lambda: bool(ends.watch.wait([(ends.server, 1)], 0.1)))
    first = [header.key for header, _ in host.receive(messages=3)]
    ends.server.received(host)
    assert len(first) <= 3
    rest = ends.received(ends.server, host, 10 - len(first), messages=3)
    assert first + [header.key for header, _ in rest] == list(range(10))


def test_whoever_is_left_is_told_and_what_came_before_is_still_received(ends: Ends) -> None:
    client, host = ends.proved()
    client.send(Header(Kind.BYE, key=5))
    ends.worker.touch(client)
    ends.worker.flush()
    ends.worker.discard(client)
    client.close()
    assert [header.key for header, _ in ends.received(ends.server, host, 1)] == [5]
    ends.until(lambda: (list(host.receive()), host.closed)[-1])
    assert host.why
    client.close()
    assert client.closed


def test_where_nobody_listens_any_more_it_fails_with_an_error_that_has_a_remedy(ends: Ends) -> None:
    ends.listener.close()
    try:
        link = ends.dial(WorkerProof(ends.transport.label, 0, 1, 0, bytes(32), "host", bytes(32)))
        ends.until(lambda: link.prove() or link.closed)
        link.close()
        number, text = link.number, link.why
    except OSError as error:
        number, text = error.errno, str(error)
    assert number
    assert ends.transport.remedy(ends.listener.address, True, Trouble(number, text))
