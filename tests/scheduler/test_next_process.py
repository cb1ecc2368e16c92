"""A scheduler's state machine that goes on from what another has written down: what members have heard still holds."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

import pytest

from psgc.errors import RemoteProtocolError
from psgc.scheduler.actions import Action, Keep
from psgc.scheduler.deaths import LAST_WORDS_S
from psgc.scheduler.membership import Membership
from psgc.scheduler.records import Complete, Record, Served, from_json, to_json
from psgc.wire.frames import Kind
from psgc.wire.messages import ErrorCode, Lookup, Published, Register, Topology
from psgc.wire.reports import Report
from tests.scheduler.talk import (
    DEAD_S,
    JOB,
    REGISTER_S,
    SILENCE_S,
    STEP_S,
    Job,
    aborted,
    declaration,
    end_of,
    logged,
    refused,
    register,
    sent,
)


@dataclass
class Followed(Job):
    """A job whose scheduler's process may end. anew: the journal was written anew just before."""

    anew: bool = False
    written: list[Record] = field(default_factory=list)

    def note(self, actions: list[Action]) -> list[Action]:
        self.written += [action.record for action in actions if isinstance(action, Keep)]
        return actions

    def follow(self) -> None:
        """Another process takes the scheduler's place."""
        records = list(self.membership.records()) if self.anew else self.written
        found = [from_json(json.loads(json.dumps(to_json(record)))) for record in records]
        self.membership = Membership(self.nodes, self.servers, JOB, self.now, self._alive, SILENCE_S, DEAD_S, REGISTER_S, STEP_S)
        self.membership.resume(found, self.now)
        self.written = found


@pytest.fixture(params=[False, True], ids=["as written", "written anew"])
def job(request: pytest.FixtureRequest) -> Followed:
    job = Followed(2, 1, anew=request.param)
    for index in range(job.servers):
        job.note(job.join(f"s{index}", register("server", index, index=index)))
    for node in range(job.nodes):
        job.note(job.join(f"w{node}", register(node=node)))
    return job


def laid_out(job: Followed, name: str) -> None:
    for node in range(job.nodes):
        job.note(job.declare(f"w{node}", declaration(name)))


def test_members_of_a_job_are_refused_by_a_scheduler_that_knows_nothing_of_it(job: Followed) -> None:
    laid_out(job, "model")
    fresh = Job(2, 1)
    followed = register("server", index=0, pid=5, incarnation=2, lineage=9, goes_on=True)
    for peer, own in (("s0", register("server", index=0)), ("s1", followed), ("w0", register(node=0)), ("w1", register(node=1))):
        said = fresh.say(peer, Kind.REGISTER, own, epoch=job.membership.epoch)
        assert "is in a job whose scheduler has ended, and has left this one nothing to go on from" in refused(said, ErrorCode.NOT_ADMITTED)
    said = fresh.say("w1", Kind.HEARTBEAT, epoch=job.membership.epoch)  # queued before there was a new connection, on which it registers
    assert "is in a job whose scheduler has ended, and has left this one nothing to go on from" in refused(said, ErrorCode.NOT_ADMITTED)
    assert "register first" in refused(fresh.say("w2", Kind.HEARTBEAT), ErrorCode.NOT_ADMITTED)
    assert not list(fresh.membership.roster), "and this one's own members are awaited"
    fresh.join("own", register(node=0, pid=7))
    assert len(list(fresh.membership.roster)) == 1


def test_members_that_register_again_have_their_places_and_hear_of_the_next_process(job: Followed) -> None:
    job.follow()
    again = Topology.from_body(sent(job.join("w1", register(node=1)), Kind.TOPOLOGY)["w1"])
    assert (again.rank, again.size, again.epoch) == (1, 2, job.membership.epoch)
    assert job.membership.agreements is not None


def test_a_member_is_known_by_its_connection_before_it_registers_again(job: Followed) -> None:
    job.follow()
    assert sent(job.say("w0", Kind.HEARTBEAT), Kind.HEARTBEAT)
    assert "register first" in refused(job.say("stranger", Kind.HEARTBEAT), ErrorCode.NOT_ADMITTED)
    assert "everyone is already there" in refused(job.join("w9", register(node=1, pid=9)), ErrorCode.NOT_ADMITTED)


