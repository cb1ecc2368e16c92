"""The worker's conversation with the scheduler, over a connection that the test plays."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from psgc.config import Config
from psgc.errors import JobFailed
from psgc.layout import Layout
from psgc.wire.frames import SCHEDULER_SENDER, Header, Kind
from psgc.wire.messages import ErrorCode, Notice, Register, Topology, decode_body, encode_body
from psgc.worker import coordinator as module
from psgc.worker.admission import Admission
from psgc.worker.coordinator import Coordinator
from psgc.worker.membership import Membership


class Connection:
    """A Dealer that has heard so many heartbeats at once."""

    socket, monitor = "socket", "monitor"

    def __init__(self, waiting: int) -> None:
        self.waiting = waiting

    def receive(self) -> Any:
        while self.waiting:
            self.waiting -= 1
            yield Header(Kind.HEARTBEAT, job=1, sender=SCHEDULER_SENDER), None

    def tick(self, now: float) -> None:
        """The connection is as it was."""

    def send(self, header: Header, payload: Any = None) -> None:
        """Nobody is there to receive it."""

    def turned_away(self, silent: bool = True) -> str:
        return ""

    def nobody_listens(self, now: float) -> bool:
        return False

    def close(self, linger_ms: int = 0) -> None:
        pass


class Owner:
    def joined(self, topology: Any) -> None:
        raise AssertionError(topology)

    def laid_out(self, layout: Layout) -> None:
        raise AssertionError(layout)

    def failed(self, text: str, cut_off: bool = False) -> None:
        raise JobFailed(text)


def test_what_the_scheduler_says_takes_no_more_than_a_turn_and_none_of_it_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of layouts may come at once: heartbeats and payloads go on in between."""
    connection, milliseconds = Connection(1000), itertools.count()
    monkeypatch.setattr(module, "Dealer", lambda *_: connection)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(milliseconds) / 1000))
    coordinator = Coordinator(None, Config(root_host="127.0.0.1", root_port=9, job=1), Membership(), Owner())  # type: ignore[arg-type]
    turns = 0
    while connection.waiting:
        before = connection.waiting
        coordinator.receive({connection.socket})
        assert before - connection.waiting <= module.TURN_S * 1000
        turns += 1
    assert turns >= 1000 / (module.TURN_S * 1000)
    coordinator.close()


def test_a_scheduler_that_does_not_answer_is_named_with_how_long_it_has_been_awaited_and_what_to_check(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "Dealer", lambda *_: Connection(0))
    coordinator = Coordinator(None, Config(root_host="127.0.0.1", root_port=9, job=1), Membership(), Owner())  # type: ignore[arg-type]
    for tick in range(30):
        coordinator.tick(coordinator.began + tick * module.TICK_S)
    assert [record.getMessage() for record in caplog.records] == [
        "waiting for the scheduler at tcp://127.0.0.1:9, for 5 s so far: nothing answers there; is it started, and are DMLC_PS_ROOT_URI and "
        "DMLC_PS_ROOT_PORT the same everywhere?"
    ]
    coordinator.close()


