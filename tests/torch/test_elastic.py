"""Elastic in one process: what it refuses, and that a state which was read gives another process the same training."""

from __future__ import annotations

import copy
import logging
import random
from typing import Any

import numpy as np
import pytest
import torch

import psgc.torch as psgc
from psgc.errors import UsageError
from psgc.torch.elastic import elastic as elastic_module
from psgc.torch.elastic.state import TrainingState
from psgc.torch.gradients.last_step import LastStep, StepFlags
from psgc.worker.session import Handover


@pytest.fixture(autouse=True)
def joined() -> Any:
    psgc.init()
    yield
    psgc.shutdown()


def made(seed: int) -> tuple[torch.nn.Module, Any, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    optimizer = psgc.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model.named_parameters())
    return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.5)


def test_steps_are_counted_from_0_and_gone_through_once() -> None:
    model, optimizer, scheduler = made(0)
    elastic = psgc.Elastic(model=model, optimizer=optimizer, scheduler=scheduler)
    assert list(elastic.steps(3)) == [0, 1, 2]
    assert not elastic.replaced
    with pytest.raises(UsageError, match="gone through before"):
        list(elastic.steps(6))


def test_a_job_is_not_left_before_its_loop_is_over() -> None:
    """Its steps would go on in the session that has been left."""
    model, optimizer, scheduler = made(0)
    elastic = psgc.Elastic(model=model, optimizer=optimizer)
    refused = pytest.raises(UsageError, match=r"suspend\(\): Elastic's steps are of one job; call it after the loop over them")
    with refused:
        psgc.suspend()
    for number in elastic.steps(2):
        step(model, optimizer, scheduler, number)
        with refused:
            psgc.suspend()
    psgc.suspend()
    psgc.resume(1, 0, 0)
    for number in psgc.Elastic(model=model, optimizer=optimizer).steps(2):
        step(model, optimizer, scheduler, number)
        if number:
            break
    psgc.suspend()
    psgc.resume(1, 0, 0)


@pytest.mark.parametrize("total", [-1, 2.0])
def test_a_number_of_steps_that_cannot_be_is_refused(total: Any) -> None:
    model, optimizer, _ = made(0)
    elastic = psgc.Elastic(model=model, optimizer=optimizer)
    with pytest.raises(UsageError, match=r"Elastic.steps\(\) of (-1|2.0): expected a whole number of at least 0"):
        list(elastic.steps(total))
    assert list(elastic.steps(0)) == []


def test_a_seed_gives_each_step_and_rank_its_own_numbers_again() -> None:
    drawn = []
    for _ in range(2):
        model, optimizer, _ = made(random.randrange(100))
        torch.rand(random.randrange(9))
        elastic = psgc.Elastic(model=model, optimizer=optimizer, seed=3)
        drawn.append([(random.random(), float(np.random.rand()), torch.rand(2).tolist()) for _ in elastic.steps(3)])
    assert drawn[0] == drawn[1]
    assert len({step[0] for step in drawn[0]}) == 3


def step(model: torch.nn.Module, optimizer: Any, scheduler: Any, number: int) -> None:
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
    scheduler.step()


