"""Momentum before compression and residuals in eight bits: what a worker's SchemeState does, against loops as the papers have them."""

from __future__ import annotations

import numpy as np
import pytest

from psgc.codecs.codec import F32, Stream
from psgc.codecs.common.sums import reference_tree_sum
from psgc.codecs.common.texts import join_text, split_text
from psgc.codecs.momentum import clipped
from psgc.codecs.registry import parse_codec, parse_scheme
from psgc.codecs.scheme import BucketContext
from psgc.errors import CodecError

NUMEL, STEPS = 5000, 12
CONTEXT = BucketContext(workers=4)


class OneWorker:
    """A worker's part whose result is its own payload: encodes, and applies what it has sent."""

    def __init__(self, text: str) -> None:
        self.scheme = parse_scheme(text, CONTEXT)
        self.state = self.scheme.new_state(NUMEL)
        self.residual = np.zeros(NUMEL, np.float32)
        self.out = np.empty(self.state.rounds[0].pair.push.payload_bound(NUMEL), np.uint8)

    def step(self, grad: F32, number: int, own: bool = True, rescale: float = 1.0) -> F32:
        target = grad.copy()
        encoded = self.state.encode(0, target, self.residual, rescale, Stream(0, number, 0, 0), self.out)
        assert target.tobytes() == grad.tobytes(), "encoding changes nothing"
        payload = self.out[: encoded.payload_bytes].copy()
        if not encoded.nonfinite:
            self.state.apply(payload, [payload], target, self.residual if own else None, rescale)
        return target


def gradients() -> list[F32]:
    generator = np.random.default_rng(5)
    return [generator.standard_normal(NUMEL, np.float32) for _ in range(STEPS)]


def top(p: F32, k: int) -> F32:
    """p where it is among its k largest magnitudes, else 0."""
    sent = np.zeros_like(p)
    places = np.argsort(-np.abs(p), kind="stable")[:k]
    sent[places] = p[places]
    return sent


def test_dgc_sends_the_largest_of_what_has_gathered_and_masks_both() -> None:
    worker = OneWorker("topk:k=50,momentum=dgc")
    velocity, gathered = np.zeros(NUMEL, np.float32), np.zeros(NUMEL, np.float32)
    for number, grad in enumerate(gradients()):
        velocity = np.float32(0.9) * velocity + grad  # Lin et al. 2018, equations 4 and 5
        gathered = velocity + gathered
        sent = top(gathered, 50)
        velocity[sent != 0] = 0
        gathered[sent != 0] = 0
        np.testing.assert_array_equal(worker.step(grad, number), sent)
        np.testing.assert_array_equal(worker.residual, gathered)


def test_nesterov_compresses_the_gradient_moved_along_its_velocity() -> None:
    worker = OneWorker("topk:k=50,momentum=nesterov,mu=0.5")
    velocity, left = np.zeros(NUMEL, np.float32), np.zeros(NUMEL, np.float32)
    for number, grad in enumerate(gradients()):
        velocity = np.float32(0.5) * velocity + grad
        p = (grad + np.float32(0.5) * velocity) + left
        sent = top(p, 50)
        left = p - sent
        np.testing.assert_array_equal(worker.step(grad, number), sent)
        np.testing.assert_array_equal(worker.residual, left)


@pytest.mark.parametrize(
    "text", ["topk:k=50,momentum=dgc", "topk:k=50,momentum=nesterov", "int4:momentum=nesterov", "onebit:momentum=nesterov"]
)
def test_another_loss_scale_changes_the_unit_of_everything_that_is_kept(text: str) -> None:
    plain, scaled, before = OneWorker(text), OneWorker(text), 1.0
    for number, grad in enumerate(gradients()):
        scale = (1.0, 1024.0, 1024.0, 0.5)[number % 4]  # powers of two round nothing
        got = scaled.step(grad * np.float32(scale), number, rescale=scale / before)
        np.testing.assert_array_equal(got, plain.step(grad, number) * np.float32(scale))
        np.testing.assert_array_equal(scaled.residual, plain.residual * np.float32(scale))
        assert plain.state.saved is not None and scaled.state.saved is not None
        np.testing.assert_array_equal(scaled.state.saved, plain.state.saved * np.float32(scale))
        before = scale


def test_a_step_of_others_and_a_nan_leave_velocity_and_residual() -> None:
    worker, (first, second, *_) = OneWorker("topk:k=50,momentum=dgc"), gradients()
    worker.step(first, 0)
    velocity, residual = worker.state.saved, worker.residual.copy()
    worker.step(second, 1, own=False)
    bad = second.copy()
    bad[17] = np.nan
    worker.step(bad, 2)
    np.testing.assert_array_equal(worker.state.saved, velocity)
    np.testing.assert_array_equal(worker.residual, residual)


