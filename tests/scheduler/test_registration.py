"""Who is let into a job, with which rank, and what is said while members are awaited."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from psgc import __version__
from psgc.scheduler.actions import Log, Send
from psgc.scheduler.losses import TOO_LATE
from psgc.transport.security.handshake import worker_key
from psgc.wire.frames import VERSION, Kind
from psgc.wire.messages import ErrorCode, Notice, Topology
from tests.scheduler.talk import (
    DEAD_S,
    REGISTER_S,
    SILENCE_S,
    Job,
    aborted,
    complete,
    end_of,
    logged,
    refused,
    register,
    sent,
)


def test_ranks_are_the_prefix_sum_of_local_sizes_whatever_order_they_come_in() -> None:
    job = Job(nodes=3, servers=1)
    sizes = [2, 1, 3]
    places = [(node, local) for node, size in enumerate(sizes) for local in range(size)]
    job.join("s0", register("server"))
    for node, local in reversed(places):
        actions = job.join(f"w{node}.{local}", register(node=node, local_rank=local, local_size=sizes[node]))
    topologies = {peer: Topology.from_body(body) for peer, body in sent(actions, Kind.TOPOLOGY).items()}
    assert {peer: t.rank for peer, t in topologies.items() if peer != "s0"} == {f"w{n}.{i}": rank for rank, (n, i) in enumerate(places)}
    assert topologies["s0"] == replace(topologies["w0.0"], rank=0, key=topologies["s0"].key)
    assert topologies["s0"].node_sizes == (2, 1, 3)
    assert topologies["s0"].size == 6
    assert topologies["s0"].epoch == 1
    assert topologies["s0"].workers[2] == "1.0@host1"
    data_key = bytes.fromhex(topologies["s0"].key)
    keys = {peer: t.key for peer, t in topologies.items() if peer != "s0"}
    assert keys == {f"w{n}.{i}": worker_key(data_key, rank, 1).hex() for rank, (n, i) in enumerate(places)}, "each its own, and no more"
    assert topologies["s0"].key not in repr(topologies["s0"]), "logs do not hold it"


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
        ({"encrypt": True}, ["has PSGC_ENCRYPT=1", "has not"]),
        ({"asynchronous": True}, ["has PSGC_ASYNC=1", "has not", "for every worker, or for none"]),
        ({"planned": True}, ["has PSGC_PLAN", "has not", "only rank 0's machine needs the file"]),
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


@pytest.mark.parametrize(("body", "who"), [(register(node=1), "worker (node 1"), (b'{"another": "body"}', "a member")])
def test_a_member_of_another_version_of_the_protocol_ends_the_job_and_reads_why(body: Any, who: str) -> None:
    job = Job()
    job.join("w0", register(node=0))
    actions = job.say("x", Kind.REGISTER, body, version=VERSION + 1)
    text = aborted(actions)
    assert who in text
    assert f"version {VERSION + 1} of the protocol, the scheduler version {VERSION}; install one psgc everywhere" in text
    versions = {action.peer: action.header.version for action in actions if isinstance(action, Send) and action.header.kind == Kind.ABORT}
    assert versions == {b"w0": VERSION, b"x": VERSION + 1}


def test_another_version_of_the_protocol_ends_no_job_that_is_complete() -> None:
    job = complete()
    (answer, _) = actions = job.say("x", Kind.REGISTER, register(node=1), version=1)
    assert "install one psgc everywhere" in refused(actions, ErrorCode.NOT_ADMITTED)
    assert answer.header.version == 1
    assert job.tick() == []


def test_a_message_of_another_job_is_refused_and_ends_nothing() -> None:
    job = complete()
    (answer, _) = actions = job.say("x", Kind.REGISTER, register(), job=78)
    assert "PSGC_JOB" in refused(actions, ErrorCode.WRONG_JOB)
    assert (answer.header.job, b"77" in answer.body) == (78, False), "nobody is told the job's id who does not know it"
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
    for again in range(3):
        job.hear_everyone()
        actions = job.tick(SILENCE_S)
        if again == 1:  # said after 5 s, and after 10 s more
            assert (logged(actions), sent(actions, Kind.HEARTBEAT)["w0"].payload_bytes) == ("", 0), (
                "who waits hears that the scheduler lives"
            )
            continue
        for text in [logged(actions), *(body["text"] for body in sent(actions, Kind.HEARTBEAT).values())]:
            for word in ["local rank 1 of node 0", "DMLC_WORKER_ID=1", "DMLC_WORKER_ID=2", "1 of 2 server(s)", "pid 1000 on host0"]:
                assert word in text
        assert set(sent(actions, Kind.HEARTBEAT)) == {"s0", "w0"}
        assert job.tick(1) == []


def test_of_a_thousand_missing_members_the_first_are_named_and_the_others_counted() -> None:
    job = Job(nodes=1024, servers=2)
    job.join("w0", register(node=3))
    job.hear_everyone()
    text = logged(job.tick(SILENCE_S))
    assert "2 of 2 server(s), node 0 (DMLC_WORKER_ID=0), node 1" in text
    assert "and 1016 more to register" in text
    assert len(text) < 500


def test_members_that_are_missing_are_counted_however_many_a_worker_has_announced() -> None:
    """They were once listed, which took all memory of the scheduler's machine."""
    job = Job(nodes=2)
    job.join("w0", register(node=1, local_rank=2, local_size=1 << 63))
    job.hear_everyone()
    text = logged(job.tick(SILENCE_S))
    assert "node 0 (DMLC_WORKER_ID=0), local rank 0 of node 1, local rank 1 of node 1, local rank 3 of node 1" in text
    assert f" and {(1 << 63) + 1 - 8} more to register" in text
    assert len(text) < 600


