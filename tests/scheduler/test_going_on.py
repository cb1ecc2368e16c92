"""Under PSGC_ON_WORKER_LOSS=shrink the job goes on without a worker that dies: whom the scheduler tells, whom nobody awaits any more, and who comes back."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from psgc.scheduler.actions import Action
from psgc.scheduler.losses import TOO_LATE
from psgc.scheduler.rendezvous import Barriers
from psgc.wire.frames import Kind
from psgc.wire.messages import NUMBERS_A_HOST, Declare, ErrorCode, Lookup, Register, Topology
from tests.scheduler.talk import DEAD_S, Job, aborted, declaration, end_of, logged, refused, register, sent
from tests.scheduler.test_next_process import Followed


def of(node: int, incarnation: int = 1) -> Register:
    return register(node=node, pid=1000 + 10 * node + 100 * max(0, incarnation - 1), incarnation=incarnation, shrinks=True)


def shrinking(workers: int = 3, anew: bool = False) -> Followed:
    job = Followed(workers, 1, anew=anew)
    job.note(job.join("s0", register("server", 0, index=0)))
    for node in range(workers):
        job.note(job.join(f"w{node}", of(node)))
    return job


def die(job: Followed, node: int, incarnation: int = 1) -> list[Action]:
    job.dead.add(1000 + 10 * node + 100 * (incarnation - 1))
    actions = [action for _ in range(3) for action in job.note(job.tick(1))]
    job.hear_everyone()
    return actions


@pytest.fixture
def job() -> Followed:
    return shrinking()


def test_servers_are_told_at_once_and_again_and_workers_hear_a_line(job: Followed) -> None:
    actions = die(job, 1)
    beats = sent(actions, Kind.HEARTBEAT)
    assert (beats["s0"].plan, beats["s0"].key, beats["s0"].step) == (1, 1, 2)
    assert "worker 1 (node 1, local rank 0, pid 1010 on host1) died: the others go on without it, 1 of 3 ranks are missing now" in logged(
        actions
    )
    assert set(beats) == {"s0", "w0", "w2"} and "go on without it" in beats["w0"]["text"]
    again = sent(job.say("s0", Kind.HEARTBEAT), Kind.HEARTBEAT)["s0"]
    assert (again.plan, again.key, again.step) == (1, 1, 2)
    assert not sent(die(job, 1), Kind.HEARTBEAT), "it is said once to workers"
    registered = sent(job.join("s0", register("server", 0, index=0)), Kind.HEARTBEAT)["s0"]
    assert (registered.plan, registered.step) == (1, 2), "and on each new connection of a server"


@pytest.mark.parametrize("here", [True, False], ids=["on the scheduler's host", "elsewhere"])
def test_a_worker_that_no_launcher_has_started_is_left_out_as_others_are(here: bool) -> None:
    job = Followed(2, 1)
    job.note(job.join("s0", register("server", 0, index=0)))
    for node in range(2):
        job.note(job.join(f"w{node}", register(node=node, shrinks=True)))
    if here:
        actions = die(job, 1)
    else:
        actions = []
        for _ in range(int(DEAD_S) + 2):
            for peer in ("w0", "s0"):
                job.say(peer, Kind.HEARTBEAT)
            actions += job.note(job.tick(1))
    assert not sent(actions, Kind.ABORT)
    assert "pid 1010 on host1) died: the others go on without it, 1 of 2 ranks are missing now" in logged(actions)
    assert set(sent(job.say("w0", Kind.BARRIER, step=1), Kind.BARRIER)) == {"w0"}


@pytest.mark.parametrize("incarnation", [0, 1])
def test_who_dies_before_everyone_was_there_ends_the_job(incarnation: int) -> None:
    job = Followed(2, 1)
    job.join("w0", of(0, incarnation))
    job.dead = {1000}
    assert "worker (node 0" in aborted(job.run(2))


def test_barriers_are_passed_without_the_dead(job: Followed) -> None:
    job.say("w0", Kind.BARRIER, step=1)
    job.say("w2", Kind.BARRIER, step=1)
    assert set(sent(die(job, 1), Kind.BARRIER)) == {"w0", "w2"}
    assert not sent(job.say("w0", Kind.BARRIER, step=2), Kind.BARRIER)
    assert set(sent(job.say("w2", Kind.BARRIER, step=2), Kind.BARRIER)) == {"w0", "w2"}


def test_a_barrier_at_which_nobody_is_is_not_passed() -> None:
    absent: set[int] = set()
    barriers = Barriers(2, absent)
    barriers.arrive(0, 1, 0.0)
    barriers.forget(0)
    absent.add(0)
    assert barriers.complete() == [] and barriers.arrive(1, 1, 0.0) == [1]


def test_declarations_are_complete_without_the_dead_and_the_lowest_rank_that_lives_gives_the_whole(job: Followed) -> None:
    job.declare("w1", declaration("later"))
    job.declare("w2", declaration("later"))
    job.say("w0", Kind.HEARTBEAT)
    asked = sent(die(job, 0), Kind.DECLARE)
    assert set(asked) == {"w1"}, "rank 0 would have been asked"
    (keys,) = sent(job.say("w1", Kind.DECLARATION, declaration("later").to_json(), plan=1), Kind.KEYS).values()
    assert keys


def test_a_rank_whose_process_before_had_declared_a_name_is_asked_for_the_whole_once_it_declares_it_itself(job: Followed) -> None:
    job.declare("w1", declaration("later"))
    job.declare("w2", declaration("later"))
    job.join("w1b", of(1, 2))
    assert not sent(die(job, 0), Kind.DECLARE), "rank 1 would be asked, but has not asked for a layout yet"
    job.join("w0b", of(0, 2))
    assert not sent(job.declare("w1b", declaration("later")), Kind.DECLARE), "rank 0 is there again"
    assert set(sent(die(job, 0, 2), Kind.DECLARE)) == {"w1b"}
    assert sent(job.say("w1b", Kind.DECLARATION, declaration("later").to_json(), plan=1), Kind.KEYS)


def test_a_declaration_that_differs_from_a_dead_ranks_differs_from_nobodys(job: Followed) -> None:
    job.declare("w0", declaration("x"))
    job.say("w1", Kind.DECLARE, _declare("x", 11), plan=1)
    job.say("w2", Kind.DECLARE, _declare("x", 10), plan=1)
    assert set(sent(die(job, 1), Kind.KEYS)) == {"s0"}


def _declare(name: str, numel: int) -> Declare:
    one = declaration(name, numel)
    return Declare(one.name, one.digest(), one.unused)


def test_a_rank_that_comes_back_is_awaited_again_and_gets_the_state(job: Followed) -> None:
    die(job, 1)
    topology = Topology.from_body(sent(job.join("w1b", of(1, 2)), Kind.TOPOLOGY)["w1b"])
    assert (topology.rank, topology.incarnation) == (1, 2)
    for peer in ("w0", "w2"):
        assert not sent(job.say(peer, Kind.BARRIER, step=1), Kind.BARRIER)
    states = sent(job.say("w1b", Kind.STATE), Kind.STATE)
    assert set(states) == {"w0", "w1b"}
    job.say("w1b", Kind.STATE, key=1)
    assert set(sent(job.say("w1b", Kind.BARRIER, step=1), Kind.BARRIER)) == {"w0", "w1b", "w2"}
    assert job.say("s0", Kind.HEARTBEAT)[0].header.step == 0  # type: ignore[union-attr]
    beats = sent(die(job, 1, 2), Kind.HEARTBEAT)
    assert beats["s0"].key == 2, "servers are told which of the rank's processes it was"


def test_a_worker_that_was_silent_for_too_long_is_told_to_end_and_its_words_are_not_heeded(job: Followed) -> None:
    told = []
    for _ in range(int(DEAD_S) + 3):
        for peer in ("w0", "w2", "s0"):
            job.say(peer, Kind.HEARTBEAT)
        told += [header for header in sent(job.tick(1), Kind.HEARTBEAT).values() if not isinstance(header, dict)]
    assert [(header.plan, header.step) for header in told] == [(1, 2)]
    for kind, body in ((Kind.HEARTBEAT, None), (Kind.BARRIER, None), (Kind.BYE, None), (Kind.LOOKUP, Lookup("x"))):
        said = job.say("w1", kind, body)
        assert set(sent(said, Kind.ABORT)) == {"w1"} and "was silent for so long that it counted as dead" in aborted(said)
    assert "counted as dead" in aborted(job.join("w1 again", of(1)))
    assert not sent(job.say("w0", Kind.HEARTBEAT), Kind.ABORT)


def test_the_job_ends_in_order_when_those_have_left_who_live(job: Followed) -> None:
    die(job, 1)
    job.say("w0", Kind.BYE)
    assert sent(job.say("w2", Kind.BYE), Kind.BYE).keys() == {"s0", "w2"}
    job.say("s0", Kind.BYE)
    end = end_of(job.tick(1))
    assert end is not None and end.status == 0


def test_who_dies_when_others_have_left_ends_nothing(job: Followed) -> None:
    job.say("w0", Kind.BYE)
    job.say("w2", Kind.BYE)
    assert set(sent(die(job, 1), Kind.BYE)) == {"s0"}


def test_who_comes_when_others_have_left_is_not_admitted(job: Followed) -> None:
    die(job, 1)
    job.say("w0", Kind.BYE)
    assert not sent(job.join("w1b", of(1, 2)), Kind.TOPOLOGY)


def test_who_was_admitted_but_finds_nobody_with_the_state_hears_that_it_is_too_late(job: Followed) -> None:
    die(job, 1)
    job.join("w1b", of(1, 2))
    for peer in ("w0", "w2"):
        job.say(peer, Kind.BYE)
    said = job.say("w1b", Kind.STATE)
    assert TOO_LATE in aborted(said) and set(sent(said, Kind.ABORT)) == {"w1b"}
    assert set(sent(die(job, 1, 2), Kind.BYE)) == {"s0"}


def test_a_giver_that_leaves_gives_no_more_and_what_was_looked_up_of_it_ends_nothing(job: Followed) -> None:
    die(job, 1)
    job.join("w1b", of(1, 2))
    states = sent(job.say("w1b", Kind.STATE), Kind.STATE)
    assert states["w0"].plan == 1 and states["w1b"].plan == 0
    job.say("w1b", Kind.LOOKUP, Lookup("state 1/0"), plan=7)
    said = job.say("w0", Kind.BYE)
    assert sent(said, Kind.STATE)["w1b"].plan == 0, "it asks again"
    again = sent(job.say("w1b", Kind.STATE, plan=1), Kind.STATE)
    assert again["w2"].plan == 1
    job.say("w1b", Kind.LOOKUP, Lookup("state 2/2"), plan=8)
    said = job.say("w2", Kind.BYE)
    assert end_of(said) is None and not sent(said, Kind.ABORT)
    assert TOO_LATE in sent(job.say("w1b", Kind.STATE, plan=2), Kind.ABORT)["w1b"]["text"]


def test_when_nobody_is_left_who_has_the_state_the_job_ends_with_a_line(job: Followed) -> None:
    die(job, 1)
    die(job, 2)
    assert "worker 0 (node 0, local rank 0, pid 1000 on host0) died, and no other worker is left" in aborted(die(job, 0))


@pytest.mark.parametrize(("one", "other"), [*itertools.permutations(("stop", "wait", "shrink"), 2)])
def test_the_policy_is_everyones(one: str, other: str) -> None:
    """Whether workers compare what a broadcast is to bring goes by it."""
    job = Job(2, 1)
    for node, policy in enumerate((one, other)):
        actions = job.join(f"w{node}", register(node=node, waits=policy == "wait", shrinks=policy == "shrink"))
    said = aborted(actions)
    assert (
        "worker (node 0, " in said
        and f"has PSGC_ON_WORKER_LOSS={one}, worker (node 1, " in said
        and f"has {other}; set it alike everywhere" in said
    )


@pytest.mark.parametrize("anew", [False, True], ids=["as written", "written anew"])
def test_another_process_of_the_scheduler_knows_who_is_missing(anew: bool) -> None:
    job = shrinking(anew=anew)
    die(job, 1)
    job.follow()
    assert sent(job.join("s0", register("server", 0, index=0)), Kind.HEARTBEAT)["s0"].plan == 1
    job.say("w0", Kind.BARRIER, step=1)
    assert set(sent(job.say("w2", Kind.BARRIER, step=1), Kind.BARRIER)) == {"w0", "w2"}
    job.note(job.join("w1b", of(1, 2)))
    job.note(job.say("w1b", Kind.STATE))
    job.note(job.say("w1b", Kind.STATE, key=1))
    job.follow()
    job.say("w0", Kind.BARRIER, step=2)
    assert not sent(job.say("w2", Kind.BARRIER, step=2), Kind.BARRIER), "the rank is there again"


def test_a_process_of_another_launcher_takes_the_place_of_one_that_has_ended_a_moment_ago(job: Followed) -> None:
    """Launchers count their processes by themselves."""
    another = register(node=1, pid=77, incarnation=1, shrinks=True)
    job.dead = {1010}
    assert sent(job.join("x", another), Kind.TOPOLOGY).keys() == {"x"}


def test_a_stranger_in_a_living_workers_place_is_refused(job: Followed) -> None:
    stranger = register(node=1, pid=77, incarnation=1, shrinks=True)
    assert "another process has taken the place" in refused(job.join("x", stranger), ErrorCode.NOT_ADMITTED)


def hear(job: Followed, waited_ms: dict[str, int]) -> tuple[int, int, int]:
    """The rank that workers hear of as the one that has waited least, how long, and the most that any has."""
    for peer, waited in waited_ms.items():
        answer = sent(job.say(peer, Kind.HEARTBEAT, step=waited), Kind.HEARTBEAT)[peer]
    return answer.plan, answer.key, answer.step


def come_back(job: Followed) -> None:
    job.note(job.join("w1b", of(1, 2)))
    job.note(job.say("w1b", Kind.STATE, key=1))


@pytest.mark.parametrize("quick", [True, False], ids=["at once", "after others have waited"])
@pytest.mark.parametrize("follow", ["", "before", "after"])
@pytest.mark.parametrize("anew", [False, True])
def test_a_rank_whose_process_was_replaced_is_not_the_slowest_for_that(quick: bool, follow: str, anew: bool) -> None:
    """Its next process counts from 0 how long it waits. follow: another process of the scheduler comes before that one, or after it."""
    job, meanwhile = shrinking(anew=anew), 0 if quick else 60000
    assert hear(job, {"w0": 4000, "w1": 7000, "w2": 5000}) == (0, 4000, 7000)
    if not quick:
        die(job, 1)
    if follow == "before":
        job.follow()
    hear(job, {"w0": 4000 + meanwhile, "w2": 5000 + meanwhile})
    come_back(job)
    if follow == "after":
        job.follow()
    assert hear(job, {"w1b": 3000, "w0": 5000 + meanwhile, "w2": 6000 + meanwhile})[:2] == (0, 5000 + meanwhile)
    own = 4000 if follow == "before" else 7000  # what is not known of the former is as the others' least
    assert job.membership.roster.workers()[1].waited_ms == own + meanwhile + 3000


def test_a_rank_that_others_have_waited_for_stays_that_when_its_process_is_replaced(job: Followed) -> None:
    assert hear(job, {"w0": 4000, "w1": 1000, "w2": 5000}) == (1, 1000, 5000)
    die(job, 1)
    hear(job, {"w0": 24000, "w2": 25000})
    come_back(job)
    assert hear(job, {"w0": 24500, "w1b": 100, "w2": 25600}) == (1, 21100, 25600)


def other_launchers(host: str, incarnation: int = 1) -> Register:
    return register(node=1, pid=77 + incarnation, hostname=host, incarnation=incarnation, lineage=ord(host), shrinks=True)


def launched(job: Followed) -> None:
    """Worker 1's present process is of a launcher on another machine, which has started it in the place of one that is lost."""
    job.dead = {1010}
    job.note(job.tick(1))
    job.note(job.tick(1))
    job.note(job.join("B", other_launchers("B")))
    job.hear_everyone()