def test_what_is_read_in_the_middle_of_a_step_is_the_state_at_its_beginning() -> None:
    """Buffers and the scheduler's state may have changed since; parameters and the optimizer's state have not."""
    session = psgc.current_session()
    model, optimizer, scheduler = made(0)
    giver = TrainingState(session, model, optimizer, {"scheduler": scheduler})
    for number in range(2):
        step(model, optimizer, scheduler, number)
    beginning = giver.beginning(2, False, (0, 2))
    model(torch.randn(8, 4))  # moves the running statistics
    head, tensors = giver.read(beginning)
    other, second, rates = made(1)
    taker = TrainingState(session, other, second, {"scheduler": rates})
    whole, places = taker.places(head)
    for place, tensor in zip(places, tensors, strict=True):
        place.copy_(tensor)
    taken = taker.take(whole)
    assert (taken.step, taken.kept, taken.members) == (beginning.step, beginning.kept, (0, 2))
    again, third, schedule = made(0)
    for number in range(2):
        step(again, third, schedule, number)
    for number in range(2, 5):
        step(other, second, rates, number)
        step(again, third, schedule, number)
    for mine, theirs in zip(other.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    assert rates.get_last_lr() == schedule.get_last_lr()


def handed_over(giver: TrainingState, taker: TrainingState, beginning: Any) -> None:
    head, tensors = giver.read(beginning)
    whole, places = taker.places(head)
    for place, tensor in zip(places, tensors, strict=True):
        place.copy_(tensor)
    taker.take(whole)


@pytest.fixture
def unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gradient has a bucket of its own, which is skipped in a step that does not use it."""
    psgc.shutdown()
    monkeypatch.setenv("PSGC_FUSE_BYTES", "1")
    psgc.init()


class Two(torch.nn.Module):
    """Of which the second is used now and then; weight decay and momentum move it also by a gradient of zeros."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
        sgd = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        self.optimizer: Any = psgc.DistributedOptimizer(sgd, self.named_parameters())

    def train_step(self, number: int, zero: bool | None) -> None:
        """zero: what zero_grad leaves; None: it is not called."""
        if zero is not None:
            self.optimizer.zero_grad(set_to_none=not zero)
        of = (self.first, self.second) if number == 0 else (self.first,)
        sum(net(torch.full((2, 4), number + 1.0)).square().mean() for net in of).backward()  # type: ignore[union-attr]
        self.optimizer.step()


@pytest.mark.parametrize("trained_before", [False, True])
@pytest.mark.parametrize("zeroed_after", [False, True])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.usefixtures("unfused")
def test_whether_a_gradient_is_there_goes_along(zero: bool, zeroed_after: bool, trained_before: bool) -> None:
    """An optimizer leaves a parameter alone whose p.grad is None, and decays one whose p.grad is zeros. zeroed_after: each step, and not before it;
    trained_before: the process that takes the state has made a step of its own before its loop."""
    session = psgc.current_session()
    model, other = Two(0), Two(1)
    giver, taker = (TrainingState(session, each, each.optimizer, {}) for each in (model, other))

    def step(each: Two, number: int) -> None:
        each.train_step(number, None if zeroed_after else zero)
        if zeroed_after:
            each.optimizer.zero_grad(set_to_none=not zero)

    step(model, 0)
    if trained_before:
        other.train_step(0, True)
    handed_over(giver, taker, giver.beginning(1, False, (0,)))
    before = [parameter.clone() for parameter in model.second.parameters()]
    for number in (1, 2):
        for each, state in ((model, giver), (other, taker)):
            step(each, number)
            state.check_gradients()
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, theirs)
    assert zero != all(map(torch.equal, before, model.second.parameters())), "zeros decay it"


@pytest.mark.usefixtures("unfused")
def test_a_step_that_uses_what_an_earlier_one_left_in_a_gradient_is_refused_before_its_update() -> None:
    """p.grad = mean1 + mean2, or a parameter that no rank uses in the step and the optimizer applies anew."""
    session = psgc.current_session()
    for used_again in (True, False):
        model = Two(0)
        state = TrainingState(session, model, model.optimizer, {})
        state.beginning(0, False, (0,))
        model.train_step(0, True)
        state.check_gradients()
        state.beginning(1, False, (0,))
        if not used_again:
            model.first.zero_grad()
        model.train_step(1, None)
        name = "first.weight" if used_again else "second.weight"
        with pytest.raises(
            UsageError, match=rf"the gradient of '{name}' still has what an earlier step left in p\.grad.*zero_grad\(\) in each step"
        ):
            state.check_gradients()


def test_two_backwards_of_one_step_may_add_up() -> None:
    session = psgc.current_session()
    model = Two(0)
    state = TrainingState(session, model, model.optimizer, {})
    for number in range(2):
        state.beginning(number, False, (0,))
        for zero in (True, None):
            model.train_step(0, zero)
            state.check_gradients()


