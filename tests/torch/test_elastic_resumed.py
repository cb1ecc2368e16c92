"""Elastic's steps in a job that goes on from an earlier one's checkpoint, and with an optimizer whose steps overlap."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import pytest
import torch

import psgc.torch as psgc
from psgc.errors import UsageError


@pytest.fixture(autouse=True)
def joined() -> Any:
    psgc.init()
    yield
    psgc.shutdown()


def made(**options: Any) -> psgc.Elastic:
    model = torch.nn.Linear(3, 1)
    optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **options)
    return psgc.Elastic(model=model, optimizer=optimizer, seed=3)


def test_a_job_that_goes_on_at_a_step_draws_what_one_job_would_have_drawn_from_there_on() -> None:
    def drawn(*steps: int) -> dict[int, Any]:
        return {step: (random.random(), float(np.random.rand()), torch.rand(2).tolist()) for step in made().steps(*steps)}

    whole, resumed = drawn(6), drawn(6, 4)
    assert list(whole) == [0, 1, 2, 3, 4, 5] and list(resumed) == [4, 5]
    assert resumed == {step: whole[step] for step in (4, 5)}


def test_a_job_whose_steps_have_all_been_taken_takes_none() -> None:
    assert list(made().steps(6, first=6)) == list(made().steps(6, first=9)) == []


def test_a_first_step_before_0_is_refused() -> None:
    with pytest.raises(UsageError, match=r"Elastic.steps\(6, first=-1\): expected the first step's number, 0 or more"):
        list(made().steps(6, first=-1))


@pytest.mark.parametrize("overlapped", [True, False])
def test_that_a_step_does_not_overlap_is_said(overlapped: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        made(overlapped_step=overlapped)
    assert caplog.text.count("Elastic: overlapped_step=True has no effect") == overlapped
