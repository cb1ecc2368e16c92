"""SparseLoCo's and DeMo's codecs and schemes, against plain NumPy and SciPy; and the operators that they are written in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.fft

from psgc.codecs import BucketContext, Stream, parse_codec, parse_scheme
from psgc.codecs.kit import Ops
from psgc.codecs.kit.cpu import CpuOps
from psgc.codecs.outer import sent
from psgc.codecs.relay import join_payloads
from psgc.errors import CodecError, PayloadError

SIZES = (1, 7, 63, 4095, 4096, 4097, 3 * 4096 + 100)
STREAM = Stream(1, 1, 0, 0)


def draw(numel: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=numel).astype(np.float32)


@pytest.mark.parametrize("numel", [0, *SIZES])
@pytest.mark.parametrize("k", [1, 32, 4096])
def test_block_largest_chooses_in_each_block_by_itself(numel: int, k: int) -> None:
    x = np.round(draw(numel) * 4)  # with many that are equal
    wanted = []
    for first in range(0, numel, 4096):
        block = np.abs(x[first : first + 4096])
        wanted += sorted(first + int(i) for i in np.argsort(-block, kind="stable")[:k])
    for ops in (Ops(), CpuOps()):
        assert ops.block_largest(x, 4096, k).tolist() == wanted
    assert len(wanted) == sent(numel, k)


@pytest.mark.parametrize("numel", [0, *SIZES])
def test_dct2_is_the_two_dimensional_dct_of_each_whole_square(numel: int) -> None:
    x = draw(numel)
    whole = numel // 4096 * 4096
    wanted = x.astype(np.float64)
    wanted[:whole] = scipy.fft.dctn(wanted[:whole].reshape(-1, 64, 64), norm="ortho", axes=(1, 2)).ravel()
    made = Ops().dct2(x, 64)
    assert made.dtype == np.float32 and np.allclose(made, wanted, atol=2e-5)
    assert CpuOps().dct2(x, 64).tobytes() == made.tobytes(), "the kernel has the definition's bits"
    back = Ops().idct2(made, 64)
    assert np.allclose(back, x, atol=2e-5) and CpuOps().idct2(made, 64).tobytes() == back.tobytes()


@pytest.mark.parametrize("block", [2, 4, 8, 16, 32, 64, 128, 256])
def test_kernels_of_every_size_of_block_have_the_definitions_bits(block: int) -> None:
    whole = (
        65 * block + 3 if block < 128 else 3 * block * block + 7 if block == 128 else 70_000
    )  # blocks beyond those that are transformed together
    x = draw(whole) * np.float32(10) ** np.random.default_rng(1).integers(-20, 20, whole).astype(np.float32)
    for name in ("dct", "idct", "dct2", "idct2"):
        assert getattr(CpuOps(), name)(x, block).tobytes() == getattr(Ops(), name)(x, block).tobytes(), name


KINDS: dict[str, Callable[[Any], Any]] = {
    "equal": np.sign,
    "zeros": lambda x: x * 0,
    "infinite": lambda x: np.where(np.abs(x) > 1, np.inf * np.sign(x), x),
    "nan": lambda x: np.where(np.arange(x.size) % 3 == 0, np.nan, x),
    "denormal": lambda x: x * np.float32(1e-42),
}


@pytest.mark.parametrize("kind", KINDS)
def test_block_largest_chooses_as_the_definition_does_whatever_the_values(kind: str) -> None:
    x = KINDS[kind](draw(3 * 4096 + 100)).astype(np.float32)
    for k in (1, 33, 4095, 4096):
        assert CpuOps().block_largest(x, 4096, k).tolist() == Ops().block_largest(x, 4096, k).tolist()


@pytest.mark.parametrize("numel", SIZES)
def test_on_tensors_the_operators_give_the_same(numel: int) -> None:
    pytest.importorskip("triton", reason="the GPU's operators are beside kernels in Triton")
    import torch

    from psgc.cuda.kit.ops import TorchOps
    from psgc.cuda.kit.vectors import DeviceVector

    x, ops = np.round(draw(numel) * 4), TorchOps(torch.device("cpu"))
    vector = DeviceVector(torch.from_numpy(x), "f32")
    for k in (1, 32, 4096):
        assert ops.block_largest(vector, 4096, k).data.tolist() == Ops().block_largest(x, 4096, k).tolist()
    made = Ops().dct2(x, 64)
    assert ops.dct2(vector, 64).data.numpy().tobytes() == made.tobytes()
    assert ops.idct2(DeviceVector(torch.from_numpy(made), "f32"), 64).data.numpy().tobytes() == Ops().idct2(made, 64).tobytes()


@pytest.mark.parametrize("block", [2, 8, 64, 256])
def test_the_kernel_of_the_dct_keeps_signs_of_zeros(block: int) -> None:
    x = np.where(np.arange(3 * block + 1) % 3 == 0, -0.0, 0.0).astype(np.float32)
    assert CpuOps().dct(x, block).tobytes() == Ops().dct(x, block).tobytes()
    assert CpuOps().idct(x, block).tobytes() == Ops().idct(x, block).tobytes()


def two_levels(values: Any) -> Any:
    """Signs and the two magnitudes of 64 values, as the codec's table says, in float64."""
    magnitudes = np.abs(values.astype(np.float64))
    large = magnitudes > magnitudes.mean()
    out = np.zeros_like(magnitudes)
    for side in (large, ~large):
        if side.any():
            out[side] = magnitudes[side].mean()
    return np.sign(values) * out


