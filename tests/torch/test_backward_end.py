"""What p.grad holds when backward returns: the job's mean, whatever the backward was."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import psgc.torch as psgc
from psgc.errors import JobFailed, UsageError
from psgc.torch import backward_end
from tests.torch.small_models import batch, linear, seeded, sgd, weights

# torch 2.4's own checkpoint uses what torch 2.4 advises against.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.cpu.amp.autocast:FutureWarning")
TINY: dict[str, Any] = {"fuse_bytes": 0}  # every tensor a bucket of its own
LATE: dict[str, Any] = {"late_synchronization": True}
BUCKETS = pytest.mark.parametrize("buckets", [TINY, {}], ids=["a bucket each", "one bucket"])


def grads(model: nn.Module) -> list[torch.Tensor]:
    """Copies of the gradients that are there."""
    return [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    """Bit for bit."""
    return len(ours) == len(theirs) and all(a.numpy().tobytes() == b.numpy().tobytes() for a, b in zip(ours, theirs, strict=True))


def mean(terms: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """As the job makes it: summed in rank order, then divided."""
    return [sum(of[1:], of[0]) / len(of) for of in zip(*terms, strict=True)]


def local(make: Callable[[], nn.Module], loss: Callable[[nn.Module], torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of a loss without any job."""
    model = make()
    loss(model).backward()
    return grads(model)


def squares(rank: int, step: int) -> Callable[[nn.Module], torch.Tensor]:
    return lambda model: model(batch(rank, step)).square().mean()


@BUCKETS
@pytest.mark.parametrize("size", [1, 3])
def test_backward_returns_with_the_mean_in_every_step(ranks: Any, size: int, buckets: dict[str, Any]) -> None:
    def train(rank: int) -> list[list[torch.Tensor]]:
        model = linear()
        optimizer = sgd(model)
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            squares(rank, step)(model).backward()
            seen.append(grads(model))
        optimizer.step()
        return seen

    results = ranks.run(size, train, **buckets)
    for step in range(3):
        wanted = mean([local(linear, squares(rank, step)) for rank in range(size)])
        assert all(equal(result[step], wanted) for result in results)


def test_clipping_right_after_backward_clips_the_mean_and_pushes_once(ranks: Any) -> None:
    def train(rank: int) -> tuple[float, list[torch.Tensor], list[float]]:
        model = linear()
        optimizer = sgd(model)
        for step in range(3):
            optimizer.zero_grad()
            (100 * squares(rank, step)(model)).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            clipped = grads(model)
            optimizer.synchronize()
            assert equal(clipped, grads(model))
            with optimizer.skip_synchronize():
                optimizer.step()
        return float(norm), clipped, weights(model)

    (norm, clipped, after), (other_norm, other_clipped, other_after) = ranks.run(2, train)
    assert norm == other_norm > 1.0 and after == other_after
    assert equal(clipped, other_clipped)
    assert torch.cat([g.reshape(-1) for g in clipped]).norm() == pytest.approx(1.0, abs=1e-4)
    assert len(ranks.steps) == 3


def test_what_is_added_by_hand_after_backward_reaches_the_step(ranks: Any) -> None:
    def train(rank: int) -> list[float]:
        model = linear()
        optimizer = sgd(model)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.full((1, 3), rank + 1.0)).sum().backward()
            for parameter in model.parameters():
                parameter.grad.add_(parameter.detach(), alpha=0.5)
            optimizer.step()
        return weights(model)

    first, second = ranks.run(2, train)
    reference = linear()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        reference(torch.full((1, 3), 1.5)).sum().backward()
        optimizer.step()
    assert first == second == pytest.approx(weights(reference))


@BUCKETS
def test_between_passes_p_grad_is_this_ranks_own_and_after_the_last_the_mean(ranks: Any, buckets: dict[str, Any]) -> None:
    def train(rank: int) -> list[float]:
        model = linear()
        optimizer = sgd(model, passes=3)
        for _ in range(2):
            optimizer.zero_grad()
            seen = []
            for _ in range(3):
                model(torch.full((1, 3), rank + 1.0)).sum().backward()
                seen.append(model.weight.grad[0, 0].item())
            optimizer.step()
        return seen

    assert ranks.run(2, train, **buckets) == [[1.0, 2.0, 4.5], [2.0, 4.0, 4.5]]


