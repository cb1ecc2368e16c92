"""SyncBatchNorm: all ranks' batches are normalised, and differentiated, as one process would do with their concatenation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import psgc.torch as psgc
from tests.torch.small_models import seeded


def net() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3), nn.Tanh(), nn.Flatten(), nn.Linear(9, 2), nn.BatchNorm1d(2, momentum=None))


def part(rank: int, step: int, rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A batch whose mean is large beside its deviation."""
    return torch.randn(rows, 2, 4, dtype=dtype, generator=torch.Generator().manual_seed(10 * step + rank)) + 50


@pytest.mark.parametrize("rows", [(4, 4), (5, 2), (6, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_statistics_and_gradients_are_those_of_one_batch_of_all(ranks: Any, rows: tuple[int, int], dtype: torch.dtype) -> None:
    def train(rank: int) -> Any:
        model = psgc.SyncBatchNorm.convert_sync_batchnorm(seeded(net)).to(dtype)
        outputs = []
        for step in range(2):
            outputs.append(model(part(rank, step, rows[rank], dtype)))
            outputs[-1].square().sum().backward()
        return [output.detach() for output in outputs], [p.grad for p in model.parameters()], list(model.buffers())

    whole = seeded(net).to(dtype)
    wanted = []
    for step in range(2):
        wanted.append(whole(torch.cat([part(rank, step, rows[rank], dtype) for rank in range(2)])))
        wanted[-1].square().sum().backward()
    (outputs, grads, buffers), (others, more, same) = ranks.run(2, train)
    close: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-11}
    for own, other, of_all in zip(outputs, others, wanted, strict=True):
        torch.testing.assert_close(torch.cat([own, other]), of_all.detach(), **close)
    for one, two, parameter in zip(grads, more, whole.parameters(), strict=True):
        torch.testing.assert_close(one + two, parameter.grad, **close)
    for own, other, of_all in zip(buffers, same, whole.buffers(), strict=True):
        assert torch.equal(own, other), "alike on all ranks"
        torch.testing.assert_close(own, of_all, **close)


def test_inputs_in_half_precision_are_normalised_in_single(ranks: Any) -> None:
    """A mean that is large beside the deviation is gone if scale and shift are rounded before they meet."""

    def work(rank: int) -> torch.Tensor:
        layer = psgc.SyncBatchNorm(2)
        return layer(part(rank, 0, 64).bfloat16()).detach()

    given = torch.cat([part(rank, 0, 64).bfloat16() for rank in range(2)])
    wanted = nn.BatchNorm1d(2)(given.float())
    found = torch.cat(ranks.run(2, work))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), wanted.detach(), rtol=2**-7, atol=1e-2)


def test_a_converted_model_keeps_its_parameters_statistics_and_names_and_evaluates_as_before(ranks: Any) -> None:
    def work(_: int) -> None:
        model = seeded(net)
        model(part(0, 0, 8))
        model.eval()
        converted = psgc.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))
        assert converted.state_dict().keys() == model.state_dict().keys()
        assert sum(isinstance(each, psgc.SyncBatchNorm) for each in converted.modules()) == 2
        assert torch.equal(converted(part(1, 1, 3)), model(part(1, 1, 3)))

    ranks.run(2, work)


def test_alone_it_is_torchs(ranks: Any) -> None:
    def work(_: int) -> None:
        plain, mine = seeded(net), psgc.SyncBatchNorm.convert_sync_batchnorm(seeded(net))
        assert torch.equal(plain(part(0, 0, 8)), mine(part(0, 0, 8)))
        assert all(torch.equal(one, two) for one, two in zip(plain.buffers(), mine.buffers(), strict=True))

    ranks.run(1, work)


def test_inputs_without_channels_are_refused_as_torch_does(ranks: Any) -> None:
    def work(_: int) -> None:
        with pytest.raises(ValueError, match="expected at least 2D input"):
            psgc.SyncBatchNorm(2)(torch.zeros(2))

    ranks.run(1, work)


def test_in_evaluation_no_other_rank_is_waited_for_also_without_running_statistics(ranks: Any) -> None:
    """As torch's: one rank alone may evaluate, and a batch's own statistics are its own."""

    def work(rank: int) -> None:
        layer = psgc.SyncBatchNorm(2, track_running_stats=False).eval()
        given = part(rank, 0, 3 + rank)
        torch.testing.assert_close(layer(given), nn.BatchNorm1d(2, track_running_stats=False)(given))

    ranks.run(2, work)
    assert ranks.steps == []


@pytest.mark.parametrize(
    "without", [["running_mean", "running_var"], ["running_mean", "running_var", "num_batches_tracked"], ["num_batches_tracked"]]
)
def test_statistics_that_were_set_to_none_are_not_followed(ranks: Any, without: list[str]) -> None:
    def layer_of(kind: Any) -> Any:
        layer = kind(2)
        for name in without:
            setattr(layer, name, None)
        return layer

    def work(rank: int) -> tuple[torch.Tensor, Any]:
        layer = psgc.SyncBatchNorm.convert_sync_batchnorm(layer_of(nn.BatchNorm1d))
        return layer(part(rank, 0, 3)).detach(), dict(layer.named_buffers())

    whole = layer_of(nn.BatchNorm1d)
    wanted = whole(torch.cat([part(rank, 0, 3) for rank in range(2)])).detach()
    results = ranks.run(2, work)
    torch.testing.assert_close(torch.cat([out for out, _ in results]), wanted, rtol=1e-3, atol=1e-4)
    for _, buffers in results:
        torch.testing.assert_close(buffers, dict(whole.named_buffers()), rtol=1e-4, atol=1e-4)
