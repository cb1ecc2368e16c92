"""What codecs of few values send: votes, thresholds and levels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from psgc.codecs.codec import Array, Bytes, Codec, Stream
from psgc.codecs.common.definitions import reference_fold
from psgc.codecs.quantize.integers import IntegerCodec
from psgc.codecs.registry import parse_codec

Values = Callable[..., Array]
STREAM = Stream(seed=3, step=1, rank=0, bucket=0)


def encode(codec: Codec, p: Array) -> Bytes:
    out = np.zeros(codec.payload_bound(p.size), np.uint8)
    return out[: codec.encode(p, None, 1.0, STREAM, out).payload_bytes]


def decode(codec: Codec, payload: Bytes, numel: int) -> Array:
    out = np.empty(numel, np.float32)
    codec.decode(payload, numel, 0, numel, out)
    return out


def sent(text: str, p: Array) -> Array:
    codec = parse_codec(text)
    return decode(codec, encode(codec, p), p.size)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("divides", [True, False])
def test_the_majority_wins_and_a_tie_is_positive(workers: int, divides: bool, values: Values) -> None:
    codec, numel = parse_codec("majority"), 5001
    grads = [values("gauss", numel, seed=rank) for rank in range(workers)]
    acc, answer = np.empty(numel, np.float32), np.zeros(codec.payload_bound(numel), np.uint8)
    codec.fold([encode(codec, grad) for grad in grads], numel, 0, numel, acc, True)
    votes = np.sum([np.where(grad < 0, -1, 1) for grad in grads], axis=0)
    assert np.array_equal(acc, votes)
    codec.finish(acc, numel, 0, numel, workers if divides else 1, None, None, 1.0, STREAM, answer)
    assert np.array_equal(decode(codec, answer, numel), np.where(votes < 0, -1, 1))


@pytest.mark.parametrize("text", ["majority", "onebit:scale=unit,ef=0"])
def test_signs_alone_are_plus_and_minus_one_with_zeros_of_either_sign_positive(text: str) -> None:
    p = np.array([0.0, -0.0, 1e-40, -1e-40, 5, -5, 0, 0, -1], np.float32)
    assert sent(text, p).tolist() == [1, 1, 1, -1, 1, -1, 1, 1, -1]


@pytest.mark.parametrize("text", ["majority", "onebit:scale=unit,ef=0"])
def test_signs_alone_take_one_bit_an_element(text: str) -> None:
    assert [parse_codec(text).payload_bound(numel) for numel in (1, 8, 9, 4096)] == [1, 1, 2, 512]


def test_tbq_sends_what_reaches_the_threshold() -> None:
    p = np.array([0.5, -0.5, 0.49, -0.49, 7, -7, 0], np.float32)
    assert sent("tbq:tau=0.5", p).tolist() == [0.5, -0.5, 0, 0, 0.5, -0.5, 0]


def test_a_block_of_tbq_with_an_infinity_sends_nothing() -> None:
    codec, p = parse_codec("tbq"), np.array([np.inf, -np.inf, 5, -5], np.float32)
    out = np.empty(codec.payload_bound(4), np.uint8)
    assert codec.encode(p, None, 1.0, Stream(0, 0, 0, 0), out).nonfinite
    assert out.tobytes() == codec.reference_payload(p, Stream(0, 0, 0, 0))
    assert not codec.reference_elements(out.tobytes(), 4).any()


def test_what_tbq_does_not_send_adds_up_until_it_reaches_the_threshold() -> None:
    codec, grad, residual = parse_codec("tbq:tau=1"), np.full(3, 0.375, np.float32), np.zeros(3, np.float32)
    steps = []
    for _ in range(8):
        out = np.zeros(codec.payload_bound(3), np.uint8)
        codec.encode(grad, residual, 1.0, STREAM, out)
        codec.commit(out, 3, 0, 3, grad, residual, 1.0)
        steps.append(float(decode(codec, out, 3)[0]))
    assert steps == [0, 0, 1, 0, 0, 1, 0, 1]
    assert residual.tolist() == [0, 0, 0]


@pytest.mark.parametrize("k", [1, 3, 7, 100])
def test_linear_levels_are_next_to_the_value(k: int, values: Values) -> None:
    p = values("gauss", 256)
    step = np.abs(p).max() / k
    levels = sent(f"dithering:k={k}", p) / step
    assert np.allclose(levels, np.rint(levels), atol=1e-4)
    assert np.abs(levels - p / step).max() < 1 + 1e-4
    assert np.abs(levels).max() == pytest.approx(k)


@pytest.mark.parametrize(("k", "ef"), [(1, 0), (3, 0), (7, 0), (100, 0), (127, 0), (2, 1), (7, 1), (100, 1)])
def test_natural_levels_are_powers_of_two_next_to_the_value(k: int, ef: int, values: Values) -> None:
    p = values("wide", 256)
    y, elements = np.abs(p) / np.abs(p).max(), sent(f"dithering:k={k},partition=natural,ef={ef}", p)
    levels = np.abs(elements) / np.abs(p).max()
    assert set(levels.tolist()) <= {0.0, *(2.0**-level for level in range(k))}
    assert levels.max() == 1
    assert (np.signbit(elements) == np.signbit(p))[levels > 0].all()
    lowest = 2.0 ** (1 - k)
    lower = np.where(y < lowest, 0, 2.0 ** np.floor(np.log2(np.maximum(y, lowest))))
    upper = np.where(y < lowest, lowest, 2 * lower)
    near = np.where(y - lower < upper - y, lower, upper) if ef else np.where(levels == upper, upper, lower)
    assert np.array_equal(levels, near)


@pytest.mark.parametrize(("k", "bits"), [(1, 2), (2, 4), (7, 4), (8, 8), (127, 8)])
@pytest.mark.parametrize("partition", ["linear", "natural"])
def test_dithered_codes_have_a_width_of_their_own(k: int, bits: int, partition: str) -> None:
    assert parse_codec(f"dithering:k={k},partition={partition}").payload_bound(4096) == 4 * 16 + 512 * bits


def test_a_codec_of_the_tree_is_a_few_attributes_whatever_its_blocks_are(values: Values) -> None:
    """Blocks whose codes fill no whole row of the vector instructions are read one by one, and nothing beyond them is touched."""

    class Int2Codec(IntegerCodec):
        name, codec_id, rotated_id, bits, block, top_code = "int2", 4000, 4001, 2, 64, 1

    codec = Int2Codec()
    for numel in (1, 63, 64, 1000):
        p = values("heavy", numel)
        payload = encode(codec, p)
        assert payload.tobytes() == codec.reference_payload(p, STREAM)
        assert np.array_equal(decode(codec, payload, numel), codec.reference_elements(payload.tobytes(), numel))
        total = np.empty(numel, np.float32)
        codec.fold([payload] * 5, numel, 0, numel, total, True)
        assert np.array_equal(total, reference_fold(codec, [payload.tobytes()] * 5, numel, None))