def test_no_sync_accumulates_and_the_next_backward_sends_the_sum(ranks: Any) -> None:
    def train(rank: int) -> list[float]:
        model = nn.ModuleList([linear(0), linear(1)])
        optimizer = sgd(model)
        for _ in range(3):
            optimizer.zero_grad()
            with optimizer.no_sync():
                (model[0](torch.full((1, 3), rank + 1.0)) + model[1](torch.full((1, 3), rank + 1.0))).sum().backward()
                own = model[0].weight.grad[0, 0].item()
            model[0](torch.full((1, 3), rank + 1.0)).sum().backward()  # the other takes part with what it has
            seen = [own, *(half.weight.grad[0, 0].item() for half in model)]
            optimizer.step()
        return seen

    assert ranks.run(2, train, **TINY) == [[1.0, 3.0, 1.5], [2.0, 3.0, 1.5]]
    assert len(ranks.steps) == 3 * 4


def test_a_step_after_no_sync_alone_sends_the_sum(ranks: Any) -> None:
    def train(rank: int) -> float:
        model = linear()
        optimizer = sgd(model)
        with optimizer.no_sync():
            for _ in range(2):
                model(torch.full((1, 3), rank + 1.0)).sum().backward()
        optimizer.step()
        return model.weight.grad[0, 0].item()

    assert ranks.run(2, train) == [3.0, 3.0]


def test_what_no_sync_gathered_can_be_thrown_away_and_nothing_was_sent(ranks: Any) -> None:
    def train(rank: int) -> int:
        model = linear()
        optimizer = sgd(model)
        for _ in range(2):
            with optimizer.no_sync():
                model(torch.ones(1, 3)).sum().backward()
            optimizer.zero_grad()
        return len(psgc.api.current_session().submissions)

    assert ranks.run(2, train) == [0, 0]


@BUCKETS
@pytest.mark.parametrize("size", [2, 3])
def test_an_undeclared_second_backward_adds_the_mean_of_what_it_added(ranks: Any, size: int, buckets: dict[str, Any]) -> None:
    def train(rank: int) -> list[list[torch.Tensor]]:
        model = linear()
        optimizer = sgd(model)
        seen = []
        for step in range(2):
            optimizer.zero_grad()
            for part in range(2):
                squares(rank, 2 * step + part)(model).backward()
                seen.append(grads(model))
        optimizer.step()
        return seen

    results = ranks.run(size, train, **buckets)
    for step in range(2):
        first, second = (mean([local(linear, squares(rank, 2 * step + part)) for rank in range(size)]) for part in range(2))
        assert all(equal(result[2 * step], first) for result in results)
        assert all(equal(result[2 * step + 1], [a + b for a, b in zip(first, second, strict=True)]) for result in results)
    assert len(ranks.steps) == 4 * (2 if buckets else 1)


def test_only_what_a_second_backward_added_travels_again(ranks: Any) -> None:
    def train(rank: int) -> list[float]:
        model = nn.ModuleList([linear(0), linear(1)])
        optimizer = sgd(model)
        for _ in range(2):
            optimizer.zero_grad()
            for half in model:
                half(torch.full((1, 3), rank + 1.0)).sum().backward()
            optimizer.step()
        return [half.weight.grad[0, 0].item() for half in model]

    assert ranks.run(2, train, **TINY) == [[1.5, 1.5]] * 2
    # The first synchronization declares all; each backward is a trip of its own, in which the other half is skipped.
    trips = [ranks.steps[at : at + 4] for at in range(0, len(ranks.steps), 4)]
    assert [sorted(s.tensors[0] for s in trip if not s.skip) for trip in trips] == [["0.bias", "0.weight"], ["1.bias", "1.weight"]] * 2


