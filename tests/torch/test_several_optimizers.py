"""Several optimizers in one backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import psgc.torch as psgc
from tests.torch.backwards import TINY, grads
from tests.torch.small_models import batch, linear, sgd, weights

# torch 2.4's own checkpoint uses what torch 2.4 advises against.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.cpu.amp.autocast:FutureWarning")


def test_two_optimizers_in_one_backward_need_no_order(ranks: Any) -> None:
    """Ranks meet the models in opposite orders, and one of them leaves one out, from the first step on."""

    def train(rank: int) -> list[float]:
        models = [linear(0), linear(1)]
        optimizers = [sgd(model) for model in models]
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            used = models if rank == 0 else models[1:] if step != 1 else models[::-1]
            x = torch.ones(1, 3)
            sum((model(x).sum() for model in used), torch.zeros(())).backward()
            if rank == 0:  # both are there
                assert all(model.weight.grad is not None for model in models)
            for optimizer in optimizers:
                optimizer.step()
        return [*weights(models[0]), *weights(models[1]), *(model.weight.grad[0, 0].item() for model in models)]

    first, second = ranks.run(2, train, **TINY)
    assert first == second and first[-2:] == [0.5, 1.0]


def test_parameters_of_two_optimizers_are_averaged_in_the_backward_of_either(ranks: Any) -> None:
    def train(rank: int) -> list[float]:
        model = nn.ModuleList([linear(0), linear(1)])
        one, two = sgd(model[0], momentum=0.9), psgc.DistributedOptimizer(torch.optim.Adam(model[1].parameters()))
        for step in range(3):
            one.zero_grad()
            two.zero_grad()
            (model[0](batch(rank, step)) * model[1](batch(rank, step))).square().mean().backward()
            assert len(grads(model)) == 4
            one.step()
            two.step()
        return weights(model)

    first, second = ranks.run(2, train)
    assert first == second


def test_an_optimizer_made_anew_takes_the_parameters_over_from_one_still_held(ranks: Any) -> None:
    def train(rank: int) -> list[float]:
        model = linear()
        held = []
        for _ in range(3):
            held.append(sgd(model))
            held[-1].zero_grad()
            model(torch.full((1, 3), rank + 1.0)).sum().backward()
            held[-1].step()
        return model.weight.grad.reshape(-1).tolist()

    assert ranks.run(2, train) == [[1.5] * 6] * 2
    assert [s.layout for s in ranks.steps] == ["optimizer0", "optimizer1", "optimizer2"]


@pytest.mark.parametrize("first", [0, 1])
def test_whichever_optimizer_is_declared_first_the_servers_of_each_are_the_same(ranks: Any, first: int) -> None:
    def train(rank: int) -> None:
        models = [linear(0), linear(1)]
        optimizers = [sgd(model) for model in models]
        for number in (first, 1 - first):
            models[number](torch.ones(1, 3)).sum().backward()
            optimizers[number].step()

    ranks.run(2, train)
    declared = ranks.sessions[0].job.declared
    assert [declared[name][0].turn for name in ("optimizer0", "optimizer1")] == [0, 1]
