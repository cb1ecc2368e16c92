"""The five programs of HiPress's CompLL (Bai et al., SOSP 2021, section 4.3), written in psgc's codec kit.

They are what their papers describe; payloads are psgc's own. Owns the programs and the count of their lines. Jobs have psgc's own ``onebit``,
``tbq`` and ``topk``, which are faster.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping

from psgc.codecs.kit import Field, KitCodec, Ops, Random, Real, Vector, Whole


class Onebit(KitCodec):
    """Seide et al. 2014: signs, and the means of the elements of each sign; the error is fed back."""

    name = "compll-onebit"

    def fields(self, numel: int) -> Mapping[str, Field]:
        return {"means": Field("f32", count=2), "signs": Field("u1", count=numel)}

    def compress(self, ops: Ops, p: Vector, random: Random) -> Mapping[str, Vector]:
        negative = p < 0
        below = ops.reduce(ops.where(negative, p, 0.0), "sum")
        above = ops.reduce(ops.where(negative, 0.0, p), "sum")
        count = ops.reduce(ops.cast(negative, "f32"), "sum")
        means = ops.concat(ops.divide(below, count), ops.divide(above, p.size - count))
        return {"means": means, "signs": ops.cast(negative, "u8")}

    def expand(self, ops: Ops, fields: Mapping[str, Vector], numel: int) -> Vector:
        return ops.where(fields["signs"] == 1, fields["means"][:1], fields["means"][1:])


class Tbq(KitCodec):
    """Strom 2015: -tau, 0 or tau, in two bits; the error is fed back."""

    name = "compll-tbq"
    tau = Real(0.05, least=1e-6, most=1e6)

    def fields(self, numel: int) -> Mapping[str, Field]:
        return {"codes": Field("u2", count=numel, most=2)}

    def compress(self, ops: Ops, p: Vector, random: Random) -> Mapping[str, Vector]:
        return {"codes": ops.cast(p >= self.tau, "u8") + 1 - ops.cast(p <= -self.tau, "u8")}

    def expand(self, ops: Ops, fields: Mapping[str, Vector], numel: int) -> Vector:
        return (ops.cast(fields["codes"], "f32") - 1) * self.tau


class TernGrad(KitCodec):
    """Levels between the part's least and largest element, rounded at random: what HiPress ships by this name (Wen et al. 2017 has three levels)."""

    name = "compll-terngrad"
    ef_by_default = False
    bits = Whole(2, least=1, most=8)

    def fields(self, numel: int) -> Mapping[str, Field]:
        return {"ends": Field("f32", count=2), "codes": Field(f"u{self.bits}", count=numel)}

    def compress(self, ops: Ops, p: Vector, random: Random) -> Mapping[str, Vector]:
        low, high = ops.reduce(p, "min"), ops.reduce(p, "max")
        levels = ops.divide(p - low, high - low) * (2**self.bits - 1)
        codes = ops.clip(ops.round_at_random(levels, random.uniform()), 0, 2**self.bits - 1)
        return {"ends": ops.concat(low, high), "codes": ops.cast(codes, "u8")}

    def expand(self, ops: Ops, fields: Mapping[str, Vector], numel: int) -> Vector:
        low, high = fields["ends"][:1], fields["ends"][1:]
        return low + ops.cast(fields["codes"], "f32") * ((high - low) / (2**self.bits - 1))


class Dgc(KitCodec):
    """Lin et al. 2018: the elements of largest magnitude with their places; what stays behind is fed back."""

    name = "compll-dgc"
    rate = Real(0.01, least=1e-6, most=1)

    def fields(self, numel: int) -> Mapping[str, Field]:
        return {"places": Field("indices", count=self.kept(numel)), "values": Field("f32", as_many_as="places")}

    def kept(self, numel: int) -> int:
        return max(1, int(numel * self.rate))

    def compress(self, ops: Ops, p: Vector, random: Random) -> Mapping[str, Vector]:
        places = ops.largest(p, self.kept(p.size))
        return {"places": places, "values": ops.extract(p, places)}

    def expand(self, ops: Ops, fields: Mapping[str, Vector], numel: int) -> Vector:
        return ops.scatter(fields["places"], fields["values"], numel)


class GradDrop(KitCodec):
    """Aji and Heafield 2017: the elements that reach a threshold, which is the largest magnitude's share, with their places; the rest is fed back."""

    name = "compll-graddrop"
    share = Real(0.1, least=1e-6, most=1)

    def fields(self, numel: int) -> Mapping[str, Field]:
        return {"places": Field("indices", at_most=numel), "values": Field("f32", as_many_as="places")}

    def compress(self, ops: Ops, p: Vector, random: Random) -> Mapping[str, Vector]:
        threshold = self.share * ops.reduce(p, "magnitude")
        places = ops.select((ops.absolute(p) >= threshold) & (p != 0))
        return {"places": places, "values": ops.extract(p, places)}

    def expand(self, ops: Ops, fields: Mapping[str, Vector], numel: int) -> Vector:
        return ops.scatter(fields["places"], fields["values"], numel)


PROGRAMS: tuple[type[KitCodec], ...] = (Onebit, Tbq, TernGrad, Dgc, GradDrop)


def lines_of(program: type[KitCodec]) -> int:
    """Lines of code of a program, its name and its text not counted."""
    (made,) = ast.parse(textwrap.dedent(inspect.getsource(program))).body
    assert isinstance(made, ast.ClassDef)
    return len({line for part in made.body[2:] for node in ast.walk(part) if (line := getattr(node, "lineno", 0))})
