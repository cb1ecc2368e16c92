"""Which codecs each level of quality allows, by their relative error, feedback and how often gradients are encoded."""

from __future__ import annotations

import numpy as np
import pytest

from psgc.codecs import parse_codec
from psgc.codecs.codec import Stream
from psgc.codecs.common.loss import relative_error
from psgc.plan.model.level import EXACT, FAST, LEVELS, SAFE
from psgc.plan.model.quality import TYPICAL_ERROR, allowed

STREAM = Stream(seed=1, step=1, rank=0, bucket=0)


@pytest.mark.parametrize("codec", [codec for codec in TYPICAL_ERROR if "shared" not in codec])  # has two rounds, and int8's grid
def test_typical_errors_are_those_of_normally_distributed_values(codec: str) -> None:
    values = np.random.default_rng(0).standard_normal(1 << 16, np.float32)
    assert relative_error(parse_codec(codec), values, STREAM) == pytest.approx(TYPICAL_ERROR[codec], rel=0.1)


def test_none_is_always_allowed() -> None:
    assert all(allowed("none", level) for level in LEVELS)


@pytest.mark.parametrize("codec", ["bf16", "fp16", "int8", "fp8", "int4", "int4:rotate=1", "int8/int4", "int4/none", "int4/relay"])
def test_safe_allows_small_errors(codec: str) -> None:
    assert allowed(codec, SAFE) and not allowed(codec, EXACT)


@pytest.mark.parametrize("codec", ["onebit", "topk", "int8/onebit", "topk:k=0.25", "randomk", "powersgd", "tbq", "onebit:ef=0,scale=unit"])
def test_safe_refuses_coarse_ones_and_what_has_no_known_error(codec: str) -> None:
    assert not allowed(codec, SAFE) and allowed(codec, FAST)


def test_the_number_of_encodings_and_a_measured_error_count() -> None:
    assert allowed("int4", SAFE, encodings=6) and not allowed("int4", SAFE, encodings=7)
    assert allowed("int4", SAFE, error=0.21) and not allowed("int4", SAFE, error=0.22)
    assert allowed("onebit", SAFE, error=0.1), "what counts is what it loses of these gradients"
    assert not allowed("bf16", SAFE, error=0.02), "a cast without feedback loses it for good"


def test_exact_allows_the_cast_to_the_gradients_own_type() -> None:
    assert allowed("bf16", EXACT, dtypes={"bfloat16"}) and allowed("fp16", EXACT, dtypes={"float16"})
    assert not allowed("bf16", EXACT, dtypes={"float32"}) and not allowed("bf16", EXACT, dtypes={"bfloat16", "float32"})
    assert not allowed("fp16", EXACT, dtypes={"bfloat16"}) and not allowed("int8", EXACT, dtypes={"bfloat16"})
