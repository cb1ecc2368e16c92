"""A name service that does not answer stops nobody, and one that fails costs no address that was known."""

from __future__ import annotations

import errno
import socket
import threading
import time
from typing import Any

import pytest

from psgc.transport import lookup as module
from psgc.transport.link import Trouble
from psgc.transport.lookup import Lookup
from psgc.transport.selection import transport

FOUND = [(socket.AF_INET, ("10.0.0.5", 9))]


def again(found: Lookup, wanted: Any) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            got: Any = found.addresses(again=True)
        except OSError as error:
            got = type(error)
        if got == wanted:
            return
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_who_asks_does_not_wait_and_is_told_once_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, asked = threading.Event(), []

    def slow(host: str, port: int) -> Any:
        asked.append(host)
        assert answers.wait(60)
        return FOUND

    monkeypatch.setattr(module, "lookup", slow)
    found = Lookup("server.cluster", 9)
    for _ in range(3):
        with pytest.raises(OSError, match=r"'server\.cluster' is being looked up") as caught:
            found.addresses(again=True)
        assert caught.value.errno == errno.EAGAIN
        text = transport("tcp").remedy("tcp://server.cluster:9", False, Trouble(caught.value.errno, caught.value.strerror))
        assert "the name service does not answer" in text
    assert asked == ["server.cluster"], "one lookup at a time"
    answers.set()
    again(found, FOUND)


def test_addresses_that_were_found_stay_while_the_name_service_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "lookup", lambda host, port: FOUND)
    found = Lookup("server.cluster", 9)
    again(found, FOUND)

    def fails(host: str, port: int) -> Any:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(module, "lookup", fails)
    for _ in range(20):
        assert found.addresses(again=True) == FOUND
    other = Lookup("other.cluster", 9)
    again(other, socket.gaierror)


def test_an_address_is_not_looked_up_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda _: pytest.fail("a thread"))
    for host in ("127.0.0.1", "::1"):
        assert Lookup(host, 9).addresses(again=True)
