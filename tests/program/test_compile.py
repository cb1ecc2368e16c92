"""Every option, compiled for ranks on nodes of equal and of different sizes, sums every rank's contribution once."""

from __future__ import annotations

import zlib
from itertools import pairwise

import numpy as np
import pytest

from psgc.errors import UsageError
from psgc.plan.model.options import all_options, encodes, server_options
from psgc.program.compile import compile_option
from psgc.program.ranks import Ranks
from psgc.program.steps import Encode, Exchange, Raw, Serve
from tests.program.lockstep import run

OPTIONS = all_options()


@pytest.mark.parametrize("sizes", [(2, 2), (1, 2, 3)])
def test_every_option_gives_every_rank_the_sum_of_all_ranks(sizes: tuple[int, ...]) -> None:
    ranks = Ranks(sizes)
    values = [np.eye(ranks.size)[[rank] * 13] for rank in ranks.everybody]
    for number, option in enumerate(OPTIONS if len(sizes) == 2 else OPTIONS[::7]):
        results = run(compile_option(option, 13, ranks, number), values)
        assert all((result == 1).all() for result in results), option


@pytest.mark.parametrize("sizes", [(1,), (3,), (1, 1, 1), (4, 1), (2, 3, 2)])
@pytest.mark.parametrize("numel", [1, 2, 7, 100_003])
def test_any_shape_of_job_and_size_of_part_sums(sizes: tuple[int, ...], numel: int) -> None:
    ranks = Ranks(sizes)
    values = [np.eye(ranks.size)[[rank] * numel] for rank in ranks.everybody]
    for number, option in enumerate(OPTIONS[:: 43 if numel < 1000 else 1003]):
        results = run(compile_option(option, numel, ranks, number), values)
        assert all((result == 1).all() for result in results), option


def test_atoms_lie_in_one_shard_on_every_node_and_cover_the_part() -> None:
    for sizes in [(1, 2, 3), (2, 2), (5,), (3, 4)]:
        for numel in [1, 3, 11, 1_000_003, 4_194_304]:
            ranks = Ranks(sizes)
            atoms = ranks.atoms(numel)
            assert atoms[0][0] == 0
            assert atoms[-1][1] == numel
            assert all(before[1] == after[0] for before, after in pairwise(atoms))
            for atom in atoms:
                owners = ranks.owners(numel, atom)
                assert [ranks.node_of[owner] for owner in owners] == list(range(ranks.nodes))


# nodes with roots of their own, with switches, with neither
SHAPED = (
    Ranks((3, 2), roots=((1, 2), (1,))),
    Ranks((4, 2), switches=(2, 0)),
    Ranks((4, 6, 1), switches=(2, 3, 0)),
    Ranks((4, 3, 2), roots=((2, 3), (0,), ()), switches=(0, 0, 2)),
)


@pytest.mark.parametrize("ranks", SHAPED)
def test_nodes_with_roots_or_switches_give_every_rank_the_sum_of_all_ranks(ranks: Ranks) -> None:
    for numel in (1, 29):
        values = [np.eye(ranks.size)[[rank] * numel] for rank in ranks.everybody]
        for number, option in enumerate((*OPTIONS[number_of(ranks) :: 60], *server_options())):
            results = run(compile_option(option, numel, ranks, number), values)
            assert all((result == 1).all() for result in results), option


@pytest.mark.parametrize("ranks", [Ranks((2, 2)), Ranks((1, 2, 3)), *SHAPED])
def test_all_ranks_end_with_the_same_result_where_encoding_loses_something_whatever_their_nodes_are(ranks: Ranks) -> None:
    """What encoding loses depends on the whole piece and on the leader's random numbers; sums of whole numbers are exact in any order."""

    def loss(slot: int, piece: tuple[int, int], leader: int) -> float:
        return float(zlib.crc32(repr((slot, piece, leader)).encode()) % 1009)

    lossy = [option for option in (*OPTIONS, *server_options()) if encodes(option)]
    for number, option in enumerate(lossy[number_of(ranks) :: 7]):
        values = [np.random.default_rng(rank).integers(-50, 50, (29, 1)).astype(float) for rank in ranks.everybody]
        results = run(compile_option(option, 29, ranks, number), values, loss=loss)
        assert all((result == results[0]).all() for result in results), option


def number_of(ranks: Ranks) -> int:
    """So that not all of them run the same options."""
    return SHAPED.index(ranks) if ranks in SHAPED else 0


def test_only_roots_own_shards_talk_to_other_nodes_and_push() -> None:
    ranks, numel = SHAPED[0], 100
    assert ranks.shards(0, numel) == ((0, 0), (0, 50), (50, 100))
    assert ranks.shards(1, numel) == ((0, 0), (0, 100))
    roots = {1, 2, 4}
    for option in (*OPTIONS[::9], *server_options()):
        if any(action.startswith("intra.") for action in option):
            programs = compile_option(option, numel, ranks, turn=3)
            assert {rank for rank, program in enumerate(programs) if list(program.served)} <= roots, option
            assert {rank for rank, program in enumerate(programs) if any(t.level == "inter" for t in program.transfers)} <= roots, option


