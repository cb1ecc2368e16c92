"""How fast a connection is, from echoes: near enough for links of any speed, and said soon."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from psgc.wire.messages import MEASURE_BYTES
from psgc.worker.connections.pace import Pace


def measured(echo_s: Callable[[int], float]) -> tuple[Pace, float, list[int]]:
    """What comes of echoes that take so long; and how long that takes, and which sizes are said."""
    pace, now, said = Pace(), 0.0, []
    while not pace.done:
        said.append(pace.say(now))
        now += echo_s(said[-1])
        pace.echoed(said[-1], now)
        assert len(said) < 30, "it comes to an end"
    return pace, now, said


@pytest.mark.parametrize("round_trip_s", [0.0001, 0.01, 0.3])
@pytest.mark.parametrize("rate", [1e4, 1.25e5, 1.25e6, 1.25e7, 1.25e8, 1.25e10])
def test_the_rate_is_the_links(rate: float, round_trip_s: float) -> None:
    pace, took, said = measured(lambda nbytes: round_trip_s + 2 * nbytes / rate)
    assert pace.rate == pytest.approx(rate, rel=0.01)
    assert max(said) <= MEASURE_BYTES
    assert took <= 12 * round_trip_s + max(1.0, 13 * 16384 / rate)


@pytest.mark.parametrize("rate", [1.25e5, 1.25e6, 1.25e7])
def test_what_buffers_take_at_once_does_not_pass_for_speed(rate: float) -> None:
    burst = 10_000
    pace, _, _ = measured(lambda nbytes: 0.001 + 2 * max(nbytes - burst, 0) / rate)
    assert pace.rate == pytest.approx(rate, rel=0.1)


def test_a_first_echo_that_waits_for_something_else_counts_nothing() -> None:
    """The server has just been started; TCP begins with a few packets and needs round trips for more."""
    before: list[int] = []

    def echo_s(nbytes: int) -> float:
        first = nbytes not in before
        before.append(nbytes)
        return 0.3 + 2 * nbytes / 1.25e8 + first * 0.6

    pace, _, _ = measured(echo_s)
    assert pace.rate == pytest.approx(1.25e8, rel=0.01)


def test_echoes_that_take_no_time_say_nothing_of_the_rate() -> None:
    assert measured(lambda _: 0.0)[0].rate == math.inf


def test_an_echo_of_another_size_is_an_old_one() -> None:
    pace = Pace()
    assert pace.say(0.0) == 0
    pace.echoed(16384, 0.1)
    assert pace.say(0.2) == 0
    assert not pace.done
