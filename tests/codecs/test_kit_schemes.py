"""The manual's MXFP4 and EF21 against plain NumPy, and the state that the kit keeps for methods that have one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from psgc.codecs import BucketContext, Stream
from psgc.codecs.codec import F32, Bytes
from psgc.codecs.kit import KitScheme, Ops
from psgc.codecs.kit.cpu import CpuOps
from psgc.errors import CodecError
from tests.codecs.conftest import FINITE_KINDS, code_of_page, make_values

NUMEL, WORKERS = 1000, 3


@pytest.fixture(scope="module")
def manual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """The classes that docs/writing-a-codec.md builds, from files."""
    folder = tmp_path_factory.mktemp("manual")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        for module in ("mxfp4_codec", "ef21_scheme"):
            (folder / f"{module}.py").write_text(code_of_page(f"{module}.py"))
        yield SimpleNamespace(
            Mxfp4Codec=importlib.import_module("mxfp4_codec").Mxfp4Codec, Ef21Scheme=importlib.import_module("ef21_scheme").Ef21Scheme
        )
        for module in ("mxfp4_codec", "ef21_scheme"):
            del sys.modules[module]


def derived(manual: SimpleNamespace, name: str, **methods: Any) -> Any:
    return type(name.title(), (manual.Ef21Scheme,), {"name": name, "__module__": "ef21_scheme", **methods})


def reference_mxfp4(p: F32) -> tuple[list[int], list[int]]:
    """Exponent bytes and codes, element by element in exact arithmetic: floor(log2 max|p|) - 2, then the nearest magnitude, ties to even."""
    magnitudes, exponents, codes = [0, 0.5, 1, 1.5, 2, 3, 4, 6], [], []
    for start in range(0, p.size, 32):
        block = [float(x) for x in p[start : start + 32]]
        top = max(abs(x) for x in block)
        exponent = max(-127, int(np.frexp(top)[1]) - 1 - 2) if top else -127
        exponents.append(exponent + 127)
        for x in block:
            scaled = abs(x) * 2.0**-exponent
            code = min(range(8), key=lambda c, scaled=scaled: (abs(magnitudes[c] - scaled), c % 2))
            codes.append(code + (8 if x < 0 else 0))
    return exponents, codes


@pytest.mark.parametrize("numel", [1, 31, 32, 33, 4097])
def test_mxfp4_is_the_formats_own_arithmetic(numel: int, manual: SimpleNamespace) -> None:
    codec = manual.Mxfp4Codec()
    for kind in FINITE_KINDS:
        p = make_values(kind, numel)
        exponents, codes = reference_mxfp4(p)
        out, elements = np.zeros(codec.payload_bound(numel), np.uint8), np.empty(numel, np.float32)
        assert codec.encode(p, None, 1.0, Stream(0, 1, 0, 0), out) == (out.size, False)
        assert out.size == -(-numel // 32) + -(-numel // 2)
        assert out[: len(exponents)].tolist() == exponents, kind
        assert Ops().unpack(out[len(exponents) :], 4, numel).tolist() == codes, kind
        codec.validate(out, numel)
        codec.decode(out, numel, 0, numel, elements)
        scales = np.repeat(np.ldexp(1.0, np.array(exponents) - 127), 32)[:numel]
        wanted = np.where(np.array(codes) >= 8, -1, 1) * np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[np.array(codes) % 8] * scales
        np.testing.assert_array_equal(elements, np.clip(wanted, -np.finfo(np.float32).max, np.finfo(np.float32).max).astype(np.float32))


def test_the_operators_of_tables_and_bits() -> None:
    for ops in (Ops(), CpuOps()):
        x = np.array([1.0, -2.5, 0.0], np.float32)
        assert ops.bitcast(x, "u32").tolist() == [0x3F800000, 0xC0200000, 0]
        assert ops.bitcast(ops.bitcast(x, "u32"), "f32").tolist() == x.tolist()
        with pytest.raises(CodecError, match="bitcast of float32 to u16: types of the same width expected"):
            ops.bitcast(x, "u16")
        table = (0.0, 1.0, 2.0, 4.0)
        assert ops.nearest(table, np.array([-9, 0.5, 0.51, 1.5, 3.0, 2.9, 99], np.float32)).tolist() == [0, 0, 1, 2, 2, 2, 3]
        assert ops.lookup(table, np.array([3, 0, 2], np.uint8)).tolist() == [4.0, 0.0, 2.0]


class Rank:
    """One worker of a job whose servers add in float32."""

    def __init__(self, scheme: KitScheme) -> None:
        self.state, self.residual = scheme.new_state(NUMEL), np.zeros(NUMEL, np.float32)

    def encode(self, step: int, rank: int, grad: F32, rescale: float) -> Bytes:
        pair = self.state.rounds[0].pair
        out = np.zeros(pair.push.payload_bound(NUMEL), np.uint8)
        return out[: self.state.encode(0, grad, self.residual, rescale, Stream(0, step, rank, 0), out).payload_bytes]

    def apply(self, answer: F32, sent: Bytes, grad: F32, rescale: float, skips: bool = False) -> F32:
        target = grad.copy()
        self.state.apply(answer.view(np.uint8), [sent], target, None if skips else self.residual, rescale)
        return target


def largest(x: F32, k: int) -> F32:
    out = np.zeros_like(x)
    places = np.argsort(-np.abs(x), kind="stable")[:k]
    out[places] = x[places]
    return out


def test_ef21_is_algorithm_2_of_its_paper(manual: SimpleNamespace) -> None:
    """Against the paper's loop: g_i <- g_i + C(grad_i - g_i), g <- mean of g_i. A rank that skips keeps its g_i and gets g."""
    scheme = manual.Ef21Scheme(BucketContext(workers=WORKERS), k=0.05)
    ranks = [Rank(scheme) for _ in range(WORKERS)]
    estimates, mean = [np.zeros(NUMEL, np.float32) for _ in ranks], np.zeros(NUMEL, np.float32)
    for step in range(1, 8):
        skipping = {1} if step in (3, 4) else set()
        grads = [make_values("gauss", NUMEL, seed=10 * step + rank) for rank in range(WORKERS)]
        sent = [rank.encode(step, number, grads[number], 1.0) for number, rank in enumerate(ranks)]
        decoded = [
            np.zeros(NUMEL, np.float32) if number in skipping else payload_of(scheme, payload) for number, payload in enumerate(sent)
        ]
        answer = np.asarray(sum(decoded[1:], decoded[0]) / np.float32(WORKERS), np.float32)
        for number in set(range(WORKERS)) - skipping:
            estimates[number] = estimates[number] + largest(grads[number] - estimates[number], 50)
        mean = mean + answer
        for number, rank in enumerate(ranks):
            got = rank.apply(answer, sent[number], grads[number], 1.0, skips=number in skipping)
            np.testing.assert_array_equal(got, mean)
            np.testing.assert_array_equal(rank.residual, -estimates[number])
        np.testing.assert_allclose(mean, np.mean(estimates, axis=0), atol=2e-6)


