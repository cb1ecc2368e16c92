"""Options over groups of ranks: every one gives the exact mean with a lossless codec; with others nothing of a gradient is lost."""

from __future__ import annotations

import numpy as np
import pytest

from psgc.codecs import parse_codec
from psgc.errors import CodecError, UsageError
from psgc.layout import BucketSpec, Declaration, TensorSpec, build_layout
from psgc.observe.figures import Figures
from psgc.plan.model.options import all_options
from tests.worker.over_groups import Job, integers

OPTIONS = all_options()
TWICE = ("comp@cpu", "flat.all_to_all.c", "decomp@cpu", "comp@cpu", "flat.all_gather.c", "decomp@cpu")
FOUR_TIMES = next(option for option in OPTIONS if sum(action.startswith("comp@") for action in option) == 4)
LEVELS = (
    "intra.reduce_scatter",
    "comp@cpu",
    "inter.all_to_all.c",
    "decomp@cpu",
    "comp@cpu",
    "inter.all_gather.c",
    "decomp@cpu",
    "intra.all_gather",
)


def _check_means(job: Job, options: list[tuple[str, ...]], numel: int, steps: int = 2, codec: str = "none") -> None:
    layout = job.layout(options, numel, codec)
    for step in range(steps):
        values = integers(job.ranks.size, len(options), numel, step)
        results = job.step(layout, values, backwards=True)
        assert not job.errors
        for index, option in enumerate(options):
            mean = sum(mine[index] for mine in values) / np.float32(job.ranks.size)
            for rank in job.ranks.everybody:
                assert (results[rank][index].array == mean).all(), (option, rank)
                assert results[rank][index].skipped is False


def test_options_give_every_rank_the_exact_mean_whatever_order_ranks_submit_in(two_by_two: Job) -> None:
    _check_means(two_by_two, list(OPTIONS[::29]), 13)


@pytest.mark.parametrize("sizes", [(1, 2, 3), (3,), (1, 1)])
def test_nodes_of_any_sizes_do(sizes: tuple[int, ...]) -> None:
    job = Job(sizes)
    _check_means(job, list(OPTIONS[5::211]), 29)
    job.close()


@pytest.mark.parametrize(("option", "own"), [(TWICE, True), (LEVELS, False), ((), True)], ids=["groups", "behind a sum", "servers"])
def test_encodes_that_wait_for_no_other_rank_are_noted_and_what_comes(option: tuple[str, ...], own: bool) -> None:
    job = Job((2, 2))
    layout = job.layout([option], 5000, "int8")
    for executor in job.executors:
        executor._member.figures = Figures(0.0)  # type: ignore[misc]
    job.step(layout, integers(4, 1, 5000, 0))
    job.close()
    for executor in job.executors:
        figures = executor._member.figures
        assert figures is not None
        assert (figures.encoded_at > 0) is own
        assert figures.arrived_at > figures.encoded_at
        assert figures.made_at == 0, "that is of devices"


def test_payloads_of_lengths_that_vary_travel(two_by_two: Job) -> None:
    """topk:k=5000 sends every element, in payloads as long as their places ask for."""
    _check_means(two_by_two, [TWICE, LEVELS, FOUR_TIMES], 5000, codec="topk:k=5000")


@pytest.mark.parametrize("codec", ["onebit", "onebit/int8:ef=1", "topk:k=0.05", "randomk:k=0.25", "int4"])
@pytest.mark.parametrize("option", [TWICE, LEVELS, FOUR_TIMES, ("comp@cpu", "flat.all_gather.c", "decomp@cpu")], ids=lambda o: str(len(o)))
def test_what_encoding_leaves_out_is_kept_in_full(two_by_two: Job, codec: str, option: tuple[str, ...]) -> None:
    """All that ranks put in is what came out, times the ranks, and what all slots of all ranks keep."""
    layout = two_by_two.layout([option], 9001, codec)
    random = np.random.default_rng(3)
    put, out = np.zeros(9001), np.zeros(9001)
    for _ in range(4):
        values = [[random.standard_normal(9001).astype(np.float32)] for _ in range(4)]
        results = two_by_two.step(layout, values)
        put += sum(mine[0].astype(np.float64) for mine in values)
        out += 4 * results[0][0].array.astype(np.float64)
        assert all((other[0].array == results[0][0].array).all() for other in results)
    kept = sum(memory.residual.astype(np.float64) for e in two_by_two.executors for memory in e.works()[0].kept.remembered().values())
    np.testing.assert_allclose(out + kept, put, atol=2e-4)


