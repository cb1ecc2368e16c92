"""Who gives the job's state to a process that has taken a dead worker's place, and what of the dead one is forgotten."""

from __future__ import annotations

from psgc.scheduler.handovers import Handovers
from psgc.scheduler.published import Values
from psgc.scheduler.rendezvous import Barriers
from psgc.wire.frames import Kind
from tests.scheduler.talk import STEP_S, Job, logged, register


def test_the_lowest_rank_that_has_the_state_gives_it() -> None:
    handovers = Handovers()
    handovers.replaced(0)
    handovers.replaced(1)
    first = handovers.ask(0, 0, range(4))
    assert first is not None and (first.giver, first.taker, first.number) == (2, 0, 1)
    other = handovers.ask(1, 0, range(4))
    assert other is not None and (other.giver, other.number) == (2, 2)
    handovers.done(0)
    assert handovers.ask(1, 0, range(4)) == other, "asked again, it is the same, until it has failed"
    after = handovers.ask(1, 1, range(4))
    assert after is not None and (after.giver, after.number) == (0, 3), "rank 0 has the state by now"


def test_a_giver_that_ends_is_followed_by_another_and_nobody_without_state_gives_it() -> None:
    handovers = Handovers()
    handovers.replaced(1)
    assert handovers.ask(1, 0, (0, 1, 2)) is not None
    assert handovers.fail(0) == [1] and handovers.fail(0) == []
    handovers.replaced(0)
    again = handovers.ask(1, 0, (0, 1, 2))
    assert again is not None and (again.giver, again.number) == (2, 2)
    assert handovers.ask(1, 1, (0, 1)) is None


def test_barriers_and_values_forget_a_rank_that_has_died() -> None:
    barriers, values = Barriers(2), Values(2)
    assert barriers.arrive(0, 1, 0.0) == []
    barriers.forget(0)
    assert barriers.arrive(1, 1, 0.0) == [], "the others wait until its next process has come"
    assert barriers.arrive(0, 1, 0.0) == [0, 1]
    assert values.look_up(0, 1, "where", 0.0) is None and values.look_up(1, 2, "where", 0.0) is None
    values.give_up(0)
    assert values.publish(1, "where", "") == {1: 2}
    assert values.look_up(0, 1, "never", 0.0) is None
    values.give_up(0)
    assert values.open() == []


def test_a_barrier_that_awaits_a_new_process_is_late_from_its_coming_on() -> None:
    """It has to prepare, and to get the job's state."""
    job = Job(nodes=2)
    job.join("s0", register("server", index=0))
    for node in range(2):
        job.join(f"w{node}", register(node=node, incarnation=1))

    def hears(seconds: float) -> str:
        said = []
        for _ in range(int(seconds)):
            job.hear_everyone()
            said += job.tick(1)
        return logged(said)

    job.say("w0", Kind.BARRIER, step=1)
    assert "more than the limit" not in hears(STEP_S - 100)
    job.dead.add(register(node=1).pid)
    job.tick(1)
    job.join("w1 again", register(node=1, pid=5000, incarnation=2))
    assert "more than the limit" not in hears(STEP_S - 1), "counted from the barrier's beginning it would be over"
    assert "has awaited rank(s) 1 for 601 s, more than the limit of 600 s (PSGC_STEP_TIMEOUT_S)" in hears(5)
