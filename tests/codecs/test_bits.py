"""Conversions to and from float16, with and without a processor that has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import types

from psgc.codecs.codec import F32
from psgc.codecs.common import bits
from psgc.codecs.common.floats import reference_narrow_f16, reference_widen_f16
from psgc.codecs.jit.kernel import IN_F32, OUT_F32, kernel

HALVES = types.Array(types.int16, 1, "C")


@kernel(types.void(IN_F32, HALVES))
def narrow(values: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = bits.narrow_f16_by_integers(values[i])


@kernel(types.void(HALVES, OUT_F32))
def widen(halves: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = bits.widen_f16_by_integers(halves[i])


def edges() -> F32:
    """Every float16, what lies half way between two, and the float32 on both sides of each of these."""
    halves = reference_widen_f16(np.arange(0x7C00, dtype=np.uint16))
    between = (halves[1:].astype(np.float64) + halves[:-1]) / 2
    points = np.concatenate([halves, between.astype(np.float32), np.array([65519.996, 65520, 65536, 3e38, 1e-8, 1e-41], np.float32)])
    points = np.concatenate([points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-np.inf))])
    return np.concatenate([points, -points, np.array([np.inf, -np.inf, np.nan], np.float32)])


def test_float32_is_rounded_to_float16_by_integers_as_by_numpy() -> None:
    values = edges()
    out = np.empty(values.size, np.int16)
    narrow(values, out)
    np.testing.assert_array_equal(out.view(np.uint16), reference_narrow_f16(values))


def test_every_float16_is_widened_by_integers_as_by_numpy() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    out = np.empty(halves.size, np.float32)
    widen(halves.view(np.int16), out)
    wanted, number = reference_widen_f16(halves), ~np.isnan(reference_widen_f16(halves))
    np.testing.assert_array_equal(out.view(np.uint32)[number], wanted.view(np.uint32)[number])
    assert np.isnan(out[~number]).all()
    assert (out.view(np.uint32)[~number] & 0x00400000).all(), "quiet"


@pytest.mark.parametrize(
    ("triple", "features", "converts"),
    [
        ("x86_64-unknown-linux-gnu", "", False),
        ("x86_64-unknown-linux-gnu", "+avx,-f16c,+fma", False),
        ("x86_64-unknown-linux-gnu", "+avx,+f16c,+fma", True),
        ("aarch64-unknown-linux-gnu", "+neon", True),
    ],
)
def test_the_processor_is_asked_whether_it_converts(triple: str, features: str, converts: bool) -> None:
    assert bits.converts_f16(triple, features) is converts
