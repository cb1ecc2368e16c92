"""Servers with standbys on each other's machines: what the scheduler says when a machine is lost, and what it no longer heeds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from psgc.scheduler.elsewhere import elsewhere
from psgc.scheduler.membership import Membership
from psgc.scheduler.records import from_json, to_json
from psgc.wire.frames import Kind
from psgc.wire.messages import Notice, Topology
from tests.scheduler.talk import DEAD_S, JOB, Job, aborted, declaration, end_of, logged, register, sent


def server(number: int, standby: bool = False, incarnation: int = 1, **other: Any) -> Any:
    fields = {
        "host": f"boot{number}/net", "incarnation": incarnation, "lineage": 10 * number + 100 + standby, "launcher": 50 + number, "standby": standby,
        "pid": 3000 + 100 * number + 10 * standby + incarnation, "index": -1 if standby else number,
        "address": f"tcp://host{number}:{90 + standby}",
    }  # fmt: skip
    return register("server", number, **{**fields, **other})


def complete(servers: int = 2) -> Job:
    """A job whose servers are s0, s1, ... and whose standbys b0, b1, ..., each beside the server of its number."""
    job = Job(2, servers, replicas=True)
    for number in range(servers):
        job.join(f"s{number}", server(number))
        job.join(f"b{number}", server(number, standby=True))
    for node in range(2):
        job.join(f"w{node}", _worker(node))
    assert job.membership.agreements is not None
    return job


def _worker(node: int) -> Any:
    return register(node=node, host=f"boot/other{node}")


def speaks(job: Job, *silent: str) -> list[Any]:
    """Time until those who are silent count as lost: everyone else gives signs of life."""
    said = []
    for _ in range(int(DEAD_S) + 2):
        for member in job.membership.roster:
            if not member.left and member.peer.decode() not in silent:
                job.say(member.peer.decode(), Kind.HEARTBEAT)
        said += job.tick(1)
    return said


def topologies(actions: list[Any]) -> dict[str, Topology]:
    return {peer: Topology.from_body(body) for peer, body in sent(actions, Kind.TOPOLOGY).items()}


def test_each_server_has_a_standby_on_another_machine_and_hears_where() -> None:
    job = Job(2, 2, replicas=True)
    for number in range(2):
        job.join(f"s{number}", server(number))
        job.join(f"b{number}", server(number, standby=True))
    job.join("w0", _worker(0))
    assert "1 of 2 standby process(es)" not in job.membership.roster.missing()
    told = topologies(job.join("w1", _worker(1)))
    assert (told["s0"].standby, told["s1"].standby) == ("tcp://host1:91", "tcp://host0:91")
    assert told["b1"].stands_by and told["b1"].rank == 0 and told["b0"].stands_by and told["b0"].rank == 1
    assert not told["w0"].standby and not told["w0"].stands_by and not told["s0"].stands_by


def test_a_job_does_not_begin_without_its_standbys() -> None:
    job = Job(1, 2, replicas=True)
    job.join("s0", server(0))
    job.join("s1", server(1))
    job.join("w0", _worker(0))
    assert job.membership.agreements is None
    assert "2 of 2 standby process(es) (PSGC_REPLICAS=1)" in job.membership.roster.missing()


def test_servers_of_one_launcher_have_no_standbys_elsewhere() -> None:
    job = Job(1, 2, replicas=True)
    for number in range(2):
        job.join(f"s{number}", server(number, host="boot/net", launcher=50))
        job.join(f"b{number}", server(number, standby=True, host="boot/net", launcher=50))
    assert "2 of 2 servers are of one launcher (pid 50 on host0)" in aborted(job.join("w0", _worker(0)))


def test_a_standby_too_many_is_named_before_the_job_is_complete() -> None:
    job = Job(2, 2, replicas=True)
    for number in range(2):
        job.join(f"b{number}", server(number, standby=True))
    assert "is one standby too many: DMLC_NUM_SERVER=2" in aborted(job.join("b2", server(2, standby=True)))


def test_launchers_on_one_machine_are_told_what_their_replicas_outlive() -> None:
    job = Job(1, 2, replicas=True)
    for number in range(2):
        job.join(f"s{number}", server(number, host="boot/net"))
        job.join(f"b{number}", server(number, standby=True, host="boot/net"))
    actions = job.join("w0", _worker(0))
    assert "replicas outlive the launchers, not the machine" in logged(actions)
    assert topologies(actions)["s0"].standby == "tcp://host1:91"


def told_standbys(hosts: list[str]) -> tuple[list[str], str]:
    """The host of each server's standby, where server and standby of a number are on one host; and what is logged."""
    job = Job(1, len(hosts), replicas=True)
    for number, host in enumerate(hosts):
        job.join(f"s{number}", server(number, host=host))
        job.join(f"b{number}", server(number, standby=True, host=host))
    actions = job.join("w0", _worker(0))
    told = topologies(actions)
    return [hosts[int(told[f"s{number}"].standby.split(":")[1].removeprefix("//host"))] for number in range(len(hosts))], logged(actions)


