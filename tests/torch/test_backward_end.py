"""What p.grad holds when backward returns: the job's mean, whatever the backward was."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import psgc.torch as psgc
from psgc.errors import JobFailed, UsageError
from psgc.torch.gradients import backward_end
from tests.torch.backwards import BUCKETS, LATE, TINY, equal, grads, local, mean, squares, two_layers
from tests.torch.small_models import batch, linear, sgd, weights

# torch 2.4's own checkpoint uses what torch 2.4 advises against.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.cpu.amp.autocast:FutureWarning")


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
    said = [record for record in caplog.records if "does not report the end of backward" in record.getMessage()]
    assert len(said) == 1


def test_the_argument_goes_before_the_setting(ranks: Any) -> None:
    def train(rank: int) -> list[bool]:
        late = []
        for given in (None, False, True):
            model = linear()
            optimizer: Any = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters()), late_synchronization=given)
            late.append(optimizer._psgc_gradients.backwards.late)
        return late

    assert ranks.run(1, train) == [[False, False, True]]
    assert ranks.run(1, train, **LATE) == [[True, False, True]]