class Averaged(torch.nn.Module):
    """A model with a moving average of its weights, which the script changes and no optimizer does. optimizer_has_it: without a gradient."""

    def __init__(self, optimizer_has_it: bool) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
        self.average = torch.nn.Linear(4, 1).requires_grad_(False)
        trained = list(self.named_parameters() if optimizer_has_it else self.net.named_parameters())
        self.optimizer: Any = psgc.DistributedOptimizer(torch.optim.SGD([p for _, p in trained], lr=0.1), trained)

    def train_step(self, number: int) -> None:
        self.follow()
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
        self.optimizer.zero_grad()
        self.net(inputs).square().mean().backward()
        self.optimizer.step()

    def follow(self) -> None:
        for average, parameter in zip(self.average.parameters(), self.net.parameters(), strict=True):
            average.data.mul_(0.5).add_(parameter.data)


@pytest.mark.parametrize("optimizer_has_it", [False, True])
def test_parameters_that_the_script_changes_are_given_as_they_were_at_the_steps_beginning(optimizer_has_it: bool) -> None:
    session = psgc.current_session()
    model, other, again = (Averaged(optimizer_has_it) for _ in range(3))
    again.load_state_dict(model.state_dict())
    giver, taker = (TrainingState(session, each, each.optimizer, {}) for each in (model, other))
    model.train_step(0)
    beginning = giver.beginning(1, False, (0,))
    model.follow()  # in the step in which the other dies, before its update
    head, tensors = giver.read(beginning)
    whole, places = taker.places(head)
    for place, tensor in zip(places, tensors, strict=True):
        place.copy_(tensor)
    taken = taker.take(whole)
    assert set(taken.apart) == {"average.weight", "average.bias"}
    other.follow()
    head, tensors = taker.read(taken)  # it may be asked, too
    third = Averaged(optimizer_has_it)
    last = TrainingState(session, third, third.optimizer, {})
    whole, places = last.places(head)
    for place, tensor in zip(places, tensors, strict=True):
        place.copy_(tensor)
    last.take(whole)
    third.train_step(1)
    for number in range(2):
        again.train_step(number)
    for mine, theirs in zip(third.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_what_its_optimizer_does_not_train_is_refused_when_it_is_made() -> None:
    """An update of another optimizer, which the giver's parameters have already, would be made again."""
    model = torch.nn.ModuleDict({"g": torch.nn.Linear(2, 1), "d": torch.nn.Linear(2, 1)})
    opt_g, opt_d = (
        psgc.DistributedOptimizer(torch.optim.SGD(model[one].parameters(), lr=0.1), model[one].named_parameters()) for one in "gd"
    )
    with pytest.raises(
        UsageError, match=r"Elastic: the optimizer does not have parameter 'd\.weight' of the model, .*; give all of the model's to one"
    ):
        psgc.Elastic(model=model, optimizer=opt_g)
    with pytest.raises(
        UsageError, match="Elastic: od is an optimizer, whose updates another process could not follow; have one optimizer for all"
    ):
        psgc.Elastic(model=model["g"], optimizer=opt_g, extra={"od": opt_d})
    model["d"].requires_grad_(False)
    psgc.Elastic(model=model, optimizer=opt_g)


def test_what_its_optimizer_trains_beside_the_model_is_refused_when_it_is_made() -> None:
    """A criterion's parameters: no rank would get those of another. One that is not trained may be left out of the model."""
    model, criterion, frozen = torch.nn.Linear(2, 1), torch.nn.Linear(1, 1), torch.nn.Linear(2, 2).requires_grad_(False)
    both = torch.nn.ModuleDict({"model": model, "criterion": criterion, "frozen": frozen})
    optimizer = psgc.DistributedOptimizer(torch.optim.SGD(both.parameters(), lr=0.1), both.named_parameters())
    with pytest.raises(UsageError, match=r"Elastic: the model does not have parameter 'criterion\.weight' of the optimizer, .*ModuleList"):
        psgc.Elastic(model=model, optimizer=optimizer)
    psgc.Elastic(model=torch.nn.ModuleList([model, criterion]), optimizer=optimizer)


def test_an_update_that_is_left_out_does_what_hooks_do_beside_it() -> None:
    """A pre hook decays weights, a post hook keeps their average in a buffer, and both run in the middle of the update that another rank has made."""
    model, optimizer, _ = made(0)
    model.register_buffer("average", torch.zeros(3, 4))
    elastic = psgc.Elastic(model=model, optimizer=optimizer)
    first: Any = model[0]  # type: ignore[index]

    def before(*_: Any) -> None:
        first.weight.data.mul_(0.5)

    def after(*_: Any) -> None:
        model.average.add_(first.weight.data)  # type: ignore[operator, union-attr]
        optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.state[first.weight]["exp_avg"].mul_(0.5)

    optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)
    for number in elastic.steps(2):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        if number == 1:
            had = {name: value.clone() for name, value in model.state_dict().items()}
            momentum, rate = optimizer.state[first.weight]["exp_avg"].clone(), optimizer.param_groups[0]["lr"]
            optimizer._psgc_updated = 1
        optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, had[name] + (had["0.weight"] if name == "average" else 0)), name
    assert torch.equal(optimizer.state[first.weight]["exp_avg"], momentum)
    assert (optimizer.param_groups[0]["lr"], optimizer._psgc_updated) == (rate, 0)


