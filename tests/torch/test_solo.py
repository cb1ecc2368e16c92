"""The session of a process alone keeps a real job's contract."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import psgc.torch as psgc
from psgc.config import Config
from psgc.errors import CodecError, JobFailed, NonFiniteError, UsageError
from psgc.layout import Declaration, TensorSpec
from psgc.worker.connect import open_session
from psgc.worker.solo import SoloSession


class Buffer:
    def __init__(self, array: Any) -> None:
        self.array, self.stored = array, []

    def load(self) -> Any:
        return self.array

    waits = False

    def store(self, skipped: bool) -> None:
        self.stored.append(skipped)


def declaration(name: str = "x", numel: int = 3, **options: Any) -> Declaration:
    return Declaration(
        **{"name": name, "kind": "adhoc", "tensors": (TensorSpec(name, (numel,), "float32"),), "codec": "none", "mean": True, **options}
    )


def test_without_a_scheduler_a_worker_is_alone() -> None:
    assert isinstance(open_session(Config()), SoloSession)


@pytest.mark.parametrize("skip", [True, False])
def test_a_step_is_over_when_submit_returns(skip: bool) -> None:
    session, buffer = SoloSession(Config()), Buffer(np.ones(3, np.float32))
    ticket = session.submit(session.declare(declaration()), 0, buffer, skip=skip)
    session.wait([ticket])
    assert ticket.done and buffer.stored == [skip] and buffer.array.tolist() == [1, 1, 1]


def test_a_name_declared_again_is_the_same_layout_or_an_error() -> None:
    session = SoloSession(Config())
    assert session.declare(declaration()) is session.declare(declaration())
    for other in (declaration(numel=4), replace(declaration(), codec="int8"), replace(declaration(), mean=False)):
        with pytest.raises(UsageError, match="'x' was declared before"):
            session.declare(other)


def test_codecs_are_checked_though_none_runs() -> None:
    with pytest.raises(CodecError):
        SoloSession(Config()).declare(declaration(codec="zip"))


def test_tensors_unused_at_declaration_stand_alone() -> None:
    tensors = tuple(TensorSpec(str(i), (3,), "float32") for i in range(3))
    layout = SoloSession(Config()).declare(declaration(kind="plan", tensors=tensors, order=(0, 2), used=(0, 2)))
    assert sorted(bucket.tensors for bucket in layout.buckets) == [(0, 2), (1,)]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nonfinite_raise_names_the_tensor(bad: float) -> None:
    session = SoloSession(Config(nonfinite="raise"))
    tensors = tuple(TensorSpec(name, (2,), "float32") for name in ("first", "second"))
    layout = session.declare(declaration(kind="plan", tensors=tensors, order=(0, 1), used=(0, 1)))
    session.submit(layout, 0, Buffer(np.ones(4, np.float32)))
    with pytest.raises(NonFiniteError, match="'second' on rank 0"):
        session.submit(layout, 0, Buffer(np.array([1, 1, bad, 1], np.float32)))


def test_after_close_or_failure_the_next_call_says_so() -> None:
    session = SoloSession(Config())
    session.close()
    session.close()
    with pytest.raises(UsageError, match="shut down"):
        session.barrier()
    session = SoloSession(Config())
    session.fail("rank 0 ended with lost")
    with pytest.raises(JobFailed, match="lost"):
        session.declare(declaration())


@pytest.mark.parametrize("skipped_first", [False, True])
def test_what_two_ranks_and_their_servers_left_over_reaches_a_job_of_one_once(alone: None, skipped_first: bool) -> None:
    """The mean of the workers' residuals, and the servers' as it is; a step that is put back leaves it as it was."""
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer: Any = psgc.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)], compression="topk")
    states = [
        {
            "format": 2, "rank": rank, "size": 2, "loss_scale": 1.0, "rates": [],
            "memories": {"gradients": {"w": {"residual": torch.full((3,), 2.0 + 4 * rank)}}},
            "servers": {"gradients": {"w": torch.full((3,), 0.5)} if rank == 0 else {}}, "layouts": {},
        }
        for rank in range(2)
    ]  # fmt: skip
    optimizer.load_residual_state_dict(states)
    if skipped_first:
        (0 * weight).sum().backward()
        optimizer.put_back()
    for _ in range(2):
        optimizer.zero_grad()
        (0 * weight).sum().backward()
        optimizer.step()
    assert weight.tolist() == [-4.5] * 3


def test_a_job_of_one_goes_on_bit_for_bit(alone: None) -> None:
    def train(weight: torch.nn.Parameter, optimizer: Any, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            (weight * torch.randn(50, generator=torch.Generator().manual_seed(step))).square().sum().backward()
            optimizer.step()

    def made() -> tuple[torch.nn.Parameter, Any]:
        weight = torch.nn.Parameter(torch.ones(50))
        return weight, psgc.DistributedOptimizer(torch.optim.SGD([weight], lr=0.01, momentum=0.9), [("w", weight)], compression="onebit")

    weight, optimizer = made()
    train(weight, optimizer, range(12))
    kept = weight.detach().clone(), copy.deepcopy(optimizer.state_dict()), optimizer.residual_state_dict()
    train(weight, optimizer, range(12, 24))
    again, resumed = made()
    with torch.no_grad():
        again.copy_(kept[0])
    resumed.load_state_dict(kept[1])
    resumed.load_residual_state_dict(kept[2])
    assert resumed.residual_state_dict()["layouts"]["gradients"][0]["declaration"]["past_steps"] == 12
    train(again, resumed, range(12, 24))
    assert torch.equal(again, weight)
    assert resumed.residual_state_dict()["layouts"]["gradients"][0]["declaration"]["past_steps"] == 24


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_in_double_precision_takes_the_steps_that_it_takes_without_psgc(line_search: str | None) -> None:
    """It decides by the loss when to stop: a loss rounded to single precision would end its line search elsewhere."""

    def ends(distributed: bool) -> tuple[torch.Tensor, int]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
        x, y = torch.randn(32, 6, dtype=torch.float64), torch.randn(32, 1, dtype=torch.float64)
        optimizer: torch.optim.Optimizer = torch.optim.LBFGS(
            model.parameters(), max_iter=20, tolerance_grad=1e-12, line_search_fn=line_search
        )
        if distributed:
            optimizer = psgc.DistributedOptimizer(optimizer, model.named_parameters())
        evaluations = 0

        def closure() -> torch.Tensor:
            nonlocal evaluations
            evaluations += 1
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        return torch.cat([p.detach().flatten() for p in model.parameters()]), evaluations

    psgc.init()
    try:
        (alone, evaluated), (wrapped, counted) = ends(False), ends(True)
    finally:
        psgc.shutdown()
    assert torch.equal(alone, wrapped) and evaluated == counted
