"""Codecs and schemes of what ranks exchange rarely, or of momenta: SparseLoCo's and DeMo's. Written with the kit, whose ids they have.

| text                   | what is pushed, of each 4096 elements                                                                   |
|------------------------|---------------------------------------------------------------------------------------------------------|
| ``topk2bit:k=64``      | the k largest, as signs and one of two magnitudes                                                        |
| ``dct64:k=32``         | the k largest coefficients of the DCT of the elements as a square of 64 x 64, row by row                   |
| ``sparseloco:k=64``    | ``topk2bit``, relayed to all ranks, with a residual of which ``beta`` is kept from step to step            |
| ``demo:k=32``          | ``dct64``, relayed; the residual is the momentum, of which ``beta`` is kept                                |

Two magnitudes: those of GROUP values that follow one another are parted at their mean, and each side has its mean, as float16. The paper says only that values
take two bits; this is psgc's choice.
Owns the sides of the matrices that DeMo cuts parameters into squares from.
Sources: Sarfi et al. 2025 (SparseLoCo, arXiv 2508.15706), algorithm 1, for pseudo-gradients: the residual takes the place of the outer momentum.
Peng, Quesnelle and Kingma 2024 (DeMo, arXiv 2411.19870), algorithm 1: momentum m = beta m + gradient, of which is taken away what was sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

from psgc.codecs.codec import F32, Array, Bytes, Codec, Encoded, Stream
from psgc.codecs.common.parameters import read_whole, with_defaults
from psgc.codecs.kit.codec import KitCodec
from psgc.codecs.kit.fields import Field
from psgc.codecs.kit.ops import Ops, Random, Vector
from psgc.codecs.kit.values import Choice, Whole, shortest
from psgc.codecs.relay import RelayScheme, _RelayState
from psgc.codecs.scheme import BucketContext, Scheme, SchemeState, check_part
from psgc.errors import CodecError

CHUNK: Final = 4096  # elements that the k largest are chosen from
SIDE: Final = 64
GROUP: Final = 64  # values that share two magnitudes


def sides_of(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a parameter as DeMo's matrix: all dimensions but the first are columns; a vector is rows of SIDE."""
    numel = math.prod(shape)
    if len(shape) >= 2:
        return shape[0], numel // shape[0] if shape[0] else 0
    return -(-numel // SIDE), SIDE


def numel_in_squares(shape: Sequence[int]) -> int:
    """Elements of the squares of SIDE x SIDE that a parameter lies in."""
    rows, columns = sides_of(shape)
    return -(-rows // SIDE) * -(-columns // SIDE) * CHUNK


def sent(numel: int, k: int) -> int:
    """How many values a part of ``numel`` elements sends."""
    whole, rest = divmod(numel, CHUNK)
    return whole * k + min(k, rest)


class TopK2BitCodec(KitCodec):
    """About 11 bits for each element that is sent, at 64 of 4096."""

    name = "topk2bit"
    advice = "pseudo-gradients of many steps, relayed (`sparseloco`): each element that is sent takes about 11 bits"
    k = Whole(64, least=1, most=CHUNK)

    def fields(self, numel: int) -> Mapping[str, Field]:
        count = sent(numel, self.k)
        groups = -(-count // GROUP)
        return {
            "places": Field("indices", count=count),
            "small": Field("f16", count=groups, least=0),
            "large": Field("f16", count=groups, least=0),
            "codes": Field("u2", count=count),
        }

    def compress(self, ops: Ops, p: Vector, random: Random) -> Mapping[str, Vector]:
        places = ops.block_largest(p, CHUNK, self.k)
        values = ops.extract(p, places)
        magnitudes, ones = ops.absolute(values), ops.fill(1, values.size)
        mean = ops.divide(ops.block_reduce(magnitudes, GROUP, "sum"), ops.block_reduce(ones, GROUP, "sum"))
        large = magnitudes > ops.spread(mean, GROUP, values.size)
        level = [
            ops.divide(
                ops.block_reduce(ops.where(side, magnitudes, 0.0), GROUP, "sum"), ops.block_reduce(ops.where(side, ones, 0.0), GROUP, "sum")
            )
            for side in (~large, large)
        ]
        codes = 2 * ops.cast(values < 0, "u8") + ops.cast(large, "u8")
        return {"places": places, "small": ops.cast(level[0], "f16"), "large": ops.cast(level[1], "f16"), "codes": codes}

    def expand(self, ops: Ops, fields: Mapping[str, Vector], numel: int) -> Vector:
        codes = fields["codes"]
        small, large = (ops.spread(ops.cast(fields[side], "f32"), GROUP, codes.size) for side in ("small", "large"))
        magnitudes = ops.where((codes & 1) == 1, large, small)
        return ops.scatter(fields["places"], ops.where(codes >= 2, -1.0 * magnitudes, magnitudes), numel)


class Dct64Codec(KitCodec):
    """The k largest of 64 x 64 cosine coefficients; elements after the last whole square are sent as they are, the k largest."""

    name = "dct64"
    advice = "momenta (`demo`, psgc.DeMo): what changes slowly over a matrix is in few coefficients"
    k = Whole(32, least=1, most=CHUNK)
    values = Choice("f32", "f16")

    def fields(self, numel: int) -> Mapping[str, Field]:
        count = sent(numel, self.k)
        return {"places": Field("indices", count=count), "values": Field(self.values, count=count)}

    def compress(self, ops: Ops, p: Vector, random: Random) -> Mapping[str, Vector]:
        coefficients = ops.saturate(ops.dct2(p, SIDE))
        places = ops.block_largest(coefficients, CHUNK, self.k)
        return {"places": places, "values": ops.cast(ops.extract(coefficients, places), "f16" if self.values == "f16" else "f32")}

    def expand(self, ops: Ops, fields: Mapping[str, Vector], numel: int) -> Vector:
        return ops.idct2(ops.scatter(fields["places"], ops.cast(fields["values"], "f32"), numel), SIDE)


class DecayedRelay(RelayScheme):
    """Payloads of ``inner`` are relayed, and of what they leave out ``beta`` is kept from step to step."""

    inner: ClassVar[type[KitCodec]]

    def __init__(self, context: BucketContext, k: int, beta: float) -> None:
        if context.dtype != "float32":
            raise CodecError(f"codec {self.name} carries float32, not {context.dtype}; use 'none' for this tensor")
        super().__init__(self.inner(context.dtype, k=k), context)
        self.k, self.beta = k, beta

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str], context: BucketContext) -> Scheme:
        given = with_defaults(cls, parameters)
        try:
            beta = float(given["beta"])
        except ValueError:
            beta = -1.0
        if not 0 <= beta <= 1:
            raise CodecError(f"codec {cls.name}: beta is the share of the residual that is kept, from 0 to 1, not {given['beta']!r}")
        return cls(context, read_whole(cls, "k", given["k"], 1, CHUNK), beta)

    @property
    def parameters(self) -> dict[str, str]:
        given = {"k": str(self.k), "beta": shortest(self.beta)}
        return {name: text for name, text in given.items() if text != self.defaults[name]}

    @property
    def canonical(self) -> str:
        return Scheme.canonical.fget(self)  # type: ignore[attr-defined, no-any-return]

    @property
    def device_codecs(self) -> tuple[Codec, ...]:
        return ()  # the decay is the host's

    def new_state(self, numel: int) -> SchemeState:
        check_part(self.canonical, numel)
        return _DecayedState(self, numel)


class _DecayedState(_RelayState):
    def __init__(self, scheme: DecayedRelay, numel: int) -> None:
        super().__init__(scheme._push, scheme.context, scheme.rounds(numel))
        self._beta = scheme.beta

    def encode(self, index: int, grad: Array, residual: F32 | None, rescale: float, stream: Stream, out: Bytes) -> Encoded:
        return super().encode(index, grad, residual, rescale * self._beta, stream, out)

    def apply(self, payload: Bytes, sent: Sequence[Bytes], target: Array, residual: F32 | None, rescale: float) -> None:
        super().apply(payload, sent, target, residual, rescale * self._beta)


class SparseLoCoScheme(DecayedRelay):
    """SparseLoCo's exchange of pseudo-gradients."""

    name = "sparseloco"
    inner = TopK2BitCodec
    advice = (
        'DiLoCo over the slowest links: 2-bit values of 64 in 4096 elements; with outer="average", the residual takes the momentum\'s place'
    )
    defaults: ClassVar[Mapping[str, str]] = {"k": "64", "beta": "0.95"}


class DemoScheme(DecayedRelay):
    """DeMo's exchange of momenta; see psgc.torch.DeMo."""

    name = "demo"
    inner = Dct64Codec
    advice = "psgc.DeMo: momenta stay local, and their largest cosine coefficients are sent"
    defaults: ClassVar[Mapping[str, str]] = {"k": "32", "beta": "0.999"}
