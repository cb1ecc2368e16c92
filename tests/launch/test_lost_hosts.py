"""Whether a job on several hosts outlives one of them, and who takes its place."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest

from psgc.config import Config
from psgc.launch.job.hostfile import Host
from psgc.launch.job.lost_hosts import LostHosts, check_reserve, fits, smallest
from psgc.launch.job.placing import Place
from psgc.launch.job.remote import Lines, await_order

FIRST = Place(Host("a"), 0, 2, 1, 0, scheduler=True)
BOTH = Place(Host("b"), 1, 2, 1, 1)
WORKERS = Place(Host("c"), 2, 2)
SERVERS = Place(Host("d"), servers=2, first_server=2)
SPARE = Place(Host("e", spare=True), spare=True)


def config(on_loss: str, replicas: bool) -> Config:
    return Config(on_worker_loss=on_loss, replicas=replicas, dead_s=60.0, heartbeat_s=1.0)


@pytest.mark.parametrize(
    ("on_loss", "replicas", "spares", "survived"),
    [
        ("stop", False, 0, []),
        ("stop", True, 0, [SERVERS]),
        ("wait", True, 0, [SERVERS]),
        ("wait", True, 1, [BOTH, WORKERS, SERVERS]),
        ("wait", False, 1, [WORKERS]),
        ("shrink", True, 0, [BOTH, WORKERS, SERVERS]),
        ("shrink", False, 1, [WORKERS]),
    ],
)
def test_a_job_outlives_hosts_of_which_it_has_everything_elsewhere(
    on_loss: str, replicas: bool, spares: int, survived: list[Place]
) -> None:
    losses = LostHosts(config(on_loss, replicas))
    assert [place for place in (FIRST, BOTH, WORKERS, SERVERS) if losses.ends(place, [SPARE] * spares) is None] == survived
    assert losses.ends(SPARE, []) is None


@pytest.mark.parametrize(
    ("place", "on_loss", "replicas", "said"),
    [
        (FIRST, "shrink", True, "it had the scheduler"),
        (BOTH, "shrink", False, "PSGC_REPLICAS=1 keeps it on another host, too"),
        (WORKERS, "stop", True, "a worker's death ends the job (PSGC_ON_WORKER_LOSS)"),
        (BOTH, "wait", True, "no spare host can take its place (`spare HOST` in the hosts' file)"),
    ],
)
def test_why_the_job_ends_is_said_and_what_would_help(place: Place, on_loss: str, replicas: bool, said: str) -> None:
    assert said in str(LostHosts(config(on_loss, replicas)).ends(place, []))


def test_a_spare_host_is_promised_to_one_lost_host_only() -> None:
    losses = LostHosts(config("wait", True))
    assert losses.ends(BOTH, [SPARE]) is None
    losses.lost(BOTH, 0.0)
    assert losses.ends(WORKERS, [SPARE]) is not None
    assert losses.ends(WORKERS, [SPARE, SPARE]) is None


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_large_spare_hosts_are_kept_for_large_places(order: list[int]) -> None:
    small, large = Place(Host("b2"), 1, 2), Place(Host("a8"), 2, 8)
    anything, eight, two = (Place(Host(name, slots, spare=True), spare=True) for name, slots in (("any", 0), ("s8", 8), ("s2", 2)))
    assert smallest([anything, eight, two], small) is two
    assert smallest([anything, eight, two], large) is eight
    assert smallest([anything, two], large) is anything
    assert smallest([two], large) is None
    lost, later = ((small, large)[number] for number in order)
    losses = LostHosts(config("wait", True))
    assert losses.ends(lost, [eight, two]) is None
    losses.lost(lost, 0.0)
    assert losses.ends(later, [eight, two]) is None, "each has a host"
    assert losses.ends(later, [eight]) is not None
    assert losses.ends(later, [two, two]) is not None


def test_a_place_is_taken_only_when_whatever_ran_there_has_ended() -> None:
    losses = LostHosts(config("wait", True))
    losses.lost(SERVERS, 5.0)
    losses.lost(BOTH, 10.0)
    assert losses.due(71.9) is None
    assert losses.due(72.0) == BOTH
    assert losses.due(1000.0) is None, "once, and of servers there is nothing to take"


def test_who_takes_a_place_runs_its_workers_and_numbers_processes_beyond_all_that_were_there() -> None:
    losses = LostHosts(config("wait", True))
    place, more = losses.taken(SPARE, BOTH)
    assert place == Place(SPARE.host, 1, 2)
    assert place.roles == "worker"
    again, later = losses.taken(SPARE, place)
    assert again == place
    assert 10_000 < int(more["PSGC_INCARNATION"]) < int(later["PSGC_INCARNATION"]) - 10_000


def test_a_spare_host_takes_no_more_workers_than_it_has_slots_and_not_its_own_place() -> None:
    assert fits(SPARE, BOTH)
    assert fits(Place(Host("e", 2, spare=True), spare=True), BOTH)
    assert not fits(Place(Host("e", 1, spare=True), spare=True), BOTH)
    assert not fits(Place(Host("b", spare=True), spare=True), BOTH)


def test_spare_hosts_are_refused_where_a_workers_death_ends_the_job() -> None:
    assert "set PSGC_ON_WORKER_LOSS to wait or shrink" in check_reserve(config("stop", True), [SPARE])
    assert check_reserve(config("stop", True), []) == check_reserve(config("wait", True), [SPARE]) == ""


ORDER = {"command": ["true"], "dead_s": 60.0}


@pytest.fixture
def pipes() -> Iterator[list[int]]:
    made: list[int] = []
    yield made
    for end in made:
        os.close(end)


def said(pipes: list[int], *lines: str) -> Lines:
    read, write = os.pipe()
    pipes.append(read)
    os.write(write, "".join(lines).encode())
    os.close(write)
    return Lines(read)


def test_a_spare_host_waits_for_its_order_through_signs_of_life(pipes: list[int]) -> None:
    lines = said(pipes, '{"dead_s": 60}\n', "\n", "\n", json.dumps(ORDER) + "\n", "15\n", "rest")
    assert await_order(lines) == ORDER
    assert lines.next(None) == b"15"
    assert lines.next(None) is None


def test_a_spare_host_whose_launcher_is_gone_or_silent_ends(pipes: list[int]) -> None:
    assert await_order(said(pipes, '{"dead_s": 60}\n', "\n")) is None
    read, write = os.pipe()
    pipes += [read, write]
    os.write(write, b'{"dead_s": 0.05}\n')
    assert await_order(Lines(read)) is None
