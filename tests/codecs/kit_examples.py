"""Kit codecs that between them use every kind of field and operator; installed by ``test_kit.py`` as another package's."""

from __future__ import annotations

from collections.abc import Mapping

from psgc.codecs.kit import Choice, Field, KitCodec, Ops, Random, Vector, Whole
from psgc.codecs.powersgd import PowerSgdScheme

GROUP = 256


class LevelsCodec(KitCodec):
    """Blockwise: codes of a few bits, rounded at random without feedback; scales are the groups' largest or mean magnitudes."""

    name = "levels3"
    blockwise = True
    ef_by_default = False
    bits = Whole(3, least=2, most=8)
    scale = Choice("largest", "mean")

    def prepare(self) -> None:
        self.unbiased = not self.feedback and self.scale == "largest"

    @property
    def top(self) -> int:
        return int(2 ** (self.bits - 1) - 1)

    def fields(self, numel: int) -> Mapping[str, Field]:
        return {
            "scales": Field("f32", count=-(-numel // GROUP), least=0),
            "codes": Field(f"u{self.bits}", count=numel, most=2 * self.top),
        }

    def compress(self, ops: Ops, p: Vector, random: Random) -> Mapping[str, Vector]:
        if self.scale == "largest":
            scales = ops.block_reduce(p, GROUP, "magnitude") / self.top
        else:
            scales = ops.block_reduce(ops.absolute(p), GROUP, "sum") / GROUP
        x = ops.divide(p, ops.spread(scales, GROUP, p.size))
        x = ops.round(x) if self.feedback else ops.round_at_random(x, random.uniform())
        return {"scales": scales, "codes": ops.cast(ops.clip(x, -self.top, self.top) + self.top, "u8")}

    def expand(self, ops: Ops, fields: Mapping[str, Vector], numel: int) -> Vector:
        return (ops.cast(fields["codes"], "f32") - self.top) * ops.spread(fields["scales"], GROUP, numel)


class HalvesCodec(KitCodec):
    """The k largest elements: places, magnitudes in f16, signs; and a count of those that are above the magnitudes' mean."""

    name = "halves"
    k = Whole(20, least=1, most=1 << 20)

    def fields(self, numel: int) -> Mapping[str, Field]:
        return {
            "places": Field("indices", count=min(self.k, numel)),
            "magnitudes": Field("f16", as_many_as="places", least=0),
            "signs": Field("u1", as_many_as="places"),
            "above": Field("u32", at_most=1),
        }

    def compress(self, ops: Ops, p: Vector, random: Random) -> Mapping[str, Vector]:
        places = ops.largest(p, min(self.k, p.size))
        values = ops.extract(p, places)
        magnitudes = ops.map(ops.absolute, values)
        mean = ops.reduce(magnitudes, "sum") / magnitudes.size
        above = ops.cast(ops.reduce(ops.concat(ops.where(magnitudes > mean, 1.0, 0.0), ops.fill(0, 1)), "sum"), "u32")
        return {
            "places": places,
            "magnitudes": ops.cast(magnitudes, "f16"),
            "signs": ops.cast(values < 0, "u8"),
            "above": ops.filter(above > 0, above),
        }

    def expand(self, ops: Ops, fields: Mapping[str, Vector], numel: int) -> Vector:
        magnitudes = ops.cast(fields["magnitudes"], "f32")
        return ops.scatter(fields["places"], ops.where(fields["signs"] == 1, -1.0 * magnitudes, magnitudes), numel)

    def check(self, ops: Ops, fields: Mapping[str, Vector], numel: int) -> str:
        return "more elements above the mean than there are" if (fields["above"] > fields["places"].size).any() else ""


class LowRankScheme(PowerSgdScheme):
    """A scheme of two rounds from another package."""

    name = "lowrank"