def test_containers_of_one_machine_are_one_place_where_there_are_others() -> None:
    hosts = ["A/net1/p", "A/net2/p", "B/net3/p", "B/net4/p"]
    standbys, said = told_standbys(hosts)
    assert [standby[0] for standby in standbys] == ["B", "B", "A", "A"]
    assert "replicas outlive" not in said


@pytest.mark.parametrize("hosts", [["A/net1/p", "A/net2/p"], ["A/net1/p", "A/net2/p", "A/net3/p", "B/net4/p"]])
def test_containers_of_one_machine_stand_by_for_each_other_where_there_are_not_and_that_is_said(hosts: list[str]) -> None:
    standbys, said = told_standbys(hosts)
    assert all(standby != host for standby, host in zip(standbys, hosts, strict=True))
    assert "replicas outlive the launchers, not the machine" in said


@pytest.mark.parametrize(("replicas", "other", "said"), [
    (True, {"launcher": 0}, "the scheduler has PSGC_REPLICAS=1, server 0 (pid 3001 on host0) has not"),
    (False, {}, "server 0 (pid 3001 on host0) has PSGC_REPLICAS=1, the scheduler has not"),
    (True, {"lineage": 0}, "no launcher keeps its memory; start it with psgc-launch"),
])  # fmt: skip
def test_replicas_are_everybodys_or_nobodys(replicas: bool, other: dict[str, Any], said: str) -> None:
    job = Job(1, 2, replicas=replicas)
    assert said in aborted(job.join("s0", server(0, **other)))


def test_a_lost_machines_server_goes_on_at_its_standby_and_everyone_hears_where() -> None:
    job = complete()
    job.declare("w0", declaration("first"))
    number = _layout(job)
    job.say("s0", Kind.KEYS_READY, plan=number)
    job.say("s1", Kind.KEYS_READY, plan=number)
    actions = speaks(job, "s0", "b0")
    told = topologies(actions)
    assert [address.address for address in told["w0"].servers] == ["tcp://host1:91", "tcp://host1:90"]
    assert told["w0"].servers == told["w1"].servers
    assert (told["b1"].rank, told["b1"].stands_by, told["b1"].layouts) == (0, False, 1)
    assert not told["s1"].standby, "its standby was on the lost machine"
    keys = [a.header.plan for a in actions if getattr(a, "peer", b"") == b"b1" and a.header.kind == Kind.KEYS]
    assert keys == [number]
    assert "takes its place (PSGC_REPLICAS=1)" in logged(actions) and "goes on without a standby" in logged(actions)
    assert not job.say("b1", Kind.KEYS_READY, plan=number), "workers have that layout"
    assert not sent(speaks(job), Kind.ABORT)


def _layout(job: Job) -> int:
    actions = job.declare("w1", declaration("first"))
    (keys,) = {action.header.plan for action in actions if getattr(action, "header", None) is not None and action.header.kind == Kind.KEYS}
    return int(keys)