def test_the_outcome_of_the_last_step_goes_along() -> None:
    giver, taker, scale = LastStep(), LastStep(), [8.0]
    giver.scale_with(lambda: scale[0])
    giver.begin()
    giver.deliver()
    with pytest.raises(UsageError, match=r"no optimizer's step; call step\(\), discard\(\) or put_back\(\)"):
        giver.told()
    giver.end(applied=False)
    taker.follow(giver.told())
    scale[0] = 4.0
    taker.scale_with(lambda: scale[0])
    giver.begin()
    taker.begin()
    assert giver.flags == taker.flags == StepFlags(True, 4.0, ())
    assert giver.rescale() == taker.rescale() == 0.5
    giver.deliver()
    giver.begin()
    with pytest.raises(UsageError, match="a step of Elastic ends between two steps"):
        giver.told()


def test_state_in_another_dtype_than_its_parameter_is_taken_as_it_is() -> None:
    """Momenta in double precision, as of master weights."""
    session, states = psgc.current_session(), []
    for seed in range(2):
        model, optimizer, schedule = made(seed)
        step(model, optimizer, schedule, seed)
        states.append((TrainingState(session, model, optimizer, {}), optimizer))
    for of in states[0][1].state.values():
        of["exp_avg"] = of["exp_avg"].double() / 3
    handed_over(states[0][0], states[1][0], states[0][0].beginning(1, False, (0,)))
    for mine, theirs in zip(states[0][1].state.values(), states[1][1].state.values(), strict=True):
        assert theirs["exp_avg"].dtype == torch.float64
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("followed", [True, False])
def test_layers_that_synchronise_are_named_by_their_places_where_another_process_may_run_them(
    followed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psgc.Elastic, "_followed", followed)
    layers = [psgc.SyncBatchNorm(2) for _ in range(2)]
    model = torch.nn.ModuleDict({"first": layers[0], "more": torch.nn.Sequential(torch.nn.Linear(2, 2), layers[1])})
    optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    names = ["SyncBatchNorm.model.first", "SyncBatchNorm.model.more.1"] if followed else ["SyncBatchNorm.0", "SyncBatchNorm.1"]
    for _ in psgc.Elastic(model=model, optimizer=optimizer).steps(2):
        assert [layer._name() for layer in layers] == names
        for forward in (2, 3):
            more = f"@{forward}" if followed else ""
            copied = copy.deepcopy(layers[1]) if forward == 3 else layers[1]
            assert [layers[0]._name(), copied._name()] == [f"{name}{more}" for name in names], "a name's result is kept until its next one"


