"""Parameters of every kind: frozen, added late, of other dtypes and memory formats, sparse, empty."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import psgc.torch as psgc
from psgc.errors import UsageError
from tests.torch.small_models import linear, seeded, sgd, weights

TINY: dict[str, Any] = {"fuse_bytes": 0}  # every tensor a bucket of its own


def test_frozen_parameters_get_no_gradient(ranks: Any) -> None:
    def train(rank: int) -> list[Any]:
        model = nn.ModuleList([linear(0), linear(1)])
        optimizer = sgd(model, weight_decay=0.1)
        for step in range(3):
            model[1].requires_grad_(step == 0)
            optimizer.zero_grad()
            (model[0](torch.ones(1, 3)) + model[1](torch.ones(1, 3))).sum().backward()
            optimizer.step()
        return [model[1].weight.grad, model[0].weight.grad.sum().item()]

    assert ranks.run(2, train) == [[None, 6.0]] * 2


def test_parameters_unfrozen_or_added_later_are_declared_then(ranks: Any) -> None:
    def train(rank: int) -> list[float]:
        model = nn.ModuleList([linear(0), linear(1), linear(2)])
        model[1].requires_grad_(False)
        optimizer = psgc.DistributedOptimizer(torch.optim.SGD([*model[0].parameters(), *model[1].parameters()], lr=0.1))
        for step in range(6):
            if step == 2:
                model[1].requires_grad_(True)
            if step == 4:
                optimizer.add_param_group({"params": model[2].parameters()})
            optimizer.zero_grad()
            parts = model if step >= 4 else model[:2]
            sum(part(torch.full((1, 3), float(rank))).sum() for part in parts).backward()
            optimizer.step()
            assert model[2].weight.grad is None or step >= 4
        assert all(p.grad.reshape(-1)[0] in (0.5, 1.0) for p in model.parameters())
        return weights(model)

    results = ranks.run(2, train)
    assert results[0] == results[1]
    assert sorted({s.layout for s in ranks.steps}) == ["optimizer0", "optimizer0.2", "optimizer0.3"]


def test_channels_last_gradients_are_packed_in_logical_order(ranks: Any) -> None:
    def train(rank: int) -> torch.Tensor:
        model = seeded(lambda: nn.Conv2d(3, 4, 3))
        if rank == 1:
            model = model.to(memory_format=torch.channels_last)
        optimizer = sgd(model)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.arange(300.0).reshape(1, 3, 10, 10) / 300).square().sum().backward()
            local = model.weight.grad.clone()
            optimizer.step()
            assert torch.allclose(model.weight.grad, local)
        return model.weight.detach().contiguous()

    first, second = ranks.run(2, train)
    assert torch.equal(first, second)


@pytest.mark.parametrize("compression", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_gradients_keep_their_dtype(ranks: Any, dtype: torch.dtype, compression: str | None) -> None:
    def train(rank: int) -> list[float]:
        model = linear().to(dtype)
        optimizer = sgd(model, compression=compression)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.full((1, 3), rank + 1.0, dtype=dtype)).sum().backward()
            optimizer.step()
        assert model.weight.grad.dtype == dtype
        return model.weight.grad.reshape(-1).tolist()

    assert ranks.run(2, train) == [[1.5] * 6] * 2


def test_sparse_gradients_are_refused(ranks: Any) -> None:
    def train(rank: int) -> None:
        model = nn.Embedding(5, 2, sparse=True)
        optimizer = sgd(model)
        with pytest.raises(UsageError, match=r"'weight' is sparse: psgc carries those that DistributedOptimizer\(\.\.\., sparse="):
            model(torch.tensor([1])).sum().backward()
        del optimizer

    ranks.run(1, train)


def test_empty_and_scalar_parameters_are_no_trouble(ranks: Any) -> None:
    def train(rank: int) -> float:
        empty, scalar = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.tensor(2.0))
        optimizer = psgc.DistributedOptimizer(torch.optim.SGD([empty, scalar], lr=1.0))
        for _ in range(2):
            optimizer.zero_grad()
            (scalar * rank + empty.sum()).backward()
            optimizer.step()
        return scalar.item()

    assert ranks.run(2, train) == [1.0, 1.0]


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
def test_a_gradient_of_another_dtype_than_its_parameters_is_refused_by_name(ranks: Any) -> None:
    def work(rank: int) -> None:
        model = nn.Linear(3, 2, bias=False).bfloat16()
        weight = model.weight
        weight.grad_dtype = torch.float32
        optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        assert optimizer
        loss = model(torch.ones(1, 3, dtype=torch.bfloat16)).sum()
        with pytest.raises(UsageError, match=r"gradient of 'weight' is torch.float32, and its parameter torch.bfloat16"):
            loss.backward()

    ranks.run(1, work)