def test_what_comes_from_a_lost_machine_after_all_is_turned_away() -> None:
    job = complete()
    speaks(job, "s0", "b0")
    for peer, said in (("s0", server(0)), ("b0", server(0, standby=True)), ("s0 again", server(0, incarnation=2))):
        assert "counted as lost, and the others have gone on without it" in sent(job.join(peer, said), Kind.ABORT)[peer]["text"]
    assert "counted as lost" in sent(job.say("s0", Kind.HEARTBEAT), Kind.ABORT)["s0"]["text"]


def test_where_both_are_lost_the_job_ends_with_a_line() -> None:
    job = complete()
    text = aborted(speaks(job, "s0", "s1", "b0", "b1"))
    assert text.startswith("server 0 ") and "it has no standby any more, so what it had kept is lost (PSGC_RESTARTS" in text


def test_one_loss_after_another_ends_it_too() -> None:
    job = complete()
    speaks(job, "s0", "b0")
    assert "it has no standby any more" in aborted(speaks(job, "s1", "b1"))


def test_without_replicas_the_last_line_says_what_would_help() -> None:
    job = Job(1, 1)
    job.join("s0", server(0, launcher=0))
    job.join("w0", _worker(0))
    assert "PSGC_REPLICAS=1 keeps it on another machine, too, and PSGC_RESTARTS starts a job again" in aborted(speaks(job, "s0"))


@pytest.mark.parametrize("peer", ["s0", "b0"])
def test_a_server_or_a_standby_that_is_told_to_end_ends_the_job_in_order(peer: str) -> None:
    """Only losses are survived."""
    job, text = complete(), "server 0: ended by SIGTERM"
    said = job.say(peer, Kind.FAULT, Notice(0, text))
    assert aborted(said) == text
    assert sent(said, Kind.ABORT).keys() == {"s0", "s1", "b0", "b1", "w0", "w1"}


def test_a_standbys_process_that_ends_is_followed_and_hears_what_it_is() -> None:
    job = complete()
    told = topologies(job.join("b0 again", server(0, standby=True, incarnation=2)))
    assert set(told) == {"b0 again"} and told["b0 again"].stands_by and told["b0 again"].rank == 1


def test_the_process_that_follows_one_that_had_moved_is_the_server() -> None:
    job = complete()
    speaks(job, "s0", "b0")
    told = topologies(job.join("b1 again", server(1, standby=True, incarnation=2)))
    assert set(told) == {"b1 again"} and not told["b1 again"].stands_by and told["b1 again"].rank == 0


def followed(job: Job, journal: list[str]) -> None:
    """Another process takes the scheduler's place."""
    job.membership = Membership(2, 2, JOB, job.now, job._alive, dead_s=DEAD_S, replicas=True)
    job.membership.resume(map(from_json, map(json.loads, journal)), job.now)


@pytest.mark.parametrize("anew", [False, True])
def test_another_process_of_the_scheduler_waits_for_a_server_whose_standby_has_left(anew: bool) -> None:
    job = complete()
    journal = [json.dumps(to_json(record)) for record in job.membership.records()]
    said = [action for peer in ("w0", "w1", "b1") for action in job.say(peer, Kind.BYE)]
    journal += [json.dumps(to_json(action.record)) for action in said if hasattr(action, "record")]
    followed(job, [json.dumps(to_json(record)) for record in job.membership.records()] if anew else journal)
    assert {member.label for member in job.membership.roster if not member.left} == {
        "server 0 (pid 3001 on host0)", "server 1 (pid 3101 on host1)", "the standby of server 1 (pid 3011 on host0)"
    }  # fmt: skip
    assert set(sent(job.tick(1), Kind.BYE)) == {"s0", "s1", "b0"}
    for peer in ("s0", "s1", "b0"):
        assert end_of(job.tick(1)) is None
        end = end_of(job.say(peer, Kind.BYE))
    assert end is not None and end.status == 0


