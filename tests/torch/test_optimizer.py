"""DistributedOptimizer as users hold it: still their optimizer, checked when it is made."""

from __future__ import annotations

import itertools
import types
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import psgc.torch as psgc
from psgc.errors import CodecError, UsageError
from psgc.torch.tensors.buffers import TensorsBuffer

pytestmark = pytest.mark.usefixtures("alone")


def model_of(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 3)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop])
def test_it_stays_an_optimizer_of_its_class_and_steps_like_it(kind: Any) -> None:
    plain, wrapped = model_of(3, 2), model_of(3, 2)
    reference, original = kind(plain.parameters(), lr=0.01), kind(wrapped.parameters(), lr=0.01)
    distributed = psgc.DistributedOptimizer(original, wrapped.named_parameters())
    assert distributed is original
    assert isinstance(distributed, kind) and type(distributed).__name__ == kind.__name__
    for _ in range(3):
        step(plain, reference)
        step(wrapped, distributed)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), wrapped.parameters(), strict=True))


@pytest.mark.parametrize("scheduler_first", [True, False])
def test_learning_rate_schedulers_work_whichever_is_made_first(scheduler_first: bool) -> None:
    model = model_of(3, 2)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if scheduler_first:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            optimizer = psgc.DistributedOptimizer(optimizer)
        else:
            optimizer = psgc.DistributedOptimizer(optimizer)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for _ in range(3):
            step(model, optimizer)
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.125
    assert optimizer._psgc_gradients.exchange.last.outcome == "settled"


def guarded(optimizer: Any) -> None:
    own = optimizer.step
    optimizer.step = lambda: own() if optimizer.param_groups else None


def guarded_by_a_method(optimizer: Any) -> None:
    own = optimizer.step
    optimizer.step = types.MethodType(lambda self, *given: own(*given), optimizer)


def guarded_and_scheduled(optimizer: Any) -> None:
    guarded_by_a_method(optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)


def compiled(optimizer: Any) -> None:
    optimizer.step = torch.compile(optimizer.step)


def across(optimizer: Any, model: nn.Module) -> Any:
    return psgc.CrossBarrier(model, optimizer, model.named_parameters())


def distributed(optimizer: Any, model: nn.Module) -> Any:
    return psgc.DistributedOptimizer(optimizer, model.named_parameters())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