def test_behind_switches_sums_are_taken_first_and_no_other_rank_sees_more_than_its_slice() -> None:
    """Of a part each rank sends what its switch's sum leaves for the other switches' ranks: half of what it would send them all at once."""
    ranks, numel = Ranks((4, 4), switches=(2, 2)), 64
    programs = compile_option(("intra.reduce_scatter", "inter.all_reduce", "intra.all_gather"), numel, ranks)
    scatter, _, gather = [[one for one in transfer.collectives if isinstance(one, Raw)] for transfer in programs[1].transfers]
    assert [(one.members, one.region) for one in scatter] == [((0, 1), (0, 64)), ((1, 3), (32, 64))]
    assert [(one.members, one.region) for one in gather] == [((1, 3), (32, 64)), ((0, 1), (0, 64))]
    assert ranks.shards(0, numel) == ((0, 16), (32, 48), (16, 32), (48, 64))
    reduced = compile_option(("intra.reduce", "inter.push", "inter.pull", "intra.broadcast"), numel, ranks, turn=2)
    assert [rank for rank, program in enumerate(reduced) if list(program.served)] == [2, 6]
    assert [len(next(iter(program.transfers)).collectives) for program in reduced] == [2, 1, 2, 1] * 2


def test_shards_of_large_parts_end_at_whole_blocks() -> None:
    ranks = Ranks((3, 3))
    assert all(lo % 4096 == 0 for lo, _ in ranks.shards(0, 1_000_003))
    shards = np.diff(ranks.shards(0, 1_000_003)).ravel()
    assert shards.max() - shards.min() <= 2 * 4096


def test_payloads_are_encoded_in_as_few_pieces_as_their_ways_allow() -> None:
    ranks = Ranks((2, 2))
    flat = compile_option(("comp@cpu", "flat.all_gather.c", "decomp@cpu"), 100, ranks)
    assert [len(step.pieces) for step in flat[0].steps if isinstance(step, Encode)] == [1]
    option = ("comp@cpu", "intra.all_to_all.c", "inter.all_to_all.c", "inter.all_gather.c", "intra.all_gather.c", "decomp@cpu")
    both = compile_option(option, 100, ranks)
    assert [len(step.pieces) for step in both[0].steps if isinstance(step, Encode)] == [4]


def test_hierarchical_options_leave_a_node_once() -> None:
    """Of one gradient 2 (n - 1) / n of its elements cross a node's link each way, whatever the ranks a node has."""
    ranks, numel = Ranks((4, 4, 4)), 1200
    option = (
        "intra.reduce_scatter", "comp@cpu", "inter.all_to_all.c", "decomp@cpu", "comp@cpu", "inter.all_gather.c", "decomp@cpu", "intra.all_gather",
    )  # fmt: skip
    assert option in OPTIONS
    sent = 0
    for rank, program in enumerate(compile_option(option, numel, ranks)):
        for transfer in program.transfers:
            for one in transfer.collectives:
                if isinstance(one, Exchange) and ranks.node_of[rank] == 0:
                    sent += sum(
                        (piece.range[1] - piece.range[0]) * piece.payloads
                        for member, pieces in zip(one.members, one.sends, strict=True)
                        if ranks.node_of[member] != 0
                        for piece in pieces
                    )
    assert sent == 2 * numel * 2 // 3


@pytest.mark.parametrize("sizes", [(1,), (2, 2), (1, 2), (1, 2, 3), (3, 1, 1)])
def test_options_over_servers_give_every_rank_the_sum_of_all_ranks(sizes: tuple[int, ...]) -> None:
    ranks = Ranks(sizes)
    for numel in [1, 2, 13] + [100_003] * (sizes == (1, 2)):
        values = [np.eye(ranks.size)[[rank] * numel] for rank in ranks.everybody]
        for number, option in enumerate(server_options()):
            results = run(compile_option(option, numel, ranks, number), values)
            assert all((result == 1).all() for result in results), option


def test_behind_a_nodes_sum_one_rank_of_each_node_pushes_each_atom() -> None:
    ranks, numel = Ranks((1, 2, 3)), 60
    programs = compile_option(
        ("intra.reduce_scatter", "comp@cpu", "inter.push.c", "inter.pull.c", "decomp@cpu", "intra.all_gather"), numel, ranks
    )
    for atom in ranks.atoms(numel):
        pushing = [rank for rank, program in enumerate(programs) if atom in program.served]
        assert tuple(pushing) == ranks.owners(numel, atom)
    assert {step.slot for program in programs for step in program.steps if isinstance(step, Serve)} == {0}
    roots = compile_option(("intra.reduce", "inter.push", "inter.pull", "intra.broadcast"), numel, ranks, turn=1)
    assert [rank for rank, program in enumerate(roots) if list(program.served)] == [0, 2, 4]
    assert all(list(roots[rank].served) == [(0, numel)] for rank in (0, 2, 4))


def test_what_no_program_has_is_refused() -> None:
    for option, why in [
        (("flat.shout",), "'flat.shout' is neither a collective nor a push or pull"),
        (("flat.pull",), "put flat.push before it"),
        (("flat.push",), "is to be followed by flat.pull"),
        (("flat.push", "inter.pull"), "is to be followed by flat.pull"),
        (("intra.all_reduce", "flat.push", "flat.pull"), "would not push each rank's contribution"),
        (("comp@cpu", "intra.all_gather.c", "inter.push.c", "inter.pull.c", "decomp@cpu"), "servers take no other payloads"),
    ]:
        with pytest.raises(UsageError, match=why):
            compile_option(option, 10, Ranks((2, 2)))
