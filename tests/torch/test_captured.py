"""Gradients of CUDA graphs: captured backwards that are replayed, and callables that replay graphs inside autograd's backward."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from psgc.errors import UsageError
from psgc.torch.device import engines
from psgc.torch.gradients import replays
from tests.device.recording import RecordingRuntime
from tests.device.steps import use_recorded
from tests.torch.captured_graphs import Graph, Graphed
from tests.torch.small_models import batch, linear, sgd, weights


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    return loss


def eager(rank: int) -> list[float]:
    model = linear()
    optimizer = sgd(model, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()
    return weights(model)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a rank's graph, and has psgc see its captures."""
    own = threading.local()
    monkeypatch.setattr(replays, "captured", lambda tensor: getattr(own, "graph", None) is not None and own.graph.capturing)

    def make(model: nn.Module) -> Graph:
        own.graph = Graph(model, loss_of)
        return own.graph

    return make


def captured(optimizer: Any, model: nn.Module, graph: Graph) -> None:
    with optimizer.no_sync(), graph.capture():
        loss_of(model, torch.zeros(4, 3)).backward()


def test_replayed_gradients_are_averaged_as_those_of_backwards(ranks: Any, graphs: Any) -> None:
    """Also where zero_grad has taken p.grad away, and where a step goes to a backward of its own."""

    def train(rank: int) -> list[float]:
        model = linear()
        optimizer = sgd(model, momentum=0.9)
        graph = graphs(model)
        captured(optimizer, model, graph)
        for step in range(4):
            if step == 1:
                optimizer.zero_grad()
            if step == 2:
                optimizer.zero_grad()
                loss_of(model, batch(rank, step)).backward()
            else:
                graph.replay(batch(rank, step))
                optimizer.replayed()
            if step == 3:
                optimizer.synchronize()
            optimizer.step()
        return weights(model)

    assert ranks.run(2, train) == ranks.run(2, eager)


class Conjugate(nn.Module):
    """Of its parameter autograd leaves a gradient that is a conjugate, not computed yet."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.tensor([1 + 2j, 2 - 1j, 1j]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.phase.conj() * x).abs()


def test_a_captured_gradient_is_computed_in_the_graph_where_autograd_leaves_a_conjugate(ranks: Any, graphs: Any) -> None:
    def train(rank: int, captures: bool) -> torch.Tensor:
        model = Conjugate()
        optimizer = sgd(model)
        graph = graphs(model)
        if captures:
            captured(optimizer, model, graph)
        for step in range(3):
            if captures:
                graph.replay(batch(rank, step))
                optimizer.replayed()
            else:
                optimizer.zero_grad()
                loss_of(model, batch(rank, step)).backward()
            optimizer.step()
        if captures:
            graph.replay(batch(rank, 3))
            with pytest.raises(UsageError, match=r"gradient of 'phase' was captured in a CUDA graph, and nothing tells.*replayed\(\)"):
                optimizer.step()
        return model.phase.detach().clone()

    found, wanted = ranks.run(2, lambda rank: train(rank, True)), ranks.run(2, lambda rank: train(rank, False))
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, other)


def test_a_replay_that_nobody_told_of_is_refused_with_what_to_do(ranks: Any, graphs: Any) -> None:
    def train(rank: int) -> None:
        model = linear()
        optimizer = sgd(model)
        graph = graphs(model)
        captured(optimizer, model, graph)
        for step in range(2):
            graph.replay(batch(rank, step))
            if step == 0:
                optimizer.replayed()
            optimizer.step()

    with pytest.raises(
        UsageError, match=r"^gradient of 'weight' was captured in a CUDA graph, .*; call optimizer.replayed\(\) after each graph.replay"
    ):
        ranks.run(2, train)


def test_replayed_is_refused_where_nothing_was_captured_and_in_the_middle_of_a_step(ranks: Any, graphs: Any) -> None:
    def train(rank: int) -> None:
        model = linear()
        optimizer = sgd(model, passes=2)
        with pytest.raises(UsageError, match="no backward of these parameters was captured; capture it inside"):
            optimizer.replayed()
        captured(optimizer, model, graphs(model))
        optimizer.zero_grad()
        loss_of(model, batch(rank, 0)).backward()
        with pytest.raises(UsageError, match="replayed\\(\\) while the gradient of 'weight' is under way; call it after step"):
            optimizer.replayed()

    ranks.run(1, train)


def test_callables_that_replay_graphs_are_averaged_as_others(ranks: Any) -> None:
    def train(rank: int) -> list[float]:
        model = linear()
        optimizer = sgd(model, momentum=0.9)
        graphed = Graphed(model)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(graphed, batch(rank, step)).backward()
            optimizer.step()
        return weights(model)

    assert ranks.run(2, train) == ranks.run(2, eager)


@pytest.fixture
def recorded() -> Iterator[RecordingRuntime]:
    runtime = RecordingRuntime()
    use_recorded(runtime)
    yield runtime
    engines.use()


def test_what_a_device_captures_is_told_by_its_runtime(recorded: RecordingRuntime) -> None:
    assert not engines.captured(torch.zeros(1))
    recorded.capturing = True
    assert engines.captured(torch.zeros(1))
    engines.use()
    assert not engines.captured(torch.zeros(1))