def test_a_name_without_an_address_is_told_and_is_waited_for(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """In Kubernetes it may come later."""
    known, looked = threading.Event(), threading.Event()

    def found(host: str, port: int) -> Any:
        looked.set()
        if known.is_set():
            return [(socket.AF_INET, ("10.0.0.1", port))]
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(module, "Dealer", lambda *_: Connection(0))
    monkeypatch.setattr("psgc.transport.lookup.lookup", found)
    monkeypatch.setattr("psgc.transport.lookup.PATIENCE_S", None)  # what is looked up is known
    coordinator = Coordinator(None, Config(root_host="10.0.0.l", root_port=9, job=1), Membership(), Owner())  # type: ignore[arg-type]
    for tick in range(30):
        coordinator.tick(coordinator.began + tick * module.TICK_S)
    assert looked.is_set()
    assert [record.getMessage() for record in caplog.records] == [
        "waiting for the scheduler at tcp://10.0.0.l:9, for 5 s so far: its name has no address (Name or service not known), and is looked up again; "
        "is DMLC_PS_ROOT_URI=10.0.0.l right?"
    ]
    known.set()
    lookup, limit = coordinator._admission._lookup, time.monotonic() + 60
    while lookup.trouble() and time.monotonic() < limit:
        time.sleep(0.01)
    assert lookup.trouble() == ""
    for tick in range(30, 62):
        coordinator.tick(coordinator.began + tick * module.TICK_S)
    assert "nothing answers there; is it started" in caplog.records[-1].getMessage()
    coordinator.close()


@pytest.mark.parametrize(("connected", "gave_up_s", "why"), [(False, 4, "nothing answers there"), (True, 10, "it has said nothing for")])
def test_a_scheduler_that_never_answers_is_given_up_at_the_limit_but_one_that_takes_the_connection_may_say_who_is_missing(
    connected: bool, gave_up_s: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "Dealer", lambda *_: Connection(0))
    config = Config(root_host="127.0.0.1", root_port=9, job=1, register_timeout_s=4.0)
    coordinator = Coordinator(None, config, Membership(), Owner())  # type: ignore[arg-type]
    if connected:
        coordinator._life.connection(True, coordinator.began)
    ticks = round(gave_up_s / module.TICK_S)
    for tick in range(1, ticks + 1):
        coordinator.tick(coordinator.began + tick * module.TICK_S)
    with pytest.raises(
        JobFailed, match=rf"^gave up after {gave_up_s} s \(PSGC_REGISTER_TIMEOUT_S\) of waiting for the scheduler .*: {why}"
    ):
        coordinator.tick(coordinator.began + (ticks + 1) * module.TICK_S)
    coordinator.close()


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("failed", [False, True])
def test_a_scheduler_that_is_silent_is_named_unless_the_job_has_failed(
    failed: bool, leaves: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Why the job failed is the last line."""
    monkeypatch.setattr(module, "Dealer", lambda *_: Connection(0))
    coordinator = Coordinator(None, Config(root_host="127.0.0.1", root_port=9, job=1), Membership(), Owner())  # type: ignore[arg-type]
    coordinator._topology = Topology(0, 1, 1, (1,), 1, (), ("0.0@here",))
    coordinator._life.connection(True, coordinator.began)
    if failed:
        coordinator.release()
    if leaves:
        coordinator.leave()
    for tick in range(30):
        coordinator.tick(coordinator.began + tick * module.TICK_S)
    assert ["has said nothing for" in record.getMessage() for record in caplog.records] == [True] * (not failed)
    coordinator.close()


def test_a_worker_that_leaves_and_meets_the_next_jobs_scheduler_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to its BYE was lost with the scheduler of its own job, which has ended; to any other worker a scheduler that does not know it is a fault."""
    refusal = np.frombuffer(encode_body(Notice(ErrorCode.NOT_ADMITTED, "scheduler: register first")), np.uint8)
    for leaves in (True, False):
        connection = Connection(0)
        monkeypatch.setattr(connection, "receive", lambda: iter([(Header(Kind.ERROR, job=1, sender=SCHEDULER_SENDER), refusal)]))
        monkeypatch.setattr(module, "Dealer", lambda *_, connection=connection: connection)
        coordinator = Coordinator(None, Config(root_host="127.0.0.1", root_port=9, job=1), Membership(), Owner())  # type: ignore[arg-type]
        coordinator._topology = Topology(0, 1, 1, (1,), 1, (), ("0.0@here",))
        if leaves:
            coordinator.leave()
            coordinator.receive({connection.socket})
            assert coordinator.left
        else:
            with pytest.raises(JobFailed, match="register first"):
                coordinator.receive({connection.socket})


def test_a_worker_that_counted_as_dead_says_again_what_is_unanswered_when_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    connection, said = Connection(0), []
    monkeypatch.setattr(connection, "receive", lambda: iter([(Header(Kind.REGISTER, job=1, sender=SCHEDULER_SENDER), None)]))
    monkeypatch.setattr(connection, "send", lambda header, body=b"": said.append(header.kind), raising=False)
    monkeypatch.setattr(module, "Dealer", lambda *_: connection)
    coordinator = Coordinator(None, Config(root_host="127.0.0.1", root_port=9, job=1), Membership(), Owner())  # type: ignore[arg-type]
    coordinator.requests.barrier(1, threading.Event())
    said.clear()
    coordinator.receive({connection.socket})
    assert said == [Kind.REGISTER, Kind.BARRIER]
    coordinator.close()


def test_processes_that_one_launcher_starts_have_a_number_in_common() -> None:
    def lineage(launcher: str, incarnation: int) -> int:
        config = Config(launcher=launcher, incarnation=incarnation)
        return decode_body(Register, Admission(config, SimpleNamespace(), 0.0).request()).lineage  # type: ignore[arg-type]

    first = lineage("psgc-launcher/7/a:0", 1)
    assert first == lineage("psgc-launcher/7/a:1", 2) > 0
    assert lineage("psgc-launcher/7/b:0", 1) not in (first, 0)
    assert lineage("psgc-launcher/7/a:0", 0) == lineage("", 1) == 0


def test_a_member_that_has_missed_the_jobs_new_token_says_so_and_not_that_the_scheduler_is_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    why, connection = "the scheduler at tcp://127.0.0.1:9 does not take this member's token", Connection(0)
    # One that leaves handshakes unanswered is not asked: that takes a second, in which nothing else goes on.
    monkeypatch.setattr(connection, "turned_away", lambda silent=True: "" if silent else why)
    monkeypatch.setattr(module, "Dealer", lambda *_: connection)
    config = Config(root_host="127.0.0.1", root_port=9, job=1, dead_s=20.0)
    coordinator = Coordinator(None, config, Membership(), Owner())  # type: ignore[arg-type]
    coordinator._line.topology = SimpleNamespace(rank=0, epoch=1)  # type: ignore[assignment]
    ticks = round(config.dead_s / module.TICK_S)
    for tick in range(1, ticks + 1):
        coordinator.tick(coordinator.began + tick * module.TICK_S)
    with pytest.raises(JobFailed, match=rf"^{why}; it was asked again for 20 s \(PSGC_DEAD_S\)$"):
        coordinator.tick(coordinator.began + (ticks + 1) * module.TICK_S)
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"{why}; it is asked again, for 20 s at most (PSGC_DEAD_S)"] * 2
    coordinator.close()


@pytest.mark.parametrize("final", [True, False])
def test_that_a_failed_job_is_not_to_be_started_again_is_told_to_the_launcher(monkeypatch: pytest.MonkeyPatch, final: bool) -> None:
    told: list[str] = []
    monkeypatch.setattr(module, "Dealer", lambda *_: Connection(0))
    monkeypatch.setattr(module, "Launcher", lambda address: SimpleNamespace(tell=lambda event: told.append(f"{event} {address}")))
    config = Config(root_host="127.0.0.1", root_port=9, job=1, launcher="there:1")
    coordinator = Coordinator(None, config, Membership(), Owner())  # type: ignore[arg-type]
    header, code = Header(Kind.ABORT, job=1, sender=SCHEDULER_SENDER), ErrorCode.FINAL if final else 0
    with pytest.raises(JobFailed, match=r"^server 0: ended by SIGTERM$"):
        coordinator._handle(header, encode_body(Notice(code, "server 0: ended by SIGTERM")))
    assert told == (["final there:1"] if final else [])
    coordinator.close()
