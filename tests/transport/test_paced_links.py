"""Connections over a simulated link: every message arrives whole, no sooner than the link carries it, and none is starved by another."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from psgc.transport import pacing
from psgc.transport.link import Link
from psgc.transport.link_set import LinkSet
from psgc.transport.pacing import FRAME_SHARE, QUANTUM_S, PacedLink
from psgc.transport.security.handshake import ServerProof, WorkerProof, worker_key
from psgc.transport.tcp import TcpLink, TcpListener
from psgc.transport.watch import Watch
from psgc.wire.frames import Header, Kind

KEY = worker_key(bytes(32), 0, 1)
PATIENCE_S = 60.0
Pair = tuple[TcpLink, TcpLink]


@pytest.fixture
def make_pair() -> Iterator[Callable[[], Pair]]:
    """A worker's end and a server's, proved."""
    with ExitStack() as ends:

        def make() -> Pair:
            listener = TcpListener("127.0.0.1", 0, dead_s=30)
            client = TcpLink.connect(
                socket.AF_INET, ("127.0.0.1", listener.port), WorkerProof("tcp", 0, 1, 0, KEY, "h", b"w" * 32), dead_s=30
            )
            proof = ServerProof("tcp", 0, 1, 1, lambda _: KEY, b"s" * 32)
            host = None
            deadline = time.monotonic() + PATIENCE_S
            while host is None or not bool(host.prove()) & bool(client.prove()):
                assert time.monotonic() < deadline
                try:
                    host = host or listener.accept(proof)
                except BlockingIOError:
                    time.sleep(0.001)
            for each in (client, host, listener):
                ends.callback(each.close)
            return client, host

        yield make


def payload(nbytes: int) -> Any:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)


def turn(watch: Watch, *sets: LinkSet) -> Iterator[tuple[Link, Header, Any]]:
    """One of a loop that has these connections: what has come."""
    for links in sets:
        links.flush()
    watch.wait([(links, 1) for links in sets], 0.0 if any(links.pending for links in sets) else 1.0)
    for links in sets:
        for link in links.ready():
            for header, data in link.receive():
                yield link, header, data
            links.received(link)


def test_messages_arrive_whole_and_take_their_time_both_ways(make_pair: Callable[[], Pair]) -> None:
    client, host = make_pair()
    sizes = (1, 100_000, 0, 64, 300_001)
    workers, servers, watch = LinkSet(PacedLink.of(20)), LinkSet(PacedLink.of(20)), Watch()
    workers.add(client)
    servers.add(host)
    began, got = time.monotonic(), {client: [], host: []}  # type: ignore[var-annotated]
    for number, size in enumerate(sizes):
        for links, link in ((workers, client), (servers, host)):
            link.send(Header(Kind.PUSH, key=number, payload_bytes=size), payload(size))
            links.touch(link)
    while any(len(each) < len(sizes) for each in got.values()):
        for link, header, data in turn(watch, workers, servers):
            assert header.payload_bytes == sizes[header.key]
            assert data is None or bytes(data) == payload(len(data)).tobytes()
            got[link].append(header.key)
        assert time.monotonic() - began < PATIENCE_S
    assert list(got.values()) == [list(range(len(sizes)))] * 2, "each in order"
    assert time.monotonic() - began > 0.95 * sum(sizes) * FRAME_SHARE * 8 / 20e6
    for links in (workers, servers):
        links.close()


class Clock:
    """The link's clock, which goes on by a quantum in each turn of the loop: a machine that is slow lets no more bytes pass than a quick one."""

    CLOCK_MONOTONIC = time.CLOCK_MONOTONIC

    def __init__(self) -> None:
        self.now_ns = time.monotonic_ns()

    def monotonic_ns(self) -> int:
        return self.now_ns

    def monotonic(self) -> float:
        return self.now_ns / 1e9


@pytest.mark.parametrize("narrow_sends", [True, False])
def test_a_host_between_two_others_shares_its_narrow_link_between_them(
    narrow_sends: bool, make_pair: Callable[[], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their own links are fast; the link of the host that talks to both is the narrow one."""
    clock = Clock()
    monkeypatch.setattr(pacing, "time", clock)
    pairs = [make_pair() for _ in range(3)]
    fast, narrow, watch = LinkSet(), LinkSet(PacedLink.of(20)), Watch()
    message, each = payload(30_000), 12
    receivers = []
    for client, host in pairs:
        fast.add(client)
        narrow.add(host)
        sender, receiver, links = (host, client, narrow) if narrow_sends else (client, host, fast)
        for number in range(each):
            sender.send(Header(Kind.PUSH, key=number, payload_bytes=len(message)), message)
        links.touch(sender)
        receivers.append(receiver)
    began, got = time.monotonic(), dict.fromkeys(receivers, 0)
    while max(got.values()) < each:
        for link, _, data in turn(watch, fast, narrow):
            assert data is not None and data.tobytes() == message.tobytes()
            got[link] += 1
        clock.now_ns += int(QUANTUM_S * 1e9)
        assert time.monotonic() - began < PATIENCE_S
    assert min(got.values()) >= each / 2, got
    for every in (fast, narrow):
        every.close()


def test_a_peer_that_closes_is_noticed_though_the_link_is_busy(make_pair: Callable[[], Pair]) -> None:
    client, host = make_pair()
    pace = PacedLink.of(20)
    servers, watch = LinkSet(pace), Watch()
    servers.add(host)
    pace.into.spend(500_000, True)  # busy for 0.2 s
    client.close()
    began = time.monotonic()
    while not host.closed:
        list(turn(watch, servers))
        assert time.monotonic() - began < PATIENCE_S
    servers.discard(host)
    servers.close()
