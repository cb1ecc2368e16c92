"""Groups over gloo between threads of one process that play ranks: sums, refusals, and how a broken collective ends."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psgc.config import Config
from psgc.errors import ConfigError, GroupError, JobFailed, UsageError
from psgc.program.sums import sum_in_order
from psgc.torch.collectives import gloo
from psgc.torch.collectives.connecting import reason
from psgc.torch.collectives.groups import JobGroups, job_groups
from psgc.worker.solo import SoloSession
from tests.program.collectives import check_every_method, fractions, uneven
from tests.torch.conftest import FakeJob
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
    assert said.startswith("rank 0: all_reduce of 7 float32 in the group of ranks 0, 1 failed: ")
    # What gloo says depends on what of rank 0's message had arrived when rank 1 closed the connection.
    assert re.search(r"(Connection closed by peer|Read error|Write error) \[127\.0\.0\.1\]:", said), said
    assert "\n" not in said


def test_a_job_that_fails_ends_what_is_under_way_on_its_groups_with_the_jobs_own_error() -> None:
    """Also where no member has gone: ranks 0 and 1 wait for messages that each other's thread never sends."""

    def run(groups: JobGroups, rank: Rank) -> None:
        group, place = groups.group((0, 1)), np.zeros(4, np.uint8)
        group.maximum(np.zeros(1, np.int32))
        if rank.rank == 0:
            threading.Timer(0.2, rank.job.fail, (JobFailed("worker 7 died"),)).start()
            threading.Timer(0.3, rank.end).start()
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
    config = Config(transport="tcp", root_host="127.0.0.1", root_port=1, heartbeat_s=0.02, step_timeout_s=3.0)
    assert (
        said_when_nobody_comes(config)
        == "rank 0: exchange in the group of ranks 0, 1 failed: Timed out waiting 3000ms for recv operation to complete"
    )


def test_two_members_that_connect_from_where_nobody_reaches_them_are_told_so() -> None:
    config = Config(transport="tcp", root_host="127.0.0.1", root_port=1, heartbeat_s=0.02, node_host="203.0.113.1")
    for error in on_ranks(2, lambda groups, _: groups.group((0, 1)), config):  # type: ignore[arg-type, return-value]
        assert isinstance(error, GroupError)
        assert "cannot listen at 203.0.113.1" in str(error)
        assert "DMLC_NODE_HOST" in str(error)


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


def test_with_encryption_groups_are_refused() -> None:
    rank = Rank(FakeJob(2, Config(transport="tcp", root_host="127.0.0.1", root_port=1, encrypt=True)), 0)
    with pytest.raises(ConfigError, match="PSGC_ENCRYPT=1, but this plan has collectives between workers, which are neither encrypted nor"):
        job_groups(rank)


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


def test_what_gloo_says_is_one_line_without_places_in_its_sources() -> None:
    said = "[/__w/third_party/gloo/pair.cc:553] Connection closed by peer [::1]:9. This is typically caused by a crash.\nGLHF!"
    assert reason(RuntimeError(said)) == "Connection closed by peer [::1]:9"


def test_an_adder_keeps_no_more_memory_than_its_largest_sum_needed() -> None:
    adder: Any = gloo.Adder()
    for numel in (4, 9, 2):
        places = adder.places(np.zeros(numel, np.float32), 2)
        assert [place.size for place in places] == [numel, numel]
    assert adder._places.size == 9 * 4 * 2


def test_slices_of_many_strips_are_summed_in_member_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "STRIP_BYTES", 256)

    def run(groups: JobGroups, rank: Rank) -> None:
        group, members = groups.group((0, 1, 2)), (0, 1, 2)
        for numel, dtype, divisor in (
            (1, "float32", 1),
            (64, "float32", 3),
            (5000, "float32", 3),
            (4097, "bfloat16", 3),
            (999, "int64", 3),
        ):
            wanted = sum_in_order([fractions(member, numel, dtype) for member in members], dtype, divisor)
            cuts, array = uneven(numel, 3, 1), fractions(rank.rank, numel, dtype)
            group.reduce_scatter(array, dtype, cuts, divisor)
            group.all_gather(array, dtype, cuts)
            assert array.tobytes() == wanted.tobytes(), (numel, dtype)

    all_well(on_ranks(3, run, CONFIG))
