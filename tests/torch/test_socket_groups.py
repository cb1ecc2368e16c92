"""Groups over TCP between threads of one process that play ranks: sums, their order, encryption, refusals, and how a broken collective ends."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psgc.config import Config
from psgc.errors import GroupError, JobFailed, UsageError
from psgc.program.ranks import Ranks
from psgc.program.sums import sum_in_order
from psgc.torch.collectives.connecting import reason
from psgc.torch.collectives.groups import JobGroups, job_groups
from psgc.transport.pacing import Pace, make_file
from psgc.transport.tcp import TRANSPORT
from psgc.worker.collectives import connections, socket_group
from psgc.worker.collectives.pump import Outcome, Streams, pump
from psgc.worker.collectives.socket_group import SocketGroup
from psgc.worker.collectives.sums import Adder
from psgc.worker.solo import SoloSession
from tests.program.collectives import check_every_method, fractions, uneven
from tests.torch.rank_threads import Rank, all_well, on_ranks, said_when_another_leaves, said_when_nobody_comes

CONFIG = Config(transport="tcp", root_host="127.0.0.1", root_port=1, heartbeat_s=0.02, step_timeout_s=60.0)


@pytest.mark.parametrize("size", [2, 3])
def test_every_collective_is_numpys(size: int) -> None:
    all_well(on_ranks(size, lambda groups, _: check_every_method(groups, tuple(range(size))), CONFIG))


def test_groups_find_each_other_by_ipv6() -> None:
    if not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    config = Config(transport="tcp", root_host="::1", root_port=1, heartbeat_s=0.02)
    all_well(on_ranks(2, lambda groups, _: check_every_method(groups, (0, 1), ("float32",)), config))


def test_who_leaves_breaks_the_groups_of_the_others_who_report_it_if_nobody_else_does() -> None:
    said = said_when_another_leaves(CONFIG)
    assert said == "rank 0: all_reduce of 7 float32 in the group of ranks 0, 1 failed: rank 1 has left the group"


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    one.setblocking(False)
    return one, other


def sent_over(one: socket.socket) -> Outcome:
    return pump(np.array([one.fileno()], np.int64), Streams.of([[np.ones(64, np.uint8)]]), Streams.of([[]]), 1_000).outcome


def test_whoever_only_sends_to_a_peer_that_has_gone_hears_of_it_each_time() -> None:
    """A send that fails takes the socket's error, and no poll tells it any more."""
    one, other = connected()
    other.close()
    found: list[Outcome] = []

    def send() -> None:
        while found.count(Outcome.BROKEN) < 3:  # the first bytes leave before the other end says that it is closed
            found.append(sent_over(one))

    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    sending.join(120)
    assert not sending.is_alive(), f"after {found} a send has not returned"
    one.close()


def test_a_peer_that_sends_no_more_and_still_receives_is_not_gone() -> None:
    one, other = connected()
    with one, other:
        other.shutdown(socket.SHUT_WR)
        assert [sent_over(one) for _ in range(3)] == [Outcome.DONE] * 3
        assert len(other.recv(192, socket.MSG_WAITALL)) == 192


def test_a_session_whose_check_raises_ends_a_collective_that_stands_still() -> None:
    """Nobody else ends the connections of a handover that is given up."""
    given_up, over = threading.Event(), threading.Event()

    def run(groups: JobGroups, rank: Rank) -> None:
        group = groups.group((0, 1))
        if rank.rank == 1:
            over.wait()
            return

        def check() -> None:
            if given_up.is_set():
                raise GroupError("the handover has been given up")

        rank.check = check  # type: ignore[method-assign]
        threading.Timer(0.2, given_up.set).start()
        try:
            group.exchange([None, None], [None, np.zeros(4, np.uint8)])
        finally:
            over.set()

    (error, nothing) = on_ranks(2, run, replace(CONFIG, step_timeout_s=1e6))
    assert nothing is None
    assert isinstance(error, GroupError)
    assert str(error) == "the handover has been given up"


