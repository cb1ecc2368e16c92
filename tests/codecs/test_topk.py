"""`topk` chooses exactly, and its payload says where everything belongs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psgc.codecs.codec import Array, Bytes, Stream
from psgc.codecs.registry import parse_codec
from psgc.codecs.sparsify.elements import reference_encode
from psgc.codecs.sparsify.gaps import packed_bound, reference_packed, reference_unpacked
from psgc.codecs.sparsify.largest import reference_largest
from psgc.errors import CodecError, PayloadError

STREAM = Stream(0, 0, 0, 0)


def encode(text: str, grad: Array) -> Bytes:
    codec = parse_codec(text)
    out = np.zeros(codec.payload_bound(grad.size), np.uint8)
    return out[: codec.encode(grad, None, 1.0, STREAM, out).payload_bytes]


def sent(text: str, grad: Array) -> list[int]:
    """Indices that are sent."""
    payload = encode(text, grad)
    count = int(payload[:4].view(np.uint32)[0])
    return reference_unpacked(payload[4 + 4 * count :].tobytes(), count).tolist()


def test_of_equal_magnitudes_the_lowest_indices_are_sent() -> None:
    grad = np.array([1, -2, 2, 3, -2, 2], np.float32)
    assert sent("topk:k=3", grad) == [1, 2, 3]
    assert sent("topk:k=2", grad) == [1, 3]


@pytest.mark.parametrize("numel", [10, 5000, 100_000])
def test_where_all_are_equal_the_first_are_sent(numel: int) -> None:
    assert sent("topk:k=4", np.full(numel, -3, np.float32)) == [0, 1, 2, 3]


@pytest.mark.parametrize("numel", [100, 20_000])
def test_where_too_few_are_not_zero_the_first_zeros_are_sent_too(numel: int) -> None:
    grad = np.zeros(numel, np.float32)
    grad[[7, 50]] = [1, -1e-45]
    assert sent("topk:k=5", grad) == [0, 1, 2, 7, 50]


@pytest.mark.parametrize("k", [1, 2, 100, 5000, 19_999, 20_000])
def test_a_sample_that_misleads_does_not_change_the_choice(k: int) -> None:
    rng = np.random.default_rng(0)
    grad = rng.standard_normal(20_000).astype(np.float32) * np.float32(1e-20)
    grad[10_000:10_050] = rng.standard_normal(50)  # a burst that a sparse sample overlooks
    assert encode(f"topk:k={k}", grad).tobytes() == reference_encode(grad, reference_largest(grad, k))


@pytest.mark.parametrize("period", [2, 64, 78, 128, 1024])
def test_columns_that_line_up_with_the_sample_do_not_change_the_choice(period: int) -> None:
    grad = np.random.default_rng(1).standard_normal(80_000).astype(np.float32)
    grad[::period] *= 100
    for k in (1, 80, 800, 40_000):
        assert encode(f"topk:k={k}", grad).tobytes() == reference_encode(grad, reference_largest(grad, k))


def test_what_is_sent_leaves_nothing_in_the_residual_and_the_rest_all() -> None:
    codec, rng = parse_codec("topk"), np.random.default_rng(2)
    grad, residual = rng.standard_normal(30_000).astype(np.float32), rng.standard_normal(30_000).astype(np.float32)
    p = grad + np.float32(0.5) * residual
    out = np.zeros(codec.payload_bound(30_000), np.uint8)
    payload = out[: codec.encode(grad, residual, 0.5, STREAM, out).payload_bytes]
    codec.commit(payload, 30_000, 0, 30_000, grad, residual, 0.5)
    decoded = np.empty(30_000, np.float32)
    codec.decode(payload, 30_000, 0, 30_000, decoded)
    assert np.count_nonzero(decoded) == 300
    assert (residual[decoded != 0] == 0).all()
    assert np.array_equal(residual[decoded == 0], p[decoded == 0])


@settings(deadline=None)
@given(st.sets(st.integers(0, 1 << 20), min_size=1, max_size=400))
def test_packed_indices_come_back_within_their_bound(chosen: set[int]) -> None:
    indices = np.array(sorted(chosen))
    packed = reference_packed(indices)
    assert reference_unpacked(packed, indices.size).tolist() == indices.tolist()
    assert len(packed) <= packed_bound(indices.size, int(indices[-1]) + 1)


@pytest.mark.parametrize("count", [1, 2, 127, 128, 129, 1000])
def test_the_bound_holds_for_the_widest_gaps(count: int) -> None:
    for gap in (0, 1, 2, 3, 127, 128, 255, 256, 100_003):
        one_wide_in_each_block = np.cumsum(np.where(np.arange(count) % 128 == 127, gap + 1, 1)) - 1
        all_alike = np.arange(1, count + 1) * (gap + 1) - 1
        for indices in (one_wide_in_each_block, all_alike):
            assert len(reference_packed(indices)) <= packed_bound(count, int(indices[-1]) + 1)


@pytest.mark.parametrize("text", ["topk", "topk:select=sampled", "topk:select=mstopk"])
def test_an_index_of_a_random_subset_costs_at_most_a_fifth_more_than_its_entropy(text: str) -> None:
    payload = encode(text, np.random.default_rng(8).standard_normal(1 << 20).astype(np.float32))
    count = int(payload[:4].view(np.uint32)[0])
    share = count / (1 << 20)
    entropy = -np.log2(share) - (1 - share) / share * np.log2(1 - share)  # bits an index: 8.08 for one in a hundred
    assert 8 * (payload.size - 4 - 4 * count) / count < 1.2 * entropy


NUMEL = 300


def good_payload() -> Bytes:
    return encode("topk:k=130", np.random.default_rng(4).standard_normal(NUMEL).astype(np.float32))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda p: p.__setitem__(slice(0, 4), np.frombuffer(np.uint32(131).tobytes(), np.uint8)),
        lambda p: p.__setitem__(slice(0, 4), 255),
        lambda p: p.__setitem__(4 + 4 * 130, 33),
        lambda p: p.__setitem__(4 + 4 * 130, 255),
        lambda p: p.__setitem__(4 + 4 * 130, p[4 + 4 * 130] + 1),
        lambda p: p.__setitem__(4 + 4 * 130 + 1, 32),
        lambda p: p.__setitem__(slice(4 + 4 * 130 + 2, None), 255),
    ],
    ids=["one more value", "billions of values", "width 33", "width 255", "wider block", "widest last block", "indices past the end"],
)
def test_a_payload_whose_structure_is_wrong_is_refused(spoil: Callable[[Bytes], None]) -> None:
    payload, codec = good_payload(), parse_codec("topk:k=130")
    codec.validate(payload, NUMEL)
    spoil(payload)
    with pytest.raises(PayloadError, match="topk payload of 300 elements"):
        codec.validate(payload, NUMEL)


def test_a_payload_of_another_k_is_refused() -> None:
    with pytest.raises(PayloadError, match="131 values"):
        parse_codec("topk:k=131").validate(good_payload(), NUMEL)


def test_a_warm_up_sends_more_at_first_and_ends_with_k() -> None:
    codec, numel, generator = parse_codec("topk:k=0.001,warmup=8"), 10_000, np.random.default_rng(3)
    p, out, counts = generator.standard_normal(numel, np.float32), np.empty(codec.payload_bound(numel), np.uint8), []
    for step in range(1, 11):
        stream = Stream(0, step, 0, 0)
        payload = out[: codec.encode(p, None, 1.0, stream, out).payload_bytes]
        codec.validate(payload, numel)
        assert payload.tobytes() == codec.reference_payload(p, stream)
        counts.append(int(payload[:4].view(np.uint32)[0]))
    assert counts == [2500, 2500, 625, 625, 157, 157, 40, 40, 10, 10]
    assert parse_codec("topk:warmup=0").canonical == "topk"
    with pytest.raises(CodecError, match="parameter warmup is a whole number from 0"):
        parse_codec("topk:warmup=-1")


def test_a_warm_up_never_sends_less_than_k() -> None:
    codec, p = parse_codec("topk:k=0.1,warmup=4"), np.arange(1, 1001, dtype=np.float32)
    sent = []
    for step in range(1, 6):
        out = np.empty(codec.payload_bound(p.size), np.uint8)
        codec.encode(p, None, 1.0, Stream(0, step, 0, 0), out)
        sent.append(int(out[:4].view(np.uint32)[0]))
    assert sent == [250, 100, 100, 100, 100]