def test_clipping_between_two_backwards_clips_the_first_alone(ranks: Any) -> None:
    def train(rank: int) -> list[float]:
        model = linear()
        optimizer = sgd(model)
        model(torch.full((1, 3), rank + 1.0)).sum().backward()
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)
        model(torch.full((1, 3), rank + 1.0)).sum().backward()
        optimizer.step()
        return model.weight.grad.reshape(-1).tolist()

    assert ranks.run(2, train) == [[0.75 + 1.5] * 6] * 2
    assert not any(s.previous_skipped for s in ranks.steps)


def test_a_graph_can_be_gone_through_twice(ranks: Any) -> None:
    def train(rank: int) -> list[float]:
        model = linear()
        optimizer = sgd(model)
        loss = model(torch.full((1, 3), rank + 1.0)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        return model.weight.grad.reshape(-1).tolist()

    assert ranks.run(2, train) == [[3.0] * 6] * 2


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_gradients_with_a_graph_of_their_own_are_averaged_too(ranks: Any) -> None:
    def train(rank: int) -> list[float]:
        model = linear()
        optimizer = sgd(model)
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(2):
                model(torch.full((1, 3), rank + 1.0)).square().sum().backward(create_graph=True)
                seen = model.weight.grad.detach().clone()
            optimizer.step()
        optimizer.zero_grad()
        return seen.reshape(-1).tolist()

    first, second = ranks.run(2, train)
    assert first == second


class Segments(nn.Module):
    """A stem, checkpointed layers, and a head; ``spare`` is used on request."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.stem, self.head, self.spare = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))

    def forward(self, x: torch.Tensor, how: str = "plain", spare: bool = False) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x).tanh() if how == "plain" else checkpoint(lambda y, f=layer: f(y).tanh(), x, use_reentrant=how == "reentrant")
        return self.head(x) + self.spare(x) if spare else self.head(x)


@BUCKETS
@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_checkpointed_segments_are_synchronized_once_when_all_is_over(ranks: Any, how: str, buckets: dict[str, Any]) -> None:
    def loss(rank: int, step: int, how: str) -> Callable[[Any], torch.Tensor]:
        # One rank goes without the spare layer: its skips must wait for the last gradient.
        return lambda model: model(batch(rank, step), how, spare=rank == 0 or step == 0).square().mean()

    def train(rank: int) -> list[list[torch.Tensor]]:
        model = seeded(Segments)
        optimizer = sgd(model)
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            loss(rank, step, how)(model).backward()
            seen.append(grads(model))
        optimizer.step()
        return seen

    first, second = ranks.run(2, train, **buckets)
    for step in range(3):
        assert equal(first[step], second[step])
        with_spare = local(lambda: seeded(Segments), loss(0, step, "plain"))
        model = seeded(Segments)
        loss(1, step, "plain")(model).backward()
        without = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(first[step], mean([with_spare, without]), strict=True))
    assert len(ranks.steps) == 3 * (12 if buckets else 1)


def test_a_model_within_one_reentrant_checkpoint_is_synchronized_when_backward_is_over(ranks: Any) -> None:
    """No hook runs in the outer graph, and not all parameters are used."""

    def train(rank: int) -> list[float]:
        model = nn.ModuleList([linear(0), linear(1)])
        optimizer = sgd(model)
        for step in range(3):
            optimizer.zero_grad()
            x = torch.full((1, 3), rank + 1.0, requires_grad=True)
            used = [0, 1] if rank == 0 or step == 0 else [0]
            checkpoint(lambda y, used=used: sum(model[i](y) for i in used), x, use_reentrant=True).sum().backward()
            seen = [half.weight.grad[0, 0].item() for half in model]
            optimizer.step()
        return seen

    assert ranks.run(2, train, **TINY) == [[1.5, 0.5]] * 2
    assert len(ranks.steps) == 3 * 4


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_checkpoints_within_checkpoints_are_synchronized_when_backward_is_over(ranks: Any) -> None:
    def train(rank: int) -> list[float]:
        model = seeded(Segments)
        optimizer = sgd(model)
        for step in range(2):
            optimizer.zero_grad()
            x = batch(rank, step).requires_grad_()
            checkpoint(lambda y: model(y, "reentrant"), x, use_reentrant=True).square().mean().backward()
            seen = torch.cat([g.reshape(-1) for g in grads(model)]).tolist()
            optimizer.step()
        return seen

    first, second = ranks.run(2, train, **TINY)
    assert first == second
    assert len(ranks.steps) == 2 * 12


class Shared(nn.Module):
    """One layer used in several segments, and another one."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.other = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, checkpointed: bool) -> torch.Tensor:
        for layer in (self.shared, self.other, self.shared):
            x = checkpoint(layer, x, use_reentrant=True) if checkpointed else layer(x)
        return x


@BUCKETS
def test_a_parameter_shared_by_reentrant_checkpoints_leaves_when_it_is_whole(ranks: Any, buckets: dict[str, Any]) -> None:
    def train(rank: int) -> list[list[torch.Tensor]]:
        model = seeded(Shared)
        optimizer = sgd(model)
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            model(batch(rank, step).requires_grad_(), True).square().mean().backward()
            seen.append(grads(model))
        return seen

    first, second = ranks.run(2, train, **buckets)
    for step in range(3):
        assert equal(first[step], second[step])
        plain = [local(lambda: seeded(Shared), lambda m, r=rank, s=step: m(batch(r, s), False).square().mean()) for rank in range(2)]
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(first[step], mean(plain), strict=True))