@pytest.mark.parametrize("follow", [False, True])
def test_a_launcher_that_was_cut_off_does_not_oust_anothers_process_that_is_heard(job: Followed, follow: bool) -> None:
    """It has started its worker again, which counts higher than the one that has the place, of another launcher."""
    launched(job)
    if follow:
        job.follow()
        job.join("B", other_launchers("B"))
    said = refused(job.join("A", other_launchers("A", 2)), ErrorCode.NOT_ADMITTED)
    assert "pid 79 on A is not let in, because worker 1 (node 1, local rank 0, pid 78 on B) has its place" in said
    assert "which another launcher has started with the same DMLC_WORKER_ID" in said
    assert not sent(job.say("B", Kind.HEARTBEAT), Kind.ERROR), "it has its place"


def test_a_launchers_own_next_process_takes_the_place_at_once(job: Followed) -> None:
    launched(job)
    assert sent(job.join("B2", other_launchers("B", 2)), Kind.TOPOLOGY).keys() == {"B2"}


def test_another_launchers_process_takes_the_place_of_one_that_is_not_heard_any_more(job: Followed) -> None:
    launched(job)
    for _ in range(int(DEAD_S) + 1):
        for peer in ("w0", "w2", "s0"):
            job.say(peer, Kind.HEARTBEAT)
        job.tick(1)
    assert sent(job.join("A", other_launchers("A", 2)), Kind.TOPOLOGY).keys() == {"A"}


