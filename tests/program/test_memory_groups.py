"""Groups of threads: the reference of every other backend, held against NumPy."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from psgc.errors import GroupError, UsageError
from psgc.program.memory_groups import MemoryGroups, MemoryWorld
from psgc.program.sums import narrow_bf16, sum_in_order, widen_bf16
from tests.program.collectives import check_every_method


def on_ranks(size: int, run: Callable[[MemoryGroups, int], None], timeout_s: float = 60.0) -> list[BaseException | None]:
    """What each of ``size`` ranks, as threads of one world, ended with."""
    world = MemoryWorld(size, timeout_s)
    ended: list[BaseException | None] = [None] * size

    def play(rank: int) -> None:
        try:
            run(world.groups(rank), rank)
        except BaseException as error:
            ended[rank] = error

    threads = [threading.Thread(target=play, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ended


def all_well(ended: list[BaseException | None]) -> None:
    for error in ended:
        if error is not None:
            raise error


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_collective_gives_what_numpy_does(size: int) -> None:
    all_well(on_ranks(size, lambda groups, _: check_every_method(groups, tuple(range(size)))))


def test_groups_of_some_ranks_work_side_by_side() -> None:
    """Two nodes of two ranks: the group of all, of a node, and of the ranks with one place on their nodes."""

    def run(groups: MemoryGroups, rank: int) -> None:
        for members in ((0, 1, 2, 3), (rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2), (rank,)):
            check_every_method(groups, members, ("float32", "bfloat16"))

    all_well(on_ranks(4, run))


def test_what_a_collective_does_not_promise_is_not_there() -> None:
    """Whoever reads what is undefined after a collective shall not find the sum there by chance."""

    def run(groups: MemoryGroups, rank: int) -> None:
        group = groups.group((0, 1))
        reduced, scattered = np.ones(6, np.float32), np.ones(6, np.float32)
        group.reduce(reduced, "float32", 0)
        assert (reduced == 2).all() == (rank == 0)
        group.reduce_scatter(scattered, "float32", [0, 2, 6])
        assert (scattered == 2).tolist() == ([True] * 2 + [False] * 4 if rank == 0 else [False] * 2 + [True] * 4)

    all_well(on_ranks(2, run))


def test_members_that_make_different_calls_are_told_so() -> None:
    def run(groups: MemoryGroups, rank: int) -> None:
        group, array = groups.group((0, 1)), np.ones(4, np.float32)
        if rank == 0:
            group.all_reduce(array, "float32")
        else:
            group.broadcast(array, "float32", 0)

    errors = on_ranks(2, run)
    assert all(isinstance(error, GroupError) for error in errors)
    assert "group of ranks 0, 1: member 0 does all_reduce of 4 float32, member 1 broadcast of 4 float32 from 0" in str(errors[0])


def test_a_member_that_never_comes_is_named() -> None:
    def run(groups: MemoryGroups, rank: int) -> None:
        if rank == 0:
            groups.group((0, 1)).maximum(np.zeros(1, np.int32))

    (error, _) = on_ranks(2, run, timeout_s=0.05)
    assert str(error) == "group of ranks 0, 1: maximum of 1: nothing came from member 1 within 0.05 s"


def test_a_payload_of_another_length_than_expected_is_named() -> None:
    def run(groups: MemoryGroups, rank: int) -> None:
        other = 1 - rank
        outgoing, incoming = [None, None], [None, None]
        outgoing[other], incoming[other] = np.zeros(3 + rank, np.uint8), np.zeros(3, np.uint8)
        groups.group((0, 1)).exchange(outgoing, incoming)

    (error, nothing) = on_ranks(2, run)
    assert str(error) == "group of ranks 0, 1: member 1 sent 4 bytes in an exchange, 3 were expected"
    assert nothing is None


def test_calls_that_no_backend_takes_are_refused_before_anything_is_sent() -> None:
    groups = MemoryWorld(3).groups(1)
    for members in ((0, 2), (1, 0), (1, 1), (1, 3), (-1, 1), ()):
        with pytest.raises(UsageError, match="no group for rank 1"):
            groups.group(members)
    group, array = groups.group((0, 1, 2)), np.zeros(6, np.float32)
    with pytest.raises(UsageError, match="unknown element type 'complex64'"):
        group.all_reduce(array, "complex64")
    for wrong in (np.zeros(6), np.zeros((2, 3), np.float32), array[::2], np.frombuffer(bytes(8), np.float32)):
        with pytest.raises(UsageError, match="a collective of float32 takes a flat, contiguous, writable array of float32"):
            group.broadcast(wrong, "float32", 0)
    for cuts in ([0, 6], [0, 2, 4, 5], [0, 4, 2, 6], [1, 2, 4, 6]):
        with pytest.raises(UsageError, match="do not divide 6 elements among 3 members"):
            group.all_gather(array, "float32", cuts)
    for root in (-1, 3):
        with pytest.raises(UsageError, match=f"root {root} .* 3 members"):
            group.reduce(array, "float32", root)
    with pytest.raises(UsageError, match="an exchange among 3 members got 1 to send and 2 to receive"):
        group.exchange([None], [None, None])
    groups.close()
    with pytest.raises(UsageError, match="closed"):
        groups.group((1,))


def test_sixteen_bit_floats_are_added_in_float32_and_rounded_once() -> None:
    values = [256.0, 1.0, 1.0]
    assert widen_bf16(sum_in_order([narrow_bf16(np.array([v], np.float32)) for v in values], "bfloat16")) == 258
    assert sum_in_order([np.array([v], np.float16) for v in (2048.0, 1.0, 1.0)], "float16") == 2050
    assert np.isnan(widen_bf16(narrow_bf16(np.array([np.nan, -np.nan], np.float32)))).all()
