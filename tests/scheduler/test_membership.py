"""The scheduler's state machine: who is let in, what is named, what ends the job, and that nothing said twice counts twice."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psgc import __version__
from psgc.layout import Declaration, Layout, TensorSpec
from psgc.scheduler.actions import Action, End, Log, Send
from psgc.scheduler.membership import FAREWELL_S, Membership
from psgc.wire.frames import SCHEDULER_SENDER, Header, Kind
from psgc.wire.messages import ErrorCode, Notice, Register, Topology, decode_body, decode_json, encode_body

JOB, TOKEN = 77, "secret"
SILENCE_S, DEAD_S, REGISTER_S, STEP_S = 5.0, 15.0, 300.0, 600.0


def register(role: Any = "worker", node: int = 0, local_rank: int = 0, **other: Any) -> Register:
    pid = 1000 + 10 * node + local_rank if role == "worker" else 2000 + node
    fields = {
        "token": TOKEN, "version": __version__, "host": f"boot/{node}", "hostname": f"host{node}", "pid": pid, "pid_started": 1,
        "nodes": 2, "servers": 1, "node": node, "local_rank": local_rank,
    }  # fmt: skip
    if role == "server":
        fields |= {"node": 0, "address": f"tcp://host{node}:9", "local_address": f"psgc/{node}"}
    return Register(role, **(fields | other))


@dataclass
class Job:
    """A Membership and the words said to it; ``now`` is moved by hand."""

    nodes: int = 2
    servers: int = 1
    now: float = 100.0
    dead: set[int] = field(default_factory=set)  # pids
    membership: Membership = field(init=False)

    def __post_init__(self) -> None:
        self.membership = Membership(
            self.nodes, self.servers, JOB, TOKEN, self.now, self._alive, SILENCE_S, DEAD_S, REGISTER_S, STEP_S
        )  # fmt: skip

    def _alive(self, register: Register) -> bool | None:
        return False if register.pid in self.dead else None

    def say(self, peer: str, kind: Kind, body: Any = None, **fields: Any) -> list[Action]:
        data = body if isinstance(body, bytes) else b"" if body is None else encode_body(body)
        header = Header(kind, **{"job": JOB, "payload_bytes": len(data), **fields})
        return self.membership.receive(peer.encode(), header, data, self.now)

    def join(self, peer: str, register: Register) -> list[Action]:
        return self.say(peer, Kind.REGISTER, replace(register, nodes=self.nodes, servers=self.servers))

    def tick(self, after: float = 0.0) -> list[Action]:
        self.now += after
        return self.membership.tick(self.now)

    def hear_everyone(self) -> None:
        for member in self.membership.roster:
            if not member.left:
                self.say(member.peer.decode(), Kind.HEARTBEAT)


def complete(nodes: int = 2, servers: int = 1) -> Job:
    """A job whose workers are w0, w1, ... and whose servers are s0, s1, ..."""
    job = Job(nodes, servers)
    for index in range(servers):
        job.join(f"s{index}", register("server", index, index=index))
    for node in range(nodes):
        job.join(f"w{node}", register(node=node))
    assert job.membership.barriers is not None
    return job


def sent(actions: list[Action], kind: Kind) -> dict[str, Any]:
    """Bodies (headers where there is none) of the messages of a kind, by receiver."""
    found: dict[str, Any] = {}
    for action in actions:
        if isinstance(action, Send) and action.header.kind == kind:
            assert action.header.sender == SCHEDULER_SENDER
            assert action.header.payload_bytes == len(action.body)
            found[action.peer.decode()] = json.loads(action.body) if action.body else action.header
    return found


def logged(actions: list[Action]) -> str:
    return "\n".join(action.text for action in actions if isinstance(action, Log))


def end_of(actions: list[Action]) -> End | None:
    return next((action for action in actions if isinstance(action, End)), None)


def aborted(actions: list[Action]) -> str:
    """The text of the ABORT that everyone got."""
    texts = {body["text"] for body in sent(actions, Kind.ABORT).values()}
    assert len(texts) == 1, actions
    return str(texts.pop())


def refused(actions: list[Action], code: ErrorCode) -> str:
    """The text of the one ERROR reply; nothing else was sent."""
    assert [a.header.kind for a in actions if isinstance(a, Send)] == [Kind.ERROR]
    (notice,) = sent(actions, Kind.ERROR).values()
    assert notice["code"] == code, notice
    return str(notice["text"])


def declaration(name: str = "model", numel: int = 10, **fields: Any) -> Declaration:
    return Declaration(name, "adhoc", (TensorSpec("layer.weight", (numel,), "float32"),), "none", True, **fields)


# registration


def test_ranks_are_the_prefix_sum_of_local_sizes_whatever_order_they_come_in() -> None:
    job = Job(nodes=3, servers=1)
    sizes = [2, 1, 3]
    places = [(node, local) for node, size in enumerate(sizes) for local in range(size)]
    job.join("s0", register("server"))
    for node, local in reversed(places):
        actions = job.join(f"w{node}.{local}", register(node=node, local_rank=local, local_size=sizes[node]))
    topologies = {peer: Topology.from_body(body) for peer, body in sent(actions, Kind.TOPOLOGY).items()}
    assert {peer: t.rank for peer, t in topologies.items() if peer != "s0"} == {f"w{n}.{i}": rank for rank, (n, i) in enumerate(places)}
    assert topologies["s0"] == replace(topologies["w0.0"], rank=0)
    assert topologies["s0"].node_sizes == (2, 1, 3)
    assert topologies["s0"].size == 6
    assert topologies["s0"].epoch == 1
    assert topologies["s0"].workers[2] == "1.0@host1"


def test_servers_keep_the_numbers_they_came_with_and_others_fill_the_gaps_in_order() -> None:
    job = Job(nodes=1, servers=3)
    job.join("a", register("server", 0))
    job.join("b", register("server", 1, index=0))
    job.join("c", register("server", 2))
    topologies = sent(job.join("w", register()), Kind.TOPOLOGY)
    assert {peer: topologies[peer]["rank"] for peer in "abc"} == {"a": 1, "b": 0, "c": 2}
    assert [s["address"] for s in topologies["w"]["servers"]] == ["tcp://host1:9", "tcp://host0:9", "tcp://host2:9"]


def test_nobody_is_admitted_before_everyone_is_there() -> None:
    job = Job()
    assert job.join("w0", register(node=0)) == []
    assert job.join("w1", register(node=1)) == []
    assert len(sent(job.join("s0", register("server")), Kind.TOPOLOGY)) == 3


def test_a_registration_said_again_is_answered_again_and_changes_nothing() -> None:
    job = Job()
    assert job.join("w0", register(node=0)) == []
    assert job.join("w0", register(node=0)) == []
    job.join("w1", register(node=1))
    first = sent(job.join("s0", register("server")), Kind.TOPOLOGY)
    again = job.join("w1", register(node=1))
    assert sent(again, Kind.TOPOLOGY) == {"w1": first["w1"]}


def test_a_process_with_two_names_is_one_member_and_is_answered_at_the_newest() -> None:
    job = Job()
    job.join("w0-before", register(node=0))
    job.join("w0", register(node=0))
    job.join("w1", register(node=1))
    assert set(sent(job.join("s0", register("server")), Kind.TOPOLOGY)) == {"w0", "w1", "s0"}
    assert set(sent(job.join("w1-before", register(node=1)), Kind.TOPOLOGY)) == {"w1-before"}
    assert set(sent(job.say("w1", Kind.HEARTBEAT), Kind.HEARTBEAT)) == {"w1"}
    job.say("w0", Kind.BARRIER, step=1)
    assert set(sent(job.say("w1-before", Kind.BARRIER, step=1), Kind.BARRIER)) == {"w0", "w1-before"}
    assert job.say("w1", Kind.BARRIER, step=2) == []


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"nodes": 3}, ["DMLC_NUM_WORKER=3", "the scheduler has 2"]),
        ({"servers": 4}, ["DMLC_NUM_SERVER=4", "the scheduler has 1"]),
        ({"version": "0.0"}, ["psgc 0.0", __version__]),
        ({"node": 0}, ["DMLC_WORKER_ID=0", "pid 1000 on host0", "pid 1010 on host1", "number the nodes 0 to 1"]),
        ({"node": 0, "local_rank": 1, "local_size": 2}, ["BYTEPS_LOCAL_SIZE=1", "has 2", "pid 1000 on host0"]),
        ({"node": 2}, ["DMLC_WORKER_ID=2", "0 to 1"]),
        ({"local_rank": 1}, ["BYTEPS_LOCAL_RANK=1", "BYTEPS_LOCAL_SIZE=1"]),
        ({"role": "server", "index": 1}, ["DMLC_SERVER_ID=1", "servers are numbered 0 to 0"]),
        ({"role": "server", "index": 0}, ["two servers have DMLC_SERVER_ID=0", "pid 2000 on host0", "pid 1010 on host1"]),
        ({"role": "server"}, ["one server too many", "DMLC_NUM_SERVER=1"]),
    ],
)
def test_a_member_that_does_not_fit_ends_the_job_naming_it_and_the_remedy(wrong: dict[str, Any], words: list[str]) -> None:
    job = Job()
    job.join("s0", register("server", index=0))
    job.join("w0", register(node=0))
    actions = job.say("x", Kind.REGISTER, replace(register(node=1), **wrong))
    text = aborted(actions)
    assert set(sent(actions, Kind.ABORT)) == {"s0", "w0", "x"}
    for word in words:
        assert word in text, text


def test_a_wrong_token_is_refused_and_ends_nothing() -> None:
    job = Job(nodes=1)
    text = refused(job.join("x", register(token="guess")), ErrorCode.BAD_TOKEN)
    assert "pid 1000 on host0" in text
    assert "PSGC_TOKEN" in text
    job.join("s0", register("server"))
    assert len(sent(job.join("w0", register()), Kind.TOPOLOGY)) == 2, "the place is still free"


def test_a_message_of_another_job_is_refused_and_ends_nothing() -> None:
    job = complete()
    assert "job 78" in refused(job.say("x", Kind.REGISTER, register(), job=78), ErrorCode.WRONG_JOB)
    assert job.tick() == []


def test_who_comes_when_everyone_is_there_is_refused_and_ends_nothing() -> None:
    job = complete()
    text = refused(job.join("late", register(node=1, pid=5)), ErrorCode.NOT_ADMITTED)
    assert "pid 1010 on host1" in text
    assert "pid 5 on host1" in text
    assert job.tick() == []


def test_who_is_missing_is_named_and_named_again_and_the_waiting_are_told() -> None:
    job = Job(nodes=3, servers=2)
    job.join("s0", register("server"))
    job.join("w0", register(node=0, local_size=2))
    assert job.tick(SILENCE_S - 0.1) == []
    for _ in range(3):
        actions = job.tick(SILENCE_S)
        for text in [logged(actions), *(body["text"] for body in sent(actions, Kind.HEARTBEAT).values())]:
            for word in ["local rank 1 of node 0", "DMLC_WORKER_ID=1", "DMLC_WORKER_ID=2", "1 of 2 server(s)", "pid 1000 on host0"]:
                assert word in text
        assert set(sent(actions, Kind.HEARTBEAT)) == {"s0", "w0"}
        assert job.tick(1) == []


def test_registration_gives_up_naming_who_never_came() -> None:
    job = Job()
    job.join("w0", register(node=0))
    text = aborted(job.tick(REGISTER_S + 1))
    assert "DMLC_WORKER_ID=1" in text
    assert "PSGC_REGISTER_TIMEOUT_S" in text


def test_a_member_that_dies_while_others_are_awaited_ends_the_job() -> None:
    job = Job()
    job.join("w0", register(node=0))
    job.join("w1", register(node=1))
    job.dead.add(1010)
    assert "pid 1010 on host1) died" in aborted(job.tick(1))


# liveness


def test_a_heartbeat_is_answered_and_what_it_says_is_logged() -> None:
    job = complete()
    assert set(sent(job.say("w0", Kind.HEARTBEAT), Kind.HEARTBEAT)) == {"w0"}
    actions = job.say("s0", Kind.HEARTBEAT, Notice(0, "step 3 has awaited rank 1"))
    assert logged(actions) == "step 3 has awaited rank 1"
    assert set(sent(actions, Kind.HEARTBEAT)) == {"s0"}


def test_a_dead_process_is_found_at_the_next_tick() -> None:
    job = complete()
    job.dead.add(1010)
    actions = job.tick(0.5)
    assert "worker 1 (node 1, local rank 0, pid 1010 on host1) died" in aborted(actions)
    assert set(sent(actions, Kind.ABORT)) == {"w0", "w1", "s0"}


def test_silence_is_named_and_after_longer_silence_counts_as_death() -> None:
    job = complete()
    named = 0
    while job.now < 100 + DEAD_S - 0.5:
        for peer in ("w0", "s0"):
            job.say(peer, Kind.HEARTBEAT)
        text = logged(job.tick(1))
        named += "worker 1" in text
        assert "worker 0" not in text
    assert named == DEAD_S / SILENCE_S
    for peer in ("w0", "s0"):
        job.say(peer, Kind.HEARTBEAT)
    assert "worker 1" in aborted(job.tick(1.5))


def test_a_member_that_has_left_is_not_watched() -> None:
    job = complete()
    job.say("w1", Kind.BYE)
    job.dead.add(1010)
    for _ in range(40):
        job.hear_everyone()
        assert sent(job.tick(1), Kind.ABORT) == {}


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
            job.say(peer, Kind.DECLARE, declaration().to_json(), plan=1)
    named = 0
    while job.now - 100 <= STEP_S:
        job.hear_everyone()
        actions = job.tick(1)
        if logged(actions) and not sent(actions, Kind.ABORT):
            named += 1
            assert f"{what} has awaited rank(s) 1 for" in logged(actions)
            assert set(sent(actions, Kind.HEARTBEAT)) == {"w0", "w1", "w2"}
    assert named == STEP_S / SILENCE_S
    assert f"{what} has awaited rank(s) 1" in aborted(actions)
    assert "PSGC_STEP_TIMEOUT_S" in aborted(actions)


# declarations


def test_a_layout_goes_to_the_servers_first_and_to_workers_when_all_servers_are_ready() -> None:
    job = complete(nodes=2, servers=2)
    assert job.say("w1", Kind.DECLARE, declaration().to_json(), plan=5) == []
    keys = job.say("w0", Kind.DECLARE, declaration().to_json(), plan=9)
    assert set(sent(keys, Kind.KEYS)) == {"s0", "s1"}
    assert {a.header.plan for a in keys if isinstance(a, Send)} == {1}
    assert job.say("s1", Kind.KEYS_READY, plan=1) == []
    assert job.say("s1", Kind.KEYS_READY, plan=1) == [], "one server's word counts once"
    layouts = job.say("s0", Kind.KEYS_READY, plan=1)
    assert {a.peer: (a.header.plan, a.header.key) for a in layouts if isinstance(a, Send)} == {b"w0": (9, 1), b"w1": (5, 1)}
    assert sent(layouts, Kind.LAYOUT)["w0"] == sent(keys, Kind.KEYS)["s0"]
    assert job.say("s0", Kind.KEYS_READY, plan=1) == []
    assert job.say("s0", Kind.KEYS_READY, plan=3) == [], "a layout that never was"


def test_a_declaration_said_again_counts_once_and_is_answered_again() -> None:
    job = complete()
    body = declaration().to_json()
    for _ in range(2):
        assert job.say("w0", Kind.DECLARE, body, plan=1) == []
    assert len(sent(job.say("w1", Kind.DECLARE, body, plan=1), Kind.KEYS)) == 1
    assert job.say("w1", Kind.DECLARE, body, plan=1) == [], "the server is not ready yet"
    job.say("s0", Kind.KEYS_READY, plan=1)
    assert set(sent(job.say("w1", Kind.DECLARE, body, plan=4), Kind.LAYOUT)) == {"w1"}


def test_names_declared_in_different_orders_meet_and_are_numbered_as_they_complete() -> None:
    job = complete()
    job.say("w0", Kind.DECLARE, declaration("a").to_json(), plan=1)
    job.say("w0", Kind.DECLARE, declaration("b").to_json(), plan=2)
    first = job.say("w1", Kind.DECLARE, declaration("b").to_json(), plan=1)
    second = job.say("w1", Kind.DECLARE, declaration("a").to_json(), plan=2)
    assert sent(first, Kind.KEYS)["s0"]["name"] == "b"
    assert sent(second, Kind.KEYS)["s0"]["name"] == "a"
    assert [a.header.plan for a in first + second if isinstance(a, Send)] == [1, 2]


def test_a_plan_is_laid_out_in_rank_0s_order_apart_from_tensors_that_some_rank_did_not_use() -> None:
    tensors = tuple(TensorSpec(f"t{i}", (10,), "float32") for i in range(4))
    ranks = [Declaration("m", "plan", tensors, "none", True, order=(3, 2, 1, 0), used=used) for used in [(0, 1, 2, 3), (0, 1, 3)]]
    job = complete()
    job.say("w1", Kind.DECLARE, replace(ranks[1], order=()).to_json())
    keys = sent(job.say("w0", Kind.DECLARE, ranks[0].to_json()), Kind.KEYS)
    layout = Layout.from_json(json.dumps(keys["s0"]))
    assert sorted(bucket.tensors for bucket in layout.buckets) == [(2,), (3, 1, 0)]


def test_ranks_that_differ_end_the_job_as_soon_as_two_do_naming_tensor_and_ranks() -> None:
    job = complete(nodes=4)
    job.say("w3", Kind.DECLARE, declaration(numel=10).to_json())
    text = aborted(job.say("w1", Kind.DECLARE, declaration(numel=11).to_json()))
    assert text.startswith("'model': shape of tensor 'layer.weight' on rank 1 is (11,), on rank 3 it is (10,)")


def test_a_codec_that_cannot_be_had_ends_the_job_with_its_own_words() -> None:
    job = complete(nodes=1)
    assert "no-such-codec" in aborted(job.say("w0", Kind.DECLARE, replace(declaration(), codec="no-such-codec").to_json()))


def test_a_server_that_is_not_ready_is_named_told_again_and_awaited_only_so_long() -> None:
    job = complete(nodes=1, servers=2)
    job.say("w0", Kind.DECLARE, declaration().to_json())
    job.say("s0", Kind.KEYS_READY, plan=1)
    told = 0
    while job.now - 100 <= STEP_S:
        job.hear_everyone()
        actions = job.tick(1)
        assert "s0" not in sent(actions, Kind.KEYS)
        if sent(actions, Kind.KEYS):
            told += 1
            assert "the layout of 'model' has awaited server(s) 1 for" in logged(actions)
    assert told == STEP_S / SILENCE_S
    assert "awaited server(s) 1" in aborted(actions)


def test_a_servers_error_about_a_layout_ends_the_job() -> None:
    job = complete(nodes=1)
    job.say("w0", Kind.DECLARE, declaration().to_json())
    text = aborted(job.say("s0", Kind.ERROR, Notice(1, "no memory for layout 1"), plan=1))
    assert "server 0 (pid 2000 on host0)" in text
    assert "no memory for layout 1" in text


# faults and the end


@pytest.mark.parametrize("peer", ["w1", "s0"])
def test_a_fault_of_any_member_ends_the_job_for_all_with_its_words(peer: str) -> None:
    job = complete()
    actions = job.say(peer, Kind.FAULT, Notice(0, "rank 1: gradient of 'x' holds NaN"))
    assert aborted(actions) == "rank 1: gradient of 'x' holds NaN"
    assert set(sent(actions, Kind.ABORT)) == {"w0", "w1", "s0"}
    assert job.say("w0", Kind.FAULT, Notice(0, "another")) == job.say("w0", Kind.HEARTBEAT), "the first reason stays"


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
        job.say("w0", waiting, declaration().to_json() if waiting is Kind.DECLARE else None, step=1)

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
        ("w0", Kind.FAULT, b"", ErrorCode.MALFORMED),
        ("x", Kind.REGISTER, {"role": "king"}, ErrorCode.MALFORMED),
    ],
)
def test_nonsense_gets_a_typed_refusal_and_changes_nothing(peer: str, kind: Kind, body: Any, code: ErrorCode) -> None:
    job = complete(nodes=1)
    refused(job.say(peer, kind, body), code)
    assert job.tick() == []
    assert set(sent(job.say("w0", Kind.BARRIER, step=1), Kind.BARRIER)) == {"w0"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def test_a_fault_without_a_text_still_says_who() -> None:
    (sent, *_) = [one for one in complete().say("w0", Kind.FAULT, encode_body(Notice(0, ""))) if isinstance(one, Send)]
    assert "reported a fault" in decode_body(Notice, sent.body).text


BODIES = [encode_body(declaration().to_json()), encode_body(register()), encode_body(Notice(0, "text")), b""]


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
                assert action.level in (logging.INFO, logging.WARNING, logging.ERROR)