def decoded(text: str, payload: Any, numel: int) -> Any:
    out = np.empty(numel, np.float32)
    parse_codec(text).decode(payload, numel, 0, numel, out)
    return out


def encoded(text: str, p: Any, residual: Any = None) -> Any:
    codec = parse_codec(text)
    out = np.empty(codec.payload_bound(p.size), np.uint8)
    return out[: codec.encode(p, residual, 1.0, STREAM, out).payload_bytes]


@pytest.mark.parametrize("numel", SIZES)
def test_topk2bit_sends_two_magnitudes_of_the_largest_of_each_chunk(numel: int) -> None:
    p = draw(numel)
    places = Ops().block_largest(p, 4096, 64)
    wanted = np.zeros(numel)
    for first in range(0, places.size, 64):
        group = places[first : first + 64]
        wanted[group] = two_levels(p[group])
    payload = encoded("topk2bit", p)
    assert np.allclose(decoded("topk2bit", payload, numel), wanted, rtol=2e-3)
    if numel == 3 * 4096 + 100:
        assert 8 * payload.size / places.size < 12, "bits for each element that is sent"


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("k", [1, 32])
def test_dct64_sends_the_largest_coefficients_of_each_chunk(numel: int, k: int) -> None:
    p = draw(numel)
    whole = numel // 4096 * 4096
    coefficients = p.astype(np.float64)
    coefficients[:whole] = scipy.fft.dctn(coefficients[:whole].reshape(-1, 64, 64), norm="ortho", axes=(1, 2)).ravel()
    kept = np.zeros(numel)
    for first in range(0, numel, 4096):
        block = coefficients[first : first + 4096]
        chosen = np.argsort(-np.abs(block))[:k]
        kept[first + chosen] = block[chosen]
    kept[:whole] = scipy.fft.idctn(kept[:whole].reshape(-1, 64, 64), norm="ortho", axes=(1, 2)).ravel()
    payload = encoded(f"dct64:k={k}", p)
    assert np.allclose(decoded(f"dct64:k={k}", payload, numel), kept, atol=1e-4)
    assert payload.size <= sent(numel, k) * (4 + 2) + 16, "the paper's formula, a value and a place each: the place in 16 bits at most"
    halves = encoded(f"dct64:k={k},values=f16", p)
    assert halves.size == payload.size - 2 * sent(numel, k)


