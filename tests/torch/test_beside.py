"""Parameters that are swapped and swapped back around a handover are noticed; those that are clipped once are not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

import psgc.torch as psgc
from psgc.errors import UsageError
from psgc.torch.elastic.beside import SAMPLED, Beside

pytestmark = pytest.mark.usefixtures("alone")


def trained(layers: int) -> tuple[list[torch.nn.Parameter], Any]:
    torch.manual_seed(layers)
    model = torch.nn.Sequential(*(torch.nn.Linear(5, 5) for _ in range(layers)))
    return list(model.parameters()), psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())


def in_place(parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(value)


def by_data(parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
    parameter.data.copy_(value)


def replaced(parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
    parameter.data = value.clone()


def refused(yes: bool) -> AbstractContextManager[Any]:
    said = r"parameter '0\.weight' was changed beside optimizer\.step\(\), and again after rank 3's next process was given it"
    return pytest.raises(UsageError, match=said) if yes else nullcontext()


@pytest.mark.parametrize("layers", [1, SAMPLED, 3 * SAMPLED])
@pytest.mark.parametrize("write", [in_place, by_data, replaced])
def test_weights_that_are_swapped_while_they_are_given_and_swapped_back_are_noticed(
    write: Callable[[torch.nn.Parameter, torch.Tensor], None], layers: int
) -> None:
    parameters, optimizer = trained(layers)
    beside = Beside(optimizer)
    beside.given(3)  # before the first step
    beside.note()
    kept = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        write(parameter, parameter.detach() * 0.9)
    beside.given(3)
    for parameter, value in zip(parameters, kept, strict=True):
        write(parameter, value)
    with refused(True):
        beside.check()
    beside.check()  # it was said


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("nan", [True, False])
def test_what_is_done_once_before_they_are_given_or_after_is_not(before: bool, nan: bool) -> None:
    parameters, optimizer = trained(2)
    beside = Beside(optimizer)
    if nan:
        parameters[0].data.fill_(float("nan"))
    beside.note()

    def clip() -> None:
        for parameter in parameters:
            parameter.data.clamp_(-0.01, 0.01)

    if before:
        clip()
    beside.given(3)
    if not before:
        clip()
    beside.check()
    beside.note()
    clip()
    beside.given(3)
    clip()  # comes to the same
    beside.check()


def test_what_no_update_trains_may_change_as_it_likes() -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).requires_grad_(False)])
    optimizer: Any = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    beside = Beside(optimizer)
    beside.note()
    for given in range(2):
        for parameter in model[1].parameters():
            parameter.data.add_(1)
        if not given:
            beside.given(3)
    beside.check()
