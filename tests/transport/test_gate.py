"""The gate: who proves nothing gets nowhere, costs little, is cut off soon, and is named in one line; who proves himself is let in meanwhile."""

from __future__ import annotations

import errno
import itertools
import logging
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from psgc.transport.link import Link
from psgc.transport.security import gate as gate_module
from psgc.transport.security.gate import AT_ONCE, MOST, Gate
from psgc.transport.security.handshake import ANSWER, CHALLENGE, PATIENCE_S, ServerProof, WorkerProof, worker_key
from psgc.transport.shm import LocalLink, LocalListener, answers
from psgc.transport.tcp import TcpLink, TcpListener
from psgc.transport.watch import Watch
from tests.readable import readable

DATA_KEY = bytes(32)
WAIT_S = 60.0
HOST = "127.0.0.83"  # nobody else's: another test's ZeroMQ socket that still looks for a port on 127.0.0.1 does not find this door


class Door:
    """A gate with its listeners, time that the test makes, and who has come in."""

    def __init__(self, workers: int = 0) -> None:
        self.now = 1000.0
        nonces = (b"%032d" % number for number in itertools.count())
        self.tcp = TcpListener(HOST, 0, dead_s=30)
        self.local = LocalListener(f"psgc-test/{id(self)}")
        self.gate = Gate(
            [self.tcp, self.local], lambda transport: ServerProof(transport.label, 0, 1, 4, self.key, next(nonces)), lambda: self.now,
            workers=workers,
        )  # fmt: skip
        self.let_in: list[Link] = []
        self.strangers: list[socket.socket] = []
        self.watch = Watch()

    @staticmethod
    def key(rank: int) -> bytes:
        return worker_key(DATA_KEY, rank, 1)

    def serve(self) -> None:
        """Turns until there is nothing more to do."""
        deadline = time.monotonic() + WAIT_S
        while self.watch.wait([(self.gate, 1)], 0.02):
            assert time.monotonic() < deadline, "the gate is never done"
            self.let_in += self.gate.serve()

    def stranger(self, *said: bytes) -> socket.socket:
        sock = socket.create_connection((HOST, self.tcp.port), timeout=WAIT_S)
        self.strangers.append(sock)
        for data in said:
            sock.sendall(data)
        return sock

    def member(self, rank: int = 0, over: str = "tcp") -> Link:
        proof = WorkerProof(over, 0, 1, rank, self.key(rank), "h", b"w" * 32)
        if over == "tcp":
            return TcpLink.connect(socket.AF_INET, (HOST, self.tcp.port), proof, 30)
        return LocalLink.connect(self.local.name, proof)

    def admits(self, link: Link) -> bool:
        deadline = time.monotonic() + WAIT_S
        before = len(self.let_in)
        while not (proved := link.prove()) and not link.closed and time.monotonic() < deadline:
            self.serve()
        self.serve()
        return proved and len(self.let_in) == before + 1

    def close(self) -> None:
        self.gate.close()
        for each in (*self.let_in, *self.strangers):
            each.close()


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door()
    yield made
    made.close()


def lines(caplog: Any) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def cut_off(sock: socket.socket) -> bytes:
    """What it was told before the end."""
    told = b""
    try:
        while data := sock.recv(4096):
            told += data
    except ConnectionResetError:
        pass
    return told


@pytest.mark.parametrize("over", ["tcp", "unix"])
def test_a_worker_with_the_key_is_let_in(door: Door, over: str, caplog: Any) -> None:
    link = door.member(rank=2, over=over)
    assert door.admits(link)
    (inside,) = door.let_in
    assert isinstance(inside.proof, ServerProof)
    assert inside.proof.rank == 2
    assert len(door.gate) == 0
    assert not lines(caplog)
    link.close()


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", b"PSGC" + bytes(60), bytes(ANSWER.size), b"PSGw" + bytes(ANSWER.size - 4), b"\xff" * 100_000]
)
def test_nonsense_is_cut_off_and_told_nothing_but_the_challenge(door: Door, said: bytes, caplog: Any) -> None:
    stranger = door.stranger(said)
    door.serve()
    assert len(cut_off(stranger)) in (0, CHALLENGE.size)  # a reset may overtake it
    assert len(door.gate) == 0
    assert not door.let_in
    assert len(lines(caplog)) == 1
    assert "refused" in lines(caplog)[0]


