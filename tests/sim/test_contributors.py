"""Keys behind sums within nodes: who pushes them, what servers tell others, and where their layouts put them."""

from __future__ import annotations

import pytest
from sim_oracle import Chances
from simulation import quiet, simulate

from psgc.errors import RemoteProtocolError, UsageError
from psgc.layout import BucketSpec, Declaration, Layout, TensorSpec, build_layout
from psgc.program.ranks import Ranks
from psgc.server.state import specs_of
from psgc.server.step import Commit, Fold, KeySpec, KeyState, Reply
from psgc.wire.frames import Flag, Header, Kind
from psgc.wire.messages import ErrorCode

SHARDED = ("intra.reduce_scatter", "inter.push", "inter.pull", "intra.all_gather")
ROOTS = ("intra.reduce", "inter.push", "inter.pull", "intra.broadcast")


def layout_of(*options: tuple[str, ...], sizes: tuple[int, ...] = (1, 2), servers: int = 2, numel: int = 1000, parts: int = 1) -> Layout:
    tensors = tuple(TensorSpec(f"t{number}", (numel,), "float32") for number in range(len(options)))
    buckets = tuple(BucketSpec((number,), "none", -number, parts, option=option) for number, option in enumerate(options))
    declaration = Declaration("gradients", "plan", tensors, "none", True, used=tuple(range(len(tensors))), buckets=buckets)
    return build_layout(declaration, layout_id=1, servers=servers, workers=sum(sizes), ranks=Ranks(sizes))


def pushed(step: int, **fields: object) -> Header:
    return Header(Kind.PUSH, Flag.WANT_RESULT, step=step, payload_bytes=4)._replace(**fields)  # type: ignore[arg-type]


def test_a_step_is_complete_when_its_contributors_have_contributed_and_sums_them_in_rank_order() -> None:
    ranks = tuple(range(1, 30, 3))  # ten: a block of eight and one of two
    key = KeyState(KeySpec(5, 1, ranks, 0, 0, divisor=30))
    folds, actions = [], []
    for rank in reversed(ranks):
        actions += key.contribute(rank, pushed(1), f"m{rank}")
        assert key.awaited() == [other for other in ranks if other < rank]
    while any(isinstance(action, Fold) for action in actions):
        fold = next(action for action in actions if isinstance(action, Fold))
        folds.append(fold.payloads)
        actions = key.folded(fold.last, 4, False, fold.slot)
    assert folds == [tuple(f"m{rank}" for rank in ranks[:8]), tuple(f"m{rank}" for rank in ranks[8:])]
    (commit,) = [action for action in actions if isinstance(action, Commit)]
    assert commit.result.contributors == 10
    assert [action.rank for action in actions if isinstance(action, Reply)] == list(ranks)


@pytest.mark.parametrize("kind", [Kind.PUSH, Kind.SKIP, Kind.PULL])
def test_a_rank_that_does_not_contribute_to_a_key_is_told_so_and_changes_nothing(kind: Kind) -> None:
    key = KeyState(KeySpec(5, 1, (0, 2), 0, 0, name="t0"))
    says = key.pull if kind == Kind.PULL else lambda rank, step: key.contribute(rank, Header(kind, step=step), None)
    with pytest.raises(RemoteProtocolError, match=r"worker 1: .*\(t0\) is contributed to by rank\(s\) 0, 2, .* not by this one") as raised:
        says(1, 1)
    assert raised.value.code == ErrorCode.NO_CONTRIBUTOR
    assert not key.contributions


def test_any_rank_may_ask_after_a_residual_between_its_steps() -> None:
    """It answers for buckets to which it need not contribute."""
    key = KeyState(KeySpec(5, 1, (0, 2), 0, 0, pull_feedback=True))
    assert key.residual(1, Header(Kind.RESIDUAL, step=0)) != []


@pytest.mark.parametrize("sizes", [(1, 2), (2, 2), (1, 2, 3)])
def test_a_layout_has_a_key_for_each_slice_that_one_rank_of_each_node_owns(sizes: tuple[int, ...]) -> None:
    ranks = Ranks(sizes)
    layout = layout_of(SHARDED, ROOTS, sizes=sizes, parts=1)
    assert Layout.from_json(layout.to_json()) == layout
    sharded, roots = layout.buckets
    assert [(key.offset, key.offset + key.numel) for key in sharded.keys] == list(ranks.atoms(1000))
    assert [key.contributors for key in sharded.keys] == [ranks.owners(1000, atom) for atom in ranks.atoms(1000)]
    assert [(key.offset, key.numel, len(key.contributors)) for key in roots.keys] == [(0, 1000, len(sizes))]
    every = [part.key for bucket in layout.buckets for part in (*bucket.parts, *bucket.keys)]
    assert len(set(every)) == len(every)
    for server in range(2):
        specs, costs = specs_of(layout, server, ranks.size)
        assert all(spec.divisor == ranks.size for spec in specs), "the mean is over all ranks"
        assert costs == [4 * spec.numel * len(spec.ranks) for spec in specs], "room for what contributors push"


def test_where_every_node_has_one_rank_all_contribute() -> None:
    assert {key.contributors for key in layout_of(SHARDED, sizes=(1, 1, 1)).buckets[0].keys} == {()}


def test_keys_lie_in_their_servers_windows_in_the_order_of_their_pushes() -> None:
    """The plan's order, here the opposite of the layout's."""
    options = [SHARDED, ROOTS, SHARDED]
    made = layout_of(*options, sizes=(2, 2), servers=1)
    turns = [tuple(range(5 * (2 - number), 5 * (2 - number) + 5)) for number in range(3)]
    buckets = tuple(BucketSpec((n,), "none", -n, 1, option=option, turns=turns[n]) for n, option in enumerate(options))
    declaration = Declaration("gradients", "plan", made.tensors, "none", True, buckets=buckets)
    layout = build_layout(declaration, layout_id=1, servers=1, workers=4, ranks=Ranks((2, 2)))
    positions = [[key.position for key in bucket.keys] for bucket in layout.buckets]
    assert [[key.position for key in bucket.keys] for bucket in made.buckets] == [[0, 1], [2], [3, 4]]
    assert positions == [[3, 4], [2], [0, 1]]
    assert [spec.key for spec in specs_of(layout, 0, 4)[0]] == [k.key for b in reversed(layout.buckets) for k in b.keys]


def test_an_option_with_servers_is_refused_in_a_job_without() -> None:
    with pytest.raises(UsageError, match=r"has servers, and the job has none"):
        layout_of(SHARDED, servers=0)


@pytest.mark.parametrize("window_bytes", [1, 1 << 30])
@pytest.mark.parametrize("sizes", [(2, 2), (1, 2, 3), (2,) * 9])
def test_every_contributor_gets_the_published_sum_whatever_happens(sizes: tuple[int, ...], window_bytes: int) -> None:
    chances = Chances(skip=0.2, poison=0.05, previous_skipped=0.2, rescale=0.2)
    for seed in range(3):
        scenario = quiet(
            seed=seed, workers=sum(sizes), node_sizes=sizes, servers=2, parts=(2, 1), steps=4, codec="onebit", cuts=2, saves=0.3, restores=True,
            chances=chances, window_bytes=window_bytes,
        )  # fmt: skip
        world = simulate(scenario)
        pushing = {rank for _, part in world.workers[0].layouts["model"].parts() for rank in part.contributors}
        assert world.oracle.words
        assert all(worker.results > 0 for worker in world.workers if worker.node in pushing)
