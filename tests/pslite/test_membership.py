"""Joining, barriers, heartbeats and resending of a ps-lite job, without sockets: the scheduler's and the members' state machines together."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psgc.errors import JobFailed, RemoteProtocolError, UsageError
from psgc.pslite.actions import Action, Connect, Send
from psgc.pslite.member import Member
from psgc.pslite.meta import ACK, ADD_NODE, BARRIER, EMPTY, HEARTBEAT, SCHEDULER, SERVER, WORKER, Meta, Node, read_meta
from psgc.pslite.nodes import ALL, SERVER_GROUP, WORKER_GROUP, group_ids, key_ranges, rank_of, role_of, server_id, worker_id
from psgc.pslite.pairs import KVPairs, slice_by_server
from psgc.pslite.resend import RETRIES, Resender, signature_of
from psgc.pslite.scheduler import Scheduler

ROOT = Node(role=SCHEDULER, hostname="10.0.0.9", port=9000, id=1)


def joined_job(workers: int, servers: int, seed: int = 0, timeout_s: float = 0.0) -> tuple[Scheduler, dict[int, Member]]:
    """A scheduler and all members, which joined in some order. By id."""
    members = [
        Member(Node(role=role, hostname=f"10.0.0.{i % 3}", port=5000 + 7 * i), workers, servers)
        for i, role in enumerate([WORKER] * workers + [SERVER] * servers)
    ]
    random.Random(seed).shuffle(members)
    scheduler = Scheduler(ROOT, workers, servers, timeout_s)
    actions: list[Action] = []
    for member in members:
        assert not actions, "nobody is answered before all are there"
        actions = scheduler.receive(EMPTY, member.join().meta, 0.0)
    by_address = {member.own.address: member for member in members}
    reached = {action.node.id: by_address[action.node.address] for action in actions if isinstance(action, Connect)}
    for action in actions:
        if isinstance(action, Send):
            reached[action.receiver].receive(1, action.meta)
    return scheduler, reached


def test_nodes_get_the_ids_that_ps_lite_would_give_them_whatever_order_they_come_in() -> None:
    """By host name, descending, as ps-lite's comparator has it; on one host by port."""
    for seed in range(5):
        scheduler, members = joined_job(4, 2, seed)
        assert scheduler.ready and scheduler.missing() == ""
        assert {i: (m.own.hostname, m.own.port) for i, m in members.items()} == {
            9: ("10.0.0.2", 5014), 11: ("10.0.0.1", 5007), 13: ("10.0.0.0", 5000), 15: ("10.0.0.0", 5021), 8: ("10.0.0.2", 5035), 10: ("10.0.0.1", 5028),
        }  # fmt: skip
        for node_id, member in members.items():
            assert member.own.id == node_id and role_of(node_id) == member.own.role
            peers = {i for i in members if role_of(i) != member.own.role} | {1}
            assert set(member.peers) == peers, "servers and the scheduler for workers, workers and the scheduler for servers"


def test_ids_ranks_groups_and_key_ranges_are_ps_lites() -> None:
    assert [worker_id(0), worker_id(3), server_id(0), server_id(2)] == [9, 15, 8, 12]
    assert [rank_of(i) for i in (1, 8, 9, 10, 11, 15)] == [0, 0, 0, 1, 1, 3]
    assert group_ids(ALL, 2, 1) == (9, 11, 8, 1)
    assert group_ids(WORKER_GROUP, 2, 1) == (9, 11) and group_ids(SERVER_GROUP, 2, 1) == (8,)
    with pytest.raises(RemoteProtocolError, match="group 8 does not exist"):
        group_ids(8, 2, 1)
    assert [r.start for r in key_ranges(2)] == [0, (1 << 63) - 1]


@given(st.integers(1, 4), st.integers(1, 3), st.randoms(use_true_random=False))
def test_a_barrier_passes_when_every_node_of_its_group_has_come_and_not_before(workers: int, servers: int, chance: random.Random) -> None:
    scheduler, members = joined_job(workers, servers)
    for group in (ALL, WORKER_GROUP, WORKER_GROUP + SERVER_GROUP, ALL):
        coming = list(group_ids(group, workers, servers))
        chance.shuffle(coming)
        sent: list[Action] = []
        for index, node_id in enumerate(coming):
            assert not sent
            meta = Meta(command=BARRIER, request=True, barrier_group=group, app_id=0, customer_id=0)
            repeated = scheduler.receive(coming[index - 1], meta, 0.0) if index else []
            assert not repeated, "a node that asks again does not stand for another"
            sent = scheduler.receive(node_id, meta, 0.0)
        assert sorted(action.receiver for action in sent if isinstance(action, Send)) == sorted(coming)
        for action in sent:
            assert isinstance(action, Send)
            if action.receiver != 1:
                before = members[action.receiver].passed
                assert members[action.receiver].receive(1, action.meta) == []
                assert members[action.receiver].passed == before + 1
    assert scheduler.waiting() == {}