def test_a_job_that_fails_ends_what_is_under_way_on_its_groups_with_the_jobs_own_error() -> None:
    """Also where no member has gone: ranks 0 and 1 wait for messages that each other's thread never sends."""

    def fail(rank: Rank) -> None:
        rank.job.fail(JobFailed("worker 7 died"))
        rank.end()

    def run(groups: JobGroups, rank: Rank) -> None:
        group, place = groups.group((0, 1)), np.zeros(4, np.uint8)
        group.maximum(np.zeros(1, np.int32))
        if rank.rank == 0:
            threading.Timer(0.2, fail, (rank,)).start()
        group.exchange([None, None], [None if index == rank.rank else place for index in range(2)])

    for error in on_ranks(2, run, CONFIG):
        assert isinstance(error, JobFailed)
        assert str(error) == "worker 7 died"


def test_a_rank_whose_peer_never_asks_for_the_group_hears_why_the_job_has_failed() -> None:
    def run(groups: JobGroups, rank: Rank) -> None:
        if rank.rank == 0:
            groups.group((0, 1))
        else:
            time.sleep(0.2)
            rank.job.fail(JobFailed("rank 1 has met an error"))

    (error, _) = on_ranks(2, run, CONFIG)
    assert isinstance(error, JobFailed)


def test_a_collective_that_no_other_member_comes_to_fails_at_the_limit_of_a_step() -> None:
    said = said_when_nobody_comes(CONFIG, limit_s=3.0)
    assert said == "rank 0: exchange in the group of ranks 0, 1 failed: rank 1 has not come to it within 3 s"


def test_two_members_that_connect_from_where_nobody_reaches_them_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "CONNECT_S", 1.0)
    config = Config(transport="tcp", root_host="127.0.0.1", root_port=1, heartbeat_s=0.02, node_host="203.0.113.1", step_timeout_s=100.0)

    def run(groups: JobGroups, rank: Rank) -> None:
        try:
            groups.group((0, 1))
        except GroupError:
            rank.job.fail(JobFailed("the other one need not wait for its limit"))
            raise

    errors = on_ranks(2, run, config)
    said = [str(error) for error in errors if isinstance(error, GroupError)]
    assert any("rank 0 cannot be reached at tcp://203.0.113.1:" in each and "DMLC_NODE_HOST" in each for each in said), errors


def test_a_process_that_is_alone_has_a_group_of_itself() -> None:
    session = SoloSession(Config())
    groups = job_groups(session)
    check_every_method(groups, (0,))
    with pytest.raises(UsageError, match="no group for rank 0"):
        groups.group((0, 1))
    session.close()
    assert job_groups(session) is not groups, "the session's end closes its groups, and nothing holds them any more"


def test_calls_that_no_group_takes_are_refused_with_the_words_of_the_reference() -> None:
    session = SoloSession(Config())
    group = job_groups(session).group((0,))
    with pytest.raises(UsageError, match="unknown element type 'complex64'"):
        group.all_reduce(np.zeros(1, np.complex64), "complex64")
    with pytest.raises(UsageError, match="do not divide 6 elements among 1 members"):
        group.all_gather(np.zeros(6, np.float32), "float32", [0, 5])
    with pytest.raises(UsageError, match="root 1 is none of the 1 members"):
        group.broadcast(np.zeros(6, np.float32), "float32", 1)
    session.close()
    with pytest.raises(UsageError, match="shut down"):
        job_groups(session).group((0,))


def encrypted(config: Config) -> Config:
    pytest.importorskip("cryptography", reason="psgc[encrypt] is not installed")
    return replace(config, encrypt=True)


@pytest.mark.parametrize("size", [2, 3])
def test_every_collective_is_numpys_under_encryption(size: int) -> None:
    all_well(on_ranks(size, lambda groups, _: check_every_method(groups, tuple(range(size))), encrypted(CONFIG)))