def test_a_schedule_of_schedules_goes_on_where_it_was() -> None:
    """Its state has a list of states, of which one counts its milestones by a Counter, and begins after the handover."""
    session, made_of, rates = psgc.current_session(), [], []
    for seed in range(2):
        model, optimizer, _ = made(seed)
        parts = [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2),
            torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 1, 3]),
        ]
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])
        made_of.append((model, optimizer, schedule, TrainingState(session, model, optimizer, {"scheduler": schedule})))
    for number in range(2):
        step(*made_of[0][:3], number)
    handed_over(made_of[0][3], made_of[1][3], made_of[0][3].beginning(2, False, (0,)))
    for number in range(2, 8):
        for model, optimizer, schedule, _ in made_of:
            step(model, optimizer, schedule, number)
        rates.append([schedule.get_last_lr() for _, _, schedule, _ in made_of])
    assert all(own == other for own, other in rates)
    assert len({own[0] for own, _ in rates}) == 3, "a milestone came after it"


def test_what_cannot_be_followed_is_refused() -> None:
    model, optimizer, scheduler = made(0)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"optimizer is a SGD, expected what psgc\.torch\.DistributedOptimizer returns"):
        psgc.Elastic(model=model, optimizer=plain)
    with pytest.raises(UsageError, match="sampler is a int, which has no state_dict"):
        psgc.Elastic(model=model, optimizer=optimizer, extra={"sampler": 3})  # type: ignore[dict-item]
    with pytest.raises(UsageError, match="which is the name of scheduler="):
        psgc.Elastic(model=model, optimizer=optimizer, scheduler=scheduler, extra={"scheduler": scheduler})
    with pytest.raises(UsageError, match="model is a AdamW"):
        psgc.Elastic(model=optimizer, optimizer=optimizer)
    lowrank = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression="powersgd")
    with pytest.raises(UsageError, match=r"powersgd.* goes on from factors of the last step"):
        psgc.Elastic(model=model, optimizer=lowrank)
    next(iter(psgc.Elastic(model=model, optimizer=optimizer).steps(1)))
    with pytest.raises(UsageError, match=r"step\(closure\)"):
        optimizer.step(lambda: model(torch.ones(2, 4)).sum())


