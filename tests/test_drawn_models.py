"""Models that are drawn from a seed, and what is reported of their predictions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.benchmark_scripts import load

drawn_model = load("drawn_model")
drawn_models = load("drawn_models")


@pytest.mark.parametrize("index", range(len(drawn_model.FAMILIES)))
def test_a_seed_draws_the_same_model_again_and_it_trains(index: int) -> None:
    before = torch.random.get_rng_state()
    try:
        (described, model, batch), (again, same, _) = (drawn_model.drawn(11, index) for _ in range(2))
        assert described == again
        assert [(name, each.shape) for name, each in model.named_parameters()] == [
            (name, each.shape) for name, each in same.named_parameters()
        ]
        rows = batch()
        nn.CrossEntropyLoss()(model(rows), torch.zeros(len(rows), dtype=torch.int64)).backward()
        assert any(parameter.grad is not None for parameter in model.parameters())
    finally:
        torch.random.set_rng_state(before)


def test_a_seed_draws_every_family_in_turn() -> None:
    layers = [{type(module).__name__ for module in drawn_model.drawn(3, index)[1].modules()} for index in range(len(drawn_model.FAMILIES))]
    for kind in ("EmbeddingBag", "Conv2d", "LSTM", "Experts", "TransformerEncoderLayer"):
        assert sum(kind in each for each in layers) == 1


def test_errors_are_summed_up_by_who_predicted_and_slow_plans_are_counted() -> None:
    """Errors of 2, 4 and 30 % by users' predictions, two of them too low; corrected 1, 1 and 3 %; another link's for one row only."""
    rows = [
        {"slower": 0.02, "candidates": [{"error": -0.02, "corrected_error": 0.01, "error_by_another_link": None}]},
        {"slower": 0.07, "candidates": [{"error": -0.30, "corrected_error": 0.03, "error_by_another_link": 0.05}]},
        {"slower": -0.4, "candidates": [{"error": 0.04, "corrected_error": -0.01, "error_by_another_link": None}]},
    ]
    found = drawn_models.summary(rows)
    assert found["users"] == {"median": 0.04, "nine_of_ten": 0.30, "worst": 0.30, "low": pytest.approx(2 / 3)}
    assert found["verified"]["median"] == 0.01 and found["by_another_link"]["worst"] == 0.05
    assert (found["plans"], found["plans_slower"], found["slowest"]) == (3, 1, 0.07)