def payload_of(scheme: KitScheme, payload: Bytes) -> F32:
    out = np.empty(NUMEL, np.float32)
    scheme.rounds(NUMEL)[0].pair.push.decode(payload, NUMEL, 0, NUMEL, out)
    return out


def test_state_follows_the_unit_of_the_gradient_and_is_saved_and_restored(manual: SimpleNamespace) -> None:
    """A loss scale that doubles every second step, also while this rank skips, changes nothing but the unit; nor does a restart."""
    scheme = manual.Ef21Scheme(k=0.05)
    plain, scaled, unit, pending = Rank(scheme), Rank(scheme), 1.0, 1.0
    for step in range(1, 9):
        grad, skips = make_values("gauss", NUMEL, seed=step), step in (4, 5)
        if step % 2 == 0:
            unit, pending = 2 * unit, 2 * pending
        if step == 7:
            again = Rank(scheme)
            saved = scaled.state.saved
            assert saved is not None
            again.state.restore(saved)
            again.residual[:] = scaled.residual
            scaled = again
        sent, big = plain.encode(step, 0, grad, 1.0), scaled.encode(step, 0, grad * np.float32(unit), pending)
        answer = np.zeros(NUMEL, np.float32) if skips else payload_of(scheme, sent)
        got = plain.apply(answer, sent, grad, 1.0, skips)
        other = scaled.apply(answer * np.float32(unit), big, grad * np.float32(unit), pending, skips)
        pending = pending if skips else 1.0
        np.testing.assert_array_equal(other, got * np.float32(unit))
        np.testing.assert_array_equal(scaled.residual * np.float32(pending), plain.residual * np.float32(unit))


def test_a_scheme_that_cannot_be_is_refused(manual: SimpleNamespace) -> None:
    with pytest.raises(CodecError, match=r"codec ef21: parameter k is a number from 1e-06 to 0\.5, not '2'"):
        manual.Ef21Scheme.from_parameters({"k": "2"}, BucketContext())
    with pytest.raises(CodecError, match="codec ef21 carries float32, bfloat16, float16, not int32"):
        manual.Ef21Scheme(BucketContext("int32"))
    keeps = derived(manual, "keeps", codecs=lambda _: ("topk", "none"))
    with pytest.raises(CodecError, match="codec keeps: its codecs keep no residual of their own, and carry floats; topk cannot be one"):
        keeps()
    short = derived(manual, "short", outgoing=lambda *_: np.zeros(3))
    with pytest.raises(CodecError, match=r"codec short: outgoing gave float64\[3\], not float32\[1000\]"):
        Rank(short()).encode(1, 0, make_values("gauss", NUMEL), 1.0)


def test_a_trainer_that_throws_a_step_away_gets_it_back_by_default(manual: SimpleNamespace) -> None:
    plain = derived(manual, "plain", put_back=KitScheme.put_back)(k=0.05)
    rank, grad = Rank(plain), make_values("gauss", NUMEL)
    sent = rank.encode(1, 0, grad, 1.0)
    rank.state.add_back([sent], rank.residual)
    np.testing.assert_array_equal(rank.residual, largest(grad, 50))
