"""`randomk` draws the same places on every rank, each element equally often, and its payloads add up as they are."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from psgc.codecs.codec import F32, Bytes, Codec, Stream
from psgc.codecs.common.definitions import reference_finish, reference_fold
from psgc.codecs.common.streams import keys
from psgc.codecs.randomk import reference_places
from psgc.codecs.registry import parse_codec, parse_pair
from psgc.errors import CodecError, PayloadError
from tests.cases import for_each

STREAM = Stream(seed=3, step=5, rank=0, bucket=2)


def encode(codec: Codec, grad: F32, stream: Stream = STREAM) -> Bytes:
    out = np.zeros(codec.payload_bound(grad.size), np.uint8)
    return out[: codec.encode(grad, None, 1.0, stream, out).payload_bytes]


def sent(text: str, numel: int, stream: Stream = STREAM) -> list[int]:
    """Places that are sent."""
    codec, out = parse_codec(text), np.empty(numel, np.float32)
    codec.decode(encode(codec, np.ones(numel, np.float32), stream), numel, 0, numel, out)
    return np.flatnonzero(out).tolist()


def gauss(numel: int, seed: int) -> F32:
    return np.random.default_rng(seed).standard_normal(numel, np.float32)


def test_every_rank_sends_the_same_places() -> None:
    assert sent("randomk", 5000) == sent("randomk", 5000, dataclasses.replace(STREAM, rank=7))


@pytest.mark.parametrize("field", ["seed", "step", "bucket", "first"])
def test_other_steps_buckets_and_parts_have_other_places(field: str) -> None:
    other = sent("randomk", 100_000, dataclasses.replace(STREAM, **{field: 4096}))
    assert len(set(sent("randomk", 100_000)) & set(other)) < 40  # of 1000; 10 by chance


@pytest.mark.parametrize(("numel", "count"), [(1, 1), (7, 7), (10, 3), (4097, 1000), (70_001, 701), (2**31 - 1, 5)])
def test_places_are_distinct_and_within_the_part(numel: int, count: int) -> None:
    for step in range(50):
        places = reference_places(numel, count, *keys(dataclasses.replace(STREAM, step=step)))
        assert np.unique(places).size == count
        assert 0 <= places.min() <= places.max() < numel


@pytest.mark.parametrize(("numel", "count"), [(10, 3), (100, 7), (101, 100), (64, 16)])
def test_each_element_is_equally_likely_though_strata_are_not_of_one_size(numel: int, count: int) -> None:
    draws = 4000
    times = np.zeros(numel)
    for step in range(draws):
        times[reference_places(numel, count, *keys(dataclasses.replace(STREAM, step=step)))] += 1
    share = count / numel
    assert np.abs(times / draws - share).max() < 6 * np.sqrt(share * (1 - share) / draws)


def test_the_decoded_mean_without_feedback_is_the_gradient() -> None:
    codec, grad, steps = parse_codec("randomk:ef=0,k=0.3"), gauss(333, 0), 5000
    total, out = np.zeros(333), np.empty(333, np.float32)
    for step in range(steps):
        codec.decode(encode(codec, grad, dataclasses.replace(STREAM, step=step)), 333, 0, 333, out)
        total += out
    spread = np.abs(grad) * np.sqrt((1 / 0.3 - 1) / steps)
    assert (np.abs(total / steps - grad) < 6 * spread + 1e-6).all()


@pytest.mark.parametrize("text", ["randomk", "randomk:ef=0", "randomk:k=3"])
@for_each(numel=[3, 4097, 70_001], workers=[1, 3, 11])
def test_payloads_add_up_to_the_answer_without_decoding(text: str, numel: int, workers: int) -> None:
    pair = parse_pair(text)
    assert pair.adder is not None
    payloads = [encode(pair.push, gauss(numel, rank), dataclasses.replace(STREAM, rank=rank)) for rank in range(workers)]
    out, wanted = np.zeros(pair.push.payload_bound(numel), np.uint8), None
    for first in range(0, workers, 8):
        pair.adder.add(payloads[first : first + 8], numel, out, first == 0)
        wanted = reference_fold(pair.push, [payload.tobytes() for payload in payloads[first : first + 8]], numel, wanted)
    assert wanted is not None
    encoded = pair.adder.divide(out, numel, workers)
    assert not encoded.nonfinite
    assert out[: encoded.payload_bytes].tobytes() == reference_finish(pair.pull, wanted, workers, None, 1.0, STREAM)[0]


def test_a_sum_that_overflows_is_flagged() -> None:
    codec = parse_pair("randomk:k=1").adder
    assert codec is not None
    payload, out = encode(parse_codec("randomk:k=1"), np.full(1, 3e38, np.float32)), np.zeros(12, np.uint8)
    codec.add([payload, payload], 1, out, True)
    assert codec.divide(out, 1, 2).nonfinite


def test_payloads_of_different_places_are_not_added() -> None:
    pair = parse_pair("randomk")
    assert pair.adder is not None
    payloads = [encode(pair.push, gauss(500, 0), dataclasses.replace(STREAM, step=step)) for step in (1, 2)]
    with pytest.raises(PayloadError, match=r"different keys.*PSGC_SEED"):
        pair.push.fold(payloads, 500, 0, 500, np.zeros(500, np.float32), True)
    with pytest.raises(PayloadError, match="different keys"):
        pair.adder.add(payloads, 500, np.zeros(pair.push.payload_bound(500), np.uint8), True)
    with pytest.raises(PayloadError, match="different keys"):
        pair.adder.add(payloads[:1], 500, payloads[1].copy(), False)


def test_servers_keep_no_residual_where_they_lose_nothing() -> None:
    pair = parse_pair("randomk:k=0.1")
    assert pair.canonical == "randomk:k=0.1"
    assert (pair.push.feedback, pair.pull.feedback) == (True, False)
    assert parse_pair("int8/randomk").pull.feedback
    assert parse_pair("int8/randomk").adder is None
    assert parse_pair("randomk/int8").adder is None


@pytest.mark.parametrize("text", ["randomk:k=0.1/randomk", "randomk/randomk:ef=0"])
def test_an_answer_with_other_parameters_is_refused(text: str) -> None:
    push, pull = text.split("/")
    with pytest.raises(CodecError, match=f"{pull} cannot answer {push}: "):
        parse_pair(text)
