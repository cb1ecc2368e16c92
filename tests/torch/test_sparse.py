"""Sparse gradients of embeddings: rows travel, and the mean is that of the dense gradients to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import psgc.torch as psgc
from psgc.codecs.rows import words_of
from psgc.config import Config
from psgc.errors import PsgcError, UsageError
from psgc.layout import Declaration, Layout, TensorSpec, build_layout
from psgc.program.ranks import Ranks
from psgc.torch.gradients.rows import RowsBuffer, rows_bucket, rows_spec
from psgc.worker import nonfinite
from psgc.worker.executor.bucket import over_groups
from psgc.worker.solo import SoloSession
from psgc.worker.submission import Submission
from psgc.worker.tickets import TicketBoard
from tests.torch.small_models import linear, seeded

ROWS, COLUMNS = 50, 3


def table(dtype: torch.dtype = torch.float32) -> nn.Embedding:
    return seeded(lambda: nn.Embedding(ROWS, COLUMNS, sparse=True)).to(dtype)


def words(rank: int, step: int) -> torch.Tensor:
    """Which rows a rank uses in a step, some of them several times; the last rank uses none in odd steps."""
    if rank == 2 and step % 2:
        return torch.empty(0, dtype=torch.long)
    return torch.randint(0, ROWS, (6,), generator=torch.Generator().manual_seed(10 * step + rank)) // 2 * 2


def backward(model: nn.Embedding, rank: int, step: int) -> None:
    out = model(words(rank, step))
    (out * torch.sin(torch.arange(out.numel()) * 0.37 + rank).view(out.shape)).sum().backward()


def gradient(rank: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    """A rank's own, dense."""
    model = table(dtype)
    backward(model, rank, step)
    return model.weight.grad.coalesce().to_dense()


def mean(ranks: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    total = gradient(0, step, dtype).float()
    for rank in range(1, ranks):
        total = total + gradient(rank, step, dtype).float()
    return (total / ranks).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_mean_is_that_of_dense_gradients_to_the_bit_and_has_the_rows_of_any_rank(ranks: Any, size: int, dtype: torch.dtype) -> None:
    def train(rank: int) -> list[torch.Tensor]:
        model = table(dtype)
        optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model.named_parameters(), sparse=["weight"])
        found = []
        for step in range(4):
            optimizer.zero_grad()
            backward(model, rank, step)
            grad = model.weight.grad
            assert grad.is_sparse and grad.is_coalesced() and grad.dtype == dtype
            used = torch.cat([words(each, step) for each in range(size)]).unique()
            assert grad.indices()[0].tolist() == used.tolist()
            assert torch.equal(grad.to_dense(), mean(size, step, dtype))
            optimizer.step()
            found.append(model.weight.detach().clone())
        return found

    for each in zip(*ranks.run(size, train), strict=True):
        assert all(torch.equal(own, each[0]) for own in each)


def test_a_sum_of_zeros_has_the_sign_that_the_dense_one_has(ranks: Any) -> None:
    def train(rank: int) -> list[float]:
        model = nn.Embedding(4, 1, sparse=True)
        optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), sparse=model)
        used = torch.tensor([0, 1, 3] if rank == 0 else [1, 2])
        (model(used) * -0.0).sum().backward()
        optimizer.step()
        values = dict(
            zip(model.weight.grad.indices()[0].tolist(), torch.signbit(model.weight.grad.values()).reshape(-1).tolist(), strict=True)
        )
        return [values[row] for row in range(4)]

    assert ranks.run(2, train) == [[False, True, False, False]] * 2, "only the row that both have is -0"


def small() -> nn.Sequential:
    return nn.Sequential(table(), linear())


@pytest.mark.parametrize("sparse", [["0.weight"], ["0.*"], "0.weight", "the model"])
def test_other_parameters_of_the_model_travel_as_ever(ranks: Any, sparse: Any) -> None:
    def train(rank: int) -> bool:
        model, plain = small(), small()
        plain[0] = nn.Embedding.from_pretrained(plain[0].weight.detach().clone(), freeze=False)
        named = model if sparse == "the model" else sparse
        optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), sparse=named)
        other = psgc.DistributedOptimizer(torch.optim.SGD(plain.parameters(), lr=0.1), plain.named_parameters())
        for step in range(4):
            for net, its in ((model, optimizer), (plain, other)):
                its.zero_grad()
                net(words(rank, step)).square().sum().backward()
                its.step()
        return all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))

    assert all(ranks.run(2, train))


