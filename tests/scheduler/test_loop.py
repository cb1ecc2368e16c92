"""The scheduler's process over real sockets: it adopts a socket, lives through nonsense, and tells everyone when it is ended."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import zmq

from psgc import __version__
from psgc.config import Config
from psgc.scheduler import loop as scheduler_loop
from psgc.transport.control.dealer import Dealer
from psgc.transport.control.router import MOST_A_FRAME_BYTES, Router
from psgc.transport.host import host_id, own_start, pid_started, process_alive
from psgc.transport.security.job_keys import JobKeys
from psgc.wire.frames import HEADER_BYTES, VERSION, Header, Kind, pack_header
from psgc.wire.messages import Register, encode_body
from tests.scheduler.talk import DEAD_S, Job, register

PATIENCE_MS = 250_000
ENV = {"DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1", "PSGC_TOKEN": "t", "PSGC_JOB": "7", "PSGC_HEARTBEAT_S": "0.2"}


class Peer:
    """A member played by the test."""

    def __init__(self, context: zmq.Context[Any], port: int, name: str, keys: JobKeys | None = None) -> None:
        self.dealer = Dealer(context, f"tcp://127.0.0.1:{port}", name.encode(), dead_s=PATIENCE_MS / 1000, keys=keys)

    def say(self, kind: Kind, body: Any = None, **fields: Any) -> None:
        data = b"" if body is None else encode_body(body)
        self.dealer.send(Header(kind, job=7, payload_bytes=len(data), **fields), data)

    def register(self, role: Any, pid: int) -> None:
        self.say(Kind.REGISTER, Register(role, __version__, host_id(), "here", pid, pid_started(pid), 1, 1))

    def hear(self, kind: Kind) -> Any:
        """The body of the next message of ``kind``; others before it are skipped."""
        while True:
            assert self.dealer.socket.poll(PATIENCE_MS), f"no {kind.name} has come"
            for header, payload in self.dealer.receive():
                if header.kind == kind:
                    return None if payload is None else json.loads(payload.tobytes())


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(0)


@pytest.fixture
def scheduler() -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """Port and process of a scheduler that was given its listening socket."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        port, fd = listening.getsockname()[1], listening.fileno()
        env = {**os.environ, **ENV, "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port), "PSGC_SCHEDULER_FD": str(fd)}
        command = [sys.executable, "-m", "psgc.launch.job.role", "scheduler"]
        process = subprocess.Popen(command, env=env, pass_fds=[fd], stderr=subprocess.PIPE, text=True)
    yield port, process
    process.kill()
    process.communicate()


@pytest.fixture
def peer(context: zmq.Context[Any], scheduler: tuple[int, subprocess.Popen[str]]) -> Iterator[Callable[[str], Peer]]:
    peers: list[Peer] = []

    def make(name: str) -> Peer:
        peers.append(Peer(context, scheduler[0], name, JobKeys(7, ("t",))))
        return peers[-1]

    yield make
    for each in peers:
        each.dealer.close()


def test_a_scheduler_has_heard_of_everyone_again_though_a_rank_is_absent() -> None:
    """Then its launcher forgets how often it has ended. Under shrink a rank may be missing for good."""
    job = Job(2, 1)
    job.join("s", register("server", index=0))
    for node in range(2):
        job.join(f"w{node}", register(node=node, shrinks=True))
    since = job.now
    assert not job.membership.has_heard_of_all(since)
    for _ in range(int(DEAD_S) + 2):
        job.tick(1)
        for peer in ("s", "w0"):
            job.say(peer, Kind.HEARTBEAT)
        absent = any(worker.absent for worker in job.membership.roster.workers())
        assert job.membership.has_heard_of_all(since) == absent
    assert absent


def test_a_scheduler_adopts_the_socket_it_was_given_and_admits_its_members(scheduler: Any, peer: Any) -> None:
    worker, server = peer("w"), peer("s")
    worker.register("worker", os.getpid())
    server.register("server", os.getppid())
    assert worker.hear(Kind.TOPOLOGY)["size"] == 1
    assert server.hear(Kind.TOPOLOGY)["servers"][0]["index"] == 0
    for each in (worker, server):
        each.say(Kind.BYE)
        each.hear(Kind.BYE)
    assert scheduler[1].wait(PATIENCE_MS / 1000) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_ended_scheduler_tells_everyone_first(scheduler: Any, peer: Any, number: signal.Signals) -> None:
    worker, server = peer("w"), peer("s")
    worker.register("worker", os.getpid())
    server.register("server", os.getppid())
    worker.hear(Kind.TOPOLOGY)
    scheduler[1].send_signal(number)
    assert number.name in worker.hear(Kind.ABORT)["text"]
    assert number.name in server.hear(Kind.ABORT)["text"]
    said = scheduler[1].communicate(timeout=PATIENCE_MS / 1000)[1]
    assert scheduler[1].returncode == 1
    assert number.name in said.strip().splitlines()[-1]


def test_a_process_that_is_gone_is_found_while_its_connection_is_still_up(scheduler: Any, peer: Any) -> None:
    worker, server = peer("w"), peer("s")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        worker.register("worker", other.pid)
        server.register("server", os.getpid())
        server.hear(Kind.TOPOLOGY)
        other.kill()
        pid = other.pid
        assert f"pid {pid} on here) died" in server.hear(Kind.ABORT)["text"], "a zombie, too, is dead"


def test_nonsense_on_the_socket_ends_nothing(scheduler: Any, peer: Any) -> None:
    stranger, worker = peer("x"), peer("w")
    for frames in ([b""], [b"GET / HTTP/1.1"], [b"\xff" * HEADER_BYTES], [pack_header(Header(Kind.PUSH))[:-1]], [b"a", b"b", b"c"]):
        stranger.dealer.socket.send_multipart(frames)
    stranger.dealer.socket.send_multipart([pack_header(Header(Kind.REGISTER, job=7, payload_bytes=3)), b"\xff\xff\xff"])
    assert "JSON" in stranger.hear(Kind.ERROR)["text"]
    worker.say(Kind.HEARTBEAT)
    assert "register first" in worker.hear(Kind.ERROR)["text"]
    assert scheduler[1].poll() is None


def test_who_announces_too_much_is_cut_off_and_the_others_are_served(context: zmq.Context[Any], caplog: pytest.LogCaptureFixture) -> None:
    router = Router(context, "tcp://127.0.0.1:*", dead_s=PATIENCE_MS / 1000, max_message_bytes=300_000)
    greedy, modest = (Peer(context, router.port, name) for name in ("greedy", "modest"))
    greedy.dealer.socket.send(bytes(MOST_A_FRAME_BYTES + 1))
    assert greedy.dealer.monitor.poll(PATIENCE_MS)
    body = os.urandom(300_000)  # travels in several frames
    modest.dealer.send(Header(Kind.HEARTBEAT, payload_bytes=300_001), body + b"x")
    modest.dealer.send(Header(Kind.HEARTBEAT, payload_bytes=300_000), body)
    heard: list[Any] = []
    while not heard:
        assert router.socket.poll(PATIENCE_MS)
        heard += router.receive()
    assert [(identity, header.kind, payload.tobytes() == body) for identity, header, payload in heard] == [
        (b"modest", Kind.HEARTBEAT, True)
    ]
    assert "payload of 300001 bytes, at most 300000" in caplog.text
    for each in (greedy.dealer, modest.dealer, router):
        each.close()


def test_a_strangers_handshake_takes_no_more_than_a_frame(context: zmq.Context[Any]) -> None:
    """It is read before the stranger has proved anything, on every connection that it makes."""
    keys = JobKeys(7, ("secret",))
    router = Router(context, "tcp://127.0.0.1:*", dead_s=PATIENCE_MS / 1000, keys=keys)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\0" + b"CURVE".ljust(20, b"\0") + bytes(32)
    for announced in (MOST_A_FRAME_BYTES + 1, 60 << 20, (1 << 63) - 1):
        with socket.create_connection(("127.0.0.1", router.port), PATIENCE_MS / 1000) as stranger:
            stranger.sendall(greeting)
            while len(stranger.recv(64, socket.MSG_PEEK)) < 64:
                pass
            stranger.recv(64)
            with suppress(ConnectionError):
                stranger.sendall(b"\x06" + announced.to_bytes(8, "big") + bytes(100))
                assert stranger.recv(1) == b"", "it is cut off when it has announced so much, and sent nothing of it"
    member = Peer(context, router.port, "member", keys)
    member.dealer.send(Header(Kind.HEARTBEAT, payload_bytes=200_000), bytes(200_000))
    assert router.socket.poll(PATIENCE_MS)
    assert [len(payload) for _, _, payload in router.receive()] == [200_000], "encrypted, its frames are long enough"
    for each in (member.dealer, router):
        each.close()


def test_a_flood_of_connections_keeps_no_member_from_the_scheduler(context: zmq.Context[Any]) -> None:
    """Silent ones and ones that begin a handshake, before the member comes and while it proves itself."""
    keys = JobKeys(7, ("secret",))
    router = Router(context, "tcp://127.0.0.1:*", dead_s=PATIENCE_MS / 1000, keys=keys)
    flood: list[socket.socket] = []

    def strangers() -> None:
        for number in range(100):
            flood.append(socket.create_connection(("127.0.0.1", router.port), PATIENCE_MS / 1000))
            if number % 2:
                flood[-1].sendall(b"\xff" + bytes(8) + b"\x7f\x03")

    strangers()
    member = Peer(context, router.port, "member", keys)
    member.dealer.send(Header(Kind.HEARTBEAT))
    strangers()
    assert router.socket.poll(PATIENCE_MS)
    assert [identity for identity, _, _ in router.receive()] == [b"member"]
    for each in (*flood, member.dealer, router):
        each.close()


def test_what_is_no_message_is_left_out_and_named(context: zmq.Context[Any], caplog: pytest.LogCaptureFixture) -> None:
    router = Router(context, "tcp://127.0.0.1:*", dead_s=PATIENCE_MS / 1000)
    peer = Peer(context, router.port, "stranger")
    for _ in range(20):
        peer.dealer.socket.send(b"GET / HTTP/1.1")
    peer.dealer.send(Header(Kind.HEARTBEAT))
    heard: list[Kind] = []
    while not heard:
        assert router.socket.poll(PATIENCE_MS)
        heard += [Kind(header.kind) for _, header, _ in router.receive()]
    assert heard == [Kind.HEARTBEAT]
    assert caplog.text.count("message dropped peer=b'stranger' reason=") == 1, "one line, however many there are"
    for each in (peer.dealer, router):
        each.close()


def test_a_message_to_who_is_not_there_is_said_to_have_gone_nowhere(context: zmq.Context[Any]) -> None:
    router = Router(context, "tcp://127.0.0.1:*", dead_s=PATIENCE_MS / 1000)
    assert not router.send(b"nobody", [b"header", b"body"])
    router.close()


def test_a_reused_pid_is_not_taken_for_the_process_that_had_it() -> None:
    started = pid_started(os.getpid())
    assert process_alive(os.getpid(), started)
    assert not process_alive(os.getpid(), started - 1)
    assert not process_alive(1 << 30, started)


def test_who_has_no_descriptor_left_takes_nobody_who_lives_for_dead_and_does_not_seem_another_process() -> None:
    started = own_start()
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as ended:
        there = pid_started(ended.pid)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        alive = process_alive(os.getpid(), started), process_alive(ended.pid, there), process_alive(1 << 30, started)
        own = own_start()
        with suppress(OSError):
            pid_started(os.getpid())
            raise AssertionError("it had a descriptor")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert alive == (True, False, False)
    assert own == started


def test_a_forked_process_has_a_start_of_its_own() -> None:
    before = own_start()
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        os.write(writing, str(own_start()).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(writing)
    with os.fdopen(reading) as said:
        assert int(said.read()) > before > 0
    assert own_start() == before


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, ["PSGC_TOKEN is not set: anybody who reaches port 9000 can join the job", "payloads are not encrypted"]),
        ({"token": "t"}, ["payloads are not encrypted"]),
        ({"token": "t", "encrypt": True}, []),
        ({"encrypt": True}, ["PSGC_TOKEN is not set"]),
    ],
)
def test_what_is_not_protected_beyond_one_machine_is_said_at_start(
    settings: dict[str, Any], said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    scheduler_loop._warn(Config(root_host="10.0.0.1", root_port=9000, **settings))
    assert len(caplog.records) == len(said)
    for record, words in zip(caplog.records, said, strict=True):
        assert words in record.getMessage()


def test_a_member_of_another_version_of_the_protocol_hears_why_in_its_own(scheduler: Any, peer: Callable[[str], Peer]) -> None:
    _, process = scheduler
    other = peer("older")
    body = encode_body(Register("worker", __version__, host_id(), "here", os.getpid(), pid_started(os.getpid()), 1, 1))
    other.dealer.send(Header(Kind.REGISTER, job=7, payload_bytes=len(body), version=VERSION + 1), body)
    assert other.dealer.socket.poll(PATIENCE_MS)
    head, notice = other.dealer.socket.recv_multipart()
    assert (head[4], head[5]) == (VERSION + 1, Kind.ABORT)
    assert "install one psgc everywhere" in json.loads(notice)["text"]
    assert process.wait(PATIENCE_MS / 1000) == 1
    assert "version" in process.stderr.read()