def test_clipping_bounds_each_ranks_part_by_its_share_of_the_norm() -> None:
    worker, grad = OneWorker("topk:clip=2,k=0.5"), gradients()[0]
    target = worker.step(grad, 0)
    np.testing.assert_allclose(np.linalg.norm(target + worker.residual), 2 / CONTEXT.workers**0.5, rtol=1e-5)
    assert clipped(grad, 1e9) is grad
    norm = np.sqrt(reference_tree_sum(grad.astype(np.float64) ** 2)[0])
    np.testing.assert_array_equal(clipped(grad, 1.0), grad * np.float32(1 / norm))
    assert clipped(grad, 0) is grad
    grad[3] = np.inf
    assert clipped(grad, 1.0) is grad, "an overflow is still seen"


def test_a_way_goes_on_from_anothers_state() -> None:
    first, second = OneWorker("topk:k=50,momentum=dgc"), OneWorker("topk:k=50,momentum=dgc")
    *before, last = gradients()
    for number, grad in enumerate(before):
        first.step(grad, number)
    assert first.state.saved is not None
    second.state.restore(first.state.saved)
    second.residual[:] = first.residual
    np.testing.assert_array_equal(first.step(last, STEPS), second.step(last, STEPS))


def test_without_momentum_there_is_no_state() -> None:
    assert OneWorker("topk:clip=2").state.saved is None
    assert OneWorker("topk").state.saved is None


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("topk:momentum=dgc", "topk:momentum=dgc"),
        ("topk:mu=0.90,momentum=dgc,k=0.001", "topk:k=0.001,momentum=dgc"),
        ("onebit:momentum=nesterov,mu=0.95/int8", "onebit:momentum=nesterov,mu=0.95/int8"),
        ("int4:residual=int8,rotate=1/relay", "int4:residual=int8,rotate=1/relay"),
        ("int8:residual=float32,clip=0", "int8"),
    ],
)
def test_the_text_form_is_canonical(text: str, canonical: str) -> None:
    assert parse_scheme(text, CONTEXT).canonical == canonical
    assert parse_scheme(canonical, CONTEXT).canonical == canonical


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("topk:momentum=heavy", "codec topk: parameter momentum is one of none, nesterov, dgc, not 'heavy'"),
        ("topk:mu=0.5", "codec topk: parameter mu needs momentum"),
        ("topk:momentum=dgc,mu=1", "codec topk: parameter mu is a number from 0 to below 1, not '1'"),
        ("topk:clip=-1", "codec topk: parameter clip is a finite number >= 0, not '-1'"),
        ("topk:clip=nan", "codec topk: parameter clip is a finite number >= 0, not 'nan'"),
        ("topk:residual=int4", "codec topk: parameter residual is one of float32, int8, not 'int4'"),
        ("bf16:momentum=nesterov", "codec bf16 keeps no residual, which momentum needs"),
        ("onebit:momentum=dgc", "codec onebit: momentum=dgc forgets the momentum of what was sent"),
        ("int8:momentum=dgc/bf16", "codec int8: momentum=dgc"),
        ("tbq:momentum=dgc", "use momentum=nesterov, or a codec that sends some elements alone, as topk does"),
        ("int8:ef=0,residual=int8", "codec int8:ef=0 keeps no residual, which residual needs"),
        ("powersgd:momentum=dgc", "codec powersgd: unknown parameter 'momentum'"),
        ("topk/topk:momentum=dgc", "codec topk: unknown parameter 'momentum'"),
    ],
)
def test_what_cannot_work_is_refused(text: str, message: str) -> None:
    with pytest.raises(CodecError) as caught:
        parse_scheme(text, CONTEXT)
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["topk", "blocktopk", "randomk", "topk:select=mstopk"])
def test_dgc_goes_with_every_codec_that_sends_some_elements_alone(text: str) -> None:
    parse_scheme(join_text(text.partition(":")[0], {**split_text(text)[1], "momentum": "dgc"}), CONTEXT)


def test_servers_see_the_codec_alone() -> None:
    (round_,) = parse_scheme("topk:k=50,momentum=dgc/bf16", CONTEXT).rounds(NUMEL)
    assert round_.pair.push.canonical == parse_codec("topk:k=50").canonical
    assert round_.pair.pull.canonical == "bf16"
