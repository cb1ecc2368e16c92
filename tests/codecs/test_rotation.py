"""The Hadamard rotation: orthonormal, its own inverse, and worth its time on heavy tails."""

from __future__ import annotations

import numpy as np
import pytest

from psgc.codecs.codec import F32, Stream
from psgc.codecs.quantize.rotation import GROUP, SIGNS, reference_hadamard, reference_rotated
from psgc.codecs.registry import parse_codec

STREAM = Stream(0, 0, 0, 0)


def error(text: str, p: F32) -> float:
    """||C(p) - p||^2 over ||p||^2."""
    codec, out = parse_codec(text), np.empty(p.size, np.float32)
    payload = np.empty(codec.payload_bound(p.size), np.uint8)
    codec.encode(p, None, 1.0, STREAM, payload)
    codec.decode(payload, p.size, 0, p.size, out)
    return float(np.square(out - p, dtype=np.float64).sum() / np.square(p, dtype=np.float64).sum())


def test_the_matrix_is_walsh_and_hadamards() -> None:
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < GROUP:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    assert (reference_hadamard(np.eye(GROUP, dtype=np.float32)) == matrix).all()


def test_rotating_keeps_lengths_and_rotating_back_gives_the_values() -> None:
    p = np.random.default_rng(0).standard_normal(5 * GROUP + 100, np.float32)
    turned = reference_rotated(p, inverse=False)
    assert np.square(turned).sum() == pytest.approx(np.square(p).sum(), rel=1e-5)
    assert (turned[5 * GROUP :] == p[5 * GROUP :]).all()  # what is left of the last whole group is as it was
    np.testing.assert_allclose(reference_rotated(turned, inverse=True), p, atol=2e-6)


def test_signs_are_fair() -> None:
    assert abs(SIGNS.sum()) < 4 * SIGNS.size**0.5


def test_a_lone_spike_is_spread_over_its_group() -> None:
    p = np.zeros(2 * GROUP, np.float32)
    p[GROUP + 7] = 32
    turned = reference_rotated(p, inverse=False)
    assert (np.abs(turned[GROUP:]) == 1).all()
    assert not turned[:GROUP].any()


@pytest.mark.parametrize("codec", ["int4", "int8"])
def test_heavy_tails_lose_no_more_than_gaussian_values(codec: str) -> None:
    generator = np.random.default_rng(1)
    gaussian = generator.standard_normal(64 * GROUP).astype(np.float32)
    heavy = generator.standard_t(3, 64 * GROUP).astype(np.float32)
    assert error(f"{codec}:rotate=1", heavy) < 0.6 * error(codec, heavy)
    assert error(f"{codec}:rotate=1", heavy) == pytest.approx(error(codec, gaussian), rel=0.1)