def test_who_is_missing_and_who_is_waited_for_is_named() -> None:
    scheduler = Scheduler(ROOT, 2, 1)
    assert scheduler.missing() == "2 of 2 workers and 1 of 1 servers"
    scheduler.receive(EMPTY, Meta(command=ADD_NODE, nodes=(Node(role=WORKER, hostname="a", port=1),)), 0.0)
    assert scheduler.missing() == "1 of 2 workers and 1 of 1 servers"
    scheduler, _ = joined_job(2, 1)
    scheduler.receive(11, Meta(command=BARRIER, request=True, barrier_group=WORKER_GROUP), 0.0)
    assert scheduler.waiting() == {WORKER_GROUP: [9]}


def test_a_node_takes_the_place_of_a_dead_one_of_its_role_and_no_others() -> None:
    scheduler, members = joined_job(2, 1, timeout_s=3.0)
    beat = members[9].heartbeat().meta
    answers = [scheduler.receive(node_id, replace(beat, nodes=(members[node_id].own,)), 5.0) for node_id in (9, 8)]
    assert [(a.receiver, a.meta.command) for [a] in answers if isinstance(a, Send)] == [(9, HEARTBEAT), (8, HEARTBEAT)]
    assert [node.id for node in scheduler.dead(5.0)] == [11]
    fresh = Member(Node(role=WORKER, hostname="10.0.0.7", port=7777), 2, 1)
    connect, *told = scheduler.receive(EMPTY, fresh.join().meta, 5.0)
    assert isinstance(connect, Connect) and connect.node.id == 11 and connect.node.is_recovery
    listed = {action.receiver: action.meta for action in told if isinstance(action, Send)}
    assert set(listed) == {8, 9, 11} and len(listed[8].nodes) == 1 and len(listed[11].nodes) == 4
    fresh.receive(1, listed[11])
    assert fresh.own.id == 11
    assert [a.node.address for a in members[8].receive(1, listed[8]) if isinstance(a, Connect)] == ["10.0.0.7:7777"]
    members[9].receive(1, listed[9])
    assert members[9].listed[11].hostname == "10.0.0.7"
    with pytest.raises(RemoteProtocolError, match=r"a server 10\.0\.0\.8:1 joins, but the job has all of its nodes"):
        scheduler.receive(EMPTY, Meta(command=ADD_NODE, nodes=(Node(role=SERVER, hostname="10.0.0.8", port=1),)), 5.0)


def test_a_worker_ends_if_another_implementations_node_takes_a_dead_ones_place() -> None:
    """It may count rounds in another way."""
    for named in (SERVER, WORKER):
        members = joined_job(2, 1)[1]
        node_id = 8 if named == SERVER else 11
        other = Node(role=named, hostname="10.0.0.7", port=7777, id=node_id, is_recovery=True, endpoint_name=b"another's")
        meta = Meta(command=ADD_NODE, nodes=(other,))
        with pytest.raises(
            JobFailed, match=rf"{node_id} at 10\.0\.0\.7:7777 took the place of .* {node_id} at .*, but only one of the two is psgc's"
        ):
            members[9].receive(1, meta)
        members[8].receive(1, meta)


def test_what_nodes_say_of_themselves_is_passed_on_to_all() -> None:
    scheduler = Scheduler(ROOT, 1, 1)
    worker = Member(Node(role=WORKER, hostname="w", port=1, endpoint_name=b"psgc"), 1, 1)
    server = Node(role=SERVER, hostname="s", port=1)
    scheduler.receive(EMPTY, worker.join().meta, 0.0)
    told = [action for action in scheduler.receive(EMPTY, Meta(command=ADD_NODE, nodes=(server,)), 0.0) if isinstance(action, Send)]
    for action in told:
        assert [node.endpoint_name for node in read_meta(action.meta.pack()).nodes] == [b"psgc", b"", b""]


