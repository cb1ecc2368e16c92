"""Asynchronous training: what is refused, each by one line, and what a job of one process does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import psgc.torch as psgc
from psgc.config import Config
from psgc.errors import CodecError, ConfigError, UsageError
from psgc.pslite.settings import Settings
from psgc.torch.optimizers.asynchronous import AsyncDistributed
from psgc.torch.optimizers.averaging import Distributed
from psgc.torch.plans.choice import Choice


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_what_averages_gradients_is_refused_by_name(ranks: Any) -> None:
    model = nn.Linear(2, 2)
    calls: dict[str, Callable[[], Any]] = {
        "CrossBarrier averages gradients": lambda: psgc.CrossBarrier(model, sgd(model), model.named_parameters()),
        "DistributedDataParallel averages gradients": lambda: psgc.DistributedDataParallel(model),
        "OneBitAdam averages gradients": lambda: psgc.OneBitAdam(model.named_parameters(), warmup_steps=1),
        "plans and auto are of synchronous": lambda: psgc.DistributedOptimizer(sgd(model), compression="auto"),
        "residuals_follow_lr": lambda: psgc.DistributedOptimizer(sgd(model), residuals_follow_lr=True),
    }

    def work(rank: int) -> None:
        for words, call in calls.items():
            with pytest.raises(UsageError, match=words):
                call()
        for codec in ("powersgd:rank=2", "onebit/relay", "none/int8", "topk:k=0.1,momentum=dgc", "shared"):
            with pytest.raises(CodecError, match="changes are pushed by a codec of one round and without momentum"):
                psgc.DistributedOptimizer(sgd(model), compression=codec)
        optimizer = psgc.DistributedOptimizer(sgd(model), model.named_parameters())
        with pytest.raises(UsageError, match="already"):
            psgc.DistributedOptimizer(optimizer)
        of_gradients = {"format": 2, "rank": rank, "size": 2, "memories": {"gradients": {"weight": {}}}}
        for words, method in {
            "expected what residual_state_dict": lambda: optimizer.load_residual_state_dict([]),
            "the state is of synchronous training": lambda: optimizer.load_residual_state_dict(of_gradients),
            "plans are of synchronous": lambda: optimizer.switch_plan("none"),
        }.items():
            with pytest.raises(UsageError, match=words):
                method()

    ranks.run(2, work, async_mode=True)
    assert Choice().codec == "none"


def test_what_asynchronous_training_has_kept_is_refused_where_gradients_are_averaged(alone: None) -> None:
    model = nn.Linear(2, 2)
    of_changes = {"format": 2, "rank": 0, "size": 1, "memories": {"changes": {"weight": {}}}}
    with pytest.raises(UsageError, match="the state is of asynchronous training, whose residuals are of changes of weights"):
        psgc.DistributedOptimizer(sgd(model), model.named_parameters()).load_residual_state_dict(of_changes)


def test_settings_that_contradict_each_other_are_refused() -> None:
    job = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "9000", "DMLC_NUM_WORKER": "2"}
    for words, env in {
        "PSGC_STALENESS=3 bounds asynchronous training": {"PSGC_STALENESS": "3"},
        "PSGC_ASYNC=1 and PSGC_PLAN=auto": {"PSGC_ASYNC": "1", "PSGC_PLAN": "auto"},
        "PSGC_ASYNC=1 and PSGC_PROFILE=p": {"BYTEPS_ENABLE_ASYNC": "1", "PSGC_PROFILE": "p"},
        "servers hold the weights": {"BYTEPS_ENABLE_ASYNC": "1", "DMLC_NUM_SERVER": "0"},
    }.items():
        with pytest.raises(ConfigError, match=words):
            Config.from_env({**job, **env}).require_cluster()
    with pytest.raises(ConfigError, match="stock servers abort at the first pull"):
        Settings.of(Config.from_env({**job, "PSGC_WIRE": "pslite", "BYTEPS_ENABLE_ASYNC": "1"}))


def test_alone_it_is_the_optimizer_itself_and_held_tensors_obey_their_rule(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    session = psgc.current_session()
    monkeypatch.setattr(session, "config", Config(async_mode=True))
    torch.manual_seed(0)
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    other.load_state_dict(model.state_dict())
    wrapped, plain = psgc.DistributedOptimizer(sgd(model), model.named_parameters()), sgd(other)
    schedule = torch.optim.lr_scheduler.StepLR(wrapped, 1)
    for net, optimizer in ((model, wrapped), (other, plain)):
        net(torch.ones(4, 3)).sum().backward()
        optimizer.step()
    schedule.step()
    wrapped.pull()
    assert torch.equal(model.weight, other.weight)

    held = psgc.HeldTensors({"w": torch.ones(3), "i": torch.zeros(2, dtype=torch.int32)}, "mine")
    assert held.push_pull({"w": torch.full((3,), 2.0)})["w"].tolist() == [3.0] * 3
    assert held.pull()["i"].tolist() == [0, 0]
    outer = psgc.HeldTensors({"w": torch.zeros(1)}, "outer", rule="nesterov:lr=0.5,momentum=0.5")
    assert [outer.push_pull({"w": torch.ones(1)})["w"].item() for _ in range(2)] == [0.75, 1.625]
    for words, make in {
        "'mine' was used before": lambda: psgc.HeldTensors({"w": torch.ones(3)}, "mine"),
        "unknown update rule": lambda: psgc.HeldTensors({}, "a", rule="max"),
        "not float16": lambda: psgc.HeldTensors({"w": torch.ones(3, dtype=torch.float16)}, "b"),
        "no tensor is named 'x'": lambda: held.push_pull({"x": torch.ones(3)}),
    }.items():
        with pytest.raises(UsageError, match=words):
            make()


def test_held_tensors_that_a_codec_cannot_carry_are_refused_alone_too(alone: None) -> None:
    for _ in range(2):
        with pytest.raises(CodecError, match=r"tensor 'w': .*onebit"):
            psgc.HeldTensors({"w": torch.ones(9000, dtype=torch.int64)}, "h", compression="onebit")
    assert psgc.HeldTensors({"w": torch.ones(9000)}, "h", compression="onebit").values["w"].tolist() == [1.0] * 9000


def test_a_script_that_handles_errors_as_documented_runs_as_it_is(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/optimizers.md: put_back() or discard() after a backward that raised. Nothing was sent, so both clear the gradients."""
    monkeypatch.setattr(psgc.current_session(), "config", Config(async_mode=True))
    model = nn.Linear(3, 2)
    optimizer: Any = psgc.DistributedOptimizer(sgd(model), model.named_parameters())
    before = model.weight.detach().clone()
    for give_up in (optimizer.put_back, optimizer.discard):
        model(torch.ones(4, 3)).sum().backward()
        give_up()
        assert model.weight.grad is None
        optimizer.step()
        assert torch.equal(model.weight, before)
    with optimizer.no_sync():
        model(torch.ones(4, 3)).sum().backward()
    optimizer.replayed()
    optimizer.step()
    assert not torch.equal(model.weight, before)


def test_it_has_all_that_users_call_of_a_synchronous_one() -> None:
    synchronous, asynchronous = ({name for name in vars(of) if not name.startswith("_")} for of in (Distributed, AsyncDistributed))
    torchs = set(dir(torch.optim.Optimizer))
    assert synchronous - torchs <= asynchronous
    assert asynchronous - torchs - synchronous == {"pull"}
