"""`none` and the casts: sums of every dtype, and roundings element by element."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from psgc.codecs.codec import DTYPES, Array, Stream
from psgc.codecs.common.definitions import reference_finish, reference_fold
from psgc.codecs.registry import parse_codec
from tests.cases import for_each

STREAM = Stream(0, 0, 0, 0)
INTEGERS = ["uint8", "int8", "int16", "int32", "int64"]


def make(dtype: str, numel: int, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    if dtype == "bfloat16":
        return (rng.standard_normal(numel).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if dtype == "bool":
        return rng.random(numel) < 0.3
    if dtype in INTEGERS:
        limits = np.iinfo(DTYPES[dtype])
        return rng.integers(limits.min, limits.max, numel, DTYPES[dtype], endpoint=True)
    return rng.standard_normal(numel).astype(DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@for_each(numel=[1, 7, 257, 4097, 70001], divisor=[1, 2, 3])
def test_sums_and_means_of_every_dtype_are_as_defined_from_bytes_of_any_alignment(dtype: str, numel: int, divisor: int) -> None:
    codec = parse_codec("none", dtype)
    item, payloads = np.dtype(DTYPES[dtype]).itemsize, []
    for seed in range(5):
        memory = np.zeros(numel * item + 1, np.uint8)
        codec.encode(make(dtype, numel, seed), None, 1.0, STREAM, memory[1:])
        payloads.append(memory[1:])
    stored = [payload.tobytes() for payload in payloads]
    acc = np.empty(numel, codec.acc_dtype)
    codec.fold(payloads[:3], numel, 0, numel, acc, True)
    wanted = reference_fold(codec, stored[:3], numel, None)
    assert acc.tobytes() == wanted.tobytes()
    codec.fold(payloads[3:], numel, 0, numel, acc, False)
    wanted = reference_fold(codec, stored[3:], numel, wanted)
    assert acc.tobytes() == wanted.tobytes()
    out = np.zeros(numel * item + 1, np.uint8)
    codec.finish(acc, numel, 0, numel, divisor, None, None, 1.0, STREAM, out[1:])
    assert out[1:].tobytes() == reference_finish(codec, wanted, divisor, None, 1.0, STREAM)[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_encoded_comes_back_bit_for_bit(dtype: str) -> None:
    codec, values = parse_codec("none", dtype), make(dtype, 1001, 0)
    out, back = np.zeros(codec.payload_bound(1001), np.uint8), np.empty_like(values)
    codec.encode(values, None, 1.0, STREAM, out)
    codec.decode(out, 1001, 0, 500, back[:500])
    codec.decode(out, 1001, 500, 1001, back[500:])
    assert back.tobytes() == values.tobytes()


def sum_and_mean(dtype: str, arrays: list[Array], divisor: int) -> Array:
    codec, numel = parse_codec("none", dtype), arrays[0].size
    acc, out = np.empty(numel, codec.acc_dtype), np.zeros(codec.payload_bound(numel), np.uint8)
    codec.fold([array.view(np.uint8) for array in arrays], numel, 0, numel, acc, True)
    codec.finish(acc, numel, 0, numel, divisor, None, None, 1.0, STREAM, out)
    return out.view(DTYPES[dtype])


def test_integers_add_exactly_then_divide_by_floor_then_wrap() -> None:
    a, b = np.array([127, -128, -1, 5], np.int8), np.array([127, -128, -2, 0], np.int8)
    assert sum_and_mean("int8", [a, b], 2).tolist() == [127, -128, -2, 2]
    assert sum_and_mean("int8", [a, b], 1).tolist() == [-2, 0, -3, 5]


def test_bools_are_true_where_the_quotient_is_not_zero() -> None:
    a, b = np.array([True, True, False]), np.array([True, False, False])
    assert sum_and_mean("bool", [a, b], 1).tolist() == [True, True, False]
    assert sum_and_mean("bool", [a, b], 2).tolist() == [True, False, False]


def test_half_sums_that_leave_their_range_come_back_by_the_mean() -> None:
    a = np.array([60000.0], np.float16)
    assert np.isinf(sum_and_mean("float16", [a, a], 1)).all()
    assert sum_and_mean("float16", [a, a], 2).tolist() == [60000.0]


def test_means_of_halves_are_rounded_once() -> None:
    arrays = [make("float16", 1001, seed) for seed in range(3)]
    wanted = ((arrays[0].astype(np.float32) + arrays[1].astype(np.float32) + arrays[2].astype(np.float32)) / np.float32(3)).astype(
        np.float16
    )
    assert np.array_equal(sum_and_mean("float16", arrays, 3), wanted)


def every_sixteenth_float() -> Array:
    """65536 + 2**17 floats: all sign, exponent and high mantissa bits, on, just below and just above ties."""
    high = np.arange(65536, dtype=np.uint32) << 16
    return np.concatenate([high, high | 0x8000, high | 0x7FFF, high | 0x8001, high | 0x1000, high | 0x0FFF]).view(np.float32)


@pytest.mark.parametrize(("name", "dtype", "quiet"), [("bf16", torch.bfloat16, 0x7FC0), ("fp16", torch.float16, 0x7E00)])
def test_casts_round_as_torch_does_and_have_one_nan(name: str, dtype: torch.dtype, quiet: int) -> None:
    codec, values = parse_codec(name), every_sixteenth_float()
    out = np.zeros(codec.payload_bound(values.size), np.uint8)
    assert not codec.encode(values, None, 1.0, STREAM, out).nonfinite
    wanted = torch.from_numpy(values).to(dtype).view(torch.int16).numpy().view(np.uint16)
    is_nan = np.isnan(values)
    assert np.array_equal(out.view(np.uint16)[~is_nan], wanted[~is_nan])
    assert (out.view(np.uint16)[is_nan] == quiet).all()


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_casts_decode_every_bit_pattern_as_torch_does(name: str, dtype: torch.dtype) -> None:
    codec, bits = parse_codec(name), np.arange(65536, dtype=np.uint16)
    out = np.empty(65536, np.float32)
    codec.decode(bits.view(np.uint8), 65536, 0, 65536, out)
    wanted = torch.from_numpy(bits.view(np.int16)).view(dtype).float().numpy()
    assert np.array_equal(out, wanted, equal_nan=True)


@pytest.mark.parametrize("name", ["none", "bf16", "fp16"])
def test_a_nan_travels_in_its_own_element(name: str) -> None:
    codec = parse_codec(name)
    values = np.array([1.0, np.nan, 2.0, -np.inf], np.float32)
    out, acc = np.zeros(codec.payload_bound(4), np.uint8), np.empty(4, np.float32)
    assert not codec.encode(values, None, 1.0, STREAM, out).nonfinite
    codec.fold([out, out], 4, 0, 4, acc, True)
    assert np.array_equal(acc, 2 * values, equal_nan=True)
    assert not codec.finish(acc, 4, 0, 4, 2, None, None, 1.0, STREAM, out).nonfinite
    codec.decode(out, 4, 0, 4, acc)
    assert np.array_equal(acc, values, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_elements_that_are_their_own_payload_are_not_touched(dtype: str) -> None:
    codec, elements = parse_codec("none", dtype), make(dtype, 4097, 0)
    elements.flags.writeable = False
    payload = elements.view(np.uint8)
    assert codec.encode(elements, None, 1.0, STREAM, payload).payload_bytes == payload.size
    codec.decode(payload, elements.size, 0, elements.size, elements)
    codec.decode(payload, elements.size, 4096, elements.size, elements[4096:])