def test_messages_that_nobody_of_the_job_would_send_change_nothing() -> None:
    scheduler, members = joined_job(1, 1)
    knock = Meta(command=ADD_NODE, nodes=(Node(role=WORKER, hostname="x", port=1),))
    for sender, meta in (
        (EMPTY, knock), (9, knock), (EMPTY, Meta(command=BARRIER, request=True, barrier_group=7)), (13, Meta(command=HEARTBEAT)),
        (9, Meta(command=BARRIER, request=True, barrier_group=SERVER_GROUP)), (9, Meta(command=BARRIER, request=True, barrier_group=99)),
        (9, Meta(command=BARRIER, request=False, barrier_group=7)),
    ):  # fmt: skip
        with pytest.raises(RemoteProtocolError):
            scheduler.receive(sender, meta, 0.0)
    assert (scheduler.waiting() == {} and [node.id for node in scheduler.joined] == [8, 9]) or [9, 8]
    for sender, meta in ((8, knock), (1, replace(knock, nodes=knock.nodes * 2)), (1, Meta(command=ACK))):
        with pytest.raises(RemoteProtocolError):
            members[9].receive(sender, meta)
    waiting = Scheduler(ROOT, 1, 1)
    waiting.receive(EMPTY, knock, 0.0)
    with pytest.raises(RemoteProtocolError, match="a second worker joins as x:1"):
        waiting.receive(EMPTY, knock, 0.0)
    with pytest.raises(RemoteProtocolError, match="DMLC_NUM_WORKER=1 have joined already"):
        waiting.receive(EMPTY, replace(knock, nodes=(replace(knock.nodes[0], port=2),)), 0.0)
    with pytest.raises(JobFailed, match="up to 1024 nodes"):
        Scheduler(ROOT, 1000, 25)


def test_a_member_refuses_a_job_of_another_size_with_both_sizes() -> None:
    member = Member(Node(role=WORKER, hostname="w", port=1), 2, 1)
    listed = (Node(role=WORKER, hostname="w", port=1, id=9), Node(role=SERVER, hostname="s", port=1, id=8), ROOT)
    with pytest.raises(RemoteProtocolError, match="lists 1 workers and 1 servers, but DMLC_NUM_WORKER=2 and DMLC_NUM_SERVER=1 here"):
        member.receive(1, Meta(command=ADD_NODE, nodes=listed))


def test_a_message_is_sent_again_until_it_is_acknowledged_and_passed_on_once() -> None:
    ours, theirs = Resender(9, 1.0), Resender(8, 1.0)
    meta = Meta(head=0, request=True, push=True, app_id=0, customer_id=0, timestamp=5)
    ours.sending(8, meta, (b"payload",), 0.0)
    assert ours.due(1.0) == []
    assert ours.due(1.5) == [(8, meta, (b"payload",))] and ours.due(1.6) == []
    fresh, acknowledgement = theirs.receive(9, meta)
    again, repeated = theirs.receive(9, meta)
    assert fresh and not again and acknowledgement == repeated
    assert acknowledgement is not None and acknowledgement.signature == signature_of(meta, 9, 8) == 9 << 40 | 8 << 32 | 11
    assert ours.receive(8, acknowledgement) == (False, None)
    assert ours.due(100.0) == []
    ours.sending(8, meta, (), 0.0)
    for time in range(1, RETRIES):
        assert len(ours.due(100.0 * time)) == 1
    with pytest.raises(JobFailed, match="node 8 has not acknowledged push request 5 after 10 tries"):
        ours.due(100.0 * RETRIES)


def test_keys_go_to_the_servers_whose_ranges_hold_them() -> None:
    ranges = key_ranges(3)
    keys = (5, ranges[2].start, ranges[2].start + 9)
    sliced = slice_by_server(KVPairs(keys, memoryview(b"aabbbc"), (2, 3, 1)), ranges)
    assert [(rank, pairs.keys, bytes(pairs.vals), pairs.lens) for rank, pairs in sliced] == [
        (0, keys[:1], b"aa", (2,)), (2, keys[1:], b"bbbc", (3, 1)),
    ]  # fmt: skip
    alike = slice_by_server(KVPairs(keys, memoryview(b"aabbcc")), ranges)
    assert [bytes(pairs.vals) for _, pairs in alike] == [b"aa", b"bbcc"]
    for wrong in (KVPairs((5, 5)), KVPairs((6, 5)), KVPairs((1 << 64,)), KVPairs((1, 2), memoryview(b"abc")), KVPairs((1,), memoryview(b"a"), (2,)),
                  KVPairs((1, 2), memoryview(b"a"), (1,))):  # fmt: skip
        with pytest.raises(UsageError):
            slice_by_server(wrong, ranges)
