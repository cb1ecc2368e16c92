"""Two small convex problems on which compression without error feedback fails, and with it does not.

The training is real but for the wire: every worker encodes, the server folds and answers, all decode, and residuals are committed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from psgc.codecs.codec import CodecPair, Stream
from psgc.codecs.registry import parse_pair

Vector = npt.NDArray[np.float64]
Gradient = Callable[[Vector], Vector]


def descend(
    codecs: str, gradients: Sequence[Gradient], start: Vector, rates: Sequence[float], momentum: float = 0.0, follow: bool = True
) -> list[Vector]:
    """Where gradient descent passes, a worker for each gradient. follow: residuals are rescaled as the learning rate changes."""
    pair, x, velocity = parse_pair(codecs), start.copy(), np.zeros_like(start)
    numel, passed = x.size, [start]
    residuals = [np.zeros(numel, np.float32) if pair.push.feedback else None for _ in gradients]
    kept = np.zeros(numel, np.float32) if pair.pull.feedback else None
    for step, rate in enumerate(rates):
        rescale = rates[step - 1] / rate if step and follow else 1.0
        grads = [gradient(x).astype(np.float32) for gradient in gradients]
        pushed = []
        for rank, (grad, residual) in enumerate(zip(grads, residuals, strict=True)):
            slot = np.zeros(pair.push.payload_bound(numel), np.uint8)
            encoded = pair.push.encode(grad, residual, rescale, Stream(0, step, rank, 0), slot)
            pushed.append(slot[: encoded.payload_bytes])
        answer, kept = serve(pair, pushed, numel, kept, rescale, step)
        for payload, grad, residual in zip(pushed, grads, residuals, strict=True):
            if residual is not None:
                pair.push.commit(payload, numel, 0, numel, grad, residual, rescale)
        update = np.empty(numel, np.float32)
        pair.pull.decode(answer, numel, 0, numel, update)
        velocity = momentum * velocity + update
        x = x - rate * velocity
        passed.append(x)
    return passed


def serve(
    pair: CodecPair, pushed: Sequence[npt.NDArray[np.uint8]], numel: int, kept: npt.NDArray[np.float32] | None, rescale: float, step: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32] | None]:
    """The answer to the workers' payloads, their mean, and the server's new residual."""
    acc, left = np.empty(numel, np.float32), None if kept is None else np.empty(numel, np.float32)
    pair.push.fold(pushed, numel, 0, numel, acc, True)
    slot = np.zeros(pair.pull.payload_bound(numel), np.uint8)
    encoded = pair.pull.finish(acc, numel, 0, numel, len(pushed), kept, left, rescale, Stream(0, step, 99, 0), slot)
    return slot[: encoded.payload_bytes], left


# Beznosikov et al. 2020, example 1: f_i(x) = <a_i, x>^2 + |x|^2 / 4. Each worker's largest element points away from the optimum, 0.
AWAY = [np.array(a, np.float64) for a in ((-3, 2, 2), (2, -3, 2), (2, 2, -3))]
PULLS: list[Gradient] = [lambda x, a=a: 2 * (a @ x) * a + x / 2 for a in AWAY]  # type: ignore[misc]
ONES = np.ones(3)


def test_top_1_without_feedback_diverges() -> None:
    norms = [float(np.linalg.norm(x)) for x in descend("topk:k=1,ef=0/none", PULLS, ONES, [0.01] * 1000)]
    growth = 1 + 0.01 * 5.5 / 3  # each worker sends -5.5 of the three equal elements' size
    assert norms[100] == pytest.approx(np.sqrt(3) * growth**100, rel=1e-4)
    assert norms[1000] > 1e8


@pytest.mark.parametrize("codecs", ["topk:k=1/none", "topk:k=1"])
def test_top_1_with_feedback_converges(codecs: str) -> None:
    norms = [float(np.linalg.norm(x)) for x in descend(codecs, PULLS, ONES, [0.01] * 3000)]
    assert norms[1000] < 1e-2
    assert norms[3000] < 1e-8


# Karimireddy et al. 2019, section 3: f(x) = |x_1 + x_2| / 2 + |x_1 - x_2|. The signs of every subgradient are (+, -) or (-, +).
def kinks(x: Vector) -> Vector:
    """A subgradient; at a kink that of the positive side."""
    return 0.5 * (1 if x.sum() >= 0 else -1) * np.ones(2) + (1 if x[0] >= x[1] else -1) * np.array([1.0, -1.0])


def height(x: Vector) -> float:
    return float(0.5 * abs(x[0] + x[1]) + abs(x[0] - x[1]))


RATES = [round(0.05 / np.sqrt(t) * 2**30) / 2**30 for t in range(1, 1001)]  # so that float64 adds them up exactly


@pytest.mark.parametrize("codecs", ["onebit:ef=0/none", "onebit:scale=unit,ef=0/none", "majority"])
def test_signs_without_feedback_never_leave_the_line_they_start_on(codecs: str) -> None:
    passed = descend(codecs, [kinks], np.ones(2), RATES)
    assert all(x.sum() == 2 for x in passed)
    assert height(passed[-1]) >= 1


def slope(x: Vector, rank: int) -> Vector:
    """Of a quadratic whose curvatures lie apart by a factor of 10, seen through noise that is each rank's own."""
    noise = np.random.default_rng([rank, int(abs(x[0]) * 1e9) % 2**32]).standard_normal(x.size)
    return np.geomspace(0.03, 0.3, x.size) * x + 0.1 * noise


# Cosine annealing with warm restarts, four times from 0.02 down to 2e-8.
RESTARTS = [0.02 * (0.5 + 0.5 * float(np.cos(np.pi * t / 100))) + 2e-8 for t in range(100)] * 4
NOISY: list[Gradient] = [lambda x, rank=rank: slope(x, rank) for rank in range(2)]  # type: ignore[misc]


@pytest.mark.parametrize("codecs", ["onebit", "topk:k=0.05", "topk:k=0.05/none"])
def test_with_momentum_warm_restarts_throw_far_what_has_residuals_that_follow_the_rate_and_nothing_else(codecs: str) -> None:
    def distances(codec: str, follow: bool) -> list[float]:
        return [float(np.linalg.norm(x)) for x in descend(codec, NOISY, np.full(400, 3.0), RESTARTS, 0.9, follow)]

    plain, stays, follows = distances("none", False), distances(codecs, False), distances(codecs, True)
    assert stays[-1] < 1.1 * plain[-1] and max(stays) == plain[0]
    assert not max(follows) < 1.5 * plain[0]


@pytest.mark.parametrize("codecs", ["onebit/none", "onebit", "none"])
def test_signs_with_feedback_converge_as_plain_descent_does(codecs: str) -> None:
    assert height(descend(codecs, [kinks], np.ones(2), RATES)[-1]) < 0.005