def test_sparse_adam_takes_the_mean(ranks: Any) -> None:
    def train(rank: int) -> torch.Tensor:
        model, alone = table(), table()
        optimizer = psgc.DistributedOptimizer(
            torch.optim.SparseAdam(list(model.parameters()), lr=0.1), model.named_parameters(), sparse=model
        )
        reference = torch.optim.SparseAdam(list(alone.parameters()), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            backward(model, rank, step)
            optimizer.step()
            used = torch.cat([words(each, step) for each in range(2)]).unique()
            alone.weight.grad = torch.sparse_coo_tensor(used[None], mean(2, step)[used], (ROWS, COLUMNS), check_invariants=True)
            reference.step()
        assert torch.equal(model.weight, alone.weight)
        return model.weight.detach()

    first, second = ranks.run(2, train)
    assert torch.equal(first, second)


@pytest.mark.parametrize("late", [False, True])
def test_backwards_that_add_up_to_one_step_send_their_sum(ranks: Any, late: bool) -> None:
    def train(rank: int) -> bool:
        model = table()
        optimizer = psgc.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model.named_parameters(),
            backward_passes_per_step=2,
            late_synchronization=late,
            sparse=model,
        )
        for step in (0, 2):
            optimizer.zero_grad()
            backward(model, rank, step)
            backward(model, rank, step + 1)
            optimizer.synchronize()
            own = [gradient(each, step, torch.float32) + gradient(each, step + 1, torch.float32) for each in range(2)]
            assert torch.allclose(model.weight.grad.to_dense(), (own[0] + own[1]) / 2)
            optimizer.step()
        return True

    assert all(ranks.run(2, train))


def test_a_further_backward_adds_the_mean_of_what_it_has_added(ranks: Any) -> None:
    def train(rank: int) -> bool:
        model = table()
        optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), sparse=model)
        backward(model, rank, 0)
        backward(model, rank, 1)
        assert not optimizer.state
        return torch.allclose(model.weight.grad.to_dense(), mean(2, 0) + mean(2, 1))

    assert all(ranks.run(2, train))


def test_what_nobody_used_keeps_its_gradient_and_what_one_rank_used_has_it_everywhere(ranks: Any) -> None:
    def train(rank: int) -> list[Any]:
        model = nn.ModuleList([table(), table(), linear()])
        optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), sparse=model)
        found = []
        for step in range(3):
            optimizer.zero_grad()
            loss = model[2](torch.ones(1, 3)).sum()
            if rank == 1 and step == 1:
                loss = loss + model[0](torch.tensor([7])).sum()
            loss.backward()
            optimizer.step()
            found.append([None if each.weight.grad is None else each.weight.grad.indices()[0].tolist() for each in model[:2]])
        return found

    assert ranks.run(2, train) == [[[None, None], [[7], None], [None, None]]] * 2


def test_a_gradient_zeroed_in_place_and_one_set_by_hand(ranks: Any) -> None:
    def train(rank: int) -> list[Any]:
        model = table()
        optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), sparse=model)
        backward(model, rank, 0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        before = model.weight.grad
        optimizer.step()
        assert model.weight.grad is before, "nobody had one"
        zeroed = model.weight.grad._nnz()
        model.weight.grad = torch.sparse_coo_tensor(
            torch.tensor([[rank]]), torch.full((1, COLUMNS), 4.0), (ROWS, COLUMNS), check_invariants=True
        )
        optimizer.synchronize()
        return [zeroed, model.weight.grad.to_dense()[:3, 0].tolist()]

    assert ranks.run(2, train) == [[0, [2.0, 2.0, 0.0]]] * 2


@pytest.mark.parametrize("options", [{"overlapped_step": True}, {"gradient_as_bucket_view": True}, {"compression": "int8"}])
def test_with_other_options_the_mean_is_the_same(ranks: Any, options: dict[str, Any]) -> None:
    def train(rank: int) -> torch.Tensor:
        model = small()
        optimizer = psgc.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), sparse=model, **options
        )
        for step in range(3):
            optimizer.zero_grad()
            backward(model[0], rank, step)
            optimizer.step()
        return model[0].weight.detach()

    alone = table()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(3):
        alone.weight.grad = mean(2, step).to_sparse(1)
        optimizer.step()
    assert all(torch.equal(found, alone.weight) for found in ranks.run(2, train))


def test_after_a_switch_rows_travel_on(ranks: Any) -> None:
    def train(rank: int) -> bool:
        model = small()
        optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), sparse=model)
        for step in range(4):
            if step == 2:
                optimizer.switch_plan("int8")
            optimizer.zero_grad()
            model(words(rank, step)).sum().backward()
            assert model[0].weight.grad.is_sparse
            optimizer.step()
        state = optimizer.residual_state_dict()
        optimizer.load_residual_state_dict(state)
        model(words(rank, 5)).sum().backward()
        return model[0].weight.grad.is_sparse

    assert all(ranks.run(2, train, min_compress_bytes=0))


def test_the_wrapper_of_models_finds_them_by_itself(ranks: Any) -> None:
    def train(rank: int) -> bool:
        model = psgc.DistributedDataParallel(small())
        model(words(rank, 0)).sum().backward()
        return model.module[0].weight.grad.is_sparse

    assert all(ranks.run(2, train))


def refused(ranks: Any, make: Callable[[], Any], **config: Any) -> str:
    def train(rank: int) -> str:
        with pytest.raises(UsageError) as raised:
            make()
        assert "\n" not in str(raised.value)
        return str(raised.value)

    return str(ranks.run(1, train, **config)[0])


