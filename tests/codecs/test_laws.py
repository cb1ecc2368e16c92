"""Laws that every codec keeps, whatever its payload."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from psgc.codecs.codec import BLOCK, Array, Bytes, Codec, Stream
from psgc.codecs.common.definitions import reference_commit, reference_decode, reference_encode, reference_finish, reference_fold
from psgc.codecs.common.payloads import reference_sum
from psgc.codecs.registry import parse_codec, registered_codecs
from psgc.errors import PayloadError
from tests.cases import for_each
from tests.codecs.lawful import CODECS

SIZES = [1, 7, 8, 9, 63, 255, 256, 257, 4095, 4096, 4097, 70001]
SIGNS_ALONE = ("onebit:ef=0,scale=unit",)  # they have no zero
LOSSY = [text for text in CODECS if parse_codec(text).flags_nonfinite]
FEEDBACK = [text for text in CODECS if parse_codec(text).feedback]
BLOCKWISE = [text for text in CODECS if parse_codec(text).chunk]
CUTTABLE = [text for text in CODECS if parse_codec(text).cut_anywhere]
EXACT = ("topk", "blocktopk", "randomk")  # what they send they send as it is
VARYING = ("topk", "blocktopk")  # in their payloads' length
STREAM = Stream(seed=7, step=3, rank=1, bucket=2, first=4096)
RESCALE = 0.3

Values = Callable[..., Array]
Guarded = Callable[[bytes | Bytes], Bytes]


def encode(codec: Codec, grad: Array, residual: Array | None = None, stream: Stream = STREAM) -> Bytes:
    out = np.full(codec.payload_bound(grad.size) + 9, 0xA5, np.uint8)
    written = codec.encode(grad, residual, RESCALE, stream, out[1:-8]).payload_bytes
    assert written <= out.size - 9
    assert (out[1 + written :][-8:] == 0xA5).all(), "wrote past the bound"
    return out[1 : 1 + written]


def decode(codec: Codec, payload: Bytes, numel: int) -> Array:
    out = np.full(numel, 77, codec.array_dtype)
    codec.decode(payload, numel, 0, numel, out)
    return out


def fold(codec: Codec, payloads: list[Bytes], numel: int, acc: Array | None = None) -> Array:
    total = np.full(numel, 77, codec.acc_dtype) if acc is None else acc.copy()
    codec.fold(payloads, numel, 0, numel, total, acc is None)
    return total


def finish(
    codec: Codec, acc: Array, divisor: int, residual: Array | None, step: int | None = None, stream: Stream = STREAM
) -> tuple[bytes, Array | None]:
    """Finish in slices of ``step`` elements, by default the whole part at once."""
    numel = acc.size
    out = np.zeros(codec.payload_bound(numel), np.uint8)
    kept = None if residual is None else np.full(numel, 77, np.float32)
    for lo in range(0, numel, step or numel):
        cut = slice(lo, min(lo + (step or numel), numel))
        written = codec.finish(
            acc[cut].copy(), numel, cut.start, cut.stop, divisor, None if residual is None else residual[cut],
            None if kept is None else kept[cut], RESCALE, stream, out,
        ).payload_bytes  # fmt: skip
    return out[:written].tobytes(), kept


def residual_for(codec: Codec, values: Values, numel: int) -> Array | None:
    return values("gauss", numel, seed=9) if codec.feedback else None


@pytest.mark.parametrize("text", CODECS)
@for_each(numel=SIZES)
def test_encode_writes_the_definitions_bytes(text: str, numel: int, kinds: tuple[str, ...], values: Values) -> None:
    for kind in kinds:
        codec, grad = parse_codec(text), values(kind, numel)
        residual = residual_for(codec, values, numel) if kind == "gauss" else None
        assert encode(codec, grad, residual).tobytes() == reference_encode(codec, grad, residual, RESCALE, STREAM)


@pytest.mark.parametrize("text", CODECS)
@for_each(numel=SIZES)
def test_decode_gives_the_definitions_elements(text: str, numel: int, kinds: tuple[str, ...], values: Values) -> None:
    for kind in kinds:
        codec = parse_codec(text)
        payload = encode(codec, values(kind, numel))
        assert decode(codec, payload, numel).tobytes() == reference_decode(codec, payload.tobytes(), numel).astype(np.float32).tobytes()


@pytest.mark.parametrize("text", CODECS)
@for_each(numel=SIZES)
def test_fold_adds_left_to_right_in_float32(text: str, numel: int, values: Values) -> None:
    codec, before = parse_codec(text), values("gauss", numel, seed=99)
    payloads = [encode(codec, np.clip(values("wide", numel, seed=i), -1e3, 1e3)) for i in range(8)]
    terms = [codec.reference_elements(payload.tobytes(), numel) for payload in payloads]
    assert reference_sum(terms, None).tobytes() == reference_fold(codec, [payload.tobytes() for payload in payloads], numel, None).tobytes()
    for count in (1, 2, 3, 4, 5, 8):
        assert fold(codec, payloads[:count], numel).tobytes() == reference_sum(terms[:count], None).tobytes()
        assert fold(codec, payloads[:count], numel, before).tobytes() == reference_sum(terms[:count], before).tobytes()


@pytest.mark.parametrize("text", CODECS)
@for_each(numel=SIZES)
def test_finish_writes_the_definitions_bytes_and_residual(text: str, numel: int, kinds: tuple[str, ...], values: Values) -> None:
    for turn, kind in enumerate(kinds):
        codec, acc, divisor = parse_codec(text), values(kind, numel), (1, 3)[turn % 2]
        residual = residual_for(codec, values, numel)
        payload, kept = finish(codec, acc, divisor, residual)
        wanted_payload, wanted_kept = reference_finish(codec, acc, divisor, residual, RESCALE, STREAM)
        assert payload == wanted_payload
        assert (kept is None) == (wanted_kept is None)
        if kept is not None and wanted_kept is not None:
            assert kept.tobytes() == wanted_kept.tobytes()


@pytest.mark.parametrize("text", CODECS)
@for_each(push=["itself", "topk:k=0.9", "topk:select=sampled", "int8"], numel=[9, 70001])
def test_fold_and_finish_do_at_once_what_they_do_in_turn(push: str, text: str, numel: int, values: Values) -> None:
    codec, sender = parse_codec(text), parse_codec(text if push == "itself" else push)
    residual = residual_for(codec, values, numel)
    payloads = [encode(sender, values("gauss", numel, seed=i)) for i in range(5)]
    out, kept = np.zeros(codec.payload_bound(numel), np.uint8), None if residual is None else np.full(numel, 77, np.float32)
    encoded = codec.fold_and_finish(sender, payloads, numel, 3, residual, kept, RESCALE, STREAM, out)
    if encoded is not None:
        payload, left = finish(codec, fold(sender, payloads, numel), 3, residual)
        assert out[: encoded.payload_bytes].tobytes() == payload
        assert kept is None or (left is not None and kept.tobytes() == left.tobytes())


@pytest.mark.parametrize("text", FEEDBACK)
@for_each(numel=SIZES)
def test_commit_leaves_the_definitions_residual(text: str, numel: int, kinds: tuple[str, ...], values: Values) -> None:
    for kind in kinds:
        codec, grad, residual = parse_codec(text), values(kind, numel), values("gauss", numel, seed=5)
        payload = encode(codec, grad, residual)
        wanted = reference_commit(codec, payload.tobytes(), grad, residual, RESCALE)
        codec.commit(payload, numel, 0, numel, grad, residual, RESCALE)
        assert residual.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("text", CODECS)
def test_encode_changes_neither_gradient_nor_residual(text: str, values: Values) -> None:
    codec, grad = parse_codec(text), values("gauss", 5000)
    residual = residual_for(codec, values, 5000)
    grad.setflags(write=False)
    if residual is not None:
        residual.setflags(write=False)
    encode(codec, grad, residual)  # both are read-only: writing raises


def assert_within_one_ulp(sent: Array, kept: Array, p: Array) -> None:
    error = np.abs(sent.astype(np.float64) + kept.astype(np.float64) - p.astype(np.float64))
    exponent = np.frexp(np.maximum(np.abs(p), np.abs(sent)).astype(np.float64))[1]
    assert (error <= np.ldexp(1.0, np.maximum(exponent - 24, -149))).all()


@pytest.mark.parametrize("text", FEEDBACK)
@for_each(numel=SIZES)
def test_what_is_not_sent_stays_in_the_residual(text: str, numel: int, kinds: tuple[str, ...], values: Values) -> None:
    for kind in kinds:
        codec, grad, residual = parse_codec(text), values(kind, numel), values("gauss", numel, seed=5)
        p = grad + np.float32(RESCALE) * residual
        payload = encode(codec, grad, residual)
        codec.commit(payload, numel, 0, numel, grad, residual, RESCALE)
        sent = decode(codec, payload, numel)
        if codec.name in EXACT:
            assert np.array_equal(sent + residual, p)
        else:
            assert_within_one_ulp(sent, residual, p)


@pytest.mark.parametrize("text", FEEDBACK)
@for_each(numel=SIZES)
def test_what_the_server_does_not_send_stays_in_its_residual(text: str, numel: int, values: Values) -> None:
    codec, acc, residual = parse_codec(text), values("heavy", numel), values("gauss", numel, seed=5)
    p = acc / np.float32(3) + np.float32(RESCALE) * residual
    payload, kept = finish(codec, acc, 3, residual)
    assert kept is not None
    assert_within_one_ulp(decode(codec, np.frombuffer(payload, np.uint8), numel), kept, p)


@pytest.mark.parametrize("text", BLOCKWISE)
@for_each(numel=[4097, 70001], step=[BLOCK, 3 * BLOCK, 65536])
def test_slices_do_not_change_any_byte(text: str, numel: int, step: int, values: Values) -> None:
    codec, acc = parse_codec(text), values("heavy", numel)
    residual = residual_for(codec, values, numel)
    payloads = [encode(codec, values("gauss", numel, seed=i)) for i in range(3)]
    whole, kept = finish(codec, acc, 3, residual)
    sliced, sliced_kept = finish(codec, acc, 3, residual, step)
    assert sliced == whole
    assert kept is None or (sliced_kept is not None and sliced_kept.tobytes() == kept.tobytes())
    elements, total, committed = np.empty(numel, np.float32), np.empty(numel, np.float32), values("gauss", numel, seed=9)
    for lo in range(0, numel, step):
        cut = slice(lo, min(lo + step, numel))
        codec.decode(payloads[0], numel, cut.start, cut.stop, elements[cut])
        codec.fold(payloads, numel, cut.start, cut.stop, total[cut], True)
        if codec.feedback:
            codec.commit(payloads[0], numel, cut.start, cut.stop, acc[cut], committed[cut], RESCALE)
    assert elements.tobytes() == decode(codec, payloads[0], numel).tobytes()
    assert total.tobytes() == fold(codec, payloads, numel).tobytes()
    if residual is not None:
        assert committed.tobytes() == reference_commit(codec, payloads[0].tobytes(), acc, residual, RESCALE).tobytes()


@pytest.mark.parametrize("text", CODECS)
def test_encode_and_finish_write_the_same_bytes(text: str, values: Values) -> None:
    codec, grad = parse_codec(text), values("heavy", 70001)
    residual = residual_for(codec, values, 70001)
    assert finish(codec, grad, 1, residual)[0] == encode(codec, grad, residual).tobytes()


@pytest.mark.parametrize("text", CUTTABLE)
@for_each(cut=[BLOCK, 5 * BLOCK])
def test_cutting_a_bucket_between_blocks_changes_no_element(text: str, cut: int, values: Values) -> None:
    """Nor what is left of it, nor what a server answers with."""
    codec, grad = parse_codec(text), values("heavy", 40001)
    tail = STREAM.at(STREAM.step, first=STREAM.first + cut)

    def found(lo: int, hi: int, stream: Stream) -> list[Array]:
        residual = values("gauss", grad.size)[lo:hi].astype(np.float32) if codec.feedback else None
        kept = None if residual is None else residual.copy()
        payload = encode(codec, grad[lo:hi], kept, stream)
        elements = decode(codec, payload, hi - lo)
        if residual is not None and kept is not None:
            codec.commit(payload, hi - lo, 0, hi - lo, grad[lo:hi], kept, RESCALE)
        answer, left = finish(codec, fold(codec, [payload, payload], hi - lo), 2, residual, stream=stream)
        back = decode(codec, np.frombuffer(answer, np.uint8), hi - lo)
        return [elements, back, *(one for one in (kept, left) if one is not None)]

    whole, head, rest = found(0, grad.size, STREAM), found(0, cut, STREAM), found(cut, grad.size, tail)
    for of_whole, of_head, of_rest in zip(whole, head, rest, strict=True):
        assert np.concatenate([of_head, of_rest]).tobytes() == of_whole.tobytes()


@pytest.mark.parametrize("text", [text for text in CODECS if text not in SIGNS_ALONE])
@for_each(numel=SIZES)
def test_zeros_come_back_as_zeros(text: str, numel: int) -> None:
    codec = parse_codec(text)
    assert not decode(codec, encode(codec, np.zeros(numel, np.float32)), numel).any()


@pytest.mark.parametrize("text", LOSSY)
@for_each(numel=SIZES, poison=[np.nan, np.inf, -np.inf], where=[0, -1])
def test_one_nan_or_infinity_is_flagged_and_the_payload_is_still_well_formed(
    text: str, numel: int, poison: float, where: int, values: Values
) -> None:
    codec, grad = parse_codec(text), values("gauss", numel)
    out = np.zeros(codec.payload_bound(numel), np.uint8)
    assert not codec.encode(grad, None, 1.0, STREAM, out).nonfinite
    grad[where] = poison
    encoded = codec.encode(grad, None, 1.0, STREAM, out)
    assert encoded.nonfinite
    codec.validate(out[: encoded.payload_bytes], numel)
    lo = max(0, (numel - 1) // codec.chunk * codec.chunk) if codec.chunk and where == -1 else 0
    hi = min(numel, lo + codec.chunk) if codec.chunk else numel
    kept = np.zeros(hi - lo, np.float32) if codec.feedback else None
    old = None if kept is None else kept.copy()
    assert codec.finish(grad[lo:hi].copy(), numel, lo, hi, 2, old, kept, 1.0, STREAM, out).nonfinite


@pytest.mark.parametrize("text", FEEDBACK)
def test_a_residual_that_is_not_finite_is_flagged_too(text: str, values: Values) -> None:
    codec, residual = parse_codec(text), values("gauss", 100)
    residual[50] = np.inf
    assert codec.encode(values("gauss", 100), residual, 1.0, STREAM, np.zeros(codec.payload_bound(100), np.uint8)).nonfinite


@pytest.mark.parametrize("text", CODECS)
@for_each(numel=SIZES)
def test_finite_input_never_decodes_to_nan_or_infinity(text: str, numel: int, kinds: tuple[str, ...], values: Values) -> None:
    for kind in kinds:
        codec, grad = parse_codec(text), values(kind, numel)
        if codec.name == "fp16":
            grad = np.clip(grad, -65504, 65504)
        if codec.name == "bf16":
            grad = np.clip(grad, -3.38e38, 3.38e38)
        out = np.zeros(codec.payload_bound(numel), np.uint8)
        assert not codec.encode(grad, None, 1.0, STREAM, out).nonfinite
        assert np.isfinite(decode(codec, encode(codec, grad), numel)).all()


@pytest.mark.parametrize("text", CODECS)
@for_each(numel=SIZES)
def test_kernels_stay_within_every_buffer_and_take_read_only_payloads(text: str, numel: int, values: Values, guarded: Guarded) -> None:
    codec, grad = parse_codec(text), guarded(values("gauss", numel).view(np.uint8)).view(np.float32)
    residual = None if not codec.feedback else guarded(values("gauss", numel, seed=1).view(np.uint8)).view(np.float32)
    kept = None if residual is None else guarded(np.zeros(4 * numel, np.uint8)).view(np.float32)
    out = guarded(np.zeros(codec.payload_bound(numel), np.uint8))
    payload = guarded(out[: codec.encode(grad, residual, RESCALE, STREAM, out).payload_bytes])
    payload.setflags(write=False)
    codec.validate(payload, numel)
    acc = guarded(np.zeros(4 * numel, np.uint8)).view(np.float32)
    codec.decode(payload, numel, 0, numel, acc)
    codec.fold([payload] * 5, numel, 0, numel, acc, True)
    codec.fold([payload], numel, 0, numel, acc, False)
    codec.finish(acc, numel, 0, numel, 2, residual, kept, RESCALE, STREAM, out)
    if residual is not None:
        codec.commit(payload, numel, 0, numel, grad, residual, RESCALE)


@pytest.mark.parametrize("text", CODECS)
@for_each(numel=[1, 9, 257, 4097])
def test_a_payload_of_another_length_is_refused(text: str, numel: int, values: Values) -> None:
    codec = parse_codec(text)
    payload = encode(codec, values("gauss", numel))
    codec.validate(payload, numel)
    for wrong in (payload[:-1], payload[:0], payload[: payload.size // 2], np.append(payload, np.uint8(0))):
        with pytest.raises(PayloadError, match=codec.name):
            codec.validate(wrong, numel)


def run_everything_that_reads(codec: Codec, payload: Bytes, numel: int, guarded: Guarded) -> None:
    acc = guarded(np.zeros(4 * numel, np.uint8)).view(np.float32)
    codec.decode(payload, numel, 0, numel, acc)
    codec.fold([payload, payload], numel, 0, numel, acc, False)
    if codec.feedback:
        codec.commit(payload, numel, 0, numel, np.zeros(numel, np.float32), acc, 1.0)


@pytest.mark.parametrize("text", CODECS)
@for_each(numel=[9, 300, 4097])
def test_a_flipped_payload_is_refused_or_decodes_in_bounds(text: str, numel: int, values: Values, guarded: Guarded) -> None:
    codec = parse_codec(text)
    clean = encode(codec, values("gauss", numel))
    payload, rng = guarded(clean), np.random.default_rng(0)
    accepted = 0
    for place in range(0, clean.size, max(1, clean.size // 200)):
        payload[:] = clean
        payload[place] ^= np.uint8(1 << rng.integers(8))
        try:
            codec.validate(payload, numel)
        except PayloadError:
            continue
        accepted += 1
        if accepted % 8 == 0:
            run_everything_that_reads(codec, payload, numel, guarded)


@pytest.mark.parametrize("text", CODECS)
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_bytes_are_refused_or_decode_in_bounds(text: str, guarded: Guarded, data: st.DataObject) -> None:
    codec, numel = parse_codec(text), data.draw(st.sampled_from([1, 8, 9, 130, 257]))
    size = data.draw(st.sampled_from([codec.payload_bound(numel), codec.payload_bound(numel) - 1, 4, 0]))
    payload = guarded(data.draw(st.binary(min_size=size, max_size=size)))
    try:
        codec.validate(payload, numel)
    except PayloadError:
        return
    run_everything_that_reads(codec, payload, numel, guarded)


@pytest.mark.parametrize("text", CODECS)
@settings(deadline=None, max_examples=30)
@given(
    grad=hnp.arrays(np.float32, st.integers(1, 600), elements=st.floats(width=32)),
    rescale=st.floats(-4, 4, width=32),
)  # fmt: skip
def test_any_floats_encode_as_defined(text: str, grad: Array, rescale: float) -> None:
    codec = parse_codec(text)
    residual = grad[::-1].copy() if codec.feedback else None
    out = np.zeros(codec.payload_bound(grad.size), np.uint8)
    with np.errstate(all="ignore"):
        encoded = codec.encode(grad, residual, rescale, STREAM, out)
        p = grad if residual is None else grad + np.float32(rescale) * residual
        finite = bool(np.isfinite(p).all())
        assert encoded.nonfinite == (codec.flags_nonfinite and not finite)
        if finite or not codec.flags_nonfinite:
            assert out[: encoded.payload_bytes].tobytes() == reference_encode(codec, grad, residual, rescale, STREAM)


@pytest.mark.parametrize("text", CODECS)
def test_the_bound_is_kept_and_is_exact_for_fixed_sizes(text: str, kinds: tuple[str, ...], values: Values) -> None:
    for kind in kinds:
        codec = parse_codec(text)
        for numel in SIZES:
            size = encode(codec, values(kind, numel)).size
            assert size <= codec.payload_bound(numel)
            assert codec.name in VARYING or codec.name not in registered_codecs() or size == codec.payload_bound(numel)