@pytest.mark.parametrize("kind", ["plain", "encrypted", "paced"])
def test_arrays_of_many_strips_are_summed_in_member_order_whatever_collective_sums_them(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"STRIP_BYTES": 4096, "SEALED_BYTES": 1000, "WHOLE_BYTES": 512}.items():
        monkeypatch.setattr(socket_group, name, value)
    config = (
        encrypted(CONFIG) if kind == "encrypted" else replace(CONFIG, link_mbit=200.0, link_fd=make_file()) if kind == "paced" else CONFIG
    )

    def run(groups: JobGroups, rank: Rank) -> None:
        rank.ranks = Ranks((1, 1, 1))
        members = (0, 1, 2)
        group = groups.group(members)
        for numel in (1, 129, 1024, 40_001):
            for dtype in ("float32", "bfloat16"):
                wanted = sum_in_order([fractions(member, numel, dtype) for member in members], dtype)
                array = fractions(rank.rank, numel, dtype)
                group.all_reduce(array, dtype)
                assert array.tobytes() == wanted.tobytes(), (numel, dtype)
                array = fractions(rank.rank, numel, dtype)
                group.reduce(array, dtype, 1)
                assert rank.rank != 1 or array.tobytes() == wanted.tobytes(), (numel, dtype)
                group.broadcast(array, dtype, 1)
                assert array.tobytes() == wanted.tobytes(), (numel, dtype)
            for dtype, divisor in (("float32", 3), ("bfloat16", 3), ("int64", 3), ("float64", 1)):
                wanted = sum_in_order([fractions(member, numel, dtype) for member in members], dtype, divisor)
                cuts, array = uneven(numel, 3, 1), fractions(rank.rank, numel, dtype)
                group.reduce_scatter(array, dtype, cuts, divisor)
                group.all_gather(array, dtype, cuts)
                assert array.tobytes() == wanted.tobytes(), (numel, dtype)

    all_well(on_ranks(3, run, config))


def test_members_that_go_ahead_as_far_as_they_can_disturb_no_collective() -> None:
    """Each rank sleeps elsewhere, so that what others have sent of later collectives waits in its sockets."""

    def run(groups: JobGroups, rank: Rank) -> None:
        group, drawn = groups.group((0, 1, 2)), np.random.default_rng(rank.rank)
        for step in range(60):
            array = np.full(20_005, 3.0**rank.rank * (step + 1), np.float32)
            if drawn.random() < 0.2:
                time.sleep(0.01 * drawn.random())
            group.all_reduce(array, "float32")
            assert (array == 13.0 * (step + 1)).all(), step

    all_well(on_ranks(3, run, CONFIG))


def test_a_simulated_link_holds_a_collective_up_by_its_bytes_but_none_within_a_node() -> None:
    """The file has the moment when the link is free again: each byte of a group between nodes moves it on."""

    def after(node_sizes: tuple[int, ...]) -> float:
        file = make_file()
        config = replace(CONFIG, link_mbit=1000.0, link_fd=file)

        def run(groups: JobGroups, rank: Rank) -> None:
            rank.ranks = Ranks(node_sizes)
            group = SocketGroup(rank, connections.connect(rank, (0, 1), f"of {node_sizes}", TRANSPORT))
            group.all_gather(np.zeros(500_000, np.float32), "float32", [0, 250_000, 500_000])
            group.close()

        began = time.monotonic()
        all_well(on_ranks(2, run, config))
        return Pace(file, "out", 1.0).free_at - began

    assert after((1, 1)) > 2 * 1_000_000 * 8 / 1000e6, "both ranks here share one link, of 8 ms for 1 MB"
    assert after((2,)) < 0


def test_a_member_that_is_in_another_collective_is_named_with_both() -> None:
    def run(groups: JobGroups, rank: Rank) -> None:
        group = groups.group((0, 1))
        if rank.rank == 0:
            group.all_gather(np.zeros(8, np.float32), "float32", [0, 4, 8])
        else:
            group.exchange([np.zeros(16, np.uint8), None], [np.zeros(16, np.uint8), None])

    for error in on_ranks(2, run, CONFIG):
        assert isinstance(error, JobFailed)
        assert re.search(
            r"rank [01] is in its collective 1 with 16 bytes for this rank, and this rank in its collective 1, (all_gather|exchange)",
            str(error),
        )


def test_a_stranger_that_connects_is_no_member() -> None:
    """It proves nothing, and the members meet without it."""
    strangers = list[socket.socket]()

    class Told(Rank):
        def publish(self, name: str, value: bytes) -> None:
            host, _, port = value[32:].decode().removeprefix("tcp://").rpartition(":")
            for said in (b"", b"x" * 200):
                strangers.append(socket.create_connection((host, int(port))))
                strangers[-1].sendall(said)
            super().publish(name, value)

    def run(_: JobGroups, rank: Rank) -> None:
        rank.__class__ = Told
        group = SocketGroup(rank, connections.connect(rank, (0, 1), "with strangers", TRANSPORT))
        array = np.ones(3, np.float32)
        group.all_reduce(array, "float32")
        assert (array == 2).all()
        group.close()

    all_well(on_ranks(2, run, CONFIG))
    assert len(strangers) == 2
    for stranger in strangers:
        stranger.close()


