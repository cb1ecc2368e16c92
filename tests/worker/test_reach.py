"""A server that cannot be reached is named with its address and the remedy, and the job does not wait for it for ever."""

from __future__ import annotations

import errno
import os

import pytest

from psgc.transport.link import Trouble
from psgc.transport.selection import transport
from psgc.worker.connections.reach import Reach

SILENCE_S, REGISTER_S, STEP_S = 5.0, 300.0, 600.0


def reach(address: str = "tcp://10.0.0.5:4000", joined: float = 0.0) -> Reach:
    return Reach(3, ["tcp://10.0.0.4:4000", address], 0.0, joined, SILENCE_S, REGISTER_S, STEP_S)


def said(reach: Reach, begin: float, end: float, why: int | None, same_host: bool = False) -> list[tuple[float, str]]:
    """All that is said from ``begin`` to ``end``, and when; the last is the fault, if one comes."""
    found, now = [], begin
    trouble = Trouble(why, os.strerror(why) if why else "says nothing")
    while now <= end:
        texts, fault = reach.tick(now, lambda server: transport("tcp").remedy(reach.addresses[server], same_host, trouble))
        found += [(now, text) for _, text in texts]
        if fault is not None:
            return [*found, (now, fault)]
        now += 0.25
    return found


def test_all_servers_must_have_answered() -> None:
    here = reach()
    assert not here.all_answered
    here.up(1)
    here.up(1)
    assert not here.all_answered
    here.up(0)
    assert here.all_answered
    assert said(here, 0, 1000, None) == []


@pytest.mark.parametrize(
    ("why", "words"),
    [
        (None, "nothing comes back from there; open port 4000 in the firewall"),
        (errno.ETIMEDOUT, "nothing comes back from there; open port 4000 in the firewall"),
        (errno.ECONNREFUSED, "nobody listens there"),
        (errno.EHOSTUNREACH, "No route to host"),
        (errno.EADDRNOTAVAIL, "'10.0.0.5' cannot be looked up here"),
        (0, "what accepts connections there does not answer as that server (says nothing)"),
    ],
)
def test_one_that_does_not_answer_is_named_within_5_s_and_given_up_at_the_limit(why: int | None, words: str) -> None:
    here = reach()
    here.up(0)
    lines = said(here, 0, 10_000, why)
    assert lines[0][0] <= 5.0
    for _, text in lines:
        assert text.startswith("rank 3 cannot reach server 1 at tcp://10.0.0.5:4000, for ")
        assert words in text
        assert "DMLC_NODE_HOST, DMLC_PORT or PSGC_ADVERTISE where the server is started" in text
    assert REGISTER_S < lines[-1][0] <= REGISTER_S + 1
    assert lines[-1][1].endswith("gave up after 300 s (PSGC_REGISTER_TIMEOUT_S)")
    assert len(lines) < 15, "named ever more rarely"


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:4000", "tcp://[::1]:4000", "tcp://localhost:4000"])
def test_a_loopback_address_of_another_machine_is_told_from_ones_own(address: str) -> None:
    for same_host, words in ((False, "that is this machine itself, and the server runs on another one"), (True, "nobody listens there")):
        here = reach(address)
        here.up(0)
        assert words in said(here, 0, 4, errno.ECONNREFUSED, same_host)[0][1]


def test_an_address_that_is_none_is_said() -> None:
    here = reach("tcp://::1:4000")
    here.up(0)
    assert "that is no address" in said(here, 0, 4, None)[0][1]


def test_whoever_joined_late_still_has_time_to_reach_them() -> None:
    here = reach(joined=REGISTER_S - 1)
    here.up(0)
    assert said(here, REGISTER_S - 1, 10_000, None)[-1][0] == pytest.approx(REGISTER_S + 9, abs=0.5)


def test_one_that_is_lost_later_has_as_long_as_a_step() -> None:
    here = reach()
    here.up(0)
    here.up(1)
    here.down(1, 1000.0)
    here.down(1, 1500.0)  # what is down stays so since it was
    lines = said(here, 1000, 10_000, errno.ECONNREFUSED)
    assert 1000 + STEP_S < lines[-1][0] <= 1000 + STEP_S + 1
    assert lines[-1][1].endswith("gave up after 600 s (PSGC_STEP_TIMEOUT_S)")


def test_one_that_comes_back_begins_anew() -> None:
    here = reach()
    here.up(0)
    here.up(1)
    for begin in (1000.0, 2000.0):
        here.down(1, begin)
        assert said(here, begin, begin + STEP_S - 1, None)
        here.up(1)
    assert said(here, 2600, 10_000, None) == []


def broken_every(seconds: float, until: float, progress: bool) -> tuple[float, str] | None:
    """The fault, if a connection that is made again at once breaks so often, with something awaited all the time."""
    here = reach()
    here.up(0)
    here.up(1)
    now = 1000.0
    trouble = Trouble(errno.ECONNRESET, "Connection reset by peer")
    while now < until:
        here.down(1, now)
        here.up(1)
        assert here.unsteady == [1]
        here.progress(1, now + 0.1 if progress else 900.0)
        texts, fault = here.tick(now + 0.2, lambda server: transport("tcp").remedy(here.addresses[server], False, trouble))
        assert not texts
        if fault is not None:
            return now, fault
        now += seconds
    return None


def test_a_connection_that_breaks_again_and_again_before_anything_comes_through_ends_the_job() -> None:
    found = broken_every(2.0, 10_000.0, progress=False)
    assert found is not None
    now, fault = found
    assert 1000 + STEP_S <= now <= 1000 + STEP_S + 4
    assert "the connection to server 1 at tcp://10.0.0.5:4000 broke 301 times in 600 s and nothing came through" in fault
    assert "Connection reset by peer" in fault
    assert fault.endswith("gave up (PSGC_STEP_TIMEOUT_S)")
    assert broken_every(2.0, 10_000.0, progress=True) is None, "however slowly, it goes on"