@pytest.mark.parametrize("anew", [False, True])
def test_a_member_is_known_by_its_connection_though_it_was_admitted_by_an_older_one(anew: bool) -> None:
    """The message of a connection that another one had replaced: the answer is lost, and what the member says to the next process may come before it
    registers there."""
    job = Followed(2, 1, anew=anew)
    for peer, each in (("s0", register("server", 0, index=0)), ("w0", register(node=0)), ("\0w1", register(node=1))):
        job.note(job.join(peer, each))
    job.note(job.join("w1", register(node=1)))
    for _ in range(2):
        job.follow()
        assert sent(job.say("w1", Kind.HEARTBEAT), Kind.HEARTBEAT)
    written = len(job.written)
    job.note(job.join("w1", register(node=1)))
    assert len(job.written) == written, "on further connections nothing is new"


def test_layouts_keep_their_numbers_and_those_that_servers_had_are_not_prepared_again(job: Followed) -> None:
    laid_out(job, "first")
    job.note(job.say("s0", Kind.KEYS_READY, plan=1))
    laid_out(job, "second")
    job.follow()
    keys = [
        a.header.plan for a in job.join("s0", register("server", 0, index=0)) if getattr(a, "header", None) and a.header.kind == Kind.KEYS
    ]
    assert keys == [2], "what the server has not answered"
    again = job.declare("w1", declaration("first"))
    assert sent(again, Kind.LAYOUT)["w1"]["id"] == 1
    job.declare("w1", declaration("second"))
    assert set(sent(job.say("s0", Kind.KEYS_READY, plan=2), Kind.LAYOUT)) == {"w1"}, "the other has not asked again yet"
    assert sent(job.declare("w0", declaration("second")), Kind.LAYOUT)["w0"]["id"] == 2
    laid_out(job, "third")
    assert job.membership.agreements is not None
    assert job.membership.agreements.declarations.layouts == 3


def test_a_whole_declaration_that_the_process_before_has_asked_for_is_asked_for_again(job: Followed) -> None:
    job.say("w0", Kind.HEARTBEAT)
    job.follow()
    assert job.say("w0", Kind.DECLARATION, declaration("late").to_json(), plan=1) == []
    laid_out(job, "late")
    assert job.membership.agreements is not None
    assert job.membership.agreements.declarations.layouts == 1


def test_a_barrier_that_one_has_passed_the_others_pass_too(job: Followed) -> None:
    job.note(job.say("w0", Kind.BARRIER, step=1))
    assert set(sent(job.note(job.say("w1", Kind.BARRIER, step=1)), Kind.BARRIER)) == {"w0", "w1"}
    job.follow()
    assert set(sent(job.say("w1", Kind.BARRIER, step=1), Kind.BARRIER)) == {"w1"}
    assert sent(job.say("w0", Kind.BARRIER, step=2), Kind.BARRIER) == {}


def test_published_values_are_kept_once(job: Followed) -> None:
    job.note(job.say("w0", Kind.PUBLISH, Published.of("where", b"here"), plan=1))
    again = job.note(job.say("w0", Kind.PUBLISH, Published.of("where", b"here"), plan=1))
    assert not [action for action in again if isinstance(action, Keep)]
    job.follow()
    assert set(sent(job.say("w1", Kind.LOOKUP, Lookup("where"), plan=7), Kind.LOOKUP)) == {"w1"}


def test_turns_go_on_where_they_were(job: Followed) -> None:
    laid_out(job, "model")
    key = 1 << 48
    for step in (1, 2):
        for rank in (0, 1):
            turned = job.note(job.say(f"w{rank}", Kind.TURN, key=key, step=step, plan=0))
    assert {peer: (h.plan, h.step) for peer, h in sent(turned, Kind.TURN).items()} == {"w0": (1, 2), "w1": (1, 2)}
    job.follow()
    (again,) = sent(job.say("w1", Kind.TURN, key=key, step=2, plan=1), Kind.TURN).values()
    assert (again.plan, again.step) == (1, 2), "whoever has not got it gets the same"
    for rank in (0, 1):
        turned = job.say(f"w{rank}", Kind.TURN, key=key, step=3, plan=2)
    assert {h.plan for h in sent(turned, Kind.TURN).values()} == {2}


def test_who_has_left_is_not_taken_for_dead_and_the_job_ends_when_all_have(job: Followed) -> None:
    job.here = {1000, 1010, 2000}
    job.note(job.say("w0", Kind.BYE))
    job.dead = {1000}
    job.follow()
    assert not any(sent([action], Kind.ABORT) for action in job.run(int(LAST_WORDS_S + DEAD_S)))
    job.note(job.say("w1", Kind.BYE))
    job.follow()
    assert set(sent(job.tick(1), Kind.BYE)) == {"s0"}
    end = end_of(job.say("s0", Kind.BYE))
    assert end is not None
    assert end.status == 0