def reference(beta: float, kept: Any, gradients: list[Any], residuals: list[Any]) -> Any:
    """A step of the papers' algorithms: p = gradient + beta residual, what is sent, the mean over ranks, and what is left."""
    total = np.zeros_like(gradients[0])
    for rank, gradient in enumerate(gradients):
        p = gradient + np.float32(beta) * residuals[rank]
        out = kept(p)
        residuals[rank] = p - out
        total += out
    return total / len(gradients)


@pytest.mark.parametrize(
    ("text", "inner", "beta"),
    [("sparseloco", "topk2bit", 0.95), ("sparseloco:k=16,beta=0.5", "topk2bit:k=16", 0.5), ("demo", "dct64", 0.999), ("demo:beta=1,k=8", "dct64:k=8", 1.0)],
)  # fmt: skip
def test_a_step_is_the_papers(text: str, inner: str, beta: float) -> None:
    numel, ranks = 2 * 4096 + 70, 3
    scheme = parse_scheme(text, BucketContext(workers=ranks))
    states = [scheme.new_state(numel) for _ in range(ranks)]
    ours, theirs = [np.zeros(numel, np.float32) for _ in range(ranks)], [np.zeros(numel, np.float32) for _ in range(ranks)]
    for step in range(4):
        gradients = [draw(numel, 10 * step + rank) for rank in range(ranks)]
        wanted = reference(beta, lambda p: decoded(inner, encoded(inner, p), numel), gradients, theirs)
        payloads, answer = [], np.empty(scheme.rounds(numel)[0].pair.pull.payload_bound(numel), np.uint8)
        for rank, state in enumerate(states):
            out = np.empty(scheme.rounds(numel)[0].pair.push.payload_bound(numel), np.uint8)
            payloads.append(out[: state.encode(0, gradients[rank], ours[rank], 1.0, STREAM, out).payload_bytes])
        answer = answer[: join_payloads(payloads, answer)]
        for rank, state in enumerate(states):
            target = gradients[rank].copy()
            state.apply(answer, [payloads[rank]], target, ours[rank], 1.0)
            assert np.allclose(target, wanted, atol=1e-5), f"step {step}, rank {rank}"
            assert np.allclose(ours[rank], theirs[rank], atol=1e-5), f"step {step}, rank {rank}"


def test_texts_are_written_as_they_are_read() -> None:
    for text in ("sparseloco", "sparseloco:k=8", "demo", "demo:beta=0.9", "sparseloco:beta=1,k=2"):
        scheme = parse_scheme(text)
        assert parse_scheme(scheme.canonical).canonical == scheme.canonical and scheme.feedback
    assert parse_scheme("sparseloco").canonical == "sparseloco"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sparseloco:beta=2", "beta is the share of the residual"),
        ("demo:beta=x", "beta is the share of the residual"),
        ("demo:k=0", "k"),
        ("demo/none", "answers by a rule of its own"),
        ("none/sparseloco", "answers by a rule of its own"),
        ("sparselocoo", "did you mean sparseloco?"),
        ("topk2bit:k=5000", "k"),
    ],
)
def test_what_cannot_be_is_told(text: str, said: str) -> None:
    with pytest.raises(CodecError) as raised:
        parse_scheme(text)
    assert said in str(raised.value) and "\n" not in str(raised.value)
    with pytest.raises(CodecError, match="carries float32, not bfloat16"):
        parse_scheme("demo", BucketContext("bfloat16"))


@pytest.mark.parametrize("text", ["topk2bit", "dct64:k=8"])
def test_any_byte_flip_is_refused_or_decodes_in_bounds(text: str) -> None:
    p = draw(4096 + 70)
    payload, codec = encoded(text, p), parse_codec(text)
    for place in range(0, payload.size, 7):
        torn = payload.copy()
        torn[place] ^= 0x55
        try:
            codec.validate(torn, p.size)
        except PayloadError:
            continue
        assert np.isfinite(decoded(text, torn, p.size)).all()
    with pytest.raises(PayloadError):
        codec.validate(payload[:-1], p.size)