@pytest.mark.parametrize("wrapped", [distributed, across])
@pytest.mark.parametrize("replace", [guarded, guarded_by_a_method, guarded_and_scheduled, compiled])
def test_a_step_that_the_script_has_put_there_is_refused_and_not_thrown_away(replace: Any, wrapped: Any) -> None:
    model = model_of(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replace(optimizer)
    step_of = optimizer.__dict__["step"]
    with pytest.raises(
        UsageError,
        match=r"(DistributedOptimizer|CrossBarrier): the script has replaced the optimizer's step\(\) by .*; replace it after this call",
    ):
        wrapped(optimizer, model)
    assert optimizer.__dict__["step"] is step_of and type(optimizer) is torch.optim.SGD
    del optimizer.step
    calls: list[int] = []
    optimizer = wrapped(optimizer, model)
    own = optimizer.step
    optimizer.step = lambda: (calls.append(1), own())  # type: ignore[assignment, method-assign]
    step(model, optimizer)
    assert calls == [1]


def test_a_schedulers_count_of_a_step_of_the_optimizers_own_class_is_no_replacement() -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    model = model_of(3, 2)
    optimizer = Own(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    wrapped = psgc.DistributedOptimizer(optimizer, model.named_parameters())
    step(model, wrapped)
    scheduler.step()
    assert wrapped.param_groups[0]["lr"] == 0.5


def test_step_hooks_run_once_also_after_loading_a_state(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of(3, 2)
    optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    step(model, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    step(model, optimizer)
    assert calls == ["pre", "post"] * 2


def test_a_closure_runs_once_with_gradients_and_its_loss_is_returned() -> None:
    model = model_of(3, 2)
    optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(1, 3)).square().sum()
        loss.backward()
        losses.append(loss.item())
        return loss

    with torch.no_grad():
        returned = [optimizer.step(closure).item() for _ in range(3)]
    assert returned == losses and losses[2] < losses[0]


def test_its_state_is_a_plain_optimizers_state() -> None:
    model = model_of(3, 2)
    optimizer = psgc.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    step(model, optimizer)
    plain = torch.optim.Adam(model.parameters())
    plain.load_state_dict(optimizer.state_dict())
    assert str(plain.state_dict()) == str(optimizer.state_dict())


def test_wrapping_twice_is_refused() -> None:
    optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model_of(3, 2).parameters()))
    with pytest.raises(UsageError, match="already"):
        psgc.DistributedOptimizer(optimizer)


def test_names_given_twice_are_refused() -> None:
    model = model_of(3, 2)
    with pytest.raises(UsageError, match="'weight' named more than once"):
        psgc.DistributedOptimizer(torch.optim.SGD(model.parameters()), [("weight", p) for p in model.parameters()])


def test_names_must_cover_the_optimizers_parameters() -> None:
    model = model_of(3, 2)
    with pytest.raises(UsageError, match=r"1 of the optimizer's parameters have no name, the first is param.0.1"):
        psgc.DistributedOptimizer(torch.optim.SGD(model.parameters()), [("weight", model[0].weight)])


def test_names_of_trained_parameters_outside_the_optimizer_are_refused_those_of_frozen_ones_are_not() -> None:
    model = model_of(3, 2, 1)
    with pytest.raises(UsageError, match=r"'1.weight' requires a gradient but is not in the optimizer"):
        psgc.DistributedOptimizer(torch.optim.SGD(model[0].parameters()), model.named_parameters())
    model[1].requires_grad_(False)
    psgc.DistributedOptimizer(torch.optim.SGD(model[0].parameters()), model.named_parameters())


def test_names_must_be_pairs() -> None:
    model = model_of(3, 2)
    with pytest.raises(UsageError, match=r"expected .name, parameter. pairs"):
        psgc.DistributedOptimizer(torch.optim.SGD(model.parameters()), model.parameters())  # type: ignore[arg-type]


@pytest.mark.parametrize("passes", [0, -1, 1.5])
def test_passes_must_be_a_positive_whole_number(passes: Any) -> None:
    with pytest.raises(UsageError, match="backward_passes_per_step is"):
        psgc.DistributedOptimizer(torch.optim.SGD(model_of(3, 2).parameters()), backward_passes_per_step=passes)


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_trained_parameters_of_dtypes_that_psgc_does_not_carry_are_refused_by_name_and_frozen_ones_are_left_alone(codec: str) -> None:
    weights, scale = nn.Parameter(torch.zeros(2, dtype=torch.float8_e4m3fn)), nn.Parameter(torch.ones(2))
    named = [("weights", weights), ("scale", scale)]
    with pytest.raises(UsageError, match="parameter 'weights': psgc does not carry float8_e4m3fn"):
        psgc.DistributedOptimizer(torch.optim.SGD([weights, scale]), named, compression=codec)
    weights.requires_grad_(False)
    packed = nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False)
    psgc.DistributedOptimizer(torch.optim.SGD([weights, scale, packed]), [*named, ("packed", packed)], compression=codec)


def test_lossy_codecs_refuse_double_precision_by_name() -> None:
    model = model_of(3, 2).double()
    with pytest.raises(CodecError, match=r"parameter '0.weight': .*not float64"):
        psgc.DistributedOptimizer(torch.optim.SGD(model.parameters()), model.named_parameters(), compression="int8")


def test_unknown_codecs_are_refused() -> None:
    with pytest.raises(CodecError, match="unknown codec 'zip'"):
        psgc.DistributedOptimizer(torch.optim.SGD(model_of(3, 2).parameters()), compression="zip")


def test_parameters_without_names_are_called_by_group_and_index() -> None:
    model = model_of(3, 2)
    optimizer: Any = psgc.DistributedOptimizer(torch.optim.SGD([{"params": [p]} for p in model.parameters()]))
    assert sorted(optimizer._psgc_names.values()) == ["param.0.0", "param.1.0"]


def test_before_init_it_says_to_call_init() -> None:
    psgc.shutdown()
    with pytest.raises(UsageError, match=r"psgc.torch.init\(\)"):
        psgc.DistributedOptimizer(torch.optim.SGD(model_of(3, 2).parameters()))


def test_an_optimizer_of_an_ended_session_says_so() -> None:
    model = model_of(3, 2)
    optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters()))
    psgc.shutdown()
    psgc.init()
    with pytest.raises(UsageError, match="shut down"):
        step(model, optimizer)


def test_a_gradient_in_a_step_that_was_taken_without_this_rank_and_that_all_others_skipped_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of(3, 2)
    optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    step(model, optimizer)
    before, store = [parameter.detach().clone() for parameter in model.parameters()], TensorsBuffer.store
    with monkeypatch.context() as patching:
        patching.setattr(TensorsBuffer, "store", lambda self, skipped: store(self, True))
        step(model, optimizer)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    step(model, optimizer)
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
