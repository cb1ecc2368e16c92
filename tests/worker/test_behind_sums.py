"""Options over servers behind sums within nodes: the published mean on every rank, and residuals of workers and servers in which nothing is lost."""

from __future__ import annotations

import numpy as np
import pytest

from psgc.plan.model.options import server_options
from tests.worker.over_groups import Job, integers

OPTIONS = tuple(option for option in server_options(("cpu",)) if option[0].startswith("intra"))
ENCODED = tuple(option for option in OPTIONS if "comp@cpu" in option)


def kept(job: Job, dropped: bool = False, layout: int = 0) -> np.ndarray:
    """What all ranks and servers hold of a layout's buckets together, in units of the sum."""
    total = np.zeros(5000)
    for executor in job.executors:
        for work in executor.works():
            if work.layout.id == layout:
                total += sum(memory.residual.astype(np.float64) for memory in work.kept.remembered(dropped).values())
    for work in job.executors[0].works():
        for part in work.kept.server_parts if work.layout.id == layout else ():
            residual = job.servers.residual(part.key, dropped or work.unapplied)
            total[part.offset : part.offset + part.numel] += job.ranks.size * residual.astype(np.float64)
    return total


def drawn(seed: int, ranks: int = 4, numel: int = 5000) -> list[list[np.ndarray]]:
    random = np.random.default_rng(seed)
    return [[random.standard_normal(numel).astype(np.float32)] for _ in range(ranks)]


def total(values: list[list[np.ndarray]]) -> np.ndarray:
    return sum(mine[0].astype(np.float64) for mine in values)


@pytest.mark.parametrize("sizes", [(2, 2), (1, 2), (1, 2, 3), (3,), (1, 1)])
def test_every_rank_gets_the_exact_mean_on_nodes_of_any_sizes(sizes: tuple[int, ...]) -> None:
    job = Job(sizes)
    for numel, parts in [(1, 1), (13, 1), (20_000, 3)]:
        layout = job.layout([*OPTIONS, ("flat.all_reduce",)], numel, "none", parts=parts)
        for step in range(2):
            values = integers(job.ranks.size, len(layout.buckets), numel, step)
            results = job.step(layout, values, backwards=True)
            assert not job.errors
            for index, bucket in enumerate(layout.buckets):
                mean = sum(mine[index] for mine in values) / np.float32(job.ranks.size)
                assert all((mine[index].array == mean).all() and mine[index].skipped is False for mine in results), bucket.option
    job.close()


def test_one_rank_of_each_node_pushes_each_element(two_by_two: Job) -> None:
    layout = two_by_two.layout(list(OPTIONS), 5000, "none")
    two_by_two.step(layout, integers(4, 4, 5000))
    for bucket in layout.buckets:
        keys = {key.key: key for key in bucket.keys}
        pushed = [(rank, key) for rank, key, _ in two_by_two.servers.pushes if key in keys]
        assert sorted(pushed) == sorted((rank, key.key) for key in keys.values() for rank in key.contributors)
        nbytes = sum(size for rank, key, size in two_by_two.servers.pushes if key in keys and rank < 2)
        assert nbytes == 4 * 5000, "a node pushes each element once"


def test_sums_are_the_same_bits_in_every_run() -> None:
    found = []
    for _ in range(2):
        job = Job((1, 2, 3))
        layout = job.layout(list(OPTIONS), 5000, "onebit")
        values = [[each for _ in OPTIONS for each in mine] for mine in drawn(1, 6)]
        for _ in range(2):
            results = job.step(layout, values, backwards=True)
        assert all((mine[index].array == results[0][index].array).all() for mine in results for index in range(len(OPTIONS)))
        found.append([buffer.array.tobytes() for buffer in results[0]])
        job.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("codec", ["onebit", "onebit/none", "onebit/int8:ef=1", "topk:k=0.05", "none/onebit", "int4"])
def test_what_encoding_leaves_out_is_kept_by_workers_and_servers(two_by_two: Job, codec: str) -> None:
    for option in ENCODED:
        layout = two_by_two.layout([option], 5000, codec)
        put, out = np.zeros(5000), np.zeros(5000)
        for step in range(4):
            values = drawn(step)
            results = two_by_two.step(layout, values)
            put += total(values)
            out += 4 * results[0][0].array.astype(np.float64)
            assert all((other[0].array == results[0][0].array).all() for other in results)
        np.testing.assert_allclose(out + kept(two_by_two, layout=layout.id), put, atol=2e-4)


@pytest.mark.parametrize("codec", ["onebit", "onebit/none", "none/onebit"])
def test_a_step_that_was_not_applied_goes_back_once(two_by_two: Job, codec: str) -> None:
    """To the servers if they keep a residual, else to the workers."""
    for option in ENCODED:
        layout = two_by_two.layout([option], 5000, codec)
        values = [drawn(step) for step in range(3)]
        first = two_by_two.step(layout, values[0])[0][0].array.astype(np.float64)
        two_by_two.step(layout, values[1])
        before = kept(two_by_two, dropped=True, layout=layout.id)
        np.testing.assert_allclose(4 * first + before, total(values[0]) + total(values[1]), atol=2e-4)
        third = two_by_two.step(layout, values[2], previous_skipped=True)[0][0].array.astype(np.float64)
        np.testing.assert_allclose(4 * (first + third) + kept(two_by_two, layout=layout.id), sum(map(total, values)), atol=2e-4)


