"""PowerSGD: what a step keeps of a matrix, columns that died, and the order in which ranks and devices compute the same."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from psgc.codecs import BucketContext, Stream, parse_scheme
from psgc.codecs.codec import F32
from psgc.codecs.common.orthonormal import orthonormalise, reference_orthonormal
from psgc.codecs.powersgd import reference_product
from tests.cases import for_each
from tests.codecs.workers import Workers, conservation

Values = Callable[..., F32]
ROWS, COLUMNS = 60, 50


def of_rank(rank: int, values: Values, seed: int = 0, scale: float = 1.0) -> F32:
    """A matrix of ROWS x COLUMNS, flat."""
    left, right = values("gauss", ROWS * rank, seed=2 * seed), values("gauss", COLUMNS * rank, seed=2 * seed + 1)
    return np.asarray(scale * (left.reshape(ROWS, rank).astype(np.float64) @ right.reshape(rank, COLUMNS)), np.float32).reshape(-1)


def job_of(text: str, workers: int = 2, **options: bool) -> Workers:
    """Residuals stay in their unit from step to step."""
    return Workers(text, ROWS * COLUMNS, workers, shapes=((ROWS, COLUMNS),), rescale=1.0, **options)


def off(got: F32, wanted: F32) -> float:
    """Relative to what is wanted."""
    return float(np.linalg.norm(got.astype(np.float64) - wanted) / np.linalg.norm(wanted.astype(np.float64)))


def test_powersgd_reconstructs_a_matrix_of_its_rank_in_one_step_and_vectors_always(values: Values) -> None:
    low = values("gauss", 60 * 2).reshape(60, 2) @ values("gauss", 50 * 2, seed=1).reshape(50, 2).T
    vector = values("gauss", 9, seed=2)
    grad = np.concatenate([low.reshape(-1), vector]).astype(np.float32)
    job = Workers("powersgd:rank=3", grad.size, 2, shapes=((60, 50), (9,)))
    got = job.synchronise([grad, grad])[0]
    assert np.abs(got - grad).max() < 1e-4
    assert got[-9:].tobytes() == vector.tobytes()


def test_powersgd_with_warm_start_comes_close_to_the_best_approximation(values: Values) -> None:
    rng = np.random.default_rng(0)
    left, right = np.linalg.qr(rng.standard_normal((80, 60)))[0], np.linalg.qr(rng.standard_normal((60, 60)))[0]
    matrix = (left * (0.7 ** np.arange(60))) @ right.T
    job = Workers("powersgd:rank=4,ef=0", matrix.size, 1, shapes=(matrix.shape,))
    grad = matrix.reshape(-1).astype(np.float32)
    for _ in range(20):
        got = job.synchronise([grad])[0]
    best = np.linalg.norm(0.7 ** np.arange(4, 60))
    assert np.linalg.norm(got - grad) < 1.01 * best


@pytest.mark.parametrize("rows", [1, 5, 300])
def test_orthonormalised_columns_are_orthonormal_or_zero(rows: int, values: Values) -> None:
    p = values("gauss", rows * 4).reshape(rows, 4).copy()
    p[:, 2] = p[:, 1]
    orthonormalise(p)
    gram = p.T @ p
    assert np.abs(gram - np.diag(np.round(np.diag(gram)))).max() < 1e-5
    assert not p[:, 2].any()


def test_the_product_is_summed_in_order(values: Values) -> None:
    job = Workers("powersgd:rank=3,ef=0", 40 * 30, 1, shapes=((40, 30),))
    got = job.synchronise([values("gauss", 1200)])[0]
    state = job.states[0]
    p = state._p.reshape(40, 3)  # type: ignore[attr-defined]
    assert got.tobytes() == reference_product(p, job.sent[0][1].view(np.float32).reshape(30, 3)).tobytes()


@pytest.mark.parametrize("ef", [0, 1])
@pytest.mark.parametrize("zeros", [1, 2, 5])
def test_after_gradients_of_zeros_the_first_other_one_arrives_whole(zeros: int, ef: int, values: Values) -> None:
    job, grad = job_of(f"powersgd:rank=3,ef={ef}"), of_rank(2, values)
    for _ in range(zeros):
        assert not job.synchronise([np.zeros_like(grad)] * 2)[0].any()
    assert off(job.synchronise([grad, grad])[0], grad) < 1e-5


@pytest.mark.parametrize("first", [1, 2])
def test_after_gradients_of_a_lower_rank_those_of_a_full_one_arrive_whole(first: int, values: Values) -> None:
    job, low, full = job_of("powersgd:rank=3"), of_rank(first, values), of_rank(3, values, seed=9)
    for _ in range(4):
        assert off(job.synchronise([low, low])[0], low) < 1e-5
    job.synchronise([full, full])
    assert off(job.synchronise([full, full])[0], full) < 1e-2, "what the residual held back has come, too"
    assert off(job.synchronise([full, full])[0], full) < 1e-4


def test_one_dead_column_of_several_comes_back(values: Values) -> None:
    job, grad = job_of("powersgd:rank=3,ef=0"), of_rank(3, values)
    job.synchronise([grad, grad])
    for state in job.states:
        state._q.reshape(COLUMNS, 3)[:, 1] = 0  # type: ignore[attr-defined]
    assert off(job.synchronise([grad, grad])[0], grad) < 1e-5


def test_nothing_is_lost_while_columns_die_and_come_back(values: Values) -> None:
    job = job_of("powersgd:rank=3", workers=3)
    for step in range(12):
        rank = (0, 1, 0, 0, 2, 5, 0, 1, 0, 3, 0, 0)[step]
        grads = [
            of_rank(rank, values, seed=3 * step + worker) if rank and worker < 2 else np.zeros(3000, np.float32) for worker in range(3)
        ]
        before = [residual.copy() for residual in job.residuals if residual is not None]
        got = job.synchronise(grads)
        assert all(target.tobytes() == got[0].tobytes() for target in got)
        assert conservation(job, grads, before, got[0]) < 2e-5


def test_what_gradients_of_zeros_find_in_the_residual_is_sent(values: Values) -> None:
    job, grad = job_of("powersgd:rank=1"), of_rank(8, values)
    total = job.synchronise([grad, grad])[0].astype(np.float64)
    for _ in range(60):
        total += job.synchronise([np.zeros_like(grad)] * 2)[0]
    assert off(total.astype(np.float32), grad) < 1e-3


def test_a_rank_that_skips_draws_as_the_others_do(values: Values) -> None:
    job = job_of("powersgd:rank=3", workers=3)
    for step, skipping in enumerate([(), (1,), (0, 2), (2,), ()]):
        low = [of_rank(1 + step % 2, values, seed=step)] * 3
        got = job.synchronise(low, skipping)
        assert all(target.tobytes() == got[0].tobytes() for target in got)
    assert len({state._q.tobytes() for state in job.states}) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_who_goes_on_from_what_was_kept_draws_as_who_never_stopped(rank: int, values: Values) -> None:
    job, other, low, full = job_of("powersgd:rank=3"), job_of("powersgd:rank=3"), of_rank(max(rank, 1), values), of_rank(5, values)
    for _ in range(3):
        job.synchronise([low * np.float32(rank > 0)] * 2)
    other.step, other.residuals = job.step, [residual.copy() for residual in job.residuals if residual is not None]
    for old, new in zip(job.states, other.states, strict=True):
        new.restore_factors({**old.factors, 77: low})
    assert job.synchronise([full, full])[1].tobytes() == other.synchronise([full, full])[1].tobytes()


def test_each_step_matrix_and_column_draws_numbers_of_its_own() -> None:
    state = parse_scheme("powersgd:rank=2", BucketContext(shapes=((40, 30), (40, 30)))).new_state(2400)
    drawn = [state._started(matrix, Stream(5, step, rank=7, bucket=1, first=0)) for step in (1, 2) for matrix in state._matrices]  # type: ignore[attr-defined]
    columns = np.concatenate(drawn, axis=1)
    assert np.abs(np.corrcoef(columns.T) - np.eye(8)).max() < 0.8
    again = state._started(state._matrices[0], Stream(5, 1, rank=3, bucket=1, first=64))  # type: ignore[attr-defined]
    assert again.tobytes() == drawn[0].tobytes(), "whatever the rank"


@pytest.mark.parametrize("scale", [1e-34, 1e-27, 1e-18, 1e18, 1e33, 2e36])
def test_gradients_may_be_of_any_size(scale: float, values: Values) -> None:
    job, grad = job_of("powersgd:rank=3"), of_rank(2, values, scale=scale)
    for _ in range(3):
        assert off(job.synchronise([grad, grad])[0], grad) < 1e-5


def test_a_sum_that_overflowed_does_not_stay(values: Values) -> None:
    job, huge, grad = job_of("powersgd:rank=2,ef=0", mean=False), np.zeros((ROWS, COLUMNS), np.float32), of_rank(2, values)
    huge[:, 3] = 3e37  # P stays in range; each rank's Q, 60 ** 0.5 times as large, too; their sum does not
    assert not np.isfinite(job.synchronise([huge.reshape(-1)] * 2)[0]).all()
    assert off(job.synchronise([grad, grad])[0] / 2, grad) < 1e-5


@for_each(poison=[np.nan, np.inf, -np.inf], place=[0, 1234, 2999, 3000, 3006])
def test_a_rank_that_is_not_finite_says_so_and_sends_zeros(place: int, poison: float, values: Values) -> None:
    scheme = parse_scheme("powersgd", BucketContext(shapes=((ROWS, COLUMNS), (7,))))
    state, grad, out = scheme.new_state(3007), values("gauss", 3007), np.ones(4 * scheme.rounds(3007)[0].numel, np.uint8)
    grad[place] = poison
    assert state.encode(0, grad, np.ones_like(grad), 1.0, Stream(0, 1, 0, 0), out) == (out.size, True)
    assert not out.any()


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_factors_that_are_not_finite_are_flagged_in_the_second_round(poison: float, values: Values) -> None:
    scheme = parse_scheme("powersgd", BucketContext(shapes=((ROWS, COLUMNS),)))
    state, grad, out = scheme.new_state(3000), values("gauss", 3000), np.ones(4 * 4 * COLUMNS, np.uint8)
    mean = np.ones(4 * ROWS, np.float32)
    mean[17] = poison
    state.take(0, mean.view(np.uint8))
    assert state.encode(1, grad, None, 1.0, Stream(0, 1, 0, 0), out).nonfinite


def test_finite_gradients_whose_product_overflows_are_flagged_without_a_warning() -> None:
    scheme = parse_scheme("powersgd", BucketContext(shapes=((ROWS, COLUMNS),)))
    out = np.zeros(4 * 4 * ROWS, np.uint8)
    for residual in (None, np.full(3000, 3e38, np.float32)):
        assert scheme.new_state(3000).encode(0, np.full(3000, 3e38, np.float32), residual, 1.0, Stream(0, 1, 0, 0), out).nonfinite


@for_each(rows=[1, 5, 63, 64, 65, 300, 4096, 4097, 12289, 20481], kind=["gauss", "zeros", "sparse", "denormal", "huge"])
def test_the_kernel_has_the_definitions_columns(kind: str, rows: int, values: Values) -> None:
    p = values(kind, rows * 4).reshape(rows, 4).copy()
    p[:, 3] = p[:, 0] * np.float32(0.5) - p[:, 1] * np.float32(0.25)
    wanted = reference_orthonormal(p)
    orthonormalise(p)
    assert p.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("rows", [6, 300, 5000])
@pytest.mark.parametrize("apart", [1.0, 1e-2, 1e-4])
def test_columns_that_are_nearly_alike_become_orthonormal(apart: float, rows: int, values: Values) -> None:
    p = values("gauss", rows * 5).reshape(rows, 5).copy()
    p[:, 1:] = p[:, :1] + np.float32(apart) * p[:, 1:]
    orthonormalise(p)
    assert np.abs(p.T.astype(np.float64) @ p - np.eye(5)).max() < 3e-7


@pytest.mark.long
def test_the_tree_has_as_many_levels_as_rows_ask_for() -> None:
    p = np.random.default_rng(0).standard_normal((4096 * 4096 + 4097, 1), np.float32)
    wanted = reference_orthonormal(p)
    orthonormalise(p)
    assert p.tobytes() == wanted.tobytes()