def test_what_was_altered_on_its_way_ends_the_collective_that_receives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = encrypted(CONFIG)

    def run(groups: JobGroups, rank: Rank) -> None:
        group: Any = groups.group((0, 1))
        if rank.rank == 1:
            (cipher,) = group._peers.ciphers
            sealed = cipher.seal

            def altered(head: bytes, payload: Any) -> memoryview:
                message: memoryview = sealed(head, payload)
                message[0] ^= 1
                return message

            cipher.seal = altered
        group.all_gather(np.zeros(8, np.float32), "float32", [0, 4, 8])

    (error, _) = on_ranks(2, run, config)
    assert isinstance(error, JobFailed)
    assert "rank 1: a message was altered in the network: its tag is wrong" in str(error)


def test_published_values_are_looked_up_and_have_one_value() -> None:
    session = SoloSession(Config())
    session.publish("place", b"here")
    session.publish("place", b"here")
    assert session.lookup("place") == b"here"
    for refused in (
        lambda: session.publish("place", b"there"),
        lambda: session.publish("", b""),
        lambda: session.publish("n" * 201, b""),
        lambda: session.publish("large", bytes((64 << 10) + 1)),
        lambda: session.lookup("nothing"),
    ):
        with pytest.raises(UsageError):
            refused()


def test_what_torchs_libraries_say_is_one_line_without_places_in_its_sources() -> None:
    said = "[/__w/third_party/gloo/pair.cc:553] Connection closed by peer [::1]:9. This is typically caused by a crash.\nGLHF!"
    assert reason(RuntimeError(said)) == "Connection closed by peer [::1]:9"


def test_an_adder_keeps_no_more_memory_than_its_largest_sum_needed() -> None:
    adder: Any = Adder()
    for numel in (4, 9, 2):
        places = adder.places(np.zeros(numel, np.float32), 2)
        assert [place.size for place in places] == [numel, numel]
    assert adder._places.size == 9 * 4 * 2


@pytest.mark.parametrize("seed", range(12))
def test_a_stream_that_is_cut_or_altered_anywhere_ends_the_collective_or_leaves_it_right_and_never_hangs(seed: int) -> None:
    """One member's end is played by hand: what a true member sends, of which a byte was mutated or the end left out. A header that is another one is found
    out; bytes after it are taken as they are, so only encryption tells of those."""
    draw = np.random.default_rng(seed)
    array = np.arange(64, dtype=np.float32)
    head = np.array([int.from_bytes(b"PSGCgrp1", "little"), 1, zlib.crc32(b"all_gather of 64 float32"), 128], np.int64).tobytes()
    true = head + (array[32:] + 1).tobytes()
    at = int(draw.integers(0, len(true)))
    altered = seed % 2 == 0
    sent = true[:at] + bytes([true[at] ^ int(draw.integers(1, 256))]) + true[at + 1 :] if altered else true[:at]

    def run(_: JobGroups, rank: Rank) -> None:
        peers = connections.connect(rank, (0, 1), f"cut {seed}", TRANSPORT)
        if rank.rank == 1:
            with socket.socket(fileno=os.dup(int(peers.sockets[0]))) as raw:
                raw.setblocking(True)
                raw.sendall(sent)
                if not altered:
                    raw.shutdown(socket.SHUT_WR)
                while raw.recv(1 << 16):
                    pass
            peers.close()
            return
        group, own = SocketGroup(rank, peers), array.copy()
        try:
            group.all_gather(own, "float32", [0, 32, 64])
        finally:
            group.abort()
        assert altered and at >= len(head), "only what follows the header may be another"

    (error, _) = on_ranks(2, run, CONFIG)
    if altered and at >= len(head):
        assert error is None
    else:
        assert isinstance(error, JobFailed) and "rank 1" in str(error), error