def test_a_job_that_had_failed_stays_failed_with_its_reason(job: Followed) -> None:
    job.note(job.membership.abort("why it failed", job.now))
    job.follow()
    assert aborted(job.say("w0", Kind.HEARTBEAT)) == "why it failed"


def test_a_member_that_died_meanwhile_is_found(job: Followed) -> None:
    job.dead = {1010}
    job.follow()
    assert "worker 1" in aborted(job.run(int(LAST_WORDS_S) + 2))


def test_a_server_whose_place_was_taken_is_known_as_the_process_that_has_it(job: Followed) -> None:
    job = Followed(1, 1, anew=job.anew)
    job.note(job.join("s1", register("server", 0, index=0, incarnation=1, lineage=3)))
    job.note(job.join("w0", register(node=0, nodes=1)))
    laid_out(job, "model")
    job.note(job.say("s1", Kind.KEYS_READY, plan=1))
    second = register("server", 0, index=0, incarnation=2, lineage=3, pid=77)
    job.note(job.join("s2", second))
    job.follow()
    again = job.join("s2", second)
    assert Topology.from_body(sent(again, Kind.TOPOLOGY)["s2"]).layouts == 1
    assert set(sent(again, Kind.KEYS)) == {"s2"}, "its answer may be lost"
    assert job.join("s1", register("server", 0, index=0, incarnation=1, lineage=3)) == [], "a former process"


@pytest.mark.parametrize("records", [[Served(1)], [Complete(1)]])
def test_a_journal_that_contradicts_itself_is_refused(records: list[Record]) -> None:
    membership = Membership(1, 0, JOB, 0.0)
    with pytest.raises(RemoteProtocolError):
        membership.resume(records, 0.0)


def of_worker(incarnation: int, node: int = 1) -> Register:
    return register(node=node, pid=1000 + 10 * node + 100 * (incarnation - 1), incarnation=incarnation)


@pytest.fixture
def followed(job: Followed) -> Followed:
    """A job whose rank 1 was followed by another process."""
    job = Followed(2, 1, anew=job.anew)
    job.note(job.join("s0", register("server", 0, index=0)))
    for node in range(2):
        job.note(job.join(f"w{node}", of_worker(1, node)))
    job.dead = {1010}
    for _ in range(3):
        job.note(job.tick(1))
    job.note(job.join("w1b", of_worker(2)))
    return job


def test_a_worker_whose_place_was_taken_is_known_as_the_process_that_has_it(followed: Followed) -> None:
    asked = followed.note(followed.say("w1b", Kind.STATE))
    assert set(sent(asked, Kind.STATE)) == {"w0", "w1b"}
    followed.note(followed.say("w1b", Kind.STATE, key=1))
    followed.follow()
    again = Topology.from_body(sent(followed.join("w1b", of_worker(2)), Kind.TOPOLOGY)["w1b"])
    assert (again.rank, again.incarnation) == (1, 2)
    followed.dead = {1010, 1000}
    for _ in range(3):
        followed.note(followed.tick(1))
    followed.note(followed.join("w0b", of_worker(2, 0)))
    (to_giver,) = (h for peer, h in sent(followed.say("w0b", Kind.STATE), Kind.STATE).items() if peer == "w1b")
    assert to_giver.step == 2, "handovers have numbers of their own in the job"


def test_a_state_that_was_still_to_be_given_is_given_in_another_handover(followed: Followed) -> None:
    before = sent(followed.note(followed.say("w1b", Kind.STATE)), Kind.STATE)
    assert {peer: header.step for peer, header in before.items()} == {"w0": 1, "w1b": 1}
    followed.follow()
    assert Topology.from_body(sent(followed.join("w1b", of_worker(2)), Kind.TOPOLOGY)["w1b"]).incarnation == 2
    anew = sent(followed.note(followed.say("w1b", Kind.STATE)), Kind.STATE)
    assert {peer: (header.plan, header.step) for peer, header in anew.items()} == {"w0": (1, 2), "w1b": (0, 2)}
    followed.note(followed.say("w1b", Kind.STATE, key=1))
    followed.follow()
    followed.dead = {1010, 1000}
    assert not sent(followed.run(3), Kind.ABORT), "rank 1 has the state"


