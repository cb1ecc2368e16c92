"""Complex tensors and parameters: they travel as their real and imaginary parts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import psgc.torch as psgc
from psgc.errors import UsageError


class Phases(nn.Module):
    """A complex parameter that is always used, a complex one that rank 1 leaves out, and a real one."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j, 0.5j]))
        self.rare = nn.Parameter(torch.tensor([[2j, 1 + 0j]], dtype=torch.complex128))
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor, rare: bool) -> Any:
        out = (self.phase * x).abs().square().sum() + (self.bias * x.real).sum()
        return out + (self.rare.abs().square().sum() if rare else 0)


def inputs(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, dtype=torch.complex64, generator=torch.Generator().manual_seed(10 * step + rank))


def mean_of(step: int, model: Phases) -> dict[str, torch.Tensor]:
    """The gradients' means over two ranks, by one process."""
    model.zero_grad()
    for rank in range(2):
        (model(inputs(rank, step), rare=rank == 0) / 2).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"overlapped_step": True}])
def test_gradients_of_complex_parameters_are_their_means(ranks: Any, options: dict[str, bool]) -> None:
    def train(rank: int) -> list[torch.Tensor]:
        model = Phases()
        optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **options)
        for step in range(3):
            optimizer.zero_grad()
            model(inputs(rank, step), rare=rank == 0).backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    alone = Phases()
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(3):
        mean_of(step, alone)
        plain.step()
    for found in ranks.run(2, train):
        for own, wanted in zip(found, alone.parameters(), strict=True):
            assert own.dtype == wanted.dtype
            assert torch.allclose(own, wanted.detach(), rtol=1e-6, atol=1e-6)


def test_complex_tensors_are_summed_in_place_and_as_copies_and_broadcast(ranks: Any) -> None:
    def work(rank: int) -> None:
        tensor = torch.tensor([[1 + 2j, 3j]]) * (rank + 1)
        given = tensor.clone()
        assert torch.equal(psgc.push_pull(tensor, name="mean"), torch.tensor([[1.5 + 3j, 4.5j]]))
        assert torch.equal(tensor, given)
        psgc.push_pull_inplace(tensor, average=False, name="sum")
        assert torch.equal(tensor, torch.tensor([[3 + 6j, 9j]]))
        model = Phases()
        with torch.no_grad():
            model.phase.mul_(rank + 1)
        psgc.broadcast_parameters(model.state_dict(), root_rank=1)
        assert torch.equal(model.phase.detach(), Phases().phase.detach() * 2)

    ranks.run(2, work)


def test_a_codec_compresses_both_parts(ranks: Any) -> None:
    def work(rank: int) -> torch.Tensor:
        model = Phases()
        optimizer = psgc.DistributedOptimizer(
            torch.optim.Adam(model.parameters(), lr=0.1), model.named_parameters(), {"phase": "bf16", "*": "none"}
        )
        model(inputs(rank, 0), rare=True).backward()
        optimizer.step()
        return model.phase.detach()

    first, second = ranks.run(2, work)
    assert torch.equal(first, second) and not torch.equal(first, Phases().phase.detach())


def test_a_conjugate_that_is_not_computed_yet_is_refused(ranks: Any) -> None:
    def work(_: int) -> None:
        with pytest.raises(UsageError, match=r"push_pull of 'x': it is a conjugate that is not computed yet.*resolve_conj"):
            psgc.push_pull_inplace(torch.ones(2, dtype=torch.complex64).conj(), name="x")

    ranks.run(1, work)


def test_servers_hold_real_tensors_only(ranks: Any) -> None:
    def work(_: int) -> None:
        with pytest.raises(UsageError, match=r"tensor 'w' is complex; give torch.view_as_real\(\) of it"):
            psgc.HeldTensors({"w": torch.ones(2, dtype=torch.complex64)}, "held")

    ranks.run(1, work)


