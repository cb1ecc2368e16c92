"""Schemes of several rounds, and relay: every worker decodes the same, and nothing that was not sent is lost."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from psgc.codecs import BucketContext, Stream, parse_scheme
from psgc.codecs.codec import DTYPES, F32, Bytes
from psgc.codecs.common.definitions import reference_encode, reference_fold
from psgc.codecs.dithering import DitheringCodec
from psgc.codecs.powersgd import PowerSgdScheme
from psgc.codecs.registry import parse_codec
from psgc.codecs.relay import join_payloads, split_payloads
from psgc.codecs.scheme import PairScheme
from psgc.codecs.shared import reference_step
from psgc.errors import CodecError, PayloadError
from tests.cases import for_each
from tests.codecs.workers import RESCALE, Workers, conservation

Values = Callable[..., F32]
SHAPES = ((40, 30), (7,), (16, 3, 5, 5), (2, 2), (64, 64))


@pytest.mark.parametrize("text", ["shared", "shared:ef=0"])
@for_each(numel=[1, 255, 257, 4097, 20000], workers=[1, 3, 9], mean=[True, False])
def test_shared_integers_are_the_definitions(text: str, numel: int, workers: int, mean: bool, values: Values) -> None:
    job = Workers(text, numel, workers, mean=mean)
    for step in range(3):
        grads = [values(("gauss", "heavy", "wide")[step], numel, seed=7 * step + rank) for rank in range(workers)]
        grads = [np.clip(grad, -1e30, 1e30) for grad in grads]
        residuals = [r.copy() for r in job.residuals if r is not None] or None
        got = job.synchronise(grads)
        wanted, kept = reference_step(grads, residuals, RESCALE, [job.stream(rank) for rank in range(workers)], workers if mean else 1)
        assert all(target.tobytes() == wanted.tobytes() for target in got)
        for residual, left in zip(job.residuals, kept, strict=False):
            assert residual is not None
            assert residual.tobytes() == left.tobytes()


def test_shared_sums_grow_wider_with_the_workers() -> None:
    assert parse_scheme("shared", BucketContext(workers=258)).rounds(100)[1].pair.pull.payload_bound(100) == 200
    assert parse_scheme("shared", BucketContext(workers=259)).rounds(100)[1].pair.pull.payload_bound(100) == 400
    with pytest.raises(CodecError, match="do not fit 32 bits"):
        parse_scheme("shared", BucketContext(workers=1 << 25))


def test_the_sum_of_258_full_scale_codes_fits_16_bits() -> None:
    job = Workers("shared", 300, 258, mean=False)
    got = job.synchronise([np.ones(300, np.float32)] * 258)
    assert np.allclose(got[0], 258, rtol=1e-6)


def test_stochastic_shared_integers_are_unbiased(values: Values) -> None:
    job, grads = Workers("shared:ef=0", 256, 2), [values("gauss", 256, seed=rank) for rank in range(2)]
    steps = 2000
    mean = np.mean([job.synchronise(grads)[0] for _ in range(steps)], axis=0)
    step = max(np.abs(grad).max() for grad in grads) / 127
    # each draw errs by at most one step: Hoeffding over 256 elements at 1e-6
    assert np.abs(mean - np.mean(grads, axis=0)).max() < step * np.sqrt(np.log(2 * 256 / 1e-6) / steps)


@pytest.mark.parametrize("text", ["shared", "powersgd:rank=2", "onebit/relay", "topk:k=0.1/relay", "int8/relay"])
def test_what_is_not_applied_is_kept(text: str, values: Values) -> None:
    numel = sum(int(np.prod(shape)) for shape in SHAPES)
    job = Workers(text, numel, 3, shapes=SHAPES)
    for step in range(4):
        grads = [values("gauss", numel, seed=10 * step + rank) for rank in range(3)]
        before = [r.copy() for r in job.residuals if r is not None]
        got = job.synchronise(grads)
        assert all(target.tobytes() == got[0].tobytes() for target in got)
        assert conservation(job, grads, before, got[0]) < 2e-5


@pytest.mark.parametrize("text", ["shared", "powersgd:rank=2", "onebit/relay"])
def test_a_skipped_steps_payload_goes_back_to_the_residual(text: str, values: Values) -> None:
    numel = sum(int(np.prod(shape)) for shape in SHAPES)
    job = Workers(text, numel, 2, shapes=SHAPES)
    grads = [values("gauss", numel, seed=rank) for rank in range(2)]
    job.synchronise(grads)
    for rank, state in enumerate(job.states):
        residual = job.residuals[rank]
        assert residual is not None
        state.add_back(job.sent[rank], residual)
        assert np.abs(residual - grads[rank]).max() < 1e-5


@pytest.mark.parametrize("push", ["onebit", "int8:ef=0", "bf16", "topk"])
@pytest.mark.parametrize("workers", [2, 11])
def test_relayed_payloads_are_summed_in_blocks_of_eight(push: str, workers: int, values: Values) -> None:
    job = Workers(f"{push}/relay", 70001, workers)
    grads = [values("gauss", 70001, seed=rank) for rank in range(workers)]
    got = job.synchronise(grads)
    codec = parse_scheme(push).rounds(1)[0].pair.push
    stored = [reference_encode(codec, grad, None, 1.0, job.stream(rank)) for rank, grad in enumerate(grads)]
    total = None
    for first in range(0, workers, 8):
        total = reference_fold(codec, stored[first : first + 8], 70001, total)
    assert total is not None
    assert got[0].tobytes() == (total / np.float32(workers)).astype(np.float32).tobytes()


@pytest.mark.parametrize("damage", [lambda a: a[:3], lambda a: a[:-1], lambda a: a[:6], lambda a: np.append(a, a[:1]), lambda a: a * 0])
def test_a_relayed_answer_that_is_none_is_refused(damage: Callable[[Bytes], Bytes]) -> None:
    out = np.zeros(100, np.uint8)
    answer = out[: join_payloads([np.ones(5, np.uint8), np.ones(7, np.uint8)], out)].copy()
    assert [part.size for part in split_payloads(answer, 2)] == [5, 7]
    with pytest.raises(PayloadError, match="relayed answer"):
        split_payloads(damage(answer), 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("powersgd:rank=0", "rank is a whole number from 1 to 64, not '0'"),
        ("powersgd:rank=x", "not 'x'"),
        ("powersgd:r=1", "unknown parameter 'r'"),
        ("shared:bits=8", "unknown parameter 'bits'"),
        ("shared/int8", "answers by a rule of its own"),
        ("relay", "codec relay|unknown codec 'relay'"),
        ("none/relay", "carries floats"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(text: str, words: str) -> None:
    with pytest.raises(CodecError, match=words):
        parse_scheme(text, BucketContext("float64" if text == "none/relay" else "float32"))


@pytest.mark.parametrize("text", ["shared", "shared:ef=0", "powersgd", "powersgd:ef=0,rank=2", "onebit/relay"])
def test_the_canonical_text_means_the_same(text: str) -> None:
    assert parse_scheme(parse_scheme(text).canonical).canonical == parse_scheme(text).canonical == text


@pytest.mark.parametrize("dtype", ["float64", "int32"])
@pytest.mark.parametrize("text", ["shared", "powersgd"])
def test_only_16_and_32_bit_floats_are_carried(text: str, dtype: str) -> None:
    with pytest.raises(CodecError, match=f"not {dtype}"):
        parse_scheme(text, BucketContext(dtype))


@pytest.mark.parametrize("text", ["shared", "powersgd"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_is_not_finite_is_flagged_in_the_first_round(text: str, poison: float, values: Values) -> None:
    scheme = parse_scheme(text, BucketContext(shapes=((40, 30),)))
    state, grad = scheme.new_state(1200), values("gauss", 1200)
    grad[700] = poison
    round_ = scheme.rounds(1200)[0]
    out = np.zeros(round_.pair.push.payload_bound(round_.numel), np.uint8)
    assert state.encode(0, grad, None, 1.0, Stream(0, 1, 0, 0), out).nonfinite


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize(
    ("workers", "size", "flagged"), [(2, 3e38, True), (2, 1.6e38, False), (9, 3e38, True), (9, 4e37, True), (9, 3e37, False)]
)
def test_shared_sums_beyond_float32_are_flagged_in_the_first_round(workers: int, size: float, flagged: bool, mean: bool) -> None:
    job = Workers("shared", 300, workers, mean=mean)
    grads = [np.full(300, size if rank % 2 else 1.0, np.float32) for rank in range(workers)]
    first = job.scheme.rounds(300)[0]
    out = np.zeros(first.pair.push.payload_bound(first.numel), np.uint8)
    for rank, (state, grad) in enumerate(zip(job.states, grads, strict=True)):
        assert not state.encode(0, grad, None, 1.0, job.stream(rank), out).nonfinite, "each is finite by itself"
    got = job.synchronise(grads)
    assert job.nonfinite is flagged
    if not flagged:
        assert np.isfinite(got[0]).all()


def test_shared_flags_all_that_overflows(values: Values) -> None:
    for seed in range(20):
        job = Workers("shared", 600, 3)
        grads = [values("huge", 600, seed=3 * seed + rank) * np.float32(0.2 + 0.01 * seed) for rank in range(3)]
        with np.errstate(over="ignore"):
            got = job.synchronise(grads)
        assert job.nonfinite or np.isfinite(got[0]).all(), seed


@pytest.mark.parametrize("text", ["int8", "onebit/int8", "onebit/relay", "shared", "powersgd"])
@pytest.mark.parametrize("numel", [-1, 0, 1 << 31])
def test_a_part_has_some_elements_and_no_more_than_kernels_count(text: str, numel: int) -> None:
    with pytest.raises(CodecError, match=f"codec {text}: a part has 1 to 2147483647 elements, not {numel}"):
        parse_scheme(text).new_state(numel)


@pytest.mark.parametrize("make", [lambda: PowerSgdScheme(rank=0), lambda: PowerSgdScheme(rank=65), lambda: DitheringCodec(k=0)])
def test_constructors_refuse_what_the_text_form_refuses(make: Callable[[], object]) -> None:
    with pytest.raises(CodecError, match=r"parameter (rank|k) is a whole number from 1 to"):
        make()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_none_pairs_with_lossy_codecs_in_parts_of_16_bits_and_loses_nothing_there(dtype: str) -> None:
    """Both codecs of a pair are handed one array: float32, though `none` by itself carries parts of 16 bits as they are."""
    numel = 10_001
    none = parse_codec("none", dtype)
    own = torch.from_numpy(np.random.default_rng(5).standard_normal(numel)).to(
        getattr(torch, dtype)
    )  # what an array of that dtype may hold
    values = own.to(torch.float32).numpy()
    for text in ("int8/none", "onebit/none", "none/int8", "bf16/none"):
        scheme = parse_scheme(text, BucketContext(dtype))
        assert isinstance(scheme, PairScheme)
        assert scheme.array_dtype == np.float32, text
        push, pull = scheme.pair.push, scheme.pair.pull
        pushed, answer = np.zeros(push.payload_bound(numel), np.uint8), np.zeros(pull.payload_bound(numel), np.uint8)
        state = scheme.new_state(numel)
        residual = np.zeros(numel, np.float32) if push.feedback else None
        state.encode(0, values.copy(), residual, 1.0, Stream(0, 0, 0, 0), pushed)
        if push.name == "none":
            assert pushed.tobytes() == own.view(torch.uint8).numpy().tobytes(), text
        target = values.copy()
        pull.encode(values, None, 1.0, Stream(0, 0, 0, 0), answer)
        state.apply(answer, [pushed], target, residual, 1.0)
        if pull.name == "none":
            assert np.array_equal(target, values) and none.array_dtype == np.dtype(DTYPES[dtype]), text
