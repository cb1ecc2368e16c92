"""Copies of what psgc wraps, and what torch.save makes of it: wrapped models are torch's own in this, optimizers say what is to be copied instead."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import psgc.torch as psgc
from psgc.config import Config
from psgc.errors import UsageError
from psgc.torch.ddp import wrappers
from tests.torch.small_models import batch, linear, sgd, weights


def saved(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_a_moving_average_of_a_wrapped_model_is_as_of_the_model_itself(ranks: Any) -> None:
    """It is made and evaluated on rank 0 alone, which no other rank waits for."""

    def work(rank: int) -> tuple[list[float], list[float]]:
        model = linear()
        ddp = psgc.DistributedDataParallel(model)
        plain = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        average = AveragedModel(ddp, multi_avg_fn=get_ema_multi_avg_fn(0.5)) if rank == 0 else plain
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            ddp(batch(rank, step)).square().mean().backward()
            optimizer.step()
            plain.update_parameters(model)
            if average is not plain:
                average.update_parameters(ddp)
                with torch.no_grad():
                    assert torch.equal(average(batch(0, 0)), plain(batch(0, 0)))
                average.eval()(batch(0, 0))
        again = linear()  # models that are wrapped later have the same names on all ranks
        psgc.DistributedDataParallel(again)(batch(rank, 0)).mean().backward()
        return weights(average), weights(plain)

    for found, wanted in ranks.run(2, work):
        assert found == wanted


@pytest.mark.parametrize("made", [copy.deepcopy, saved])
def test_a_copy_of_a_wrapped_model_trains_over_all_ranks_as_the_model_does(ranks: Any, made: Callable[[Any], Any]) -> None:
    def work(rank: int) -> list[list[float]]:
        first = psgc.DistributedDataParallel(linear(), compression="bf16", broadcast_buffers=False, gradient_as_bucket_view=True)
        second = made(first)
        assert second.broadcast_buffers is False
        for ddp in (second, first):
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
            for step in range(3):
                optimizer.zero_grad()
                if step == 1:
                    with ddp.no_sync():
                        ddp(batch(rank, 7)).square().mean().backward()
                ddp(batch(rank, step)).square().mean().backward()
                ddp.synchronize()
                optimizer.step()
        return [weights(first), weights(second)]

    (mine, copied), (other, others_copy) = ranks.run(2, work)
    assert mine == copied == other == others_copy
    assert {submission.layout for submission in ranks.steps} >= {"model0", "copy0"}


def test_a_copy_that_was_not_trained_needs_no_job(alone: None) -> None:
    """It joins one when it trains, not before."""
    ddp = psgc.DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    copied = copy.deepcopy(ddp)
    copied.synchronize()
    for parameter in copied.parameters():
        parameter.requires_grad_(False)
    with copied.no_sync():
        copied(torch.ones(4, 3))
    assert copied._gradients is None
    assert pickle.loads(pickle.dumps(ddp)).state_dict().keys() == ddp.state_dict().keys()


def optimizers() -> dict[str, Callable[[], Any]]:
    def crossing() -> Any:
        model = nn.Sequential(nn.Linear(3, 3))
        return psgc.CrossBarrier(model, torch.optim.Adam(model.parameters()))

    return {
        "SGD": lambda: sgd(linear()),
        "AdamW": lambda: psgc.DistributedOptimizer(torch.optim.AdamW(linear().parameters()), overlapped_step=True),
        "OneBitAdam": lambda: psgc.OneBitAdam(linear().named_parameters(), warmup_steps=2),
        "ZeroOneAdam": lambda: psgc.ZeroOneAdam(linear().named_parameters(), warmup_steps=2, local_growth=2),
        "DeMo": lambda: psgc.DeMo(linear().named_parameters()),
        "Adam": crossing,
    }


@pytest.mark.parametrize("kind", list(optimizers()))
@pytest.mark.parametrize("made", [copy.copy, copy.deepcopy, pickle.dumps, saved])
def test_an_optimizer_is_neither_copied_nor_pickled_and_says_what_is(alone: None, kind: str, made: Callable[[Any], Any]) -> None:
    optimizer = optimizers()[kind]()
    with pytest.raises(
        UsageError, match=rf"this {kind} is one of psgc's.* copy or save its state_dict\(\), and make and wrap a new {kind}"
    ):
        made(optimizer)
    assert saved(copy.deepcopy(optimizer.state_dict())).keys() == optimizer.state_dict().keys()


def test_neither_is_an_asynchronous_one(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psgc.current_session(), "config", Config(async_mode=True))
    with pytest.raises(UsageError, match="this SGD is one of psgc's"):
        copy.deepcopy(sgd(linear()))


def test_copies_of_a_model_without_barrier_wait_for_nothing(ranks: Any) -> None:
    """They are made, saved, and run between its steps."""

    def work(rank: int) -> list[float]:
        model = nn.Sequential(linear(), nn.Tanh(), linear(width=2))
        optimizer = psgc.CrossBarrier(model, torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        for step in range(4):
            optimizer.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            optimizer.step()
            if step % 2 == rank:
                for copied in (copy.deepcopy(model), saved(model), AveragedModel(model)):
                    copied(batch(rank, 9)).sum().backward()
                    copied.load_state_dict(copied.state_dict())
        optimizer.synchronize()
        return weights(model)

    def plain(rank: int) -> list[float]:
        model = nn.Sequential(linear(), nn.Tanh(), linear(width=2))
        optimizer = sgd(model)
        for step in range(4):
            optimizer.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            optimizer.step()
        return weights(model)

    assert ranks.run(2, work) == ranks.run(2, plain)


@pytest.fixture
def group(alone: None, tmp_path: Any) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_models_of_torchs_ddp_are_copied_and_saved_with_psgcs_hook_as_with_a_function(group: None) -> None:
    model = DistributedDataParallel(linear())
    hook = psgc.ddp_hook()
    model.register_comm_hook(None, hook)
    model(batch(0, 0)).sum().backward()
    average = AveragedModel(model)
    average.update_parameters(model)
    assert torch.equal(average(batch(0, 1)), model(batch(0, 1)))
    for copied in (copy.deepcopy(model), saved(model)):
        copied(batch(0, 0)).sum().backward()
        assert copied.module.weight.grad is not None, "DDP averages it by itself"
        assert copied in wrappers.all_wrappers()
    assert hook.statistics()["steps"] == 1
    copied.register_comm_hook(None, hook)
    copied(batch(0, 0)).sum().backward()
    assert hook.statistics()["steps"] == 2
    with pytest.raises(UsageError, match=r"register psgc.torch.ddp_hook\(\) on the one that was loaded"):
        saved(hook)(None, None)