def test_a_parameter_that_is_shared_only_in_a_later_step_is_refused_and_no_sync_mends_it(ranks: Any) -> None:
    def train(rank: int) -> list[float]:
        model = seeded(Shared)
        optimizer = sgd(model)
        model(batch(rank, 0), False).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(UsageError, match=r"'shared.(weight|bias)' was added to in several parts .*no_sync"):
            model(batch(rank, 1).requires_grad_(), True).sum().backward()
        optimizer.zero_grad()
        with optimizer.no_sync():
            model(batch(rank, 1).requires_grad_(), True).sum().backward()
        optimizer.synchronize()
        return torch.cat([g.reshape(-1) for g in grads(model)]).tolist()

    first, second = ranks.run(2, train, **TINY)
    assert first == second


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


def by_optimizer(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()


def by_module(model: nn.Module, optimizer: Any) -> None:
    model.zero_grad()


def by_module_in_place(model: nn.Module, optimizer: Any) -> None:
    model.zero_grad(set_to_none=False)


def by_none(model: nn.Module, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = None


@BUCKETS
@pytest.mark.parametrize("throw_away", [by_optimizer, by_module, by_module_in_place, by_none])
def test_a_step_thrown_away_is_told_with_the_next(ranks: Any, throw_away: Any, buckets: dict[str, Any]) -> None:
    def train(rank: int) -> list[float]:
        model = linear()
        optimizer = sgd(model)
        for step in range(4):
            throw_away(model, optimizer)
            model(torch.full((1, 3), rank + 1.0)).sum().backward()
            assert torch.equal(model.weight.grad, torch.full((2, 3), 1.5)), step
            if step != 1:
                optimizer.step()
        return weights(model)

    first, second = ranks.run(2, train, **buckets)
    assert first == second
    flags = [s.previous_skipped for s in ranks.steps if "weight" in s.tensors]
    assert flags == [False, False, True, False]


@pytest.mark.parametrize(("codec", "told"), [("none", 0), ("bf16", 0), ("topk:k=0.5", 1), ("int8", 1)])
@pytest.mark.parametrize("throw_away", [by_optimizer, by_module])
def test_under_error_feedback_it_is_said_once_what_becomes_of_gradients_thrown_away(
    ranks: Any, throw_away: Any, codec: str, told: int, caplog: pytest.LogCaptureFixture
) -> None:
    def train(rank: int) -> None:
        model = linear()
        optimizer = sgd(model, compression=codec)
        for _ in range(3):
            throw_away(model, optimizer)
            squares(rank, 0)(model).backward()

    with caplog.at_level(logging.WARNING):
        ranks.run(1, train, min_compress_bytes=0)
    assert caplog.text.count("thrown away before step()") == told
    assert not told or (f"codec {codec})" in caplog.text and "no_sync()" in caplog.text)


def test_gradients_that_module_zero_grad_lets_go_are_freed(ranks: Any) -> None:
    def train(rank: int) -> None:
        model = linear()
        optimizer = sgd(model)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        alive = [weakref.ref(p.grad) for p in model.parameters()]
        model.zero_grad()
        gc.collect()
        assert [reference() for reference in alive] == [None, None]

    ranks.run(1, train)


@BUCKETS
def test_gradients_that_nobody_zeroes_add_up_over_steps_with_ranks_that_skip_some(ranks: Any, buckets: dict[str, Any]) -> None:
    def train(rank: int) -> list[float]:
        model = nn.ModuleList([linear(0), linear(1)])
        optimizer = sgd(model)
        for step in range(3):
            used = [0, 1] if rank == 0 or step == 0 else [0]
            sum(model[i](torch.full((1, 3), 2.0)).sum() for i in used).backward()
            seen = [half.weight.grad[0, 0].item() for half in model]
            optimizer.step()
        return seen

    assert ranks.run(2, train, **buckets) == [[6.0, 4.0]] * 2


def test_gradients_kept_by_a_rank_without_a_backward_count_once(ranks: Any) -> None:
    def train(rank: int) -> list[float]:
        model = linear()
        optimizer = sgd(model)
        for step in range(3):
            if rank == 0 or step != 1:
                model(torch.full((1, 3), 2.0)).sum().backward()
            optimizer.step()
        return model.weight.grad.reshape(-1).tolist()

    assert ranks.run(2, train) == [[5.0] * 6] * 2


def test_a_rank_without_a_backward_takes_part_in_step(ranks: Any) -> None:
    def train(rank: int) -> list[float]:
        model = linear()
        optimizer = sgd(model)
        for step in range(3):
            optimizer.zero_grad()
            if (rank, step) not in ((1, 0), (0, 2)):
                model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        return [*weights(model), *model.weight.grad.reshape(-1).tolist()]

    first, second = ranks.run(2, train)
    assert first == second and first[-1] == 0.5


class Boom(Exception):
    """A user's own error."""


def failing(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """A loss whose backward raises when the last layer's gradients are done, and the first one's are not."""
    middle = model[0](batch(rank, step))

    def explode(grad: torch.Tensor) -> None:
        raise Boom

    middle.register_hook(explode)
    return model[1](middle).square().mean()


def two_layers() -> nn.Sequential:
    return seeded(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))


@BUCKETS
@pytest.mark.parametrize("failing_step", [0, 2])
@pytest.mark.parametrize("throw_away", [by_optimizer, by_module, by_none])
def test_a_backward_that_raises_costs_a_step_and_nothing_else(
    ranks: Any, throw_away: Any, failing_step: int, buckets: dict[str, Any]
) -> None:
    def train(rank: int) -> list[float]:
        model = two_layers()
        optimizer = sgd(model)
        for step in range(5):
            throw_away(model, optimizer)
            if step == failing_step:
                with pytest.raises(Boom):
                    failing(model, rank, step).backward()
                continue
            squares(rank, step)(model).backward()
            optimizer.step()
        return weights(model)

    first, second = ranks.run(2, train, **buckets)
    reference = two_layers()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(5):
        if step != failing_step:
            optimizer.zero_grad()
            (sum(squares(rank, step)(reference) for rank in range(2)) / 2).backward()
            optimizer.step()
    assert first == second == pytest.approx(weights(reference), abs=1e-6)
    if buckets and failing_step:
        sent = [s for s in ranks.steps if s.tensors == ("1.weight",)]
        rest = [s for s in ranks.steps if s.tensors == ("0.weight",)]
        assert [s.skip for s in sent] == [False] * 5
        assert [s.skip for s in rest] == [False, False, True, False, False]  # every step is whole, on every rank
        assert [s.previous_skipped for s in sent] == [s.previous_skipped for s in rest] == [False, False, False, True, False]


def test_after_a_backward_that_raised_a_step_is_refused(ranks: Any) -> None:
    def train(rank: int) -> None:
        model = two_layers()
        optimizer = sgd(model)
        for step in range(2):
            with pytest.raises(Boom):
                failing(model, rank, step).backward()
            with pytest.raises(UsageError, match=r"raised before it was over.*call optimizer.zero_grad\(\)"):
                optimizer.step()
            with pytest.raises(UsageError, match=r"raised before it was over.*call optimizer.zero_grad\(\)"):
                squares(rank, step)(model).backward()
            optimizer.zero_grad()
            squares(rank, step)(model).backward()
            optimizer.step()

    ranks.run(2, train, **TINY)


def test_an_end_that_never_came_since_another_callback_raised_is_noticed(ranks: Any) -> None:
    def train(rank: int) -> list[float]:
        model = linear()
        optimizer = sgd(model)
        broken = True

        def other(parameter: torch.Tensor) -> None:
            def callback() -> None:
                if broken:
                    raise Boom

            torch.autograd.Variable._execution_engine.queue_callback(callback)

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(other)
        with pytest.raises(Boom):
            squares(rank, 0)(model).backward()
        broken = False
        optimizer.zero_grad()
        squares(rank, 1)(model).backward()
        return torch.cat([g.reshape(-1) for g in grads(model)]).tolist()

    first, second = ranks.run(2, train)
    assert first == second


def double(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


def test_a_gradient_changed_by_a_hook_while_it_is_under_way_is_refused(ranks: Any) -> None:
    def train(rank: int) -> None:
        model = linear()
        optimizer = sgd(model)
        squares(rank, 0)(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.weight.register_post_accumulate_grad_hook(double)
        with pytest.raises(UsageError, match=r"'weight' was changed between .* after backward"):
            squares(rank, 1)(model).backward()

    ranks.run(1, train, **TINY)


def test_two_optimizers_in_one_backward_need_no_order(ranks: Any) -> None:
    """Ranks meet the models in opposite orders, and one of them leaves one out, from the first step on."""

    def train(rank: int) -> list[float]:
        models = [linear(0), linear(1)]
        optimizers = [sgd(model) for model in models]
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            used = models if rank == 0 else models[1:] if step != 1 else models[::-1]
            x = torch.ones(1, 3)
            sum((model(x).sum() for model in used), torch.zeros(())).backward()
            if rank == 0:  # both are there
                assert all(model.weight.grad is not None for model in models)
            for optimizer in optimizers:
                optimizer.step()
        return [*weights(models[0]), *weights(models[1]), *(model.weight.grad[0, 0].item() for model in models)]

    first, second = ranks.run(2, train, **TINY)
    assert first == second and first[-2:] == [0.5, 1.0]


def test_parameters_of_two_optimizers_are_averaged_in_the_backward_of_either(ranks: Any) -> None:
    def train(rank: int) -> list[float]:
        model = nn.ModuleList([linear(0), linear(1)])
        one, two = sgd(model[0], momentum=0.9), psgc.DistributedOptimizer(torch.optim.Adam(model[1].parameters()))
        for step in range(3):
            one.zero_grad()
            two.zero_grad()
            (model[0](batch(rank, step)) * model[1](batch(rank, step))).square().mean().backward()
            assert len(grads(model)) == 4
            one.step()
            two.step()
        return weights(model)

    first, second = ranks.run(2, train)
    assert first == second


def test_an_optimizer_made_anew_takes_the_parameters_over_from_one_still_held(ranks: Any) -> None:
    def train(rank: int) -> list[float]:
        model = linear()
        held = []
        for _ in range(3):
            held.append(sgd(model))
            held[-1].zero_grad()
            model(torch.full((1, 3), rank + 1.0)).sum().backward()
            held[-1].step()
        return model.weight.grad.reshape(-1).tolist()

    assert ranks.run(2, train) == [[1.5] * 6] * 2
    assert [s.layout for s in ranks.steps] == ["optimizer0", "optimizer1", "optimizer2"]


def test_autograd_grad_changes_nothing(ranks: Any) -> None:
    def train(rank: int) -> int:
        model = linear()
        optimizer = sgd(model)
        squares(rank, 0)(model).backward()
        before, sent = grads(model), len(psgc.api.current_session().submissions)
        own = torch.autograd.grad(squares(rank, 1)(model), list(model.parameters()))
        assert equal(list(own), local(linear, squares(rank, 1))) and equal(before, grads(model))
        optimizer.step()
        return len(psgc.api.current_session().submissions) - sent

    assert ranks.run(2, train) == [0, 0]


@BUCKETS
def test_a_backward_for_some_inputs_averages_those_and_skips_the_rest(ranks: Any, buckets: dict[str, Any]) -> None:
    def train(rank: int) -> list[Any]:
        model = linear()
        optimizer = sgd(model)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.full((1, 3), rank + 1.0)).sum().backward(inputs=[model.weight])
        optimizer.step()
        return [model.weight.grad[0, 0].item(), model.bias.grad is None or model.bias.grad.abs().sum().item() == 0]

    assert ranks.run(2, train, **buckets) == [[1.5, True]] * 2


def test_backward_may_run_in_another_thread(ranks: Any) -> None:
    def train(rank: int) -> list[float]:
        model = linear()
        optimizer = sgd(model)
        for step in range(2):
            optimizer.zero_grad()
            thread = threading.Thread(target=lambda s=step: squares(rank, s)(model).backward())
            thread.start()
            thread.join()
            seen = torch.cat([g.reshape(-1) for g in grads(model)]).tolist()
            optimizer.step()
        return seen

    first, second = ranks.run(2, train)
    assert first == second


def test_a_backward_inside_a_hook_of_another_is_over_when_that_is(ranks: Any) -> None:
    """The inner one is of another model; its means are there when the outer backward returns."""

    def train(rank: int) -> list[float]:
        outer, inner = linear(0), linear(1)
        optimizers = [sgd(outer), sgd(inner)]
        x = torch.full((1, 3), rank + 1.0)
        for _ in range(2):
            for optimizer in optimizers:
                optimizer.zero_grad()
            result = outer(x)

            def run_inner(grad: torch.Tensor) -> None:
                with torch.enable_grad():
                    inner(x).sum().backward()

            result.register_hook(run_inner)
            result.sum().backward()
            seen = [model.weight.grad[0, 0].item() for model in (outer, inner)]
            for optimizer in optimizers:
                optimizer.step()
        return seen

    assert ranks.run(2, train) == [[1.5, 1.5]] * 2


@pytest.fixture
def compiled_afresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("compiled_afresh")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_models_are_averaged_as_others(ranks: Any) -> None:
    model_lock = threading.Lock()

    def train(rank: int) -> list[list[torch.Tensor]]:
        model = two_layers()
        optimizer = sgd(model)
        compiled = torch.compile(model, backend="aot_eager")
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            with model_lock:  # dynamo compiles in one thread at a time
                loss = compiled(batch(rank, step)).square().mean()
            loss.backward()
            seen.append(grads(model))
        optimizer.step()
        return seen

    first, second = ranks.run(2, train)
    for step in range(3):
        assert equal(first[step], second[step])
        wanted = mean([local(two_layers, squares(rank, step)) for rank in range(2)])
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(first[step], wanted, strict=True))


def test_closures_see_the_mean(ranks: Any) -> None:
    def train(rank: int) -> list[float]:
        model = linear()
        optimizer = sgd(model)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = squares(rank, 0)(model)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            return loss

        for _ in range(3):
            optimizer.step(closure)
        return weights(model)

    first, second = ranks.run(2, train)
    assert first == second
    assert len(ranks.steps) == 3


def test_parameters_unfrozen_or_added_later_are_averaged_in_their_first_backward(ranks: Any) -> None:
    def train(rank: int) -> list[float]:
        model = nn.ModuleList([linear(0), linear(1), linear(2)])
        model[1].requires_grad_(False)
        optimizer: Any = psgc.DistributedOptimizer(torch.optim.SGD([*model[0].parameters(), *model[1].parameters()], lr=0.1))
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            if step == 1:
                model[1].requires_grad_(True)
                optimizer.add_param_group({"params": list(model[2].parameters())})
            sum(layer(torch.full((1, 3), rank + 1.0)).sum() for layer in model).backward()
            seen = [layer.weight.grad[0, 0].item() for layer in model] if step else []
            optimizer.step()
        return [*seen, *weights(model)]

    first, second = ranks.run(2, train)
    assert first == second and first[:3] == [1.5] * 3


def test_a_frozen_parameter_that_is_unfrozen_alone_is_averaged_by_step(ranks: Any) -> None:
    def train(rank: int) -> list[float]:
        model = nn.ModuleList([linear(0), linear(1)])
        model[1].requires_grad_(False)
        optimizer: Any = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(3):
            optimizer.zero_grad()
            if step == 1:
                model[0].requires_grad_(False)
                model[1].requires_grad_(True)
            sum(layer(torch.full((1, 3), rank + 1.0)).sum() for layer in model).backward()
            optimizer.step()
        return [*model[1].weight.grad.reshape(-1).tolist(), *weights(model)]

    first, second = ranks.run(2, train)
    assert first == second and first[:6] == [1.5] * 6


def test_a_failed_job_is_raised_by_the_backward_that_waits(ranks: Any) -> None:
    def train(rank: int) -> None:
        model = linear()
        optimizer = sgd(model)
        for step in range(2):
            optimizer.zero_grad()
            if (rank, step) == (1, 1):
                ranks.sessions[1].fail("rank 1 ended with ValueError: lost")
                return
            squares(rank, step)(model).backward()
            optimizer.step()

    with pytest.raises(JobFailed, match=r"^rank 1 ended with ValueError: lost$"):
        ranks.run(2, train)


def test_unscaling_right_after_backward_finds_the_mean_and_sends_nothing(ranks: Any) -> None:
    def train(rank: int) -> list[float]:
        model = linear()
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        seen = []
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.full((1, 3), rank + 1.0)).sum()).backward()
            seen.append(model.weight.grad[0, 0].item())
            scaler.unscale_(optimizer)
            seen.append(model.weight.grad[0, 0].item())
            scaler.step(optimizer)
            scaler.update()
        return seen

    assert ranks.run(2, train) == [[1.5 * 256, 1.5] * 3] * 2
    assert [(s.previous_skipped, s.rescale) for s in ranks.steps] == [(False, 1.0)] * 3


