"""A complete job: who counts as dead, what ends it and how, and that nothing said breaks it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psgc.scheduler.actions import End, Log, Send
from psgc.scheduler.deaths import LAST_WORDS_S
from psgc.scheduler.membership import FAREWELL_S
from psgc.wire.frames import Kind
from psgc.wire.messages import PACK_FROM_BYTES, Declare, ErrorCode, Lookup, Notice, Published, decode_body, decode_json, encode_body, pack
from tests.scheduler.talk import (
    DEAD_S,
    SILENCE_S,
    Job,
    aborted,
    complete,
    declaration,
    end_of,
    logged,
    refused,
    register,
    sent,
)

# liveness


def test_a_heartbeat_is_answered_and_what_it_says_is_logged() -> None:
    job = complete()
    assert set(sent(job.say("w0", Kind.HEARTBEAT), Kind.HEARTBEAT)) == {"w0"}
    actions = job.say("s0", Kind.HEARTBEAT, Notice(0, "step 3 has awaited rank 1"))
    assert logged(actions) == "step 3 has awaited rank 1"
    assert set(sent(actions, Kind.HEARTBEAT)) == {"s0", "w0", "w1"}, "workers on other machines hear it, too"


def test_a_server_that_a_worker_cannot_reach_is_told_to_the_others() -> None:
    job = complete(nodes=3)
    actions = job.say("w1", Kind.HEARTBEAT, Notice(0, "rank 1 cannot reach server 0"), step=0)
    assert logged(actions) == "rank 1 cannot reach server 0"
    assert {peer for peer, body in sent(actions, Kind.HEARTBEAT).items() if isinstance(body, dict)} == {"w0", "w2"}


def test_a_stall_that_every_server_reports_is_named_once() -> None:
    job = complete(servers=3)
    said = [logged(job.say(f"s{i}", Kind.HEARTBEAT, Notice(0, f"step 3 of key {i} has awaited rank 1"))) for i in range(3)]
    assert said == ["step 3 of key 0 has awaited rank 1", "", ""]
    job.now += SILENCE_S
    assert logged(job.say("s1", Kind.HEARTBEAT, Notice(0, "step 3 of key 1 has awaited rank 1")))


def test_a_dead_process_ends_the_job_once_its_last_words_must_have_come() -> None:
    job = complete()
    job.dead.add(1010)
    assert sent(job.tick(0.5), Kind.ABORT) == {}, "found; what it said before may still be on its way"
    actions = job.tick(LAST_WORDS_S)
    assert "worker 1 (node 1, local rank 0, pid 1010 on host1) died" in aborted(actions)
    assert set(sent(actions, Kind.ABORT)) == {"w0", "w1", "s0"}


def test_why_a_process_ended_counts_although_its_end_was_seen_first() -> None:
    job = complete()
    job.dead.add(1010)
    job.tick(0.5)
    actions = job.say("w1", Kind.FAULT, Notice(0, "rank 1: its gradients are not finite"))
    assert "its gradients are not finite" in aborted(actions)


def test_workers_hear_which_rank_waits_least_for_steps() -> None:
    job = complete(nodes=3)
    for peer, waited_ms in (("w0", 900), ("w1", 40), ("w2", 700)):
        answer = sent(job.say(peer, Kind.HEARTBEAT, step=waited_ms), Kind.HEARTBEAT)[peer]
    assert (answer.plan, answer.key, answer.step) == (1, 40, 900)
    answer = sent(job.say("s0", Kind.HEARTBEAT), Kind.HEARTBEAT)["s0"]
    assert (answer.plan, answer.key, answer.step) == (0, 0, 0), "servers wait for nobody"


def test_each_server_hears_of_every_worker_that_has_left() -> None:
    job = complete(nodes=4, servers=2)
    job.say("w1", Kind.BYE)
    job.say("w3", Kind.BYE)
    heard: dict[str, set[int]] = {"s0": set(), "s1": set()}
    for _ in range(2):
        for peer, ranks in heard.items():
            answer = sent(job.say(peer, Kind.HEARTBEAT), Kind.HEARTBEAT)[peer]
            assert answer.step == 1
            ranks.add(answer.plan)
    assert heard == {"s0": {1, 3}, "s1": {1, 3}}


def test_silence_is_named_and_after_longer_silence_counts_as_death() -> None:
    job = complete()
    named = 0
    while job.now < 100 + DEAD_S - 0.5:
        for peer in ("w0", "s0"):
            job.say(peer, Kind.HEARTBEAT)
        text = logged(job.tick(1))
        named += "worker 1" in text
        assert "worker 0" not in text
    assert named == 2, "after 5 s, and after 10 s more"
    for peer in ("w0", "s0"):
        job.say(peer, Kind.HEARTBEAT)
    assert "worker 1" in aborted(job.tick(1.5))


def test_on_the_schedulers_own_host_a_silent_process_that_lives_is_named_and_never_dead() -> None:
    job = complete()
    job.here.add(1010)
    said = ""
    while job.now < 100 + 10 * DEAD_S:
        for peer in ("w0", "s0"):
            job.say(peer, Kind.HEARTBEAT)
        actions = job.tick(1)
        assert sent(actions, Kind.ABORT) == {}
        said += logged(actions)
    assert "worker 1 (node 1, local rank 0, pid 1010 on host1) has said nothing for 5 s" in said
    job.dead.add(1010)
    assert "worker 1 (node 1, local rank 0, pid 1010 on host1) died" in aborted(job.run(2))


def test_silence_while_the_scheduler_itself_did_not_run_is_nobodys() -> None:
    job = complete()
    job.hear_everyone()
    job.tick(1)
    assert sent(job.tick(10 * DEAD_S), Kind.ABORT) == {}
    assert logged(job.tick(1)) == ""
    later = [action for _ in range(int(DEAD_S)) for action in job.tick(1)]
    assert "has said nothing for" in aborted(later), "what comes after that counts"


def test_a_member_that_has_left_is_not_watched() -> None:
    job = complete()
    job.say("w1", Kind.BYE)
    job.dead.add(1010)
    for _ in range(40):
        job.hear_everyone()
        assert sent(job.tick(1), Kind.ABORT) == {}


# faults and the end


@pytest.mark.parametrize("peer", ["w1", "s0"])
def test_a_fault_of_any_member_ends_the_job_for_all_with_its_words(peer: str) -> None:
    job = complete()
    actions = job.say(peer, Kind.FAULT, Notice(0, "rank 1: gradient of 'x' holds NaN"))
    assert aborted(actions) == "rank 1: gradient of 'x' holds NaN"
    assert set(sent(actions, Kind.ABORT)) == {"w0", "w1", "s0"}
    assert job.say("w0", Kind.FAULT, Notice(0, "another")) == job.say("w0", Kind.HEARTBEAT), "the first reason stays"


@pytest.mark.parametrize("told", [True, False])
def test_a_job_that_fails_after_a_signal_has_ended_a_launcher_is_not_to_be_started_again(told: bool) -> None:
    job = complete()
    if told:
        said = job.say("launcher", Kind.FAULT, Notice(ErrorCode.FINAL, "a launcher on host1 was ended by SIGTERM"))
        assert sent(said, Kind.BYE).keys() == {"launcher"}
        assert not sent(said, Kind.ABORT), "its workers may still save, and leave in order"
    ended = sent(job.say("w1", Kind.FAULT, Notice(0, "rank 1 ended")), Kind.ABORT)
    assert {body["code"] for body in ended.values()} == {ErrorCode.FINAL if told else 0}
    assert {body["text"] for body in ended.values()} == {"rank 1 ended"}


def test_a_launcher_that_a_signal_ends_before_everyone_is_there_may_be_started_once_more() -> None:
    job = Job(nodes=2)
    job.join("s0", register("server", index=0))
    job.join("w0", register())
    job.say("launcher", Kind.FAULT, Notice(ErrorCode.FINAL, "a launcher on host1 was ended by SIGTERM"))
    job.join("w1", register(node=1))
    ended = sent(job.say("w1", Kind.FAULT, Notice(0, "rank 1 ended")), Kind.ABORT)
    assert {body["code"] for body in ended.values()} == {0}


def test_the_end_of_a_failed_job_comes_when_all_have_said_bye_or_after_a_while() -> None:
    patient = complete()
    patient.membership.abort("why", patient.now)
    for peer in ("w0", "w1"):
        patient.say(peer, Kind.BYE)
        assert end_of(patient.tick(0.1)) is None
    assert end_of(patient.tick(FAREWELL_S + 0.1)) == End(1, "why")
    quick = complete()
    quick.membership.abort("why", quick.now)
    for peer in ("w0", "w1", "s0"):
        assert set(sent(quick.say(peer, Kind.BYE), Kind.BYE)) == {peer}
    assert end_of(quick.tick()) == End(1, "why")


def test_who_missed_the_abort_hears_it_at_its_next_word() -> None:
    job = complete()
    job.membership.abort("why", job.now)
    for kind, body in [(Kind.HEARTBEAT, None), (Kind.BARRIER, None), (Kind.REGISTER, register(node=1))]:
        assert aborted(job.say("w1", kind, body)) == "why"


def test_when_all_workers_have_left_the_servers_are_told_and_the_job_ends_well() -> None:
    job = complete(nodes=2, servers=2)
    assert set(sent(job.say("w0", Kind.BYE), Kind.BYE)) == {"w0"}
    assert set(sent(job.say("w1", Kind.BYE), Kind.BYE)) == {"w1", "s0", "s1"}
    assert end_of(job.say("s0", Kind.BYE)) is None
    assert set(sent(job.say("w0", Kind.BYE), Kind.BYE)) == {"w0"}, "said again, answered again"
    assert end_of(job.say("s1", Kind.BYE)) == End(0, "")


def test_a_server_that_missed_the_bye_is_told_again_and_one_that_is_gone_is_not_waited_for() -> None:
    job = complete(nodes=1, servers=2)
    job.say("w0", Kind.BYE)
    assert set(sent(job.tick(1), Kind.BYE)) == {"s0", "s1"}
    job.dead.add(2001)
    job.tick(1)
    assert set(sent(job.tick(1), Kind.BYE)) == {"s0"}
    assert end_of(job.say("s0", Kind.BYE)) == End(0, "")


def test_a_done_job_ends_well_even_if_a_server_never_says_bye() -> None:
    job = complete(nodes=1)
    job.say("w0", Kind.BYE)
    actions = job.tick(DEAD_S + 1)
    assert end_of(actions) == End(0, "")
    assert "server 0" in logged(actions)


@pytest.mark.parametrize("waiting", [Kind.BARRIER, Kind.DECLARE])
@pytest.mark.parametrize("leaves_first", [True, False])
def test_a_worker_that_leaves_what_others_wait_for_ends_the_job_and_is_named(waiting: Kind, leaves_first: bool) -> None:
    job = complete()

    def wait() -> None:
        if waiting is Kind.DECLARE:
            job.declare("w0", declaration())
        else:
            job.say("w0", waiting, step=1)

    if leaves_first:
        job.say("w1", Kind.BYE)
        wait()
        actions = job.tick(1)
    else:
        wait()
        actions = job.say("w1", Kind.BYE)
    text = aborted(actions)
    assert "rank(s) 1 left the job, but" in text
    assert set(sent(actions, Kind.ABORT)) == {"w0", "s0"}


def test_a_server_that_leaves_while_workers_run_ends_the_job() -> None:
    job = complete()
    assert "server 0" in aborted(job.say("s0", Kind.BYE))


def test_a_member_that_leaves_before_everyone_is_there_ends_the_job() -> None:
    job = Job()
    job.join("w0", register(node=0))
    job.join("w1", register(node=1))
    assert "worker (node 1, local rank 0, pid 1010 on host1) left before everyone was there" in aborted(job.say("w1", Kind.BYE))


def test_a_fault_without_a_text_still_says_who() -> None:
    (sent, *_) = [one for one in complete().say("w0", Kind.FAULT, encode_body(Notice(0, ""))) if isinstance(one, Send)]
    assert "reported a fault" in decode_body(Notice, sent.body).text


# whatever comes


@pytest.mark.parametrize(
    ("peer", "kind", "body", "code"),
    [
        ("nobody", Kind.HEARTBEAT, None, ErrorCode.NOT_ADMITTED),
        ("w0", Kind.PUSH, None, ErrorCode.UNKNOWN_KIND),
        ("w0", Kind.KEYS_READY, None, ErrorCode.UNKNOWN_KIND),
        ("s0", Kind.BARRIER, None, ErrorCode.UNKNOWN_KIND),
        ("w0", Kind.DECLARE, b"no json", ErrorCode.MALFORMED),
        ("w0", Kind.DECLARE, {"name": "x"}, ErrorCode.MALFORMED),
        ("w0", Kind.DECLARATION, {"name": "x"}, ErrorCode.MALFORMED),
        ("w0", Kind.DECLARATION, b"\x78\x9cnot packed", ErrorCode.MALFORMED),
        ("s0", Kind.DECLARATION, None, ErrorCode.UNKNOWN_KIND),
        ("w0", Kind.FAULT, b"", ErrorCode.MALFORMED),
        ("x", Kind.REGISTER, {"role": "king"}, ErrorCode.MALFORMED),
    ],
)
def test_nonsense_gets_a_typed_refusal_and_changes_nothing(peer: str, kind: Kind, body: Any, code: ErrorCode) -> None:
    job = complete(nodes=1)
    refused(job.say(peer, kind, body), code)
    assert job.tick() == []
    assert set(sent(job.say("w0", Kind.BARRIER, step=1), Kind.BARRIER)) == {"w0"}


def test_ranks_may_come_to_the_barriers_of_layouts_in_any_order() -> None:
    job = complete(nodes=2)
    assert not sent(job.say("w0", Kind.BARRIER, plan=1, step=1), Kind.BARRIER)
    assert not sent(job.say("w1", Kind.BARRIER, plan=2, step=1), Kind.BARRIER)
    assert not sent(job.say("w1", Kind.BARRIER, step=1), Kind.BARRIER)
    opened = sent(job.say("w1", Kind.BARRIER, plan=1, step=1), Kind.BARRIER)
    assert {peer: (header.plan, header.step) for peer, header in opened.items()} == {"w0": (1, 1), "w1": (1, 1)}
    assert set(sent(job.say("w0", Kind.BARRIER, plan=2, step=1), Kind.BARRIER)) == {"w0", "w1"}
    assert set(sent(job.say("w0", Kind.BARRIER, step=1), Kind.BARRIER)) == {"w0", "w1"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
DIGEST = Declare("model", declaration().digest())
BODIES = [
    encode_body(DIGEST),
    encode_body(declaration().to_json()),
    pack(encode_body(declaration().to_json()) + b" " * PACK_FROM_BYTES),
    encode_body(register()),
    encode_body(Notice(0, "text")),
    encode_body(Published.of("place", b"here")),
    encode_body(Lookup("place")),
    b"",
]


@st.composite
def damaged_bodies(draw: st.DrawFn) -> bytes:
    """A body that was right before one of its values, or some of its bytes, became something else."""
    body = draw(st.sampled_from(BODIES))
    if not body or draw(st.booleans()):
        return draw(st.binary(max_size=64)) + body[draw(st.integers(0, 64)) :]
    parsed = decode_json(body, "body")
    key = draw(st.sampled_from(sorted(parsed)))
    parsed[key] = draw(JSON)
    return encode_body(parsed)


@settings(max_examples=500, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["w0", "w1", "s0", "x"]), st.sampled_from(list(Kind)), damaged_bodies(), st.integers(0, 3), st.integers(0, 3)
        ),
        max_size=12,
    )
)  # fmt: skip
def test_whatever_anyone_says_the_scheduler_answers_or_ends_the_job_and_never_breaks(words: list[Any]) -> None:
    job = complete()
    for peer, kind, body, plan, step in words:
        for action in job.say(peer, kind, body, plan=plan, step=step) + job.tick(0.5):
            if isinstance(action, Send) and action.header.kind in (Kind.ERROR, Kind.ABORT):
                assert decode_body(Notice, action.body).text
            if isinstance(action, Log):
                assert action.level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)


def test_under_wait_a_worker_that_was_only_silent_is_asked_to_say_again_what_was_forgotten() -> None:
    """One C call held the GIL; the connection stood all the time."""
    job = Job(2, 1)
    job.join("s0", register("server", 0, index=0))
    for node in range(2):
        job.join(f"w{node}", register(node=node, incarnation=1))
    assert sent(job.say("w1", Kind.BARRIER, step=1), Kind.BARRIER) == {}
    heard: list[Any] = []
    for _ in range(int(DEAD_S) + 3):
        heard += [*job.say("w0", Kind.HEARTBEAT), *job.say("s0", Kind.HEARTBEAT), *job.tick(1)]
    assert "worker 1" in logged(heard) and "the others wait for the process that takes its place" in logged(heard)
    assert sent(job.say("w0", Kind.BARRIER, step=1), Kind.BARRIER) == {}, "its next process is to come, too"
    job.say("w1", Kind.HEARTBEAT)
    asked = job.tick(1)
    assert set(sent(asked, Kind.REGISTER)) == {"w1"}
    assert sent(job.tick(1), Kind.REGISTER) == {}, "once"
    job.join("w1", register(node=1, incarnation=1))
    assert set(sent(job.say("w1", Kind.BARRIER, step=1), Kind.BARRIER)) == {"w0", "w1"}
