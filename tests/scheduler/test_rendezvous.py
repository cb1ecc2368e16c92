"""What workers meet at: barriers, and the declarations that become layouts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from psgc.layout import Declaration, Layout, TensorSpec
from psgc.scheduler.actions import Log, Send
from psgc.wire.frames import Kind
from psgc.wire.messages import Declare, ErrorCode, Notice
from tests.scheduler.talk import (
    SILENCE_S,
    STEP_S,
    aborted,
    complete,
    declaration,
    logged,
    refused,
    register,
    sent,
)

SAID_AT = (5, 15, 35, *range(75, 600, 60))  # seconds: twice as long each time, up to a minute

# barriers


def test_a_barrier_opens_for_all_when_the_last_has_come() -> None:
    job = complete(nodes=3)
    assert job.say("w0", Kind.BARRIER, step=1) == []
    assert job.say("w2", Kind.BARRIER, step=1) == []
    assert job.say("w0", Kind.BARRIER, step=1) == [], "said twice, counted once"
    opened = sent(job.say("w1", Kind.BARRIER, step=1), Kind.BARRIER)
    assert set(opened) == {"w0", "w1", "w2"}
    assert {header.step for header in opened.values()} == {1}


def test_an_open_barrier_answers_again_to_who_asks_again() -> None:
    job = complete()
    job.say("w0", Kind.BARRIER, step=1)
    job.say("w1", Kind.BARRIER, step=1)
    assert set(sent(job.say("w0", Kind.BARRIER, step=1), Kind.BARRIER)) == {"w0"}
    assert job.say("w0", Kind.BARRIER, step=2) == []


@pytest.mark.parametrize("what", ["barrier 1", "the declaration of 'model'"])
def test_what_is_awaited_is_named_and_fails_at_its_limit(what: str) -> None:
    job = complete(nodes=3)
    for peer in ("w0", "w2"):
        if what == "barrier 1":
            job.say(peer, Kind.BARRIER, step=1)
        else:
            job.declare(peer, declaration(), plan=1)
    named = 0
    while job.now - 100 <= STEP_S:
        job.hear_everyone()
        actions = job.tick(1)
        if logged(actions) and not sent(actions, Kind.ABORT):
            named += 1
            assert f"for {SAID_AT[named - 1]} s" in logged(actions)
            assert f"{what} has awaited rank(s) 1 for" in logged(actions)
            assert set(sent(actions, Kind.HEARTBEAT)) == {"w0", "w1", "w2"}
    assert named == len(SAID_AT)
    assert f"{what} has awaited rank(s) 1" in aborted(actions)
    assert "PSGC_STEP_TIMEOUT_S" in aborted(actions)
    assert "every rank must make the same calls" not in aborted(actions), "rank 1 waits for nobody"


LATE = "server 0: step 5 of key 1.0.0 (w) has awaited rank(s) 0 for 600 s, more than the limit of 600 s (PSGC_STEP_TIMEOUT_S)"


def test_what_an_awaited_rank_waits_for_itself_is_part_of_the_last_line() -> None:
    job = complete(nodes=3)
    job.declare("w0", declaration("push_pull.val"), plan=1)
    text = aborted(job.say("s0", Kind.FAULT, Notice(0, LATE, (0,))))
    assert text == (
        f"{LATE}; rank(s) 0 have come to the declaration of 'push_pull.val', which awaits rank(s) 1, 2: every rank must make the same calls"
    )


def test_what_others_than_the_awaited_rank_wait_for_is_not() -> None:
    job = complete(nodes=3)
    job.declare("w1", declaration("push_pull.val"), plan=1)
    assert aborted(job.say("s0", Kind.FAULT, Notice(0, LATE, (0,)))) == LATE


def test_two_meetings_that_await_each_others_ranks_are_both_named_at_the_limit() -> None:
    job = complete()
    job.say("w0", Kind.BARRIER, step=1)
    job.declare("w1", declaration("push_pull.val"), plan=1)
    actions = []
    while not sent(actions, Kind.ABORT):
        job.hear_everyone()
        actions = job.tick(1)
    assert aborted(actions) == (
        f"barrier 1 has awaited rank(s) 1 for {STEP_S + 1:.0f} s, more than the limit of {STEP_S:.0f} s (PSGC_STEP_TIMEOUT_S); "
        "rank(s) 1 have come to the declaration of 'push_pull.val', which awaits rank(s) 0: every rank must make the same calls"
    )


# declarations


def test_a_layout_goes_to_the_servers_first_and_to_workers_when_all_servers_are_ready() -> None:
    job = complete(nodes=2, servers=2)
    assert job.declare("w1", declaration(), plan=5) == []
    keys = job.declare("w0", declaration(), plan=9)
    assert set(sent(keys, Kind.KEYS)) == {"s0", "s1"}
    assert {a.header.plan for a in keys if isinstance(a, Send)} == {1}
    assert job.say("s1", Kind.KEYS_READY, plan=1) == []
    assert job.say("s1", Kind.KEYS_READY, plan=1) == [], "one server's word counts once"
    layouts = job.say("s0", Kind.KEYS_READY, plan=1)
    assert {a.peer: (a.header.plan, a.header.key) for a in layouts if isinstance(a, Send)} == {b"w0": (9, 1), b"w1": (5, 1)}
    assert sent(layouts, Kind.LAYOUT)["w0"] == sent(keys, Kind.KEYS)["s0"]
    assert job.say("s0", Kind.KEYS_READY, plan=1) == []
    assert job.say("s0", Kind.KEYS_READY, plan=3) == [], "a layout that never was"


def test_more_names_than_keys_have_room_for_end_the_job_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psgc.scheduler.rendezvous.MAX_LAYOUTS", 3)
    job = complete(nodes=1)
    for number in range(2):
        assert sent(job.declare("w0", declaration(f"push_pull.{number}")), Kind.KEYS)
    assert "'push_pull.2' is name number 3, at most 2 can be declared; use names again" in aborted(
        job.declare("w0", declaration("push_pull.2"))
    )


def test_a_declaration_said_again_counts_once_and_is_answered_again() -> None:
    job = complete()
    body = declaration()
    for _ in range(2):
        assert job.declare("w0", body) == []
    assert len(sent(job.declare("w1", body), Kind.KEYS)) == 1
    assert job.declare("w1", body) == [], "the server is not ready yet"
    job.say("s0", Kind.KEYS_READY, plan=1)
    assert set(sent(job.declare("w1", body, plan=4), Kind.LAYOUT)) == {"w1"}


def test_one_rank_alone_is_asked_for_the_whole_declaration() -> None:
    job = complete(nodes=3)
    digest = Declare("model", declaration().digest())
    assert job.say("w2", Kind.DECLARE, digest, plan=7) == []
    for _ in range(2):
        asked = job.say("w0", Kind.DECLARE, digest, plan=5)
        assert {peer: header.plan for peer, header in sent(asked, Kind.DECLARE).items()} == {"w0": 5}, "said again, asked again"
    assert job.say("w1", Kind.DECLARE, digest, plan=6) == [], "not all is there before rank 0's is"
    keys = [sent(job.say("w0", Kind.DECLARATION, declaration().to_json(), plan=5), Kind.KEYS) for _ in range(2)]
    assert [set(each) for each in keys] == [{"s0"}, set()], "said again, counted once"
    job.say("s0", Kind.KEYS_READY, plan=1)
    assert set(sent(job.say("w1", Kind.DECLARE, digest, plan=6), Kind.LAYOUT)) == {"w1"}


def test_rank_0_is_awaited_until_it_has_said_all() -> None:
    job = complete(nodes=2)
    for peer in ("w0", "w1"):
        job.say(peer, Kind.DECLARE, Declare("model", declaration().digest()), plan=1)
    job.hear_everyone()
    assert "the declaration of 'model' has awaited rank(s) 0 for" in logged(job.run(int(SILENCE_S)))


def test_a_declaration_of_a_name_that_nobody_has_announced_is_not_heeded() -> None:
    job = complete()
    job.say("w0", Kind.DECLARE, Declare("model", declaration().digest()))
    assert job.say("w0", Kind.DECLARATION, declaration("other").to_json()) == [], "another process of the scheduler has asked for it"


@pytest.mark.parametrize("body", [declaration(numel=11), replace(declaration(), mean=False)])
def test_a_declaration_that_was_not_announced_is_refused(body: Declaration) -> None:
    job = complete()
    job.say("w0", Kind.DECLARE, Declare("model", declaration().digest()))
    assert "not what rank 0 announced" in refused(job.say("w0", Kind.DECLARATION, body.to_json()), ErrorCode.MALFORMED)
    assert "again, and differently" in refused(job.say("w0", Kind.DECLARE, Declare("model", "another")), ErrorCode.MALFORMED)


def test_of_many_ranks_that_differ_two_are_asked() -> None:
    job = complete(nodes=6)
    for node in (5, 4, 3, 2, 1):
        job.declared[f"w{node}"] = declaration(numel=node // 4)
        body = Declare("model", declaration(numel=node // 4).digest())
        asked = sent(job.say(f"w{node}", Kind.DECLARE, body, plan=node), Kind.DECLARE)
        assert set(asked) == ({"w3", "w5"} if node == 3 else set())


def test_names_declared_in_different_orders_meet_and_are_numbered_as_they_complete() -> None:
    job = complete()
    job.declare("w0", declaration("a"), plan=1)
    job.declare("w0", declaration("b"), plan=2)
    first = job.declare("w1", declaration("b"), plan=1)
    second = job.declare("w1", declaration("a"), plan=2)
    assert sent(first, Kind.KEYS)["s0"]["name"] == "b"
    assert sent(second, Kind.KEYS)["s0"]["name"] == "a"
    assert [a.header.plan for a in first + second if isinstance(a, Send)] == [1, 2]


def test_a_plan_is_laid_out_in_rank_0s_order_apart_from_tensors_that_some_rank_did_not_use() -> None:
    tensors = tuple(TensorSpec(f"t{i}", (10,), "float32") for i in range(4))
    ranks = [Declaration("m", "plan", tensors, "none", True, order=(3, 2, 1, 0), used=used) for used in [(0, 1, 2, 3), (0, 1, 3)]]
    job = complete()
    job.declare("w1", replace(ranks[1], order=()))
    keys = sent(job.declare("w0", ranks[0]), Kind.KEYS)
    layout = Layout.from_json(json.dumps(keys["s0"]))
    assert sorted(bucket.tensors for bucket in layout.buckets) == [(2,), (3, 1, 0)]


def test_ranks_that_differ_end_the_job_as_soon_as_two_do_naming_tensor_and_ranks() -> None:
    job = complete(nodes=4)
    job.declare("w3", declaration(numel=10))
    text = aborted(job.declare("w1", declaration(numel=11)))
    assert text.startswith("shape of tensor 'layer.weight' on rank 1 is (11,), on rank 3 it is (10,) (declared as model)")


def test_a_codec_that_cannot_be_had_ends_the_job_with_its_own_words() -> None:
    job = complete(nodes=1)
    assert "no-such-codec" in aborted(job.declare("w0", replace(declaration(), codec="no-such-codec")))


def test_a_server_that_is_not_ready_is_named_and_awaited_only_so_long_and_told_nothing_again() -> None:
    job = complete(nodes=1, servers=2)
    job.declare("w0", declaration())
    job.say("s0", Kind.KEYS_READY, plan=1)
    while job.now - 100 <= STEP_S:
        job.hear_everyone()
        actions = job.tick(1)
        assert not sent(actions, Kind.KEYS), "it is told once on a connection, however long it takes"
        if text := logged(actions):
            assert "the layout of 'model' has awaited server(s) 1 for" in text
            assert "they load its codec's kernels, or compile them (`psgc warm` does that ahead)" in text
    assert "awaited server(s) 1" in aborted(actions)


def test_a_server_with_a_new_connection_is_told_the_layouts_that_it_has_not_answered() -> None:
    job = complete(nodes=1, servers=2)
    for number in (1, 2):
        job.declare("w0", declaration(f"name {number}"), plan=number)
    job.say("s0", Kind.KEYS_READY, plan=1)

    def again(peer: str, index: int) -> list[int]:
        actions = job.join(peer, register("server", index, index=index))
        assert set(sent(actions, Kind.TOPOLOGY)) == {peer}
        return [a.header.plan for a in actions if isinstance(a, Send) and a.header.kind == Kind.KEYS]

    assert again("s0", 0) == [2]
    assert again("s1", 1) == [1, 2]
    for server, layout in (("s1", 1), ("s0", 2), ("s1", 2)):
        job.say(server, Kind.KEYS_READY, plan=layout)
    assert again("s1", 1) == []


def test_thousands_of_names_that_are_awaited_are_one_line_a_kind() -> None:
    job = complete(nodes=3)
    names = 1000
    for number in range(names):
        job.now += 0.001
        job.say("w0", Kind.DECLARE, Declare(f"name {number}", "digest"), plan=number)
        job.say("w0", Kind.BARRIER, plan=number, step=1)
    lines = told = 0
    for _ in range(60):
        job.hear_everyone()
        actions = job.tick(1)
        lines += len([a for a in actions if isinstance(a, Log)])
        told += len([a for a in actions if isinstance(a, Send)])
    assert lines == 2 * 3, "after 5, 15 and 35 s"
    assert told == 3 * lines, "each line goes to each worker"
    job.hear_everyone()
    text = logged(job.run(20))
    assert f"the declaration of 'name 0' (and {names - 1} more) has awaited rank(s) 0, 1, 2 for 7" in text


def test_messages_of_an_old_connection_are_heard_and_not_answered_there() -> None:
    """ZeroMQ gives a connection that another has replaced a name of its own, which begins with a zero."""
    job = complete(nodes=1, servers=1)
    job.join("\0old", register("server", 0, index=0))
    assert set(sent(job.declare("w0", declaration()), Kind.KEYS)) == {"s0"}


def test_a_servers_error_about_a_layout_ends_the_job() -> None:
    job = complete(nodes=1)
    job.declare("w0", declaration())
    text = aborted(job.say("s0", Kind.ERROR, Notice(1, "no memory for layout 1"), plan=1))
    assert "server 0 (pid 2000 on host0)" in text
    assert "no memory for layout 1" in text


# declarations of some ranks


def test_a_declaration_of_some_ranks_awaits_these_and_reaches_these_alone() -> None:
    job = complete(nodes=4)
    some = declaration("half", members=(1, 3))
    assert job.declare("w3", some, plan=7) == []
    job.hear_everyone()
    assert "the declaration of 'half' has awaited rank(s) 1 for" in logged(job.run(int(SILENCE_S)))
    keys = sent(job.declare("w1", some, plan=5), Kind.KEYS)
    layout = Layout.from_json(json.dumps(keys["s0"]))
    assert layout.members == (1, 3) and all(bucket.members == (1, 3) for bucket in layout.buckets)
    assert all(part.contributors == (1, 3) for bucket in layout.buckets for part in bucket.parts)
    assert set(sent(job.say("s0", Kind.KEYS_READY, plan=1), Kind.LAYOUT)) == {"w1", "w3"}
    assert job.say("w1", Kind.BARRIER, plan=1, step=1) == []
    assert set(sent(job.say("w3", Kind.BARRIER, plan=1, step=1), Kind.BARRIER)) == {"w1", "w3"}, "the layout's barriers are theirs, too"


def test_a_declaration_of_ranks_that_cannot_be_is_refused() -> None:
    job = complete(nodes=2)
    for members, said in (((0, 2), "the job has 2"), ((1, 0), "the job has 2"), ((0,), "which is of other ranks")):
        name = f"x{members}"
        assert said in refused(job.say("w1", Kind.DECLARE, Declare(name, "digest", (), members)), ErrorCode.MALFORMED)
    job.say("w1", Kind.DECLARE, Declare("y", declaration("y", members=(1,)).digest(), (), ()))
    job.say("w0", Kind.DECLARE, Declare("y", declaration("y", members=(1,)).digest(), (), ()))
    assert "of other ranks than rank 0 announced" in refused(
        job.say("w0", Kind.DECLARATION, declaration("y", members=(1,)).to_json()), ErrorCode.MALFORMED
    )