@pytest.mark.parametrize("anew", [False, True])
def test_another_process_of_the_scheduler_knows_who_has_moved_and_who_is_alone(anew: bool) -> None:
    job = complete()
    journal = [json.dumps(to_json(record)) for record in job.membership.records()]
    kept = [action.record for action in speaks(job, "s0", "b0") if hasattr(action, "record")]
    journal = (
        [json.dumps(to_json(record)) for record in job.membership.records()] if anew else journal + [json.dumps(to_json(r)) for r in kept]
    )
    followed(job, journal)
    told = topologies(job.join("b1", server(1, standby=True)))
    assert (told["b1"].rank, told["b1"].stands_by) == (0, False)
    assert [address.address for address in told["b1"].servers] == ["tcp://host1:91", "tcp://host1:90"]
    assert not topologies(job.join("s1", server(1)))["s1"].standby
    assert [member.rank for member in job.membership.roster.standbys()] == []


@pytest.mark.parametrize("anew", [False, True])
def test_another_process_of_the_scheduler_knows_the_standbys_next_process(anew: bool) -> None:
    job = complete()
    journal = [json.dumps(to_json(record)) for record in job.membership.records()]
    said = job.join("b0 again", server(0, standby=True, incarnation=2)) + job.join("s0 again", server(0, incarnation=2))
    journal += [json.dumps(to_json(action.record)) for action in said if hasattr(action, "record")]
    followed(job, [json.dumps(to_json(record)) for record in job.membership.records()] if anew else journal)
    assert not sent(job.say("b0 again", Kind.HEARTBEAT), Kind.ERROR), "it may be heard before it has registered on its new connection"
    told = topologies(job.join("b0 again", server(0, standby=True, incarnation=2)))
    assert (told["b0 again"].rank, told["b0 again"].stands_by) == (1, True)
    assert "goes on without a standby" not in logged(speaks(job)), "nobody is taken for silent"
    told = topologies(speaks(job, "s1", "b1"))
    assert (told["b0 again"].rank, told["b0 again"].stands_by) == (1, False), "it still protects its server"


def test_a_server_that_is_lost_while_its_standbys_process_is_followed_by_another_goes_on_there() -> None:
    """b0, the standby of server 1, is on the scheduler's host, where its end is seen; its next process has not registered yet."""
    job = complete()
    speaks(job)
    for _ in range(int(DEAD_S) - 1):
        job.now += 1
        for peer in ("s0", "b0", "w0", "w1"):
            job.say(peer, Kind.HEARTBEAT)
        job.tick()
    job.dead.add(server(0, standby=True).pid)
    said = []
    for _ in range(5):
        for peer in ("s0", "w0", "w1"):
            job.say(peer, Kind.HEARTBEAT)
        said += job.tick(1)
    assert not sent(said, Kind.ABORT) and "takes its place" not in logged(said)
    job.join("b0 again", server(0, standby=True, incarnation=2))
    told = topologies(job.tick())
    assert (told["b0 again"].rank, told["b0 again"].stands_by) == (1, False)
    assert told["w0"].servers[1].address == "tcp://host0:91"


def test_a_server_that_is_lost_and_whose_standby_is_followed_by_none_ends_the_job() -> None:
    job = complete()
    job.dead.add(server(0, standby=True).pid)
    assert "server 1 (pid 3101 on host1) has said nothing for" in aborted(speaks(job, "s1", "b1", "b0"))
    assert "has no standby any more" in job.membership.failed[1]  # type: ignore[index]


@pytest.mark.parametrize(("servers", "standbys", "found"), [
    ("ab", "ab", True), ("aabb", "aabb", True), ("abc", "abc", True), ("aabbc", "abcab", True), ("aab", "aab", False), ("aaabbc", "abcaab", True),
    ("a", "a", False), ("ab", "aa", False), ("ba", "ab", True),
])  # fmt: skip
def test_standbys_are_elsewhere_where_that_can_be(servers: str, standbys: str, found: bool) -> None:
    placed = elsewhere(servers, standbys)
    assert (placed is not None) == found
    if placed is not None:
        assert sorted(placed) == list(range(len(servers)))
        assert all(servers[server] != standbys[standby] for server, standby in enumerate(placed))