def test_a_peer_that_never_ends_its_hello_is_cut_off_after_ten_seconds_in_one_line(door: Door, caplog: Any) -> None:
    slow = door.stranger(b"PSGw")
    silent = door.stranger()
    door.serve()
    assert len(door.gate) == 2
    door.now += PATIENCE_S - 0.1
    slow.sendall(b"\1")  # another byte now and then buys no time
    door.serve()
    door.gate.tick()
    assert len(door.gate) == 2
    door.now += 0.2
    door.gate.tick()
    assert len(door.gate) == 0
    for each in (slow, silent):
        assert len(cut_off(each)) in (0, CHALLENGE.size)
    assert [line for line in lines(caplog) if "within 10 s" in line] == lines(caplog)
    assert len(lines(caplog)) == 1


def test_a_crowd_of_strangers_holds_few_places_fills_no_log_and_keeps_no_member_out(door: Door, caplog: Any) -> None:
    for _ in range(2 * MOST + AT_ONCE):
        door.stranger()
    door.serve()
    assert len(door.gate) == MOST
    link = door.member()
    assert door.admits(link), "the newest stays; the oldest goes"
    assert len(lines(caplog)) == 1
    door.now += 30
    door.gate.tick()
    assert len(door.gate) == 0
    told = lines(caplog)
    assert len(told) == 3, told
    assert any(f"{MOST + AT_ONCE} more were refused (crowd)" in line for line in told)
    link.close()


def test_all_workers_of_a_job_may_come_at_the_same_moment(caplog: Any) -> None:
    """They are strangers until they have proved themselves, and their number is known."""
    door = Door(workers=MOST // 2)
    for _ in range(MOST + MOST // 2):
        door.stranger()
    door.serve()
    waiting = len(door.gate)
    door.close()
    assert waiting == MOST + MOST // 2
    assert lines(caplog) == []


def test_of_a_crowd_anybody_goes_and_not_who_has_waited_longest(door: Door) -> None:
    """So a worker from the flood's own address still has a chance."""
    early = [door.member(rank=1) for _ in range(20)]
    for _ in range(MOST + 30):
        door.stranger()
        door.gate.serve()
    assert any(door.admits(member) for member in early), "the oldest 50 of the crowd would have been all of them"
    for member in early:
        member.close()


def test_whoever_there_was_no_time_for_comes_first_in_a_later_turn(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    members = [door.member(rank=1) for _ in range(10)]
    door.serve()
    for member in members:  # their answers are all there
        while not member.proof.done and not member.prove():
            if not readable(member, 0.05):
                break
    seconds = itertools.count()
    monkeypatch.setattr(gate_module, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    proved: list[Link] = []
    for _ in range(3 * len(members)):
        door.stranger()
        proved += door.gate.serve()
    door.let_in += proved
    assert len(proved) == len(members), "one event a turn, though somebody connects in every turn"
    for member in members:
        member.close()


def test_out_of_descriptors_the_gate_rests_and_opens_again(door: Door, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(TcpListener, "accept", none_left)
    link = door.member()
    door.serve()  # comes to an end: a gate that polled on would never sleep
    door.now += 1
    door.gate.tick()
    door.serve()
    assert [line for line in lines(caplog) if "ulimit -n" in line] == lines(caplog)
    assert len(lines(caplog)) == 1
    monkeypatch.undo()
    door.gate.tick()
    assert door.admits(link)
    link.close()


def test_a_local_peer_of_another_user_is_refused(door: Door, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psgc.transport.shm.os.getuid", lambda: 4242)
    link = door.member(over="unix")
    assert not door.admits(link)
    assert link.closed
    assert "this server of user 4242" in "".join(lines(caplog))
    assert len(lines(caplog)) == 1
    link.close()


def test_what_closes_by_itself_costs_a_place_no_longer_and_is_no_news(door: Door, caplog: Any) -> None:
    for _ in range(10):
        door.stranger().close()
    assert answers(door.local.name), "as workers do before they choose how to connect"
    door.serve()
    assert len(door.gate) == 0
    assert not lines(caplog)


def test_the_limits_are_those_that_are_documented() -> None:
    assert (MOST, PATIENCE_S, gate_module.AT_ONCE) == (256, 10.0, 64)
