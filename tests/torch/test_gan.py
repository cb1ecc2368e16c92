"""Two models and two optimizers, of which one's backward goes through the other's model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.torch.backwards import BUCKETS
from tests.torch.small_models import batch, seeded, sgd, weights

# torch 2.4's own checkpoint uses what torch 2.4 advises against.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.cpu.amp.autocast:FutureWarning")


class Gan(nn.Module):
    """DCGAN's two halves, in small."""

    def __init__(self) -> None:
        super().__init__()
        self.d = nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1), nn.Sigmoid())
        self.g = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3), nn.Tanh())


def train_gan(gan: Gan, d_step: Any, g_step: Any, data: Callable[[int], tuple[torch.Tensor, torch.Tensor]]) -> None:
    """The loop of PyTorch's DCGAN tutorial, word for word where it matters. data: of a step, real samples and noise."""
    criterion = nn.BCELoss()
    for step in range(4):
        real, noise = data(step)
        gan.d.zero_grad()
        criterion(gan.d(real).view(-1), torch.ones(len(real))).backward()
        fake = gan.g(noise)
        criterion(gan.d(fake.detach()).view(-1), torch.zeros(len(real))).backward()
        d_step.step()
        gan.g.zero_grad()
        criterion(gan.d(fake).view(-1), torch.ones(len(real))).backward()
        g_step.step()


def gan_data(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return batch(rank, step), batch(rank, 50 + step, width=2)


@BUCKETS
@pytest.mark.parametrize("size", [1, 2])
def test_the_dcgan_tutorial_trains_as_one_process_on_all_the_data(ranks: Any, size: int, buckets: dict[str, Any]) -> None:
    def train(rank: int) -> list[float]:
        gan = seeded(Gan)
        d_step, g_step = sgd(gan.d), sgd(gan.g)
        train_gan(gan, d_step, g_step, lambda step: gan_data(rank, step))
        return weights(gan)

    results = ranks.run(size, train, **buckets)
    gan = seeded(Gan)
    optimizers = [torch.optim.SGD(half.parameters(), lr=0.1) for half in (gan.d, gan.g)]
    shares = lambda step: [gan_data(rank, step) for rank in range(size)]  # noqa: E731
    train_gan(gan, *optimizers, lambda step: tuple(torch.cat(column) for column in zip(*shares(step), strict=True)))
    assert all(result == results[0] for result in results)
    assert results[0] == pytest.approx(weights(gan), abs=1e-6)


def test_no_sync_spares_a_gan_the_trips_that_it_throws_away(ranks: Any) -> None:
    def train(rank: int, sparing: bool) -> list[float]:
        gan = seeded(Gan)
        d_step, g_step = sgd(gan.d), sgd(gan.g)
        criterion = nn.BCELoss()
        for step in range(3):
            real, noise = gan_data(rank, step)
            d_step.zero_grad()
            with d_step.no_sync():
                criterion(gan.d(real).view(-1), torch.ones(4)).backward()
            fake = gan.g(noise)
            criterion(gan.d(fake.detach()).view(-1), torch.zeros(4)).backward()
            d_step.step()
            g_step.zero_grad()
            with d_step.no_sync():
                criterion(gan.d(fake).view(-1), torch.ones(4)).backward()
            g_step.step()
        return weights(gan)

    first, second = ranks.run(2, lambda rank: train(rank, True))
    assert first == second
    assert [s.layout for s in ranks.steps] == ["optimizer0", "optimizer1"] * 3
    assert not any(s.previous_skipped for s in ranks.steps)