@pytest.mark.parametrize("way", ["missing", "failing"])
def test_where_torch_does_not_tell_the_end_gradients_come_late_and_that_is_said_once(
    ranks: Any, way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(callback: Any) -> None:
        raise RuntimeError("no queue")

    if way == "missing":
        monkeypatch.setattr(backward_end, "AVAILABLE", False)
    else:
        monkeypatch.setattr(backward_end, "_queue", refuse)
    monkeypatch.setattr(backward_end, "_unsaid", threading.Lock())

    def train(rank: int) -> list[float]:
        model = linear()
        optimizer = sgd(model, momentum=0.9)
        for step in range(3):
            optimizer.zero_grad()
            squares(rank, step)(model).backward()
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return weights(model)

    with caplog.at_level(logging.WARNING, logger=backward_end.logger.name):
        first, second = ranks.run(2, train)
    assert first == second
    said = [record for record in caplog.records if "does not tell the end of backward" in record.getMessage()]
    assert len(said) == 1


def test_both_modes_train_alike(ranks: Any) -> None:
    def train(rank: int) -> list[float]:
        model = seeded(Segments)
        optimizer = sgd(model, momentum=0.9)
        for step in range(4):
            optimizer.zero_grad()
            model(batch(rank, step), spare=rank == 0 or step % 2 == 0).square().mean().backward()
            optimizer.step()
        return weights(model)

    assert ranks.run(2, train) == ranks.run(2, train, **LATE)


def test_the_argument_goes_before_the_setting(ranks: Any) -> None:
    def train(rank: int) -> list[bool]:
        late = []
        for given in (None, False, True):
            model = linear()
            optimizer: Any = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters()), late_synchronization=given)
            late.append(optimizer._psgc_exchange.late)
        return late

    assert ranks.run(1, train) == [[False, False, True]]
    assert ranks.run(1, train, **LATE) == [[True, False, True]]
