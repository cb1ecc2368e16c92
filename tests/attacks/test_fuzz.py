"""Peers with and without a key send arbitrary messages: a server refuses or accepts them, but never crashes, and its memory does not grow."""

from __future__ import annotations

import os
import random
import socket
import time
from typing import Any

import pytest

from psgc.errors import RemoteProtocolError
from psgc.layout import Declaration, TensorSpec, build_layout
from psgc.server.state import Close, Fold, Send, ServerState, specs_of
from psgc.transport.link import Link
from psgc.transport.link_set import LinkSet
from psgc.transport.memory.arena import Arena
from psgc.transport.security.gate import Gate
from psgc.transport.security.handshake import ServerProof, WorkerProof, worker_key
from psgc.transport.shm import LocalListener
from psgc.transport.tcp import TcpListener
from psgc.wire.frames import HEADER_BYTES, HEADER_STRUCT, Flag, Header, Kind, pack_header
from tests.attacks.mutations import flipped, noise, repeat

JOB, EPOCH, WORKERS = 5, 1, 2
DATA_KEY = bytes(32)


class Fuzzed:
    """What a server does with its connections, around the real state machine; folds are done at once, and results lie in one array."""

    def __init__(self) -> None:
        tensors = (TensorSpec("a", (100,), "float32"), TensorSpec("b", (5000,), "float32"))
        declaration = Declaration("m", "adhoc", tensors, "onebit", True, order=(0, 1), used=(0, 1), fuse_bytes=0)
        self.layout = build_layout(declaration, layout_id=1, servers=1, workers=WORKERS)
        self.keys = [part.key for _, part in self.layout.parts()]
        self.state = ServerState(0, WORKERS, JOB, EPOCH)
        self.state.register(self.layout, *specs_of(self.layout, 0, WORKERS))
        self.tcp, self.local = TcpListener("127.0.0.1", 0, dead_s=30), LocalListener(f"psgc-fuzz/{os.getpid()}/{os.urandom(4).hex()}")
        self.gate = Gate(
            [self.tcp, self.local], lambda transport: ServerProof(transport.label, 0, EPOCH, WORKERS, self.key, os.urandom(32))
        )
        self.links = LinkSet()
        self.arena = Arena("psgc-fuzz")
        self.result = self.arena.cut(1 << 20)
        self.heard = self.refused = 0

    @staticmethod
    def key(rank: int) -> bytes:
        return worker_key(DATA_KEY, rank, EPOCH)

    def turn(self) -> None:
        self.links.flush()
        for link in self.gate.serve():
            self.links.add(link)
            self.carry_out(self.state.proved(link, link.proof.rank))
        for link in self.links.ready():
            try:
                for header, payload in link.receive():
                    self.heard += 1
                    self.carry_out(self.state.receive(link, header, payload, 0.0))
            except RemoteProtocolError:
                self.refused += 1
                link.fail("nonsense")
            self.links.received(link)
            if link.closed:
                self.bury(link)

    def carry_out(self, effects: Any) -> None:
        for effect in effects:
            if isinstance(effect, Fold):
                self.carry_out(self.state.folded(effect.key, effect.last, 20, False, effect.slot, 0.0))
            elif isinstance(effect, Close):
                effect.peer.fail(effect.why)
                self.bury(effect.peer)
            elif isinstance(effect, Send) and not effect.peer.closed:
                effect.peer.send(effect.header, effect.body, None if effect.result_slot is None else self.result)
                self.links.touch(effect.peer)

    def bury(self, link: Link) -> None:
        self.links.discard(link)
        self.state.lost(link)
        link.close()

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.gate.close()
        self.links.close()
        self.arena.close()


class Peer:
    """A worker's end that says what it likes, proved or not."""

    def __init__(self, server: Fuzzed, rng: random.Random, rank: int | None) -> None:
        self.over = rng.choice(["tcp", "unix"])
        if self.over == "tcp":
            self.socket = socket.create_connection(("127.0.0.1", server.tcp.port))
        else:
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.socket.connect("\0" + server.local.name)
        self.socket.setblocking(False)
        self.dead = False
        if rank is not None:
            self.prove(server, rank)

    def prove(self, server: Fuzzed, rank: int) -> None:
        proof = WorkerProof(self.over, 0, EPOCH, rank, server.key(rank), "h", os.urandom(32))
        deadline = time.monotonic() + 60
        while not proof.done:
            assert time.monotonic() < deadline
            server.turn()
            try:
                data = self.socket.recv(proof.wants)
            except BlockingIOError:
                continue
            if not data:  # this process was stopped for so long that the gate has closed it
                self.dead = True
                return
            self.socket.send(proof.receive(data) or b"")

    def say(self, data: bytes) -> None:
        try:
            self.socket.send(data)
            while self.socket.recv(1 << 16):
                pass
            self.dead = True
        except BlockingIOError:
            return
        except OSError:
            self.dead = True

    def close(self) -> None:
        self.socket.close()


def anything(rng: random.Random, server: Fuzzed, rank: int) -> bytes:
    """From a right message to noise."""
    kind = rng.choice([Kind.PUSH, Kind.PULL, Kind.SKIP, Kind.HELLO, Kind.BYE, Kind.RESIDUAL, Kind.RESTORE, rng.choice(list(Kind))])
    size = rng.choice([0, 0, 1, 20, 700, 70_000]) if rng.random() < 0.8 else rng.getrandbits(rng.randrange(64))
    header = Header(
        kind, rng.choice([int(Flag.WANT_RESULT), 0, rng.getrandbits(6)]), JOB, EPOCH, 1, rng.choice([*server.keys, rng.getrandbits(64)]),
        rng.choice([1, 2, 3, rng.getrandbits(20)]), 0, rng.choice([0, 1, 2, 3, 7]), rank, rng.choice([0, rng.getrandbits(32)]), 1.0, size,
    )  # fmt: skip
    data = pack_header(header) + rng.randbytes(min(size, 70_000))
    chance = rng.random()
    if chance < 0.2:
        return flipped(rng, data, HEADER_BYTES)
    if chance < 0.25:
        return data[: rng.randrange(len(data))]
    if chance < 0.28:
        return noise(rng)
    if chance < 0.3:
        return HEADER_STRUCT.pack(b"PSGC", 1, *(rng.getrandbits(8) for _ in range(11)), 1.0, rng.getrandbits(64))
    return data


def fuzz(frames: int, seed: int) -> Fuzzed:
    rng = random.Random(seed)
    server = Fuzzed()
    peers: dict[int, Peer] = {}

    def once(_: int) -> None:
        place = rng.randrange(2 * WORKERS)  # half of them prove themselves
        peer = peers.get(place)
        if peer is None or peer.dead or rng.random() < 0.02:
            if peer is not None:
                peer.close()
            peer = peers[place] = Peer(server, rng, place if place < WORKERS else None)
        peer.say(anything(rng, server, place))
        server.turn()

    repeat(frames, once)
    for peer in peers.values():
        peer.close()
    server.close()
    return server


def test_some_thousand_frames_break_nothing() -> None:
    server = fuzz(6000, seed=1)
    assert server.heard > 300, "some of it was understood"
    assert server.refused > 100, "and some was not"


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_a_million_frames_break_nothing_and_leave_nothing_behind() -> None:
    fuzz(1_000_000, seed=int.from_bytes(os.urandom(4), "little"))