@pytest.mark.parametrize("followed", [True, False])
def test_what_modules_save_besides_tensors_is_named_where_another_process_would_not_have_it(
    followed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Scaled(torch.nn.Linear):
        def get_extra_state(self) -> Any:
            return {"scale": 2.0}

        def set_extra_state(self, state: Any) -> None: ...

    monkeypatch.setattr(psgc.Elastic, "_followed", followed)
    monkeypatch.setattr(logging.getLogger("psgc"), "propagate", True)
    model = torch.nn.Sequential(Scaled(2, 2), torch.nn.Linear(2, 2), *(Scaled(2, 2) for _ in range(4)))
    optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    assert list(psgc.Elastic(model=model, optimizer=optimizer).steps(2)) == [0, 1]
    said = "Elastic: what modules save besides tensors (get_extra_state of 0, 2, 3 and 2 more) is each rank's own"
    assert caplog.text.count(said) == followed, caplog.text


def test_a_state_that_is_not_plain_is_refused_before_the_first_step() -> None:
    class Sampler:
        def state_dict(self) -> dict[str, Any]:
            return {"at": object()}

        def load_state_dict(self, state: Any) -> None: ...

    model, optimizer, _ = made(0)
    with pytest.raises(UsageError, match=r"Elastic: state\['extra'\]\['sampler'\]\['at'\].*dataclasses.asdict\)$"):
        next(iter(psgc.Elastic(model=model, optimizer=optimizer, extra={"sampler": Sampler()}).steps(1)))


def own_form(_optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    return {"inner": state}


def in_a_state(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """As what a second-order optimizer keeps."""
    return state | ({"factors": object()} if optimizer.state else {})


@pytest.mark.parametrize(
    ("form", "step_taken", "message"),
    [(own_form, False, r"state_dict\(\) of AdamW has no param_groups"), (in_a_state, True, r"Elastic: state\['optimizer'\]\['factors'\]")],
)
def test_a_state_of_the_optimizer_that_cannot_be_given_is_refused_before_a_worker_dies(
    form: Any, step_taken: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psgc.Elastic, "_followed", True)
    model, optimizer, scheduler = made(0)
    optimizer.register_state_dict_post_hook(form)
    steps = psgc.Elastic(model=model, optimizer=optimizer).steps(3)
    if step_taken:
        step(model, optimizer, scheduler, next(steps))
    with pytest.raises(UsageError, match=message):
        next(steps)


def test_what_raises_when_the_state_is_read_ends_the_job_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoChannel:
        def __init__(self, *_: Any) -> None: ...
        def close(self) -> None: ...
        def give(self, _: Any) -> None: ...

    def broken(_: Any) -> Any:
        raise RuntimeError("factors are not there")

    said: list[str] = []
    monkeypatch.setattr(elastic_module, "Channel", NoChannel)
    monkeypatch.setattr(psgc.Elastic, "_followed", True)
    monkeypatch.setattr(psgc.current_session(), "fail", said.append)
    model, optimizer, _ = made(0)
    elastic = psgc.Elastic(model=model, optimizer=optimizer)
    next(iter(elastic.steps(1)))
    optimizer.register_state_dict_pre_hook(broken)
    elastic._given[1] = 1
    elastic._give(Handover(1, 1, takes=False))
    assert said == ["rank 0 could not give the training's state to rank 1, whose process is new: RuntimeError: factors are not there"]


@pytest.mark.parametrize("first", ["the script's hook", "Elastic"])
def test_rates_are_scaled_after_the_scripts_hooks_and_put_back_also_where_the_update_raises(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic_module.Attendance, "share", 0.5)
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer: Any = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=9.0), model.named_parameters())

    def sets(*_: Any) -> None:
        optimizer.param_groups[0]["lr"] = 0.5

    def raises(*_: Any) -> None:
        raise RuntimeError("no memory")

    if first != "Elastic":
        optimizer.register_step_pre_hook(sets)
    elastic = psgc.Elastic(model=model, optimizer=optimizer, scale_lr=True)
    if first == "Elastic":
        optimizer.register_step_pre_hook(sets)
    for number in elastic.steps(4):
        before = model.weight.item()
        optimizer.zero_grad()
        model(torch.ones(1)).sum().backward()
        if number == 1:
            hook = optimizer.register_step_pre_hook(raises)
            with pytest.raises(RuntimeError, match="no memory"):
                optimizer.step()
            hook.remove()
        else:
            optimizer.step()
        assert before - model.weight.item() == pytest.approx(0.0 if number == 1 else 0.25)
        assert optimizer.param_groups[0]["lr"] == 0.5


def test_who_takes_part_is_told_once_before_the_steps_and_not_asked_for_after() -> None:
    told: list[psgc.Members] = []
    psgc.on_membership(told.append)
    with pytest.raises(UsageError, match=r"on_membership\(\): int cannot be called; give a function that takes psgc.torch.Members"):
        psgc.on_membership(3)  # type: ignore[arg-type]
    model, optimizer, scheduler = made(0)
    for number in psgc.Elastic(model=model, optimizer=optimizer).steps(2):
        step(model, optimizer, scheduler, number)
    assert [(members.step, members.ranks, members.shard, members.size) for members in told] == [(0, (0,), (0, 1), 1)]
    with pytest.raises(UsageError, match=r"on_membership\(\) after the first step of Elastic"):
        psgc.on_membership(told.append)


def test_a_rank_that_the_others_do_not_know_yet_shares_anothers_data() -> None:
    assert psgc.Members(3, (0, 2, 3), 3, 4).shard == (2, 3)
    assert psgc.Members(3, (0, 2, 3), 1, 4).shard == (1, 3)
