"""Schemes of several rounds, and relay: every worker decodes the same, and nothing that was not sent is lost."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from psgc.codecs import Scheme, Setting, Stream, Way, parse_scheme
from psgc.codecs.codec import F32, Bytes
from psgc.codecs.definitions import define_encode, define_fold
from psgc.codecs.dithering import DitheringCodec
from psgc.codecs.powersgd import PowerSgdScheme, define_product, orthonormalise
from psgc.codecs.relay import RelayCodec, join_payloads, split_payloads
from psgc.codecs.shared import define_step
from psgc.errors import CodecError, PayloadError

Values = Callable[..., F32]
RESCALE = 0.3
SHAPES = ((40, 30), (7,), (16, 3, 5, 5), (2, 2), (64, 64))


class Workers:
    """Some workers' ways through one part, and the server between them: what the protocol does, without it."""

    def __init__(self, text: str, numel: int, workers: int, *, mean: bool = True, shapes: tuple[tuple[int, ...], ...] = ()) -> None:
        self.scheme: Scheme = parse_scheme(text, Setting("float32", workers, mean, shapes))
        self.numel, self.count, self.mean = numel, workers, mean
        self.ways: list[Way] = [self.scheme.way(numel) for _ in range(workers)]
        self.residuals = [np.zeros(numel, np.float32) if self.scheme.feedback else None for _ in range(workers)]
        self.sent: list[list[Bytes]] = []
        self.step = 0

    def stream(self, rank: int) -> Stream:
        return Stream(seed=3, step=self.step, rank=rank, bucket=1)

    def synchronise(self, grads: list[F32]) -> list[F32]:
        """One step; what each worker's gradient becomes."""
        self.step += 1
        self.sent = [[] for _ in self.ways]
        targets = [grad.copy() for grad in grads]
        rounds = self.scheme.rounds(self.numel)
        for index, round_ in enumerate(rounds):
            for rank, way in enumerate(self.ways):
                out = np.zeros(round_.pair.push.payload_bound(round_.numel), np.uint8)
                encoded = way.encode(index, targets[rank], self.residuals[rank], RESCALE, self.stream(rank), out)
                assert not encoded.nonfinite
                round_.pair.push.validate(out[: encoded.payload_bytes], round_.numel)
                self.sent[rank].append(out[: encoded.payload_bytes])
            answer = self.answer(index)
            for rank, way in enumerate(self.ways):
                if index < len(rounds) - 1:
                    way.take(index, answer)
                else:
                    way.apply(answer, self.sent[rank], targets[rank], self.residuals[rank], RESCALE)
        return targets

    def answer(self, index: int) -> Bytes:
        round_ = self.scheme.rounds(self.numel)[index]
        push, pull = round_.pair.push, round_.pair.pull
        payloads = [sent[index] for sent in self.sent]
        out = np.zeros(pull.payload_bound(round_.numel), np.uint8)
        if isinstance(pull, RelayCodec):
            return out[: join_payloads(payloads, out)]
        acc = np.zeros(round_.numel, push.acc_dtype)
        for first in range(0, len(payloads), 8):
            push.fold(payloads[first : first + 8], round_.numel, 0, round_.numel, acc, first == 0)
        divisor = self.count if self.mean and round_.divides else 1
        encoded = pull.finish(acc, round_.numel, 0, round_.numel, divisor, None, None, 1.0, self.stream(99), out)
        return out[: encoded.payload_bytes]


@pytest.mark.parametrize("text", ["shared", "shared:ef=0"])
@pytest.mark.parametrize("numel", [1, 255, 257, 4097, 20000])
@pytest.mark.parametrize("workers", [1, 3, 9])
@pytest.mark.parametrize("mean", [True, False])
def test_shared_integers_are_the_definitions(text: str, numel: int, workers: int, mean: bool, values: Values) -> None:
    job = Workers(text, numel, workers, mean=mean)
    for step in range(3):
        grads = [values(("gauss", "heavy", "wide")[step], numel, seed=7 * step + rank) for rank in range(workers)]
        grads = [np.clip(grad, -1e30, 1e30) for grad in grads]
        residuals = [r.copy() for r in job.residuals if r is not None] or None
        got = job.synchronise(grads)
        wanted, kept = define_step(grads, residuals, RESCALE, [job.stream(rank) for rank in range(workers)], workers if mean else 1)
        assert all(target.tobytes() == wanted.tobytes() for target in got)
        for residual, left in zip(job.residuals, kept, strict=False):
            assert residual is not None
            assert residual.tobytes() == left.tobytes()