def test_who_may_have_got_the_state_meanwhile_is_asked_before_the_job_is_given_up(followed: Followed) -> None:
    followed.note(followed.say("w1b", Kind.STATE))
    followed.follow()  # it ends before it has heard that rank 1 has the state
    followed.dead = {1010, 1000}
    assert not sent(followed.run(3), Kind.ABORT)
    followed.note(followed.join("w0b", of_worker(2, 0)))
    assert not sent(followed.say("w0b", Kind.STATE), Kind.STATE)
    followed.note(followed.say("w1b", Kind.STATE, key=1))
    assert set(sent(followed.say("w0b", Kind.STATE), Kind.STATE)) == {"w0b", "w1b"}


def test_who_says_that_it_has_not_got_the_state_is_not_waited_for(followed: Followed) -> None:
    followed.follow()
    followed.dead = {1010, 1000}
    followed.run(3)
    assert "no other worker is left to give it the job's state" in aborted(followed.say("w1b", Kind.STATE))


def test_a_layout_of_some_ranks_stays_theirs(job: Followed) -> None:
    job.note(job.declare("w1", declaration("half", members=(1,))))
    job.note(job.say("s0", Kind.KEYS_READY, plan=1))
    job.follow()
    assert set(sent(job.declare("w1", declaration("half", members=(1,))), Kind.LAYOUT)) == {"w1"}
    assert set(sent(job.say("w1", Kind.BARRIER, plan=1, step=1), Kind.BARRIER)) == {"w1"}


@pytest.fixture
def mourned(job: Followed) -> Followed:
    """A job whose rank 1, on a machine that says nothing any more, has been said to be dead."""
    job = Followed(2, 1, anew=job.anew)
    job.note(job.join("s0", register("server", 0, index=0)))
    for node in range(2):
        job.note(job.join(f"w{node}", replace(of_worker(1, node), lineage=10 + node)))
    assert "worker 1 (node 1, local rank 0, pid 1010 on host1) died" in logged(silent(job, DEAD_S + 2))
    return job


def silent(job: Followed, seconds: float) -> list[Action]:
    """Rank 1 says nothing."""
    said: list[Action] = []
    for _ in range(int(seconds)):
        for peer in ("s0", "w0"):
            job.say(peer, Kind.HEARTBEAT)
        said += job.note(job.tick(1))
    return said


def test_a_worker_that_was_said_to_be_dead_stays_so_and_its_place_is_free(mourned: Followed) -> None:
    mourned.follow()
    assert not logged(silent(mourned, DEAD_S)), "it has been said"
    mourned.follow()
    elsewhere = register(node=1, pid=5000, host="boot/other", hostname="other", incarnation=1, lineage=99)
    said = mourned.note(mourned.join("new", elsewhere))
    assert Topology.from_body(sent(said, Kind.TOPOLOGY)["new"]).incarnation == 2
    mourned.follow()
    assert not logged(silent(mourned, SILENCE_S - 1)), "another has its place"
    assert sent(mourned.join("new", elsewhere), Kind.TOPOLOGY)


def test_a_worker_that_was_said_to_be_dead_and_was_heard_after_all_is_alive_to_the_next_process(mourned: Followed) -> None:
    mourned.follow()
    mourned.say("w1", Kind.HEARTBEAT)
    assert "w1" in sent(mourned.note(mourned.tick(1)), Kind.REGISTER), "it is to say again what was forgotten"
    mourned.follow()
    elsewhere = register(node=1, pid=5000, host="boot/other", hostname="other", incarnation=1, lineage=99)
    assert "another process has taken the place of worker 1" in refused(mourned.join("new", elsewhere), ErrorCode.NOT_ADMITTED)


def test_a_worker_that_was_said_to_be_dead_is_waited_for_no_longer_than_by_one_process(mourned: Followed) -> None:
    mourned.follow()
    assert "was not started again within 300 s (PSGC_REGISTER_TIMEOUT_S)" in aborted(silent(mourned, REGISTER_S + 1))


def test_connections_that_broke_before_the_process_before_ended_are_no_news(job: Followed) -> None:
    report = Report(1000, 0, steps=1, reconnects=2)
    for reconnects in (2, 3):
        job.say("w1", Kind.REPORT, replace(report, reconnects=reconnects))
    assert [event.text for event in job.membership.events.told(job.now)] == ["rank 1 has lost a connection to a server and made it again"]
    job.follow()
    job.say("w1", Kind.REPORT, replace(report, reconnects=3))
    assert not job.membership.events.told(job.now)
    job.say("w1", Kind.REPORT, replace(report, reconnects=5))
    assert [event.text for event in job.membership.events.told(job.now)] == [
        "rank 1 has lost a connection to a server and made it again, 2 times"
    ]
