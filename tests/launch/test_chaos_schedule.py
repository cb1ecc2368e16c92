"""What happens to a job is a pure function of a seed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from psgc.errors import UsageError
from psgc.launch.chaos.recovery import LEAST_S, bars, bucket_of, histogram, summary
from psgc.launch.chaos.schedule import FOR_S, KINDS, ROLES, Event, kinds_of, roles_of, schedule

SERVICES = roles_of("server,scheduler")


def test_a_seed_always_means_the_same_and_another_seed_something_else() -> None:
    assert schedule(7, 50, SERVICES, KINDS, 1.0) == schedule(7, 50, SERVICES, KINDS, 1.0)
    assert schedule(7, 50, SERVICES, KINDS, 1.0) != schedule(8, 50, SERVICES, KINDS, 1.0)


def test_the_schedule_of_a_seed_is_fixed() -> None:
    """A seed in a report must mean the same in the next version."""
    assert schedule(7, 2, SERVICES, KINDS, 1.0) == (
        Event(0, "cut", "scheduler", 0.8062202990543818, 0.85, False),
        Event(1, "kill", "scheduler", 0.14297146322604581, 0.797, False),
    )


def test_a_shorter_schedule_is_the_beginning_of_a_longer_one() -> None:
    assert schedule(3, 100, SERVICES, KINDS, 1.0)[:10] == schedule(3, 10, SERVICES, KINDS, 1.0)


def test_every_kind_happens_to_every_role_and_its_numbers_are_in_bounds() -> None:
    events = schedule(0, 2000, ROLES, KINDS, 2.0)
    seen = Counter((event.kind, event.role) for event in events)
    assert len(seen) == len(KINDS) * len(ROLES)
    assert min(seen.values()) > 100
    assert [event.number for event in events] == list(range(2000))
    for event in events:
        assert 1.0 <= event.pause_s <= 3.0
        assert (event.for_s > 0) == (event.kind in ("stop", "slow"))
        assert (event.rate > 0) == (event.kind == "slow")
        assert FOR_S[0] <= event.for_s <= FOR_S[1] or not event.for_s
    assert 200 < sum(event.together for event in events) < 400


def test_some_kills_are_followed_by_another_one_while_a_process_comes_into_the_killed_ones_place() -> None:
    events = schedule(0, 2000, ROLES, KINDS, 1.0)
    kills = [event for event in events if event.kind == "kill"]
    seen = Counter((event.role, event.again) for event in kills if event.again is not None)
    assert set(seen) == {(role, again) for role in ROLES for again in (role, "scheduler")} and min(seen.values()) > 15
    assert not any(event.again for event in events if event.kind != "kill")
    assert all(event.again in (None, "worker") for event in schedule(0, 500, roles_of("worker"), KINDS, 1.0)), (
        "of the roles that are chosen"
    )
    assert [replace(event, again=None, again_s=0.0) for event in kills] != kills


def test_a_member_is_chosen_by_its_share_whatever_the_number() -> None:
    events = schedule(1, 3000, SERVICES, KINDS, 1.0)
    for members in (1, 2, 5):
        chosen = Counter(event.of(members) for event in events)
        assert set(chosen) == set(range(members))
        assert min(chosen.values()) > 3000 / members * 0.8


@pytest.mark.parametrize("text", ["", "srver", "server,all", ","])
def test_roles_and_kinds_that_there_are_not_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"chaos: --roles .*: expected one or more of server,scheduler,worker"):
        roles_of(text)
    with pytest.raises(UsageError, match=r"chaos: --kinds .*: expected one or more of kill,stop,cut,slow"):
        kinds_of(text)


def test_the_order_in_which_they_are_named_does_not_matter() -> None:
    assert kinds_of("stop, kill") == kinds_of("kill,stop") == ("kill", "stop")


# recovery


@pytest.mark.parametrize(
    ("seconds", "bucket"), [(0, 0), (LEAST_S, 0), (LEAST_S * 1.001, 1), (2 * LEAST_S, 1), (0.3, 2), (1.0, 3), (1.01, 4)]
)
def test_buckets_double(seconds: float, bucket: int) -> None:
    assert bucket_of(seconds) == bucket


def test_a_histogram_has_every_time_in_the_bucket_whose_bound_it_does_not_exceed() -> None:
    times = [0.1, 0.2, 0.2, 0.9, 5.0]
    found = histogram(times)
    assert found == [(0.125, 1), (0.25, 2), (0.5, 0), (1.0, 1), (2.0, 0), (4.0, 0), (8.0, 1)]
    assert sum(count for _, count in found) == len(times)
    assert [line.count("#") for line in bars(times)] == [20, 40, 0, 20, 0, 0, 20]
    assert summary(times)["median_s"] == 0.2
    assert summary([]) == {"count": 0, "median_s": None, "longest_s": None, "histogram": []}
