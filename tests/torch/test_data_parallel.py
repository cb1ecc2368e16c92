"""BytePS's DistributedDataParallel wrapper: the same training as DistributedOptimizer's, bit for bit, and its rules about buffers, no_sync and loss scaling."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn

import psgc.torch as psgc
from psgc.errors import UsageError
from psgc.torch.session import api
from tests.torch.small_models import batch, linear, seeded, sgd, weights


def test_it_trains_as_distributed_optimizer_does(ranks: Any) -> None:
    def wrapped(rank: int) -> list[float]:
        model = linear(seed=rank)
        ddp = psgc.DistributedDataParallel(model, device_ids=[0])
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            optimizer.zero_grad()
            ddp(batch(rank, step)).square().mean().backward()
            ddp.synchronize()
            optimizer.step()
        return weights(model)

    def plain(rank: int) -> list[float]:
        model = linear(seed=rank)
        psgc.broadcast_parameters(model.state_dict())
        optimizer = sgd(model, momentum=0.9)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            optimizer.step()
        return weights(model)

    mine, other = ranks.run(2, wrapped)
    assert mine == other == ranks.run(2, plain)[0]


def test_no_sync_accumulates_and_the_next_backward_sends_the_sum(ranks: Any) -> None:
    def work(rank: int) -> tuple[list[float], list[float]]:
        model = linear()
        ddp = psgc.DistributedDataParallel(model)
        with ddp.no_sync():
            ddp(batch(rank, 0)).mean().backward()
        sent = len([s for s in api.current_session().submissions if s.layout == "model0"])
        ddp(batch(rank, 1)).mean().backward()
        assert sent == 0
        want = torch.stack([batch(r, s).mean(0) for r in range(2) for s in range(2)]).sum(0) / 4
        assert model.weight.grad is not None
        return model.weight.grad[0].tolist(), want.tolist()

    for got, want in ranks.run(2, work):
        assert got == pytest.approx(want)


def test_buffers_become_rank_0s_in_training_and_parameters_at_construction(ranks: Any) -> None:
    def work(rank: int) -> tuple[list[float], list[float]]:
        model = seeded(lambda: nn.BatchNorm1d(3), rank)
        model.weight.data.fill_(rank)
        ddp = psgc.DistributedDataParallel(model)
        assert model.weight.tolist() == [0.0] * 3
        ddp(batch(rank, 0)).square().mean().backward()
        own = model.running_mean.tolist()
        ddp(batch(rank, 1))
        model.running_mean.fill_(rank)
        ddp.eval()
        with torch.no_grad():
            ddp(batch(rank, 2))
        return own, model.running_mean.tolist()

    (first, last_0), (second, last_1) = ranks.run(2, work)
    assert first != second  # each rank's own, until the next forward
    assert (last_0, last_1) == ([0.0] * 3, [1.0] * 3)  # no broadcast outside training


class WithMore(nn.Module):
    """A buffer that is not saved, and what is no tensor and is."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("features", torch.full((3,), rank + 1.0), persistent=False)

    def get_extra_state(self) -> Any:
        return {"version": 3}

    def set_extra_state(self, state: Any) -> None:
        del state


@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_buffers_that_are_not_saved_are_rank_0s_at_construction_too(ranks: Any, broadcast_buffers: bool) -> None:
    def work(rank: int) -> list[float]:
        features: torch.Tensor = psgc.DistributedDataParallel(WithMore(rank), broadcast_buffers=broadcast_buffers).module.features
        return features.tolist()

    assert ranks.run(2, work) == [[1.0] * 3] * 2


class Scaled(nn.Module):
    """Its gradient is computed from its buffer, which differs from rank to rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.full((3,), rank + 1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * self.scale


def test_several_forwards_before_a_backward_are_right_or_refused(ranks: Any) -> None:
    """As of a GAN's discriminator, or of twins: batch norm's averages change in between, which its gradient does not depend on."""

    def work(rank: int) -> list[float]:
        model = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), 0)
        alone = copy.deepcopy(model)
        ddp = psgc.DistributedDataParallel(model)
        losses = [
            sum((-1) ** k * forward(batch(rank, k)).square().mean() for k in range(3)) for forward in (ddp, alone)
        ]  # fmt: skip
        losses[1].backward()
        own = torch.cat([parameter.grad.flatten() for parameter in alone.parameters()])
        losses[0].backward()
        mean = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        assert torch.allclose(mean, psgc.push_pull(own, name="own"), atol=1e-6)
        other = psgc.DistributedDataParallel(Scaled(rank))
        loss = other(torch.ones(3)).sum()
        with torch.no_grad():
            other.module.scale.mul_(rank + 1)
        loss = loss + other(torch.ones(3)).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        return mean.tolist()

    first, second = ranks.run(2, work)
    assert first == second


def test_a_step_that_the_loss_scaler_drops_is_told(ranks: Any) -> None:
    def work(rank: int) -> None:
        model = linear()
        ddp = psgc.DistributedDataParallel(model, compression="int8")
        optimizer, scaler = torch.optim.SGD(ddp.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(3):
            optimizer.zero_grad()
            loss = ddp(batch(rank, step)).square().mean() * (float("inf") if step == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    ranks.run(2, work)
    steps = [s for s in ranks.steps if s.layout == "model0"]
    assert [s.previous_skipped for s in steps] == [False, False, True]
    assert steps[2].rescale == 0.5


def test_wrong_calls_say_what_to_do(ranks: Any) -> None:
    def work(rank: int) -> None:
        model = linear()
        plain = functools.partial(torch.optim.SGD, list(model.parameters()), lr=0.1)
        before = psgc.DistributedOptimizer(plain())
        wrapped = psgc.DistributedDataParallel(model)
        wrapped(batch(rank, 0)).sum().backward()
        for call in (before.step, lambda: psgc.DistributedOptimizer(plain()), lambda: psgc.CrossBarrier(model, plain())):
            with pytest.raises(
                UsageError, match=r"psgc\.torch\.DistributedDataParallel averages it already, in backward; use torch's optimizer"
            ):
                call()
        with pytest.raises(UsageError, match="device_ids has 2 devices, expected one"):
            psgc.DistributedDataParallel(linear(), device_ids=[0, 1])
        with pytest.raises(UsageError, match="no parameter of the module requires a gradient"):
            psgc.DistributedDataParallel(nn.ReLU())
        with pytest.raises(UsageError, match="auto chooses for DistributedOptimizer and ddp_hook"):
            psgc.DistributedDataParallel(linear(), compression="auto")

    ranks.run(2, work)