def test_who_is_missing_under_a_launcher_that_has_started_everyone_is_named_only_after_a_minute() -> None:
    job = Job(nodes=1, launched=True)
    job.join("s0", register("server"))
    said = []
    for second in range(1, 100):
        job.now = 100.0 + second
        job.say("s0", Kind.HEARTBEAT)
        said += [(second, action.text) for action in job.membership.tick(job.now) if isinstance(action, Log)]
    assert [second for second, _ in said] == [60], said
    assert said[0][1].startswith("waiting for node 0 (DMLC_WORKER_ID=0) to register, for 60 s so far")


def test_registration_gives_up_naming_who_never_came() -> None:
    job = Job()
    job.join("w0", register(node=0))
    text = ""
    while not text:
        job.hear_everyone()
        assert job.now - 100 <= REGISTER_S
        actions = job.tick(1)
        text = aborted(actions) if sent(actions, Kind.ABORT) else ""
    assert job.now - 100 > REGISTER_S
    assert "DMLC_WORKER_ID=1" in text
    assert "PSGC_REGISTER_TIMEOUT_S" in text


def test_a_member_that_falls_silent_while_others_are_awaited_ends_the_job() -> None:
    job = Job()
    job.join("w0", register(node=0))
    limit = int(max(DEAD_S, 3 * SILENCE_S))
    for _ in range(3):
        assert sent([action for _ in range(limit) for action in job.tick(1)], Kind.ABORT) == {}
        job.join("w0", register(node=0))  # it registers again and again
    later = [action for _ in range(limit + 1) for action in job.tick(1)]
    assert "pid 1000 on host0) has said nothing" in aborted(later)


@pytest.mark.parametrize("nodes", [2, 3])
def test_a_launcher_tells_in_its_workers_place_why_that_will_not_come(nodes: int) -> None:
    job = Job(nodes)
    job.join("s0", register("server"))
    job.join("w0", register(node=0))
    job.join("launcher", register(node=1, pid=7))
    actions = job.say(
        "launcher", Kind.FAULT, Notice(0, "node 1 (host1): worker 0 ended with ModuleNotFoundError, before it joined the job")
    )
    assert aborted(actions).startswith("node 1 (host1): worker 0 ended with ModuleNotFoundError")
    assert {"s0", "w0"} <= set(sent(actions, Kind.ABORT))


def test_a_member_that_dies_while_others_are_awaited_ends_the_job() -> None:
    job = Job()
    job.join("w0", register(node=0))
    job.join("w1", register(node=1))
    job.dead.add(1010)
    assert "pid 1010 on host1) died" in aborted(job.run(2))


@pytest.mark.parametrize(
    ("address", "host", "warned"),
    [
        ("tcp://127.0.0.1:9000", "boot/net1", True),
        ("tcp://[::1]:9000", "boot/net1", True),
        ("tcp://localhost:9000", "boot/net1", True),
        ("tcp://10.0.0.5:9000", "boot/net1", False),
        ("tcp://127.0.0.1:9000", "boot/net0/other-container", False),
    ],
)
def test_a_server_elsewhere_that_advertises_loopback_is_named_with_the_remedy(address: str, host: str, warned: bool) -> None:
    job = Job()
    job.membership.itself = ("boot/net0/pid0", 1, 1)
    text = logged(job.join("s0", register("server", address=address, host=host)))
    assert bool(text) == warned
    if warned:
        assert f"server (pid 2000 on host0) says that workers reach it at {address}" in text
        assert "set DMLC_NODE_HOST or PSGC_ADVERTISE" in text


def test_who_sends_the_topology_is_told_with_it() -> None:
    job = Job(nodes=1)
    job.membership.roster._scheduler = ("boot/net0/pid0", 77, 5)
    job.join("s0", register("server"))
    topology = Topology.from_body(sent(job.join("w0", register()), Kind.TOPOLOGY)["w0"])
    assert (topology.scheduler_host, topology.scheduler_pid, topology.scheduler_started) == ("boot/net0/pid0", 77, 5)


