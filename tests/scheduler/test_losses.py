"""Who gives the job's state to a process that has taken a dead worker's place, and what of the dead one is forgotten."""

from __future__ import annotations

from psgc.scheduler.handovers import Handovers
from psgc.scheduler.published import Values
from psgc.scheduler.rendezvous import Barriers


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
