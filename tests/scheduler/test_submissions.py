"""A job without servers: layouts go to the workers at once, and steps of named tensors get turns, which all ranks hear of."""

from __future__ import annotations

from psgc.layout import Layout, make_key
from psgc.layout.collective import SUM
from psgc.scheduler.actions import End
from psgc.wire.frames import Kind
from psgc.wire.messages import ErrorCode, Notice
from tests.scheduler.talk import SILENCE_S, STEP_S, Job, aborted, complete, declaration, end_of, logged, refused, register, sent


def _declared(nodes: int = 2) -> Job:
    job = complete(nodes, servers=0)
    for number in range(nodes):
        said = job.declare(f"w{number}", declaration("push_pull.loss"), plan=number + 1)
    layouts = sent(said, Kind.LAYOUT)
    assert set(layouts) == {f"w{number}" for number in range(nodes)}
    assert {Layout.from_json(str(body).replace("'", '"').replace("True", "true")).buckets[0].option for body in layouts.values()} == {SUM}
    return job


def _submit(job: Job, peer: str, step: int = 1, bucket: int = 0, taken: int = 0) -> dict[str, tuple[int, int]]:
    """By receiver, the step that got a turn, and its number."""
    said = job.say(peer, Kind.TURN, plan=taken, key=make_key(1, bucket, 0), step=step)
    return {receiver: (header.step, header.plan) for receiver, header in sent(said, Kind.TURN).items()}


def test_a_layout_goes_to_the_workers_as_soon_as_all_have_declared_it() -> None:
    job = _declared(3)
    again = job.declare("w1", declaration("push_pull.loss"), plan=9)
    assert set(sent(again, Kind.LAYOUT)) == {"w1"}


def test_a_step_gets_its_turn_when_every_rank_has_submitted_it() -> None:
    job = _declared()
    assert _submit(job, "w0") == {}
    assert _submit(job, "w0") == {}, "said twice, counted once"
    assert _submit(job, "w1", bucket=1) == {}
    assert _submit(job, "w0", bucket=1) == {"w0": (1, 0), "w1": (1, 0)}
    assert _submit(job, "w1") == {"w0": (1, 1), "w1": (1, 1)}
    assert _submit(job, "w1") == {"w1": (1, 1)}, "to who asks again, alone"


def test_turns_that_no_longer_fit_in_their_field_are_counted_on() -> None:
    """After 50 days of a thousand turns a second."""
    job, end = _declared(), 1 << 32
    assert job.membership.agreements is not None
    turns = job.membership.agreements.submissions.turns
    turns.begin_at(end - 1, make_key(1, 7, 0), 1)
    job.say("w0", Kind.TURN, plan=end - 1, key=make_key(1, 0, 0), step=1)
    assert _submit(job, "w1", taken=end - 1) == {"w0": (1, end - 1), "w1": (1, end - 1)}
    _submit(job, "w0", step=2, taken=0)  # knows all of them
    assert _submit(job, "w1", step=2, taken=0) == {"w0": (2, 0), "w1": (2, 0)}
    assert turns.count == end + 1 and [turn.number for turn in turns.known] == [end], "what all know is forgotten"


def test_a_step_that_a_rank_does_not_submit_is_named_and_ends_the_job_at_its_limit() -> None:
    job = _declared()
    _submit(job, "w0")
    named = False
    while job.now - 100 <= STEP_S:
        job.hear_everyone()
        said = job.tick(1)
        named = named or f"step 1 of 'push_pull.loss' has awaited rank(s) 1 for {SILENCE_S:.0f} s" in logged(said)
    assert named
    assert "step 1 of 'push_pull.loss' has awaited rank(s) 1 for 601 s, more than the limit" in aborted(said)


def test_a_rank_that_leaves_while_a_step_awaits_it_ends_the_job() -> None:
    job = _declared()
    _submit(job, "w0")
    said = job.say("w1", Kind.BYE)
    assert aborted(said) == "rank(s) 1 left the job, but step 1 of 'push_pull.loss' awaits them: every rank must make the same calls"


def test_a_collective_that_breaks_because_a_rank_has_left_is_told_as_that() -> None:
    job = _declared()
    broken = Notice(ErrorCode.BROKEN_GROUP, "rank 0: reduce_scatter failed: Connection closed by peer")
    assert aborted(complete(servers=0).say("w0", Kind.FAULT, broken)) == broken.text
    job.say("w1", Kind.BYE)
    said = aborted(job.say("w0", Kind.FAULT, broken))
    assert said == f"rank(s) 1 left the job, but others go on: every rank must run the same number of steps ({broken.text})"


def test_a_turn_of_a_layout_that_is_not_there_is_refused() -> None:
    assert "layout 1" in refused(complete(servers=0).say("w0", Kind.TURN, key=make_key(1, 0, 0), step=1), ErrorCode.UNKNOWN_KEY)


def test_the_job_ends_when_its_workers_have_left() -> None:
    job = complete(servers=0)
    job.say("w0", Kind.BYE)
    job.say("w1", Kind.BYE)
    assert end_of(job.tick(1)) == End(0, "")


def test_a_server_that_comes_nevertheless_is_told() -> None:
    job = Job(2, 0)
    assert "this job has no servers (DMLC_NUM_SERVER=0)" in aborted(job.join("s0", register("server")))