def test_shared_sums_grow_wider_with_the_workers() -> None:
    assert parse_scheme("shared", Setting(workers=258)).rounds(100)[1].pair.pull.payload_bound(100) == 200
    assert parse_scheme("shared", Setting(workers=259)).rounds(100)[1].pair.pull.payload_bound(100) == 400
    with pytest.raises(CodecError, match="do not fit 32 bits"):
        parse_scheme("shared", Setting(workers=1 << 25))


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


def conservation(job: Workers, grads: list[F32], before: list[F32], got: F32) -> float:
    """Largest difference between mean of what came in, and what came out plus what was kept."""
    came_in = np.mean([g.astype(np.float64) + np.float64(np.float32(RESCALE)) * r for g, r in zip(grads, before, strict=True)], axis=0)
    kept = np.mean([r.astype(np.float64) for r in job.residuals if r is not None], axis=0)
    return float(np.abs(came_in - got - kept).max())


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
    for rank, way in enumerate(job.ways):
        residual = job.residuals[rank]
        assert residual is not None
        way.add_back(job.sent[rank], residual)
        assert np.abs(residual - grads[rank]).max() < 1e-5


@pytest.mark.parametrize("push", ["onebit", "int8:ef=0", "bf16", "topk"])
@pytest.mark.parametrize("workers", [2, 11])
def test_relayed_payloads_are_summed_in_blocks_of_eight(push: str, workers: int, values: Values) -> None:
    job = Workers(f"{push}/relay", 70001, workers)
    grads = [values("gauss", 70001, seed=rank) for rank in range(workers)]
    got = job.synchronise(grads)
    codec = parse_scheme(push).rounds(1)[0].pair.push
    stored = [define_encode(codec, grad, None, 1.0, job.stream(rank)) for rank, grad in enumerate(grads)]
    total = None
    for first in range(0, workers, 8):
        total = define_fold(codec, stored[first : first + 8], 70001, total)
    assert total is not None
    assert got[0].tobytes() == (total / np.float32(workers)).astype(np.float32).tobytes()


@pytest.mark.parametrize("damage", [lambda a: a[:3], lambda a: a[:-1], lambda a: a[:6], lambda a: np.append(a, a[:1]), lambda a: a * 0])
def test_a_relayed_answer_that_is_none_is_refused(damage: Callable[[Bytes], Bytes]) -> None:
    out = np.zeros(100, np.uint8)
    answer = out[: join_payloads([np.ones(5, np.uint8), np.ones(7, np.uint8)], out)].copy()
    assert [part.size for part in split_payloads(answer, 2)] == [5, 7]
    with pytest.raises(PayloadError, match="relayed answer"):
        split_payloads(damage(answer), 2)


def test_powersgd_reconstructs_a_matrix_of_its_rank_in_one_step_and_vectors_always(values: Values) -> None:
    low = values("gauss", 60 * 2).reshape(60, 2) @ values("gauss", 50 * 2, seed=1).reshape(50, 2).T
    vector = values("gauss", 9, seed=2)
    grad = np.concatenate([low.reshape(-1), vector]).astype(np.float32)
    job = Workers("powersgd:rank=3", grad.size, 2, shapes=((60, 50), (9,)))
    got = job.synchronise([grad, grad])[0]
    assert np.abs(got - grad).max() < 1e-4
    assert got[-9:].tobytes() == vector.tobytes()


