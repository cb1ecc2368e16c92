"""suspend and resume: what an optimizer takes along into a job of another size, and when it cannot."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

import psgc.torch as psgc
from psgc.errors import UsageError
from psgc.torch.session import api
from psgc.torch.state.residuals import Kept, among
from psgc.torch.tensors import push_pull
from psgc.worker.residuals.residual import TensorMemory
from tests.torch.small_models import batch, linear, sgd, weights


def step(rank: int, number: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(batch(rank, number)).square().mean().backward()
    optimizer.step()


def expected(sizes: list[int]) -> list[float]:
    """One process with the mean of as many workers' gradients as there are in each step."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number, size in enumerate(sizes):
        optimizer.zero_grad()
        for rank in range(size):
            (model(batch(rank, number)).square().mean() / size).backward()
        optimizer.step()
    return weights(model)


def crossing(model: torch.nn.Module) -> Any:
    return psgc.CrossBarrier(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


@pytest.mark.parametrize("wrap", [lambda model: sgd(model, momentum=0.9), crossing])
def test_optimizers_go_on_among_two_then_three_then_one(ranks: Any, wrap: Any) -> None:
    made: dict[int, tuple[torch.nn.Module, Any]] = {}
    found: dict[int, list[float]] = {}
    for phase, size in enumerate((2, 3, 1)):

        def work(rank: int, phase: int = phase, size: int = size) -> None:
            session: Any = api.current_session()
            model, optimizer = made.setdefault(rank, (linear(), None))
            member = None
            if optimizer is None:
                if phase:
                    model.load_state_dict(made[0][0].state_dict())
                optimizer = wrap(model)
                if phase:
                    optimizer.load_state_dict(copy.deepcopy(made[0][1].state_dict()))
                made[rank] = model, optimizer
                member = next(m for m in list(api._members) if m.session is session)
                optimizer.member = member
            else:
                optimizer.member.rejoin(session)
            session.barrier()
            step(rank, phase, model, optimizer)
            optimizer.member.check_leaving()
            optimizer.member.leave()
            found[rank] = weights(model)

        ranks.run(size, work)
        assert len({tuple(found[rank]) for rank in range(size)}) == 1
    assert found[0] == pytest.approx(expected([2, 3, 1]), abs=1e-6)


def test_what_codecs_keep_has_the_same_weight_in_a_mean_of_another_size() -> None:
    memories = {"w": TensorMemory(np.array([1.0, 0.0], np.float32)), "v": TensorMemory(), "z": TensorMemory(np.zeros(1, np.float32))}
    found = among(Kept(memories, {"w": np.array([0.0, 5.0], np.float32)}), 2, 3)
    assert {name: memory.residual.tolist() for name, memory in found.tensors.items() if memory.residual is not None} == {
        "w": [1.5, 15.0]  # e 3 / 2, f 3: divided by 3 workers e / 2 and f
    }
    assert not found.servers


TAKEN_ALONG = Kept({"weight": TensorMemory(np.full(6, 2.0, np.float32))}, {"bias": np.ones(2, np.float32)})


def brought(optimizer: Any, workers: int) -> Any:
    """The optimizer, as if it had taken this along from a session of so many workers."""
    optimizer._psgc_gradients.exchange._left = TAKEN_ALONG, workers
    optimizer._psgc_gradients.rejoin(api.current_session())
    return optimizer


def zero_gradients(model: torch.nn.Module, optimizer: Any) -> list[float]:
    optimizer.zero_grad()
    (model(torch.zeros(1, 3)).sum() * 0).backward()
    assert model.weight.grad is not None and model.bias.grad is not None
    first = [model.weight.grad[0, 0].item(), model.bias.grad[0].item()]
    optimizer.step()
    return first


@pytest.mark.usefixtures("alone")
def test_residuals_are_sent_with_the_first_gradients_after_it() -> None:
    model = linear()
    optimizer = brought(sgd(model), 2)
    assert zero_gradients(model, optimizer) == [1.0, 1.0], "a half of what one of two kept, and a share of the servers'"
    assert zero_gradients(model, optimizer) == [0.0, 0.0]


def test_a_rank_that_goes_on_does_so_from_what_it_kept_and_one_that_is_new_from_nothing(ranks: Any) -> None:
    def work(rank: int) -> dict[str, list[float]]:
        model = linear()
        zero_gradients(model, brought(sgd(model), 2) if rank else sgd(model))
        session: Any = api.current_session()
        return {name: memory.residual.tolist() for name, memory in session.memories.items()}

    assert ranks.run(3, work) == [{}, *[{"weight": [3.0] * 6, "bias": [3.0] * 2}] * 2]


def test_a_process_alone_suspends_and_resumes_and_calls_in_between_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DMLC_PS_ROOT_URI", "WORLD_SIZE", "PSGC_CODEC", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match=r"resume\(\) goes on after suspend\(\)"):
        psgc.resume(1, 0)
    psgc.init()
    model = linear()
    optimizer = sgd(model)
    model(batch(0, 0)).sum().backward()
    optimizer.step()
    model(batch(0, 0)).sum().backward()
    psgc.declare("mine", "int8")
    psgc.suspend()
    assert (psgc.rank(), psgc.size(), psgc.local_rank(), psgc.local_size()) == (0, 1, 0, 1), "as before"
    for call, remedy in (
        (psgc.barrier, r"is suspended.*call psgc\.torch\.resume"),
        (psgc.init, r"init\(\) after suspend\(\): call resume"),
    ):
        with pytest.raises(UsageError, match=remedy):
            call()
    with monkeypatch.context() as second:
        second.setenv("BYTEPS_LOCAL_SIZE", "2")
        second.setenv("BYTEPS_LOCAL_RANK", "1")
        with pytest.raises(UsageError, match="global_rank=2 is local rank 0 of a machine with 2, but this is local rank 1"):
            psgc.resume(1, 0, 2)
    psgc.resume(1, 0, 0)
    assert psgc.size() == 1
    step(0, 1, model, optimizer)
    names = [each._psgc_gradients.exchange.name for each in (optimizer, sgd(linear()))]
    assert names == ["optimizer0", "optimizer1"], "another optimizer has another name than those that went on"
    assert push_pull._names_of(api.current_session()).codecs == {"mine": "int8"}
    psgc.shutdown()


@pytest.mark.usefixtures("alone")
def test_what_cannot_go_on_says_so_before_anything_is_left() -> None:
    model = linear()
    optimizer = crossing(model)
    model(batch(0, 0)).sum().backward()
    with pytest.raises(UsageError, match=r"suspend\(\) between backward\(\) and step\(\)"):
        psgc.suspend()
    optimizer.step()
    assert psgc.is_initialized()
    adam: Any = psgc.OneBitAdam(linear().named_parameters(), lr=0.1, warmup_steps=1)
    assert adam.param_groups
    momenta = psgc.DeMo(linear().named_parameters())
    with pytest.raises(UsageError, match=r"suspend\(\): DeMo cannot go on in a job of another size; save its state, and start a new job"):
        psgc.suspend()
    assert psgc.is_initialized() and momenta.state_dict()["momentum"]
