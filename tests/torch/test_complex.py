"""Complex tensors and parameters: they travel as their real and imaginary parts."""

from __future__ import annotations

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
