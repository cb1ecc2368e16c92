"""Groups over shared memory between threads of one process that play ranks of one host: sums, their order, and how a broken collective ends."""

from __future__ import annotations

import socket
import threading
import time

import numpy as np
import pytest

from psgc.config import Config
from psgc.errors import JobFailed, UsageError
from psgc.program.ranks import Ranks
from psgc.program.sums import sum_in_order
from psgc.torch.collectives.groups import JobGroups
from psgc.worker.collectives import mesh, shared_group
from psgc.worker.collectives.shared_group import SLOT_BYTES, SharedGroup
from tests.program.collectives import check_every_method, fractions, uneven
from tests.torch.rank_threads import Rank, all_well, on_ranks, said_when_another_leaves, said_when_nobody_comes

CONFIG = Config(root_host="127.0.0.1", root_port=1, heartbeat_s=0.02, step_timeout_s=60.0)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_collective_is_numpys(size: int) -> None:
    def run(groups: JobGroups, _: Rank) -> None:
        check_every_method(groups, tuple(range(size)))
        assert isinstance(groups.group(tuple(range(size))), SharedGroup)

    all_well(on_ranks(size, run, CONFIG))


def test_arrays_of_many_slots_are_summed_in_member_order_whatever_collective_sums_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_group, "SLOT_BYTES", 4096)  # many rounds of little
    monkeypatch.setattr(shared_group, "SEGMENT_BYTES", 3 * 4096)
    monkeypatch.setattr(shared_group, "WHOLE_BYTES", 512)
    sizes = (1, 127, 128, 129, 1024, 5000, 40_001)

    def run(groups: JobGroups, rank: Rank) -> None:
        members = (0, 1, 2)
        group = groups.group(members)
        for numel in sizes:
            for dtype in ("float32", "bfloat16", "float64"):
                wanted = sum_in_order([fractions(member, numel, dtype) for member in members], dtype)
                array = fractions(rank.rank, numel, dtype)
                group.all_reduce(array, dtype)
                assert array.tobytes() == wanted.tobytes(), (numel, dtype)
                array = fractions(rank.rank, numel, dtype)
                group.reduce(array, dtype, 1)
                assert rank.rank != 1 or array.tobytes() == wanted.tobytes(), (numel, dtype)
                group.broadcast(array, dtype, 1)
                assert array.tobytes() == wanted.tobytes(), (numel, dtype)
                cuts = uneven(numel, 3, 1)
                array = fractions(rank.rank, numel, dtype)
                group.reduce_scatter(array, dtype, cuts)
                group.all_gather(array, dtype, cuts)
                assert array.tobytes() == wanted.tobytes(), (numel, dtype)
        payloads = [[np.full(3000 * sender + 41 * receiver, 9 * sender + receiver, np.uint8) for receiver in members] for sender in members]
        incoming = [np.zeros(payloads[sender][rank.rank].size, np.uint8) for sender in members]
        group.exchange(payloads[rank.rank], incoming)
        for sender in members:
            assert incoming[sender].tobytes() == payloads[sender][rank.rank].tobytes()

    all_well(on_ranks(3, run, CONFIG))


def test_members_that_go_ahead_as_far_as_they_can_overwrite_nothing_that_others_still_read() -> None:
    """Each rank sleeps elsewhere, so that the others are up to a round ahead of it."""

    def run(groups: JobGroups, rank: Rank) -> None:
        group, drawn = groups.group((0, 1, 2)), np.random.default_rng(rank.rank)
        numel = SLOT_BYTES // 4 + 5
        for step in range(40):
            array = np.full(numel, 3.0**rank.rank * (step + 1), np.float32)
            if drawn.random() < 0.2:
                time.sleep(0.01 * drawn.random())
            group.all_reduce(array, "float32")
            assert (array == 13.0 * (step + 1)).all(), step

    all_well(on_ranks(3, run, CONFIG))


def test_only_workers_of_one_node_that_may_use_shared_memory_do() -> None:
    def kind(node_sizes: tuple[int, ...], config: Config) -> list[str]:
        found = ["", ""]

        def run(groups: JobGroups, rank: Rank) -> None:
            rank.ranks = Ranks(node_sizes)
            found[rank.rank] = type(groups.group((0, 1))).__name__

        all_well(on_ranks(2, run, config))
        return found

    base = {"root_host": "127.0.0.1", "root_port": 1}
    assert kind((2,), Config(**base)) == ["SharedGroup"] * 2
    assert kind((1, 1), Config(**base)) == ["SocketGroup"] * 2
    assert kind((2,), Config(transport="tcp", **base)) == ["SocketGroup"] * 2
    assert kind((2,), Config(transport="tcp", link_mbit=100.0, **base)) == ["SharedGroup"] * 2, "a simulated node has memory, too"
    assert kind((1, 1), Config(transport="tcp", link_mbit=100.0, **base)) == ["SocketGroup"] * 2


