"""The offsets of other machines' clocks are estimated from sent and received messages, to half of the shortest round trip."""

from __future__ import annotations

import pytest

from psgc.observe.clocks import Offset, offsets, solve
from tests.observe.jobs import grouped, served

AHEAD = {"rank 0": 5e6, "rank 1": -3e6, "rank 2": 123.0, "server 0": 777_000.0, "server 1": -42.0}


@pytest.mark.parametrize("servers", [1, 2])
def test_shifted_clocks_are_found_within_half_the_least_round_trip(servers: int) -> None:
    for seed in range(20):
        timelines, round_trip_us = served(AHEAD, seed, ranks=3, servers=servers)
        found = offsets(timelines)
        assert found[0] == Offset(0.0, 0.0)
        for one, offset in zip(timelines, found, strict=True):
            wrong = abs(offset.us - (AHEAD[one.about.name] - AHEAD["rank 0"]))
            assert offset.uncertain_us is not None
            assert wrong <= offset.uncertain_us + 1e-3
            legs = 1 if one.about.role == "server" else 2  # to another rank it is two hops
            assert offset.uncertain_us <= legs * (round_trip_us + 400) / 2, "rather less: the least, not some, round trip counts"


def test_a_symmetric_path_leaves_no_error_where_some_message_was_not_delayed() -> None:
    timelines, _ = served(AHEAD, 3, steps=200)
    for one, offset in zip(timelines, offsets(timelines), strict=True):
        assert offset.us == pytest.approx(AHEAD[one.about.name] - AHEAD["rank 0"], abs=8.0)


def test_without_servers_the_control_words_tell() -> None:
    ahead = [1e6, -5e5, 0.0, 42.0]
    for seed in range(10):
        for rank, offset in enumerate(offsets(grouped(ahead, seed))):
            assert offset.uncertain_us is not None
            assert abs(offset.us - (ahead[rank] - ahead[0])) <= offset.uncertain_us + 1e-3
            assert offset.uncertain_us <= 300.0


def test_where_no_encoding_is_recorded_the_buckets_readiness_bounds_a_push() -> None:
    timelines, _ = served(AHEAD, 5)
    for one in timelines:
        one.events = [event for event in one.events if event["args"]["action"] != "comp@cpu"]
    for one, offset in zip(timelines, offsets(timelines), strict=True):
        assert offset.uncertain_us is not None
        assert abs(offset.us - (AHEAD[one.about.name] - AHEAD["rank 0"])) <= offset.uncertain_us + 1e-3


def test_members_of_one_machine_have_one_clock() -> None:
    timelines, _ = served(
        {"rank 0": 9e5, "server 0": 9e5, "rank 1": 10.0}, 1, clocks={"rank 0": "one", "server 0": "one", "rank 1": "other"}
    )
    first, other, server = offsets(timelines)
    assert first == server == Offset(0.0, 0.0)
    assert other.us == pytest.approx(10.0 - 9e5, abs=200.0)


def test_a_member_that_nothing_relates_to_the_first_keeps_its_times() -> None:
    timelines, _ = served(AHEAD, 1)
    timelines[1].events.clear()
    assert [offset.uncertain_us is None for offset in offsets(timelines)] == [False, True, False]


def test_clocks_that_have_drifted_still_get_an_offset_between_their_bounds() -> None:
    found = solve(2, {(0, 1): 100.0, (1, 0): -140.0})  # ahead by 100 at most, and by 140 at least
    assert found[1].us == pytest.approx(120.0)
    assert solve(1, {}) == [Offset(0.0, 0.0)]