@pytest.mark.parametrize("option", [TWICE, FOUR_TIMES])
def test_a_step_that_was_not_applied_goes_back(two_by_two: Job, option: tuple[str, ...]) -> None:
    layout = two_by_two.layout([option], 5000, "onebit")
    random = np.random.default_rng(4)
    values = [[[random.standard_normal(5000).astype(np.float32)] for _ in range(4)] for _ in range(3)]
    first = two_by_two.step(layout, values[0])[0][0].array
    two_by_two.step(layout, values[1])
    dropped = sum(m.residual.astype(np.float64) for e in two_by_two.executors for m in e.works()[0].kept.remembered(dropped=True).values())
    third = two_by_two.step(layout, values[2], previous_skipped=True)[0][0].array
    kept = sum(m.residual.astype(np.float64) for e in two_by_two.executors for m in e.works()[0].kept.remembered().values())
    put = sum(mine[0].astype(np.float64) for step in values for mine in step)
    np.testing.assert_allclose(4 * (first.astype(np.float64) + third) + kept, put, atol=2e-4)
    np.testing.assert_allclose(
        4 * first.astype(np.float64) + dropped, sum(m[0].astype(np.float64) for s in values[:2] for m in s), atol=2e-4
    )


def test_a_nan_on_one_rank_is_a_nan_on_all_and_changes_no_residual(two_by_two: Job) -> None:
    layout = two_by_two.layout([TWICE], 5000, "int8:ef=1")
    values = [[np.ones(5000, np.float32)] for _ in range(4)]
    two_by_two.step(layout, values)
    before = [e.works()[0].kept.remembered()["t0"].residual for e in two_by_two.executors]
    values[2][0][77] = np.nan
    results = two_by_two.step(layout, values)
    assert all(np.isnan(mine[0].array).all() for mine in results)
    after = [e.works()[0].kept.remembered()["t0"].residual for e in two_by_two.executors]
    assert all((a == b).all() for a, b in zip(before, after, strict=True))


def test_a_rank_that_skips_counts_as_zeros_and_gets_the_mean(two_by_two: Job) -> None:
    layout = two_by_two.layout([TWICE, ("flat.all_reduce",)], 100, "none")
    values = integers(4, 2, 100)
    results = two_by_two.step(layout, values, skips=[1])
    for index in range(2):
        mean = (values[0][index] + values[2][index] + values[3][index]) / 4
        assert all((mine[index].array == mean).all() for mine in results)


def test_a_step_that_all_ranks_skip_has_no_result_and_leaves_residuals(two_by_two: Job) -> None:
    layout = two_by_two.layout([TWICE], 5000, "onebit")
    random = np.random.default_rng(5)
    two_by_two.step(layout, [[random.standard_normal(5000).astype(np.float32)] for _ in range(4)])
    before = [e.works()[0].kept.remembered()["t0"].residual for e in two_by_two.executors]
    results = two_by_two.step(layout, integers(4, 1, 5000), skips=range(4))
    assert all(mine[0].skipped for mine in results)
    assert all((b == e.works()[0].kept.remembered()["t0"].residual).all() for b, e in zip(before, two_by_two.executors, strict=True))


def test_a_loss_scale_that_changes_rescales_what_is_kept(two_by_two: Job) -> None:
    layout = two_by_two.layout([TWICE], 5000, "onebit")
    random = np.random.default_rng(6)
    values = [random.standard_normal(5000).astype(np.float32) for _ in range(8)]
    first = two_by_two.step(layout, [[v] for v in values[:4]])[0][0].array
    second = two_by_two.step(layout, [[v * np.float32(4)] for v in values[4:]], rescale=4.0)[0][0].array
    kept = sum(e.works()[0].kept.remembered()["t0"].residual.astype(np.float64) for e in two_by_two.executors)
    np.testing.assert_allclose(4 * (4 * first.astype(np.float64) + second) + kept, 4 * sum(v.astype(np.float64) for v in values), atol=2e-3)


def test_what_was_kept_under_another_option_goes_with_the_first_gradient(two_by_two: Job) -> None:
    layout = two_by_two.layout([FOUR_TIMES], 5000, "onebit")
    random = np.random.default_rng(8)
    values = [[random.standard_normal(5000).astype(np.float32)] for _ in range(4)]
    first = two_by_two.step(layout, values)[0][0].array.astype(np.float64)
    kept = [e.works()[0].kept.remembered() for e in two_by_two.executors]
    other = two_by_two.layout([("flat.all_reduce",)], 5000, "none")
    for executor, memory in zip(two_by_two.executors, kept, strict=True):
        executor.works(other)[0].kept.remember(memory)
    second = two_by_two.step(other, values)[0][0].array.astype(np.float64)
    np.testing.assert_allclose(4 * (first + second), 2 * sum(v[0].astype(np.float64) for v in values), atol=2e-4)