def test_who_leaves_breaks_the_groups_of_the_others_who_report_it_if_nobody_else_does() -> None:
    said = said_when_another_leaves(CONFIG)
    assert said.startswith("rank 0: all_reduce of 7 float32 in the group of ranks 0, 1 failed: rank 1 has left the group")


def test_a_job_that_fails_ends_what_is_under_way_on_its_groups_with_the_jobs_own_error() -> None:
    failed = threading.Event()

    def run(groups: JobGroups, rank: Rank) -> None:
        group = groups.group((0, 1, 2))
        group.maximum(np.zeros(1, np.int32))
        if rank.rank == 2:  # alive, and never there
            rank.job.fail(JobFailed("worker 7 died"))
            failed.set()
        else:
            threading.Thread(target=lambda: failed.wait(60) and rank.end()).start()
            group.all_reduce(np.zeros(9, np.float32), "float32")

    for error in on_ranks(3, run, CONFIG)[:2]:
        assert isinstance(error, JobFailed)
        assert str(error) == "worker 7 died"


def test_a_rank_whose_peer_never_asks_for_the_group_hears_why_the_job_has_failed() -> None:
    def run(groups: JobGroups, rank: Rank) -> None:
        if rank.rank == 0:
            groups.group((0, 1))
        else:
            rank.publish("shares memory: 1", mesh_host(rank))
            time.sleep(0.2)
            rank.job.fail(JobFailed("rank 1 has met an error"))

    def mesh_host(rank: Rank) -> bytes:
        return rank.lookup("shares memory: 0")

    (error, _) = on_ranks(2, run, CONFIG)
    assert isinstance(error, JobFailed)


def test_a_collective_that_a_member_never_comes_to_fails_at_the_limit_of_a_step() -> None:
    said = said_when_nobody_comes(CONFIG, limit_s=3.0)
    assert said == "rank 0: exchange in the group of ranks 0, 1 failed: rank 1 has not come to it within 3 s"


def test_members_in_different_collectives_are_told_which_they_are_in() -> None:
    def run(groups: JobGroups, rank: Rank) -> None:
        groups.group((0, 1)).all_reduce(np.zeros(7 + rank.rank, np.float32), "float32")

    errors = [str(error) for error in on_ranks(2, run, CONFIG)]
    said = [
        f"all_reduce of {7 + rank} float32 in the group of ranks 0, 1 failed: "
        f"rank {1 - rank} is in its round 1, all_reduce of {8 - rank} float32, and this rank in round 1"
        for rank in range(2)
    ]
    assert any(text in error for text in said for error in errors), errors


def test_another_thread_may_not_issue_a_collective_meanwhile() -> None:
    refused: list[UsageError] = []
    told = threading.Event()

    def run(groups: JobGroups, rank: Rank) -> None:
        group = groups.group((0, 1))

        def issue() -> None:
            try:
                group.maximum(np.zeros(1, np.int32))
            except UsageError as error:
                refused.append(error)
                told.set()

        if rank.rank == 1:
            assert told.wait(60)
            issue()
        else:
            both = [threading.Thread(target=issue) for _ in range(2)]
            for thread in both:
                thread.start()
            for thread in both:
                thread.join()

    all_well(on_ranks(2, run, CONFIG))
    (error,) = refused
    assert "one thread at a time" in str(error)


def test_strangers_on_the_socket_get_nothing_and_keep_nobody_waiting() -> None:
    def run(groups: JobGroups, rank: Rank) -> None:
        if rank.rank == 1:
            rank.publish("shares memory: 1", rank.lookup("shares memory: 0"))
            name = next(name for name in iter(lambda: _listener_of(rank), None) if name)
            secret = rank.job.published[name][: mesh.SECRET_BYTES]
            address = b"\0" + rank.job.published[name][mesh.SECRET_BYTES :]
            for said in (b"", b"?", bytes(60), bytes(mesh.SECRET_BYTES) + bytes(12), secret + bytes(11)):
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                    stranger.connect(address)
                    if said:
                        stranger.send(said)
                    else:
                        stranger.shutdown(socket.SHUT_WR)
                    stranger.settimeout(60)
                    assert stranger.recv(100) == b""
        check_every_method(groups, (0, 1), ("float32",))

    all_well(on_ranks(2, run, CONFIG))


def _listener_of(rank: Rank) -> str:
    return next((name for name in list(rank.job.published) if name.startswith("memory ")), "")


def test_a_rank_and_its_job_can_do_without_a_listener_for_the_last_member() -> None:
    def run(_: JobGroups, rank: Rank) -> None:
        mesh.connect(rank, (0, 1), "here", 4096).close()
        assert list(rank.job.published) == ["here/0"]

    all_well(on_ranks(2, run, CONFIG))
