"""The kit's block DCT: it is the DCT, it is orthonormal, and its bits are fixed. A codec that sends the largest coefficients keeps the kit's promises."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import pytest
import scipy.fft

from psgc.codecs.codec import Stream
from psgc.codecs.kit import Field, KitCodec, Ops, Random, Vector, Whole
from psgc.codecs.kit.cpu import CpuOps
from psgc.codecs.kit.dct import matrix
from psgc.errors import CodecError

SIZES = (1, 7, 64, 65, 4097)
BLOCKS = (2, 8, 64, 256)


def test_it_is_the_orthonormal_dct_of_each_whole_block_and_leaves_the_rest_as_it_is() -> None:
    for numel in SIZES:
        x = np.random.default_rng(numel).standard_normal(numel).astype(np.float32)
        for block in BLOCKS:
            whole = numel // block * block
            wanted = x.astype(np.float64)
            wanted[:whole] = scipy.fft.dct(wanted[:whole].reshape(-1, block), norm="ortho", axis=1).ravel()
            made = Ops().dct(x, block)
            assert made.dtype == np.float32
            np.testing.assert_allclose(made, wanted, rtol=0, atol=1e-5)
            assert CpuOps().dct(x, block).tobytes() == made.tobytes()
            back = Ops().idct(made, block)
            assert CpuOps().idct(made, block).tobytes() == back.tobytes()
            np.testing.assert_allclose(back, x, rtol=0, atol=1e-5)


def test_the_matrix_is_rounded_from_exact_cosines_and_its_bits_are_fixed() -> None:
    digests = {}
    for block in BLOCKS:
        k, n = np.mgrid[:block, :block].astype(np.longdouble)
        exact = np.sqrt(np.where(k == 0, 1, 2) / np.longdouble(block)) * np.cos(np.longdouble(np.pi) * (2 * n + 1) * k / (2 * block))
        assert np.abs(matrix(block) - exact.astype(np.float64)).max() < 2.0**-25
        digests[block] = hashlib.sha256(matrix(block).astype("<f4").tobytes()).hexdigest()[:16]
    assert digests == {2: "a6d2256bd3124c77", 8: "3ca546239b1ab62a", 64: "23ad299315db91c9", 256: "7c9968a7b57ee920"}


def test_a_block_that_is_no_power_of_two_or_too_large_is_refused() -> None:
    for block in (0, 1, 3, 96, 512):
        with pytest.raises(CodecError, match=f"dct of blocks of {block} elements: a power of two from 2 to 256 expected"):
            Ops().dct(np.zeros(4, np.float32), block)


class LargestCoefficientsCodec(KitCodec):
    """The ``k`` largest DCT coefficients in 64ths of a part, as DeMo sends them."""

    name = "dctk"
    k = Whole(4, least=1, most=64)

    def fields(self, numel: int) -> Mapping[str, Field]:
        return {"places": Field("indices", count=self.count(numel)), "values": Field("f32", as_many_as="places")}

    def count(self, numel: int) -> int:
        return max(1, numel * self.k // 64)

    def compress(self, ops: Ops, p: Vector, random: Random) -> Mapping[str, Vector]:
        coefficients = ops.dct(p, 64)
        places = ops.largest(coefficients, self.count(p.size))
        return {"places": places, "values": ops.extract(coefficients, places)}

    def expand(self, ops: Ops, fields: Mapping[str, Vector], numel: int) -> Vector:
        return ops.idct(ops.scatter(fields["places"], fields["values"], numel), 64)


def test_a_codec_of_coefficients_sends_a_smooth_gradient_in_a_few_of_them_and_keeps_the_rest() -> None:
    codec = LargestCoefficientsCodec.from_parameters({}, "float32")
    numel = 4096 + 64
    gradient, residual = np.cos(np.arange(numel) / 40).astype(np.float32), np.zeros(numel, np.float32)
    out, decoded = np.empty(codec.payload_bound(numel), np.uint8), np.empty(numel, np.float32)
    encoded = codec.encode(gradient, residual, 1.0, Stream(0, 0, 0, 0, 0), out)
    assert encoded.payload_bytes < numel * 4 / 12
    codec.validate(out[: encoded.payload_bytes], numel)
    codec.decode(out[: encoded.payload_bytes], numel, 0, numel, decoded)
    assert np.sum((gradient - decoded) ** 2) < 1e-3 * np.sum(gradient**2)
    codec.commit(out[: encoded.payload_bytes], numel, 0, numel, gradient, residual, 1.0)
    np.testing.assert_allclose(decoded + residual, gradient, rtol=0, atol=1e-6)