@pytest.mark.parametrize("dropped", [False, True])
def test_a_state_that_was_saved_goes_on_bit_for_bit_under_the_same_option(two_by_two: Job, dropped: bool) -> None:
    """Slot by slot; under another option the sum of the slots goes along with the first gradient."""
    random = np.random.default_rng(11)
    values = [[[random.standard_normal(9001).astype(np.float32)] for _ in range(4)] for _ in range(3)]
    layout = two_by_two.layout([FOUR_TIMES], 9001, "topk:k=0.05")
    for step in values[:2]:
        two_by_two.step(layout, step)
    saved = [(e.works(layout)[0].kept.remembered(dropped), e.works(layout)[0].kept.exact(dropped)) for e in two_by_two.executors]
    wanted = two_by_two.step(layout, values[2], previous_skipped=dropped, rescale=0.5)[0][0].array
    again = two_by_two.layout([FOUR_TIMES], 9001, "topk:k=0.05")
    other = two_by_two.layout([TWICE], 9001, "topk:k=0.05")
    for executor, (memory, exact) in zip(two_by_two.executors, saved, strict=True):
        for new in (again, other):
            work = executor.works(new)[0].kept
            work.remember(memory)
            assert (work.exact_place == executor.works(layout)[0].kept.exact_place) == (new is again)
            work.set_exact(exact if new is again else {})
    assert (two_by_two.step(again, values[2], rescale=0.5)[0][0].array == wanted).all()
    assert (two_by_two.step(other, values[2], rescale=0.5)[0][0].array != wanted).any()


def test_ranks_whose_trainers_disagree_end_with_a_line() -> None:
    job = Job((2,))
    layout = job.layout([("flat.all_reduce",)], 10, "none")
    job.step(layout, integers(2, 1, 10))
    job.step(layout, integers(2, 1, 10), previous_skipped=[True, False])
    assert "some ranks applied the last step and others did not" in job.errors[0]
    job.close()


def test_integers_and_doubles_and_halves_are_summed_as_they_are(two_by_two: Job) -> None:
    for dtype, mean in [("int64", False), ("float64", True), ("float16", True)]:
        layout = two_by_two.layout([("flat.reduce_scatter", "flat.all_gather")], 77, "none", dtype, mean)
        values = [[np.arange(77).astype(dtype) + rank] for rank in range(4)]
        total = sum(v[0].astype(np.float64) for v in values) / (4 if mean else 1)
        assert (two_by_two.step(layout, values)[3][0].array == total.astype(dtype)).all()


def test_codecs_of_several_rounds_are_refused_with_the_tensor() -> None:
    declaration = Declaration(
        "g", "plan", (TensorSpec("w", (64, 64), "float32"),), "none", True, buckets=(BucketSpec((0,), "powersgd", 0, option=TWICE),)
    )
    with pytest.raises(CodecError, match=r"'w': codec powersgd.* choose another codec"):
        build_layout(declaration, layout_id=0, servers=0, workers=2)


def test_a_bucket_in_parts_is_pipelined_and_right(two_by_two: Job) -> None:
    layout = two_by_two.layout([TWICE, LEVELS], 50_000, "none", parts=4)
    values = integers(4, 2, 50_000)
    results = two_by_two.step(layout, values)
    for index in range(2):
        mean = sum(mine[index] for mine in values) / 4
        assert all((mine[index].array == mean).all() for mine in results)


def test_randomk_without_a_residual_is_refused_where_it_is_encoded_again_in_other_pieces() -> None:
    """There it would draw other places, and nobody would keep the rest."""
    job = Job((2, 2))
    job.layout([TWICE], 2001, "randomk:k=0.25,ef=0")
    with pytest.raises(UsageError, match=r"randomk:\S* of the bucket of 't0' keeps no residual, .* choose ef=1"):
        job.layout([FOUR_TIMES], 2001, "randomk:k=0.25,ef=0")
    job.close()


def test_ranks_that_encode_the_same_sum_draw_the_same_numbers(two_by_two: Job) -> None:
    """Else stochastic rounding would give nodes different results."""
    options = [option for option in OPTIONS if "comp@cpu" in option and "comp@gpu" not in option][::61]
    layout = two_by_two.layout(options, 5000, "int8:ef=0")
    random = np.random.default_rng(9)
    results = two_by_two.step(layout, [[random.standard_normal(5000).astype(np.float32) for _ in options] for _ in range(4)])
    for index, option in enumerate(options):
        assert all((mine[index].array == results[0][index].array).all() for mine in results), option


def test_what_a_rank_moves_is_counted(two_by_two: Job) -> None:
    """A ring moves 2 (n - 1) / n of a gradient each way; of an all-to-all and an all-gather of payloads as much of each, in the codec's bytes."""
    layout = two_by_two.layout([("flat.all_reduce",), TWICE], 65536, "int8:ef=0")
    two_by_two.step(layout, integers(4, 2, 65536))
    plain, encoded = (work.moved_bytes for work in two_by_two.executors[0].works())
    assert plain == 2 * 2 * 3 * 65536 * 4 // 4
    payload = parse_codec("int8").payload_bound(65536 // 4)
    assert encoded == 4 * 3 * payload
    assert two_by_two.executors[0].carried() == {"none": (plain, plain), "int8:ef=0": (encoded, plain)}


def test_a_nan_ends_the_job_with_rank_and_tensor_where_that_is_asked_for() -> None:
    job = Job((2,), raises=True)
    layout = job.layout([("flat.all_reduce",), TWICE], 100, "none")
    values = integers(2, 2, 100)
    values[1][1][7] = np.inf
    job.step(layout, values)
    assert job.errors[0] == "rank 1: gradient of 't1' holds NaN or infinity in its step 1, and PSGC_NONFINITE=raise"
    job.close()
