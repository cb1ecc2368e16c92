"""A member's connection to the scheduler where something else listens, or the token differs: it never waits, and says what is wrong."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

from psgc.transport.control import dealer as module
from psgc.transport.control.dealer import Dealer
from psgc.transport.control.router import Router
from psgc.transport.security.job_keys import JobKeys
from psgc.wire.frames import Header, Kind
from tests.ports import free_port
from tests.programs import program

PATIENCE_S = 60.0
KEYS = JobKeys(7, ("secret",))


@contextmanager
def scheduler(keys: JobKeys | None) -> Iterator[int]:
    context: zmq.Context[Any] = zmq.Context()
    router = Router(context, "tcp://127.0.0.1:*", 15.0, keys=keys)
    yield router.port
    router.close()
    context.destroy(0)


def verdict(port: int, keys: JobKeys | None) -> str:
    """What a member says in the end of who listens there: nothing if its handshake succeeds."""
    context: zmq.Context[Any] = zmq.Context()
    dealer = Dealer(context, f"tcp://127.0.0.1:{port}", b"member", 15.0, keys)
    until = time.monotonic() + PATIENCE_S
    try:
        while time.monotonic() < until:
            dealer.send(Header(Kind.HEARTBEAT, job=7, payload_bytes=1), b"x")  # never waits, whatever has become of the connection
            dealer.socket.poll(20)
            if "up" in dealer.events():
                return ""
            dealer.tick(time.monotonic())
            if why := dealer.turned_away():
                return why
    finally:
        dealer.close()
        context.destroy(0)
    pytest.fail(f"nothing is said of what listens at port {port}")


def test_who_listens_is_named_whatever_it_is_and_with_a_token_or_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENT_S", 0.5)
    programs = {
        "it says 'SSH-2.0-OpenSSH_9.6'": program(b"SSH-2.0-OpenSSH_9.6\r\n"),
        "it says 'HTTP/1.1 400 Bad Request'": program(b"", b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"),
        "no scheduler of psgc": program(b"\x4a\x00\x00\x00\x0a8.0.36\x00" + bytes(60)),
        "a server of a job and not its scheduler": program(b"PSGs\x01" + bytes(35)),
    }
    for what, started in programs.items():
        with started as port:
            for keys in (KEYS, None):
                text = verdict(port, keys)
                assert what in text and text.endswith("check DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT"), (text, keys)


def test_a_token_that_only_one_end_has_or_that_differs_is_told_apart() -> None:
    with scheduler(None) as port:
        assert "has no token, and this member has one: set the same PSGC_TOKEN" in verdict(port, KEYS)
        assert verdict(port, None) == ""
    with scheduler(KEYS) as port:
        assert "asks for a token, and this member has none" in verdict(port, None)
        assert "does not take this member's token" in verdict(port, JobKeys(7, ("another",)))
        assert verdict(port, KEYS) == ""


def test_a_member_is_heard_once_the_scheduler_is_there_however_often_it_was_refused_before() -> None:
    """A proxy takes connections and closes them while the scheduler behind it is not up yet: nothing is certain then."""
    context: zmq.Context[Any] = zmq.Context()
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as proxy:
        proxy.settimeout(PATIENCE_S)
        dealer = Dealer(context, f"tcp://127.0.0.1:{port}", b"member", 15.0, KEYS)
        for _ in range(3 * module.CERTAIN):
            proxy.accept()[0].close()
            list(dealer.events())
            dealer.tick(time.monotonic() + module.LONGEST_PAUSE_S)
        dealer.refused = module.CERTAIN  # however many of these failures have been heard of
    router = Router(context, f"tcp://127.0.0.1:{port}", 15.0, keys=KEYS)
    until, up = time.monotonic() + PATIENCE_S, False
    while not up and time.monotonic() < until:
        dealer.socket.poll(20)
        up = "up" in dealer.events()
        dealer.tick(time.monotonic())
        assert dealer.turned_away() == ""
    assert up
    dealer.close()
    router.close()
    context.destroy(0)
