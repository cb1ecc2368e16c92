"""A server's process that takes the place of another in a job: what the scheduler says to it, and what it no longer heeds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from psgc.scheduler.deaths import LAST_WORDS_S
from psgc.wire.frames import Kind
from psgc.wire.messages import ErrorCode, Topology
from tests.scheduler.talk import DEAD_S, Job, aborted, declaration, logged, refused, register, sent

LINEAGE = 4711


def server(incarnation: int, **other: Any) -> Any:
    return register("server", 0, index=0, incarnation=incarnation, lineage=LINEAGE, **{"pid": 2000 + incarnation, **other})


def complete(workers: int = 2) -> Job:
    job = Job(workers, 1)
    job.join("s1", server(1))
    for node in range(workers):
        job.join(f"w{node}", register(node=node))
    return job


def declare(job: Job, name: str) -> int:
    """All workers declare it. Returns the layout's number, which the server has been told."""
    for node in range(job.nodes):
        actions = job.declare(f"w{node}", declaration(name))
    keys = [action.header.plan for action in actions if getattr(action, "header", None) is not None and action.header.kind == Kind.KEYS]
    assert len(keys) == 1
    return int(keys[0])


def test_the_next_process_of_a_server_gets_its_place_and_every_layout_again() -> None:
    job = complete()
    first = declare(job, "first")
    job.say("s1", Kind.KEYS_READY, plan=first)
    second = declare(job, "second")
    actions = job.join("s2", server(2))
    topology = Topology.from_body(sent(actions, Kind.TOPOLOGY)["s2"])
    assert (topology.rank, topology.layouts) == (0, 2)
    assert [action.header.plan for action in actions if getattr(action, "header", None) and action.header.kind == Kind.KEYS] == [
        first,
        second,
    ]
    assert "server 0 (pid 2001" in logged(actions)
    again = job.join("s2", replace(server(2)))
    assert [action.header.plan for action in again if getattr(action, "header", None) and action.header.kind == Kind.KEYS] == [
        first,
        second,
    ], "as lost"
    assert not job.say("s2", Kind.KEYS_READY, plan=first), "workers have that layout"
    assert set(sent(job.say("s2", Kind.KEYS_READY, plan=second), Kind.LAYOUT)) == {"w0", "w1"}
    assert list(job.membership.agreements.declarations.unready(0)) == []  # type: ignore[union-attr]


def test_the_first_process_of_a_server_lets_workers_in_at_once() -> None:
    job = complete()
    declare(job, "first")
    again = Topology.from_body(sent(job.join("s1", server(1)), Kind.TOPOLOGY)["s1"])
    assert again.layouts == 0


def test_what_a_former_process_still_says_is_not_heeded() -> None:
    job = complete()
    number = declare(job, "first")
    job.join("s2", server(2))
    assert "register first" in refused(job.say("s1", Kind.KEYS_READY, plan=number), ErrorCode.NOT_ADMITTED)
    assert job.join("s1", server(1)) == [], "nor its registration"
    assert set(sent(job.say("s2", Kind.KEYS_READY, plan=number), Kind.LAYOUT)) == {"w0", "w1"}


def test_a_server_whose_launcher_can_start_it_again_is_given_time_for_that() -> None:
    job = complete()
    job.dead = {2001}
    job.here = {1000, 1010}
    assert not [action for action in job.run(int(LAST_WORDS_S + DEAD_S)) if sent([action], Kind.ABORT)]
    assert "died and was not started again within" in aborted(job.run(3))


def test_a_server_that_nobody_starts_again_ends_the_job_at_once() -> None:
    job = Job(1, 1)
    job.join("s1", register("server", 0, index=0))
    job.join("w0", register())
    job.dead = {2000}
    assert "its process is gone" in aborted(job.run(3))


def test_a_process_that_comes_back_before_everyone_is_there_has_its_place_too() -> None:
    job = Job(1, 1)
    job.join("s1", server(1))
    job.join("s2", server(2))
    topologies = sent(job.join("w0", register()), Kind.TOPOLOGY)
    assert set(topologies) == {"s2", "w0"}


def test_a_process_that_listens_elsewhere_ends_the_job() -> None:
    assert "workers do not find it" in aborted(complete().join("s2", server(2, address="tcp://elsewhere:1")))
