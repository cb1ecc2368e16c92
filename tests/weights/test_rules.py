"""Update rules: the arithmetic against plain definitions and torch's own SGD, and the texts that name a rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from psgc.errors import CodecError, UsageError
from psgc.layout import Declaration, TensorSpec, build_layout
from psgc.layout.update_rule import UpdateRule
from psgc.server.weights.rules import apply_rule

SIZES = (1, 7, 64, 4097)


def run(text: str, deltas: list[list[Any]], dtype: Any = np.float32) -> Any:
    """The weights after each round of ``deltas``, from zeros. Old weights must stay as they were."""
    rule = UpdateRule.parse(text)
    accumulator = dtype if np.issubdtype(dtype, np.floating) else np.int64
    weights = np.zeros_like(deltas[0][0], dtype)
    momentum = np.zeros(weights.size, accumulator) if rule.name == "nesterov" else None
    for of_round in deltas:
        total = sum(np.asarray(delta, accumulator) for delta in of_round)
        before, new = weights.copy(), np.empty_like(weights)
        apply_rule(rule, weights, total, len(of_round), momentum, new)
        assert np.array_equal(weights, before)
        weights = new
    return weights


@pytest.mark.parametrize("numel", SIZES)
def test_add_and_average_are_what_they_say(numel: int) -> None:
    deltas = np.random.default_rng(numel).normal(size=(5, 3, numel)).astype(np.float32)
    by_add = run("add", [[delta] for of_round in deltas for delta in of_round])
    by_mean = run("average", [list(of_round) for of_round in deltas])
    wanted = np.zeros(numel, np.float32)
    for delta in deltas.reshape(-1, numel):
        wanted = wanted + delta
    assert np.array_equal(by_add, wanted)
    assert np.allclose(by_mean, deltas.astype(np.float64).mean(1).sum(0), atol=1e-5)


@pytest.mark.parametrize("numel", SIZES)
def test_nesterov_is_torchs_sgd_on_minus_the_mean_delta(numel: int) -> None:
    deltas = np.random.default_rng(numel).normal(size=(6, 2, numel))
    weight = torch.zeros(numel, dtype=torch.float64, requires_grad=True)
    reference = torch.optim.SGD([weight], lr=0.7, momentum=0.9, nesterov=True)
    for of_round in deltas:
        weight.grad = -torch.from_numpy(of_round.mean(0))
        reference.step()
    assert np.allclose(run("nesterov", [list(r) for r in deltas], np.float64), weight.detach().numpy(), rtol=1e-12)
    assert np.allclose(run("nesterov", [list(r) for r in deltas]), weight.detach().numpy(), atol=1e-4)


def test_integers_add_exactly_and_wrap() -> None:
    for dtype in (np.int8, np.uint8, np.int16, np.int32, np.int64):
        deltas = np.random.default_rng(1).integers(0, 100, size=(9, 33)).astype(dtype)
        assert np.array_equal(run("add", [[delta] for delta in deltas], dtype), deltas.sum(0, dtype=dtype))


def test_a_rules_text_comes_back_the_same() -> None:
    texts = ("add", "add:staleness=0", "add:round=1", "average", "average:round=0,staleness=4", "nesterov:lr=0.5,momentum=0.0")
    for text in texts:
        assert UpdateRule.parse(text).canonical == text
    assert UpdateRule.parse("nesterov") == UpdateRule("nesterov", True, -1, 0.7, 0.9)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ad", "unknown update rule 'ad'; did you mean add"),
        ("add:lr=1", "unknown option 'lr'; it takes round, staleness"),
        ("nesterov:lr=0", "lr above 0"),
        ("nesterov:momentum=1", "momentum from 0 to below 1"),
        ("add:staleness=-2", "staleness of at least 0"),
        ("add:staleness=x", "a whole staleness"),
        ("average:staleness=1", "in rounds no rank is ahead"),
        ("add:round=2", "round=0 or 1"),
    ],
)
def test_a_wrong_rule_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        UpdateRule.parse(text)


def test_what_servers_cannot_hold_is_refused_when_it_is_declared() -> None:
    def declare(dtype: str = "float32", rule: str = "add", codec: str = "none", servers: int = 1) -> None:
        spec = TensorSpec("w", (5000,), dtype)
        declaration = Declaration("weights.w", "weights", (spec,), codec, False, min_compress_bytes=0, rule=rule)
        build_layout(declaration, layout_id=1, servers=servers, workers=2)

    declare()
    declare(codec="onebit/none")
    for words, wrong in {
        "not bfloat16": {"dtype": "bfloat16"},
        "update rule average works on float32, float64, not int32": {"dtype": "int32", "rule": "average"},
        "this job has none": {"servers": 0},
    }.items():
        with pytest.raises(UsageError, match=words):
            declare(**wrong)  # type: ignore[arg-type]
    for codec in ("onebit", "none/onebit", "onebit/relay"):
        with pytest.raises(CodecError, match="pulled uncompressed"):
            declare(codec=codec)
