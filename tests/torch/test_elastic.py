"""Elastic in one process: what it refuses, and that a state which was read gives another process the same training."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

import psgc.torch as psgc
from psgc.errors import UsageError
from psgc.torch.elastic.state import TrainingState
from psgc.torch.gradients.last_step import LastStep, StepFlags


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


def test_a_state_that_is_not_plain_is_refused_before_the_first_step() -> None:
    class Sampler:
        def state_dict(self) -> dict[str, Any]:
            return {"at": object()}

        def load_state_dict(self, state: Any) -> None: ...

    model, optimizer, _ = made(0)
    with pytest.raises(UsageError, match=r"Elastic: state\['extra'\]\['sampler'\]\['at'\]"):
        next(iter(psgc.Elastic(model=model, optimizer=optimizer, extra={"sampler": Sampler()}).steps(1)))


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
