"""What ``auto`` sees of a step's gradients, and the relative error of a codec on them."""

from __future__ import annotations

import math

import pytest
import torch

from psgc.torch.auto.sampling import LEAST, MOST, GradientSample


def sample(**gradients: torch.Tensor) -> GradientSample:
    found = GradientSample(sum(gradient.numel() for gradient in gradients.values()))
    for name, gradient in gradients.items():
        found.take(name, gradient)
    return found


def noise(numel: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(numel, generator=torch.Generator().manual_seed(numel))


def test_an_error_is_that_of_the_codec() -> None:
    found = sample(w=noise(100_000))
    assert found.relative_error("none") == 0.0
    assert found.relative_error("int4") == pytest.approx(0.118, rel=0.1)
    assert found.relative_error("topk") == pytest.approx(0.956, rel=0.1)


def test_each_tensor_counts_by_its_own_size_and_not_by_that_of_its_values() -> None:
    """A tensor of small values between large ones loses all of them to 1 % of the largest magnitudes."""
    found = sample(large=noise(50_000, 1000.0), small=noise(50_000))
    alone, both = found.relative_error("topk:k=0.04", ["large"]), found.relative_error("topk:k=0.02")
    assert alone is not None and both is not None
    assert math.sqrt(2 * both**2 - alone**2) == pytest.approx(1.0, rel=1e-3), "nothing of the small one is sent"
    assert found.relative_error("topk:k=0.02", ["large", "small"]) == both


def test_large_tensors_give_a_stretch_and_small_ones_all_they_have() -> None:
    found = sample(large=noise(8 * MOST), bias=noise(10), layer=noise(2 * LEAST))
    taken = {name: stretch.numel() for name, (stretch, _) in found._stretches.items()}
    assert taken["bias"] == 10 and taken["layer"] == LEAST
    assert 0.9 * MOST < taken["large"] < 1.1 * MOST


def test_a_sample_is_a_copy_and_of_several_backwards_the_last_counts() -> None:
    gradient = noise(5000)
    found = sample(w=gradient)
    before = found.relative_error("int8")
    gradient.zero_()
    assert found.relative_error("int8") == before != 0
    found.take("w", gradient)
    assert found.relative_error("int8") is None


LARGEST = torch.finfo(torch.float32).max


@pytest.mark.parametrize(
    "gradients", [{}, {"w": torch.zeros(100)}, {"w": torch.tensor([1.0, math.inf])}, {"w": torch.zeros(0)}, {"w": torch.arange(10)}]
)
def test_where_nothing_can_be_said_there_is_no_error(gradients: dict[str, torch.Tensor]) -> None:
    assert sample(**gradients).relative_error("int4") is None


def test_large_values_do_not_overflow() -> None:
    """As a loss scaler's first steps have them."""
    assert sample(w=noise(5000, LARGEST / 100)).relative_error("int4") == pytest.approx(0.118, rel=0.1)


def test_gradients_of_other_shapes_and_types_are_taken() -> None:
    strided = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).t()
    assert sample(a=strided, b=noise(5000).bfloat16()).relative_error("int4") == pytest.approx(0.118, rel=0.2)