def test_a_negation_that_is_not_computed_yet_is_refused_in_place_and_read_as_a_copy(ranks: Any) -> None:
    def work(_: int) -> None:
        lazy = torch.tensor([1 + 2j]).conj().imag
        assert lazy.is_neg()
        with pytest.raises(UsageError, match=r"push_pull of 'x': it is a negation that is not computed yet.*resolve_neg"):
            psgc.push_pull_inplace(lazy, name="x")
        assert psgc.push_pull(lazy, name="y").tolist() == [-2.0]
        assert psgc.push_pull_group([lazy, torch.tensor([1 + 2j]).conj()], name="z")[1].tolist() == [1 - 2j]

    ranks.run(1, work)


class Lazy(torch.autograd.Function):
    """Its gradient is a conjugate, or a negation, that is not computed."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (grad,) = grads
        return grad.clone().conj() if grad.is_complex() else torch._neg_view(grad.clone())


class Conjugates(nn.Module):
    """Parameters whose gradients autograd leaves as conjugates, and one as a negation."""

    def __init__(self) -> None:
        super().__init__()
        self.mixing = nn.Parameter(torch.tensor([[1 + 2j, 3 - 1j], [0.5j, 2 + 1j]]))
        self.phase = nn.Parameter(torch.tensor([[1j, 2 - 1j]]))
        self.gain = nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, x: torch.Tensor) -> Any:
        return ((self.mixing.mH @ x) * self.phase.conj() * Lazy.apply(self.gain)).abs().sum()


def lazy_input(rank: int, step: int) -> torch.Tensor:
    return torch.randn(2, 2, dtype=torch.complex64, generator=torch.Generator().manual_seed(10 * step + rank))


def distributed(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> torch.optim.Optimizer:
    return psgc.DistributedOptimizer(optimizer, model.named_parameters(), **options)


WAYS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], torch.optim.Optimizer]] = {
    "late or not": distributed,
    "views": lambda model, optimizer: distributed(model, optimizer, gradient_as_bucket_view=True),
    "overlapped": lambda model, optimizer: distributed(model, optimizer, overlapped_step=True),
    "crossing": psgc.CrossBarrier,
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("fuse_bytes", [0, 4 << 20])
@pytest.mark.parametrize("way", [*WAYS, "wrapped"])
def test_gradients_that_are_conjugates_not_computed_yet_are_averaged(ranks: Any, way: str, fuse_bytes: int, late: bool) -> None:
    alone = Conjugates()
    alone(lazy_input(0, 0)).backward()
    assert [alone.mixing.grad.is_conj(), alone.phase.grad.is_conj(), alone.gain.grad.is_neg()] == [True, True, True], (
        "else nothing is tested"
    )

    def train(rank: int) -> list[torch.Tensor]:
        model: nn.Module = Conjugates()
        plain: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if way == "wrapped":
            whole, optimizer = psgc.DistributedDataParallel(model), plain
        else:
            whole, optimizer = model, WAYS[way](model, plain)
        for step in range(3):
            optimizer.zero_grad()
            whole(lazy_input(rank, step)).backward()
            optimizer.step()
        if way == "crossing":
            optimizer.synchronize()
        return [parameter.detach().clone() for parameter in model.parameters()]

    alone.zero_grad()
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(3):
        plain.zero_grad()
        for rank in range(2):
            (alone(lazy_input(rank, step)) / 2).backward()
        plain.step()
    for found in ranks.run(2, train, fuse_bytes=fuse_bytes, late_synchronization=late):
        for own, wanted in zip(found, alone.parameters(), strict=True):
            torch.testing.assert_close(own, wanted.detach())


def test_a_conjugate_that_the_script_puts_into_a_gradient_is_averaged(ranks: Any) -> None:
    def work(rank: int) -> None:
        model = Conjugates()
        optimizer = distributed(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model.phase.grad = (torch.tensor([[1j, 2 + 4j]]) * (rank + 1)).conj()
        optimizer.step()
        assert model.phase.grad.tolist() == [[-1.5j, 3 - 6j]]

    ranks.run(2, work)


def test_the_gradient_of_a_push_pull_may_be_a_conjugate_that_is_not_computed_yet(ranks: Any) -> None:
    def work(rank: int) -> None:
        given, factor = torch.nn.Parameter(torch.tensor([1 + 2j, 3 - 1j])), torch.tensor([2j, 1 + 1j]) * (rank + 1)
        (psgc.push_pull(given, name="x").conj() * factor).abs().sum().backward()
        alone = torch.nn.Parameter(given.detach().clone())
        (alone.conj() * factor * 1.5 / (rank + 1)).abs().sum().backward()
        torch.testing.assert_close(given.grad, alone.grad)

    ranks.run(2, work)


def test_a_conjugate_is_pushed_and_pulled_as_a_copy_and_differentiated(ranks: Any) -> None:
    def work(rank: int) -> None:
        given = torch.nn.Parameter(torch.tensor([1 + 2j]) * (rank + 1))
        total = psgc.push_pull(given.conj(), average=False, name="x")
        assert total.tolist() == [3 - 6j]
        total.imag.sum().backward()
        assert given.grad.resolve_conj().tolist() == [-2j]

    ranks.run(2, work)


@pytest.mark.parametrize("decoupled", [True, False])
def test_whole_steps_of_onebit_adam_are_torchs_for_both_parts(ranks: Any, decoupled: bool) -> None:
    options: dict[str, Any] = {"lr": 0.05, "betas": (0.8, 0.9), "weight_decay": 0.1}

    def train(rank: int) -> list[torch.Tensor]:
        model = Conjugates()
        optimizer = psgc.OneBitAdam(model.named_parameters(), warmup_steps=10, decoupled_weight_decay=decoupled, **options)
        for step in range(4):
            optimizer.zero_grad()
            model(lazy_input(rank, step)).backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    alone = Conjugates()
    plain = (torch.optim.AdamW if decoupled else torch.optim.Adam)(alone.parameters(), **options)
    for step in range(4):
        plain.zero_grad()
        for rank in range(2):
            (alone(lazy_input(rank, step)) / 2).backward()
        for parameter in alone.parameters():
            parameter.grad = parameter.grad.resolve_conj().resolve_neg()
        plain.step()
    for found in ranks.run(2, train):
        for own, wanted in zip(found, alone.parameters(), strict=True):
            torch.testing.assert_close(own, wanted.detach(), rtol=1e-4, atol=1e-5)


class Apart(nn.Module):
    """The same numbers as complex parameters, or as their parts."""

    def __init__(self, parts: bool) -> None:
        super().__init__()
        given = torch.tensor([[1 + 2j, 3 - 1j], [0.5j, 2 + 1j]])
        self.parts = parts
        self.weight = nn.Parameter(torch.view_as_real(given).clone() if parts else given)

    def forward(self, x: torch.Tensor) -> Any:
        weight = torch.view_as_complex(self.weight) if self.parts else self.weight
        return (weight.mH @ x).abs().square().sum()


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("kind", ["onebit", "zero_one"])
def test_optimizers_that_send_momenta_do_with_a_complex_parameter_what_they_do_with_its_parts(
    ranks: Any, kind: str, decoupled: bool
) -> None:
    options: dict[str, Any] = {"lr": 0.05, "betas": (0.8, 0.9), "weight_decay": 0.1, "warmup_steps": 3, "decoupled_weight_decay": decoupled}

    def made(model: nn.Module) -> Any:
        if kind == "onebit":
            return psgc.OneBitAdam(model.named_parameters(), **options)
        return psgc.ZeroOneAdam(model.named_parameters(), local_growth=2, max_local_steps=4, variance_updates=2, **options)

    def steps(rank: int, model: nn.Module, optimizer: Any, which: range) -> torch.Tensor:
        for step in which:
            optimizer.zero_grad()
            model(lazy_input(rank, step)).backward()
            optimizer.step()
        return model.weight.detach().clone()

    def train(rank: int) -> None:
        model, parts = Apart(False), Apart(True)
        optimizer, other = made(model), made(parts)
        own, wanted = steps(rank, model, optimizer, range(9)), steps(rank, parts, other, range(9))
        assert torch.equal(torch.view_as_real(own), wanted)
        assert not torch.allclose(own, Apart(False).weight, atol=0.05)
        again = Apart(False)  # local steps of ZeroOneAdam are in its state
        again.load_state_dict(model.state_dict())
        third = made(again)
        third.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        third.load_residual_state_dict(copy.deepcopy(optimizer.residual_state_dict()))
        assert torch.equal(steps(rank, again, third, range(9, 14)), steps(rank, model, optimizer, range(9, 14)))

    ranks.run(2, train)
