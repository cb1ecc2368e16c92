"""A simulated host's link carries its rate, no more for being asked by several processes, and no less for waking late."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psgc.transport import pacing
from psgc.transport.pacing import FRAME_SHARE, LATE_S, LEAST_QUANTUM_BYTES, PacedLink, after

MS = 1_000_000


class Clock:
    """Of a simulated sender that sleeps until the link is free and wakes late."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns = 10**15
        monkeypatch.setattr(pacing.time, "monotonic_ns", lambda: self.ns)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def send(link: PacedLink, clock: Clock, nbytes: int, late_ns: int = 0) -> float:
    """Seconds until the link has carried a message, its sender always woken late."""
    began = clock.ns
    while nbytes:
        if allowed := link.out.allowance():
            sent = min(allowed, nbytes)
            nbytes -= sent
            link.out.spend(sent, more=nbytes > 0)
        else:
            clock.ns = max(clock.ns, int(link.out.free_at * 1e9)) + 1 + late_ns
    return (max(clock.ns, int(link.out.free_at * 1e9)) - began) / 1e9


@pytest.mark.parametrize("mbit", [1, 10, 100, 1000])
@pytest.mark.parametrize("late_ms", [0, 3, 30])
def test_a_message_takes_as_long_as_its_bytes_at_the_links_rate_though_its_sender_wakes_late(clock: Clock, mbit: int, late_ms: int) -> None:
    link, nbytes = PacedLink.of(mbit), mbit * 125_000
    assert send(link, clock, nbytes, late_ms * MS) == pytest.approx(FRAME_SHARE, rel=0.04 if late_ms else 0.001)


def test_a_pause_saves_nothing_up(clock: Clock) -> None:
    link = PacedLink.of(100)
    for pause_s in (0.0, 0.01, 0.2, 100.0):
        clock.ns += int(pause_s * 1e9)
        assert send(link, clock, 1_250_000) == pytest.approx(0.1 * FRAME_SHARE, rel=0.001)


def test_whoever_pauses_in_the_middle_of_a_message_has_not_sent_meanwhile(clock: Clock) -> None:
    link = PacedLink.of(100)
    link.out.spend(12_500, more=True)
    clock.ns += int(1e9)
    link.out.spend(12_500, more=True)
    assert link.out.allowance() == 0


def test_directions_do_not_share(clock: Clock) -> None:
    link = PacedLink.of(1)
    link.out.spend(10**6, more=False)
    assert (link.out.allowance(), link.into.allowance()) == (0, link.into.quantum)


def test_two_that_share_a_link_have_its_rate_together(clock: Clock) -> None:
    fd = pacing.make_file()
    one, other = PacedLink.of(100, fd), PacedLink.of(100, fd)
    began, left = clock.ns, [1_250_000, 1_250_000]
    while any(left):
        for sender, link in enumerate((one, other)):
            if allowed := min(link.out.allowance(), left[sender]):
                left[sender] -= allowed
                link.out.spend(allowed, more=left[sender] > 0)
        clock.ns = max(clock.ns + 1, int(one.out.free_at * 1e9) + 1)
    assert (clock.ns - began) / 1e9 == pytest.approx(0.2 * FRAME_SHARE, rel=0.01)
    os.close(fd)


SPENDER = "import sys; from psgc.transport.pacing import Pace; pace = Pace(int(sys.argv[1]), 'in', 1e6)\nfor _ in range(5000): pace.spend(1000, True)"


def test_what_several_processes_spend_at_once_is_all_paid_for() -> None:
    fd = pacing.make_file()
    os.set_inheritable(fd, True)
    pace = pacing.Pace(fd, "in", 1e6)
    pace.spend(10**9, True)  # busy for longer than the test takes
    before = pace.free_at
    processes = [subprocess.Popen([sys.executable, "-c", SPENDER, str(fd)], pass_fds=[fd]) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert pace.free_at - before == pytest.approx(15.0 * FRAME_SHARE, rel=1e-6)
    os.close(fd)


@given(st.integers(0, 10**12), st.booleans(), st.integers(-(10**9), 10**9), st.integers(0, 10**9))
def test_the_link_is_never_free_before_what_was_spent_has_passed(free_ns: int, waited: bool, late_ns: int, cost_ns: int) -> None:
    now = free_ns + late_ns
    assert after(free_ns, waited, now, cost_ns) >= max(free_ns, now - int(LATE_S * 1e9)) + cost_ns
    assert after(free_ns, waited, now, cost_ns) <= max(free_ns, now) + cost_ns


@pytest.mark.parametrize("mbit", [0.001, 1, 1e5])
def test_a_quantum_is_at_least_a_frame(mbit: float) -> None:
    assert PacedLink.of(mbit).out.quantum >= LEAST_QUANTUM_BYTES