def test_a_spare_hosts_process_takes_the_place_before_the_lost_one_has_been_silent_for_long(job: Followed) -> None:
    """The job's launcher knows that nothing runs on the lost host any more, and has the spare host's launcher count beyond all that may come of that."""
    launched(job)
    spare = other_launchers("S", 1 + NUMBERS_A_HOST)
    assert sent(job.join("spare", spare), Kind.TOPOLOGY).keys() == {"spare"}
    assert "another process has taken the place" in refused(job.join("A", other_launchers("A", 2)), ErrorCode.NOT_ADMITTED)
    assert "not let in" in refused(job.join("C", other_launchers("C", 2 + NUMBERS_A_HOST)), ErrorCode.NOT_ADMITTED)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"local_size": 3}, "BYTEPS_LOCAL_SIZE=3, and that one had 1"),
        ({"encrypt": True}, "PSGC_ENCRYPT set, unlike that one"),
        ({"shrinks": False}, "PSGC_ON_WORKER_LOSS=shrink not set, unlike that one"),
        ({"shrinks": False, "waits": True}, "PSGC_ON_WORKER_LOSS=wait set, unlike that one"),
        ({"roots": (0, 1)}, "BYTEPS_REDUCE_ROOTS=0,1, and that one had none"),
    ],
)
def test_a_process_with_other_settings_takes_nobodys_place_and_the_job_goes_on(job: Followed, other: dict[str, Any], said: str) -> None:
    job.dead = {1010}
    settings = {"node": 1, "pid": 77, "incarnation": 1, "shrinks": True}
    text = refused(job.join("x", register(**(settings | other))), ErrorCode.NOT_ADMITTED)
    assert f"pid 77 on host1 would take the place of worker 1 (node 1, local rank 0, pid 1010 on host1), but it has {said}" in text
    assert sent(job.join("y", register(**settings)), Kind.TOPOLOGY).keys() == {"y"}