@pytest.mark.parametrize("codec", ["onebit", "onebit/none"])
def test_a_step_that_all_ranks_skip_is_not_applied_and_loses_nothing(two_by_two: Job, codec: str) -> None:
    for option in ENCODED:
        layout = two_by_two.layout([option], 5000, codec)
        first = two_by_two.step(layout, drawn(1))[0][0].array.astype(np.float64)
        for _ in range(2):
            results = two_by_two.step(layout, integers(4, 1, 5000), skips=range(4))
            assert all(mine[0].skipped for mine in results)
            np.testing.assert_allclose(4 * first + kept(two_by_two, layout=layout.id), total(drawn(1)), atol=2e-4)
        last = two_by_two.step(layout, drawn(2))[0][0].array.astype(np.float64)
        np.testing.assert_allclose(4 * (first + last) + kept(two_by_two, layout=layout.id), total(drawn(1)) + total(drawn(2)), atol=2e-4)


def test_a_rank_that_skips_counts_as_zeros_and_gets_the_mean(two_by_two: Job) -> None:
    layout = two_by_two.layout(list(OPTIONS), 100, "none")
    values = integers(4, 4, 100)
    results = two_by_two.step(layout, values, skips=[0, 1])
    for index in range(4):
        assert all((mine[index].array == (values[2][index] + values[3][index]) / 4).all() for mine in results)


def test_a_nan_on_one_rank_is_a_nan_on_all_and_what_was_kept_there_stays(two_by_two: Job) -> None:
    """Of the slice that one rank of each node pushes; other slices have their means."""
    layout = two_by_two.layout([ENCODED[0]], 5000, "onebit")
    first = two_by_two.step(layout, drawn(1))[0][0].array.astype(np.float64)
    before = kept(two_by_two)
    values = drawn(2)
    values[3][0][77] = np.nan
    results = two_by_two.step(layout, values)
    lo, hi = next((key.offset, key.offset + key.numel) for key in layout.buckets[0].keys if key.offset + key.numel > 77)
    assert 0 < hi - lo < 5000
    for mine in results:
        assert np.isnan(mine[0].array[lo:hi]).all()
        assert np.isfinite(np.delete(mine[0].array, np.s_[lo:hi])).all()
    np.testing.assert_allclose(kept(two_by_two)[lo:hi], before[lo:hi], atol=1e-6)
    third = two_by_two.step(layout, drawn(3), previous_skipped=True)[0][0].array.astype(np.float64)
    finite = np.s_[hi:] if lo == 0 else np.s_[:lo]
    put = total(drawn(1)) + total(values) + total(drawn(3))
    np.testing.assert_allclose((4 * (first + third) + kept(two_by_two))[finite], put[finite], atol=2e-4)


def test_a_loss_scale_that_changes_rescales_what_workers_and_servers_keep(two_by_two: Job) -> None:
    layout = two_by_two.layout([ENCODED[0]], 5000, "onebit")
    first = two_by_two.step(layout, drawn(1))[0][0].array.astype(np.float64)
    second = two_by_two.step(layout, [[mine[0] * np.float32(4)] for mine in drawn(2)], rescale=4.0)[0][0].array.astype(np.float64)
    np.testing.assert_allclose(4 * (4 * first + second) + kept(two_by_two), 4 * (total(drawn(1)) + total(drawn(2))), atol=2e-3)


@pytest.mark.parametrize("codec", ["onebit", "none", "onebit/none"])
def test_what_an_earlier_option_kept_goes_along_once_whatever_becomes_of_the_step(two_by_two: Job, codec: str) -> None:
    """Its first step is not applied, so that it goes into this option's residuals, or is still to be added."""
    first = two_by_two.layout([("comp@cpu", "flat.all_gather.c", "decomp@cpu")], 5000, "onebit")
    before = two_by_two.step(first, drawn(1))[0][0].array.astype(np.float64)
    memories = [executor.works(first)[0].kept.remembered() for executor in two_by_two.executors]
    layout = two_by_two.layout([ENCODED[0] if codec != "none" else OPTIONS[0]], 5000, codec)
    for executor, memory in zip(two_by_two.executors, memories, strict=True):
        executor.works(layout)[0].kept.remember(memory)
    two_by_two.step(layout, drawn(2), skips=[1])
    after = two_by_two.step(layout, drawn(3), previous_skipped=True)[0][0].array.astype(np.float64)
    skipped = total([mine for rank, mine in enumerate(drawn(2)) if rank != 1])
    put = total(drawn(1)) + total(drawn(3)) + (skipped if codec != "none" else 0)
    np.testing.assert_allclose(4 * (before + after) + kept(two_by_two, layout=layout.id), put, atol=2e-4)


def test_ranks_whose_trainers_disagree_end_with_a_line() -> None:
    job = Job((2, 2))
    layout = job.layout([OPTIONS[0]], 10, "none")
    job.step(layout, integers(4, 1, 10))
    job.step(layout, integers(4, 1, 10), previous_skipped=[True, True, False, False])
    assert any("ranks disagree on step 2" in error and "skip steps" in error for error in job.errors)
    job.close()


def test_other_types_are_summed_as_they_are(two_by_two: Job) -> None:
    for dtype, mean in [("int64", False), ("float64", True), ("float16", True), ("int32", True)]:
        layout = two_by_two.layout(list(OPTIONS)[:1], 77, "none", dtype, mean)
        values = [[np.arange(77).astype(dtype) + rank] for rank in range(4)]
        summed = sum(v[0].astype(np.float64) for v in values)
        wanted = np.floor(summed / 4) if dtype == "int32" else summed / (4 if mean else 1)
        assert (two_by_two.step(layout, values)[3][0].array == wanted.astype(dtype)).all(), dtype
