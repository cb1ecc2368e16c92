"""Codecs' declarations about their errors are true: no bias, at a stated confidence, and contraction, on ordinary and on hostile inputs.

Every registered codec falls in, as it is by default and with feedback off and on, besides the variants named here. Random numbers are those
of counter-based streams, so that every run is the same: a test cannot begin to fail by chance, only when bytes change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from psgc.codecs.codec import Array, Codec, Stream
from psgc.codecs.registry import parse_codec, registered_codecs
from psgc.errors import CodecError
from tests.cases import for_each

VARIANTS = [
    "topk:k=5", "topk:k=0.3", "onebit:scale=unit,ef=0", "tbq:tau=0.7", "fp8:format=e5m2", "fp8:format=e5m2,ef=0",
    "dithering:k=1", "dithering:k=127", "dithering:k=20,normalize=l2", "dithering:k=2,ef=1", "dithering:k=4,partition=natural",
    "dithering:k=1,partition=natural", "dithering:k=9,normalize=l2,partition=natural", "dithering:k=2,partition=natural,ef=1",
    "dithering:k=9,partition=natural,ef=1",
]  # fmt: skip
ERROR_RATE = 1e-9  # chance that a right codec fails one of these tests, over all of its elements
SIGMAS = 6.0  # of a normal distribution: 2e-9 lies beyond, on either side
STEPS = 4000
ROUNDING = 1e-6  # of float32 arithmetic, and of random numbers in steps of 2**-24

F64 = npt.NDArray[np.float64]
Values = Callable[[int], Array]


def every_codec() -> list[str]:
    """Canonical texts, each once."""
    found = []
    for text in [name + ef for name in registered_codecs() for ef in ("", ":ef=0", ":ef=1")] + VARIANTS:
        try:
            found.append(parse_codec(text).canonical)
        except CodecError:
            assert text not in VARIANTS
    return list(dict.fromkeys(found))


CODECS = every_codec()
UNBIASED = [text for text in CODECS if parse_codec(text).unbiased]
BIASED = [text for text in CODECS if not parse_codec(text).unbiased and not parse_codec(text).feedback]
FEEDBACK = [text for text in CODECS if parse_codec(text).feedback]


def gauss(numel: int) -> Array:
    return np.random.default_rng(numel).standard_normal(numel, np.float32)


def heavy(numel: int) -> Array:
    """Student-t values with 3 degrees of freedom: the variance exists, the kurtosis does not."""
    return np.random.default_rng(numel).standard_t(3, numel).astype(np.float32)


def sent(codec: Codec, p: Array, steps: int) -> F64:
    """What is decoded of p in each of ``steps`` steps."""
    out, elements = np.zeros(codec.payload_bound(p.size), np.uint8), np.empty(p.size, np.float32)
    drawn = np.empty((steps, p.size))
    for step in range(steps):
        written = codec.encode(p, None, 1.0, Stream(seed=1, step=step, rank=0, bucket=0), out).payload_bytes
        codec.decode(out[:written], p.size, 0, p.size, elements)
        drawn[step] = elements
    return drawn


def bias_along_its_direction(codec: Codec, p: Array) -> tuple[float, float]:
    """The mean error of half of the steps along the signs of the mean error of the other half, and how far from zero it may be by chance.

    The two halves are independent, so that an unbiased codec has none; a small bias of many elements adds up.
    """
    errors = sent(codec, p, STEPS) - p
    along = errors[STEPS // 2 :] @ np.sign(errors[: STEPS // 2].mean(axis=0))
    return abs(along.mean()), SIGMAS * along.std() / np.sqrt(along.size) + ROUNDING * np.abs(p).sum()


@pytest.mark.parametrize("text", UNBIASED)
@pytest.mark.parametrize("values", [gauss, heavy])
def test_the_mean_of_an_unbiased_codec_is_its_input_in_every_element(text: str, values: Values) -> None:
    p = values(301)
    drawn = sent(parse_codec(text), p, STEPS)
    # Maurer and Pontil 2009, theorem 4 (empirical Bernstein bound), for both sides and all elements together
    log, width = np.log(4 * p.size / ERROR_RATE), 2 * np.abs(drawn).max()
    bound = np.sqrt(2 * drawn.var(axis=0, ddof=1) * log / STEPS) + 7 * width * log / (3 * (STEPS - 1))
    assert (np.abs(drawn.mean(axis=0) - p) <= bound + ROUNDING * np.abs(p).max()).all()


@pytest.mark.parametrize("text", UNBIASED)
@pytest.mark.parametrize("values", [gauss, heavy])
def test_errors_of_an_unbiased_codec_have_no_direction(text: str, values: Values) -> None:
    bias, chance = bias_along_its_direction(parse_codec(text), values(301))
    assert bias <= chance


@pytest.mark.parametrize("text", BIASED)
def test_a_codec_that_does_not_declare_it_is_seen_to_be_biased(text: str) -> None:
    bias, chance = bias_along_its_direction(parse_codec(text), heavy(301))
    assert bias > chance


DRAWING = ("randomk",)  # what they keep depends on chance; of the others it is the same in every step


def adversarial(numel: int) -> Iterator[Array]:
    """Inputs of which little may be sent, or the wrong thing: equals, one element that dwarfs the others, and decay from large to small."""
    rng = np.random.default_rng(numel)
    signs = np.where(rng.random(numel) < 0.5, -1, 1)
    yield np.clip(rng.standard_cauchy(numel), -1e6, 1e6).astype(np.float32)
    yield np.full(numel, 0.1, np.float32)
    yield (0.9 ** np.minimum(np.arange(numel), 200)).astype(np.float32)
    for ratio in (0.0, 0.499 / 127, 0.499 / 7, *np.geomspace(1e-4, 0.99, 25)):
        p = ratio * signs
        p[numel // 2] = 1
        yield p.astype(np.float32)


def assert_contracts(codec: Codec, p: Array, steps: int) -> None:
    """The mean of |C(p) - p|^2 over the steps is at most (1 - delta) |p|^2, give or take chance and rounding; delta is 0 where none is declared."""
    delta, square = codec.contraction(p.size) or 0.0, np.square(p.astype(np.float64)).sum()
    assert 0 <= delta <= 1
    left = np.square(sent(codec, p, steps) - p).sum(axis=1) / square
    # of a share in [0, 1] whose mean is 1 - delta the variance is at most this (Bhatia and Davis 2000); few draws may not show it
    spread = np.sqrt(delta * (1 - delta)) if codec.name in DRAWING else 0.0
    assert left.mean() <= 1 - delta + SIGMAS * spread / np.sqrt(steps) + ROUNDING


@pytest.mark.parametrize("text", FEEDBACK)
@for_each(numel=[1, 300, 4097])
def test_what_feedback_keeps_is_at_most_what_the_codec_declares_and_never_more_than_there_was(text: str, numel: int) -> None:
    for p in (gauss(numel), heavy(numel), *adversarial(numel)):
        assert_contracts(parse_codec(text), p, 30)


@pytest.mark.parametrize("text", FEEDBACK)
@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    magnitudes=hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(2.0**-20, 2.0**20, width=32)),
    sign=st.sampled_from([-1, 1]),
)  # fmt: skip
def test_and_so_it_is_whatever_the_input(text: str, magnitudes: Array, sign: int) -> None:
    p = magnitudes.copy()
    p[::2] *= sign
    assert_contracts(parse_codec(text), p, 20)


@pytest.mark.parametrize(
    ("text", "numel", "delta"),
    [
        ("int8", 1000, 4 * 127**2 / (4 * 127**2 + 255)),
        ("int4", 64, 196 / (196 + 63)),
        ("onebit", 100_000, 1 / 4096),
        ("topk:k=0.25", 400, 0.25),
        ("fp8", 1000, 1 - 2.0**-8),
        ("fp8:format=e5m2", 1000, 1 - 2.0**-6),
        ("dithering:ef=1,k=9,partition=natural", 1, 8 / 9),
    ],
)  # fmt: skip
def test_a_contraction_is_declared_where_one_is_known(text: str, numel: int, delta: float) -> None:
    assert parse_codec(text).contraction(numel) == pytest.approx(delta)


@pytest.mark.parametrize("text", ["none", "int8:ef=0", "onebit:ef=0", "ternary", "majority", "tbq"])
def test_none_is_declared_without_feedback_or_with_a_fixed_threshold(text: str) -> None:
    assert parse_codec(text).contraction(1000) is None


def test_a_fixed_threshold_may_keep_everything() -> None:
    codec, p = parse_codec("tbq:tau=0.7"), np.full(300, 0.69, np.float32)
    assert not sent(codec, p, 1).any()
