"""Values that workers publish for each other: kept to the end of the job, answered as soon as they are there."""

from __future__ import annotations

import pytest

from psgc.scheduler import published
from psgc.scheduler.actions import Send
from psgc.wire.frames import Kind
from psgc.wire.messages import ErrorCode, Lookup, Published
from tests.scheduler.talk import DEAD_S, SILENCE_S, STEP_S, Job, aborted, complete, logged, refused, register, sent

VALUE = Published.of("place", b"\0here")


def answers(actions: list[object]) -> dict[str, tuple[int, bytes]]:
    """Request ids and values of the answers to LOOKUP, by receiver."""
    bodies = sent(actions, Kind.LOOKUP)  # type: ignore[arg-type]
    requests = {a.peer.decode(): a.header.plan for a in actions if isinstance(a, Send) and a.header.kind == Kind.LOOKUP}
    return {peer: (requests[peer], Published(**body).data) for peer, body in bodies.items()}


def test_a_value_is_told_to_whoever_asks_before_or_after_it_is_published() -> None:
    job = complete(nodes=3)
    assert job.say("w0", Kind.LOOKUP, Lookup("place"), plan=5) == []
    assert job.say("w2", Kind.LOOKUP, Lookup("another"), plan=6) == []
    published_ = job.say("w1", Kind.PUBLISH, VALUE, plan=9)
    assert sent(published_, Kind.PUBLISH)["w1"].plan == 9, "the publisher hears that the value is kept"
    assert answers(published_) == {"w0": (5, b"\0here")}
    for peer, request in (("w2", 7), ("w1", 10), ("w0", 5)):
        assert answers(job.say(peer, Kind.LOOKUP, Lookup("place"), plan=request)) == {peer: (request, b"\0here")}


def test_what_is_said_twice_counts_once_and_is_answered_again() -> None:
    job = complete()
    for _ in range(2):
        assert job.say("w0", Kind.LOOKUP, Lookup("place"), plan=1) == []
    for times in (1, 0):
        actions = job.say("w1", Kind.PUBLISH, VALUE, plan=1)
        assert list(sent(actions, Kind.PUBLISH)) == ["w1"]
        assert len(answers(actions)) == times


@pytest.mark.parametrize("other", ["w0", "w1"])
def test_another_value_under_the_same_name_ends_the_job(other: str) -> None:
    job = complete()
    job.say("w0", Kind.PUBLISH, VALUE, plan=1)
    job.say(other, Kind.PUBLISH, VALUE, plan=2)
    text = aborted(job.say(other, Kind.PUBLISH, Published.of("place", b"there"), plan=3))
    who = "rank 0" if other == "w0" else "rank 0 and rank 1"
    assert text == f"{who} published two different values under the name 'place'; a name has one value in a job"


def test_a_job_keeps_only_so_many_values_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, most in (("MAX_VALUES", 3), ("MAX_VALUES_BYTES", 3 * (len("n0") + 8))):
        with monkeypatch.context() as patch:
            patch.setattr(published, limit, most)
            job = complete()
            for number in range(3):
                assert sent(job.say("w0", Kind.PUBLISH, Published.of(f"n{number}", bytes(6)), plan=1), Kind.PUBLISH)
            assert sent(job.say("w0", Kind.PUBLISH, Published.of("n1", bytes(6)), plan=1), Kind.PUBLISH), "no new one"
            text = aborted(job.say("w0", Kind.PUBLISH, Published.of("n3", bytes(6)), plan=1))
            assert "rank 0 published 'n3', but a job keeps at most" in text


def test_a_value_that_nobody_publishes_is_named_and_fails_at_its_limit() -> None:
    job = complete(nodes=3)
    job.say("w2", Kind.LOOKUP, Lookup("place"), plan=1)
    job.say("w0", Kind.LOOKUP, Lookup("place"), plan=1)
    named = ""
    for _ in range(int(STEP_S) + 1):
        job.hear_everyone()
        actions = job.tick(1)
        if not named and logged(actions):
            named = logged(actions)
            assert set(sent(actions, Kind.HEARTBEAT)) == {"w0", "w1", "w2"}
    assert named == f"the value 'place' has awaited its publication, for rank(s) 0, 2, for {SILENCE_S:.0f} s"
    assert "the value 'place' has awaited its publication, for rank(s) 0, 2, for 601 s" in aborted(actions)
    assert "PSGC_STEP_TIMEOUT_S" in aborted(actions)


def test_time_during_which_the_scheduler_was_suspended_does_not_count() -> None:
    job = complete()
    job.say("w0", Kind.LOOKUP, Lookup("place"), plan=1)
    job.tick(1)
    assert sent(job.tick(DEAD_S + STEP_S), Kind.ABORT) == {}
    job.hear_everyone()
    assert sent(job.tick(1), Kind.ABORT) == {}


def test_who_waits_for_a_value_when_all_others_have_left_is_told() -> None:
    job = complete(nodes=3)
    job.say("w0", Kind.LOOKUP, Lookup("place"), plan=1)
    assert sent(job.say("w1", Kind.BYE), Kind.ABORT) == {}, "worker 2 may publish it yet"
    text = aborted(job.say("w2", Kind.BYE))
    assert text == "the value 'place' awaits its publication, for rank(s) 0, and all other ranks have left the job: nobody can publish it"


def test_only_workers_of_a_complete_job_publish_and_look_up() -> None:
    job = complete()
    for kind, body in ((Kind.PUBLISH, VALUE), (Kind.LOOKUP, Lookup("place"))):
        assert f"a server does not send {kind.name}" in refused(job.say("s0", kind, body), ErrorCode.UNKNOWN_KIND)
    alone = Job(nodes=2)
    alone.join("w0", register(node=0))
    assert "before everyone is there" in refused(alone.say("w0", Kind.PUBLISH, VALUE), ErrorCode.NOT_ADMITTED)