def wrap(model: nn.Module, sparse: Any, **options: Any) -> Any:
    return psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), sparse=sparse, **options)


def test_what_cannot_be_is_told_in_a_line(ranks: Any) -> None:
    assert "sparse has 'wieght', but no parameter is called so" in refused(ranks, lambda: wrap(table(), ["wieght"]))
    assert "none of the parameters is the table of an embedding with sparse=True" in refused(ranks, lambda: wrap(linear(), linear()))
    assert "is float64[50, 3]; sparse gradients have rows of float32, bfloat16, float16" in refused(
        ranks, lambda: wrap(table(torch.float64), ["weight"])
    )
    assert "under PSGC_ASYNC=1 servers hold whole weights" in refused(ranks, lambda: wrap(table(), ["weight"]), async_mode=True)
    assert "carries dense tensors" in refused(ranks, lambda: wrap(table(), ["weight"]), wire="pslite")

    def unnamed() -> None:
        model = table()
        optimizer = wrap(model, ())
        backward(model, 0, 0)
        del optimizer

    def dense() -> None:
        model = linear()
        optimizer = wrap(model, ["weight"])
        model(torch.ones(1, 3)).sum().backward()
        del optimizer

    assert "'weight' is sparse: psgc carries those that DistributedOptimizer(..., sparse=[names]) names" in refused(ranks, unnamed)
    assert "gradient of 'weight' is dense, but sparse= says that it is of rows" in refused(ranks, dense)


@pytest.mark.parametrize("servers", [1, 0])
def test_in_a_job_sums_are_the_dense_ones_to_the_bit_and_bytes_follow_the_rows(make_job: Callable[..., Any], servers: int) -> None:
    texts = make_job(nodes=3, servers=servers).said(job="sparse.py")
    assert all("sums right" in text for text in texts)
    assert len({line for text in texts for line in text.splitlines() if line.startswith("digest")}) == 1


def lone_table(workers: int) -> Layout:
    """Of one sparse gradient."""
    spec = TensorSpec("words.weight", (ROWS, COLUMNS), "float32")
    declaration = Declaration("m", "plan", (rows_spec(spec),), "none", False, order=(0,), used=(0,), buckets=(rows_bucket(0, spec),))
    return build_layout(declaration, layout_id=1, servers=1, workers=workers, used_by_all=frozenset((0,)))


def steps_alone() -> tuple[RowsBuffer, Callable[[], None]]:
    """A buffer, and what begins its next step where PSGC_NONFINITE=raise."""
    layout, session = lone_table(1), SoloSession(Config(nonfinite="raise"))
    buffer = RowsBuffer(layout, layout.buckets[0])
    return buffer, lambda: session.wait([session.submit(layout, 0, buffer)])


def steps_over_groups() -> tuple[RowsBuffer, Callable[[], None]]:
    layout = lone_table(2)
    buffer, work = RowsBuffer(layout, layout.buckets[0]), over_groups(layout, layout.buckets[0], Ranks((2,)), 0)
    return buffer, lambda: work.begin(Submission(buffer, TicketBoard().issue()), check=True)


STEPS = pytest.mark.parametrize("steps", [steps_alone, steps_over_groups])


def rows_of(*numbers: int, value: float = 1.0) -> torch.Tensor:
    return torch.sparse_coo_tensor([list(numbers)], torch.full((len(numbers), COLUMNS), value), (ROWS, COLUMNS), check_invariants=True)


@STEPS
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_are_an_error_where_that_is_asked_for(steps: Any, bad: float) -> None:
    buffer, begin = steps()
    like = torch.zeros(ROWS, COLUMNS)
    buffer.bind([rows_of(3, 7)], [like])
    begin()
    grad = rows_of(3, 7)
    grad._values()[1, 2] = bad
    buffer.bind([grad], [like])
    with pytest.raises(PsgcError, match=r"'words\.weight'.* holds NaN or infinity"):
        begin()


@STEPS
@pytest.mark.parametrize("grad", [rows_of(5), None])
def test_what_an_earlier_sum_of_more_rows_has_left_is_not_taken_for_this_rows(steps: Any, grad: torch.Tensor | None) -> None:
    """All ranks' sum may overflow though each gradient is finite, and the next step's fewer rows leave most of it where it lies."""
    buffer, begin = steps()
    like = torch.zeros(ROWS, COLUMNS)
    buffer.bind([rows_of(1, 2, 3, 4)], [like])
    begin()
    buffer.load()[words_of(2, COLUMNS) :] = np.inf
    buffer.bind([grad], [like])
    begin()


@STEPS
def test_only_a_steps_own_rows_are_looked_at(steps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    first = nonfinite.first_nonfinite

    def counted(array: Any, dtype: str) -> int | None:
        looked.append(array.size)
        return first(array, dtype)

    monkeypatch.setattr(nonfinite, "first_nonfinite", counted)
    buffer, begin = steps()
    for grad in (rows_of(3, 7), None):
        buffer.bind([grad], [torch.zeros(ROWS, COLUMNS)])
        begin()
    assert looked == [2 * COLUMNS, 0]