def test_powersgd_with_warm_start_comes_close_to_the_best_approximation(values: Values) -> None:
    rng = np.random.default_rng(0)
    left, right = np.linalg.qr(rng.standard_normal((80, 60)))[0], np.linalg.qr(rng.standard_normal((60, 60)))[0]
    matrix = (left * (0.7 ** np.arange(60))) @ right.T
    job = Workers("powersgd:rank=4,ef=0", matrix.size, 1, shapes=(matrix.shape,))
    grad = matrix.reshape(-1).astype(np.float32)
    for _ in range(20):
        got = job.synchronise([grad])[0]
    best = np.linalg.norm(0.7 ** np.arange(4, 60))
    assert np.linalg.norm(got - grad) < 1.01 * best


@pytest.mark.parametrize("rows", [1, 5, 300])
def test_orthonormalised_columns_are_orthonormal_or_zero(rows: int, values: Values) -> None:
    p = values("gauss", rows * 4).reshape(rows, 4).copy()
    p[:, 2] = p[:, 1]
    orthonormalise(p)
    gram = p.T @ p
    assert np.abs(gram - np.diag(np.round(np.diag(gram)))).max() < 1e-5
    assert not p[:, 2].any()


def test_the_product_is_summed_in_order(values: Values) -> None:
    job = Workers("powersgd:rank=3,ef=0", 40 * 30, 1, shapes=((40, 30),))
    got = job.synchronise([values("gauss", 1200)])[0]
    way = job.ways[0]
    p = way._p.reshape(40, 3)  # type: ignore[attr-defined]
    assert got.tobytes() == define_product(p, job.sent[0][1].view(np.float32).reshape(30, 3)).tobytes()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("powersgd:rank=0", "rank is a whole number from 1 to 64, not '0'"),
        ("powersgd:rank=x", "not 'x'"),
        ("powersgd:r=1", "unknown parameter 'r'"),
        ("shared:bits=8", "unknown parameter 'bits'"),
        ("shared/int8", "answers in its own way"),
        ("relay", "codec relay|unknown codec 'relay'"),
        ("none/relay", "carries floats"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(text: str, words: str) -> None:
    with pytest.raises(CodecError, match=words):
        parse_scheme(text, Setting("float64" if text == "none/relay" else "float32"))


@pytest.mark.parametrize("text", ["shared", "shared:ef=0", "powersgd", "powersgd:ef=0,rank=2", "onebit/relay"])
def test_the_canonical_text_means_the_same(text: str) -> None:
    assert parse_scheme(parse_scheme(text).canonical).canonical == parse_scheme(text).canonical == text


@pytest.mark.parametrize("dtype", ["float64", "int32"])
@pytest.mark.parametrize("text", ["shared", "powersgd"])
def test_only_16_and_32_bit_floats_are_carried(text: str, dtype: str) -> None:
    with pytest.raises(CodecError, match=f"not {dtype}"):
        parse_scheme(text, Setting(dtype))


@pytest.mark.parametrize("text", ["shared", "powersgd"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_is_not_finite_is_flagged_in_the_first_round(text: str, poison: float, values: Values) -> None:
    scheme = parse_scheme(text, Setting(shapes=((40, 30),)))
    way, grad = scheme.way(1200), values("gauss", 1200)
    grad[700] = poison
    round_ = scheme.rounds(1200)[0]
    out = np.zeros(round_.pair.push.payload_bound(round_.numel), np.uint8)
    assert way.encode(0, grad, None, 1.0, Stream(0, 1, 0, 0), out).nonfinite


@pytest.mark.parametrize("text", ["int8", "onebit/int8", "onebit/relay", "shared", "powersgd"])
@pytest.mark.parametrize("numel", [-1, 0, 1 << 31])
def test_a_part_has_some_elements_and_no_more_than_kernels_count(text: str, numel: int) -> None:
    with pytest.raises(CodecError, match=f"codec {text}: a part has 1 to 2147483647 elements, not {numel}"):
        parse_scheme(text).way(numel)


@pytest.mark.parametrize("make", [lambda: PowerSgdScheme(rank=0), lambda: PowerSgdScheme(rank=65), lambda: DitheringCodec(k=0)])
def test_constructors_refuse_what_the_text_form_refuses(make: Callable[[], object]) -> None:
    with pytest.raises(CodecError, match=r"parameter (rank|k) is a whole number from 1 to"):
        make()