def test_a_process_that_left_and_joins_again_is_no_member_of_the_job_it_left_and_hears_who_is_still_in_it() -> None:
    job = complete(nodes=2, servers=1)
    job.say("w0", Kind.BYE)
    actions = job.join("w0 again", register(node=0, session=1))
    assert [action.header.kind for action in actions] == [Kind.HEARTBEAT], "not the topology, and no refusal"
    assert not sent(actions, Kind.HEARTBEAT)["w0 again"].payload_bytes
    job.now += SILENCE_S
    said = sent(job.join("w0 again", register(node=0, session=1)), Kind.HEARTBEAT)["w0 again"]["text"]
    assert said.startswith(
        "server 0 (pid 2000 on host0), worker 1 (node 1, local rank 0, pid 1010 on host1) still in the job that this process has left"
    )


def test_a_scheduler_that_serves_again_waits_for_the_first_worker_without_a_limit_and_then_as_ever() -> None:
    job = Job(again=True, here={1000, 2000})
    job.join("s0", register("server", 0, index=0))
    actions = job.run(2 * int(REGISTER_S))
    assert sent(actions, Kind.HEARTBEAT) and not logged(actions) and job.membership.unbegun
    job.join("w0", register(node=0))
    assert not job.membership.unbegun
    actions = job.run(int(REGISTER_S) - 1)
    assert "waiting for node 1 (DMLC_WORKER_ID=1) to register" in logged(actions) and not sent(actions, Kind.ABORT)
    assert aborted(job.run(3)).startswith("gave up after 30")


def test_a_server_that_serves_again_may_be_heard_before_its_farewell_on_the_connection_before() -> None:
    job = complete(nodes=1, servers=1)
    job.say("w0", Kind.BYE)
    actions = job.join("s0 again", register("server", 0, index=0, session=1, address="tcp://host0:10"))
    assert [action.header.kind for action in actions] == [Kind.HEARTBEAT], "no refusal"
    assert end_of(job.say("s0", Kind.BYE)) is not None


@pytest.mark.parametrize("shrinks", [True, False])
def test_a_process_in_a_dead_workers_place_takes_no_part_in_the_job_after_that_which_has_ended(shrinks: bool) -> None:
    """Its script is at its beginning. The same process may join a later job once it has been in one."""
    job = Job(again=True)
    job.join("s0", register("server", 0, index=0))
    actions = job.join("w1", register(node=1, incarnation=2, shrinks=shrinks))
    said = sent(actions, Kind.ABORT)
    assert said.keys() == {"w1"} and len(actions) == 1 and job.membership.unbegun and job.membership.failed is None
    assert said["w1"]["text"] == f"worker (node 1, local rank 0, pid 1010 on host1) {TOO_LATE}"
    assert job.join("w1", register(node=1, incarnation=2, session=1, shrinks=shrinks)) == [] and not job.membership.unbegun
    assert len(sent(job.join("w0", register(node=0, incarnation=1, session=1, shrinks=shrinks)), Kind.TOPOLOGY)) == 3


@pytest.mark.parametrize("standby", [False, True])
@pytest.mark.parametrize("again", [True, False])
def test_a_server_that_goes_on_from_what_was_kept_of_a_job_that_has_ended_begins_the_next_with_nothing(again: bool, standby: bool) -> None:
    """The next job's layouts have the same numbers. again: the same scheduler's process serves it."""
    job = Job(again=again, replicas=standby)
    left = register("server", 0, index=0, incarnation=2, lineage=9, goes_on=True, standby=standby, launcher=int(standby))
    actions = job.join("former", left)
    assert sent(actions, Kind.BYE).keys() == {"former"} and len(actions) == 1 and not list(job.membership.roster)
    assert job.join("s0", replace(left, goes_on=False, session=1)) == [] and len(list(job.membership.roster)) == 1


def test_a_server_goes_on_from_what_was_kept_of_this_job_and_its_next_process_may_come_before_everyone_is_there() -> None:
    job = Job(servers=1)
    job.join("s0", register("server", 0, index=0, incarnation=1, lineage=9))
    assert not sent(job.join("s0 again", register("server", 0, index=0, pid=7, incarnation=2, lineage=9)), Kind.BYE)
    for node in range(2):
        job.join(f"w{node}", register(node=node))
    actions = job.join("s0 once more", register("server", 0, index=0, pid=8, incarnation=3, lineage=9, goes_on=True))
    assert sent(actions, Kind.TOPOLOGY).keys() == {"s0 once more"} and not sent(actions, Kind.BYE)
