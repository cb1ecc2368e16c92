"""What planners take for sound: one judgement, which ``psgc plan`` and ``psgc advise`` share, for every codec and both optimizers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from psgc.codecs.registry import registered_codecs, registered_schemes
from psgc.errors import CodecError
from psgc.plan.inputs.cluster import Cluster, Link
from psgc.plan.inputs.profile import CostCurve, Profile, TensorProfile
from psgc.plan.methods.bound import Bounds
from psgc.plan.model.job import Job, default_codec
from psgc.plan.model.level import EXACT
from psgc.plan.model.options import Constraints
from psgc.plan.model.problem import PUBLISHED_BYTES, Problem, codec_costs
from psgc.plan.model.quality import FAST as LEVEL_FAST
from psgc.plan.model.quality import LENIENTLY, SAFELY, Standard, is_sound
from psgc.plan.report import assessment
from psgc.plan.report.assessment import assess
from psgc.plan.report.sentences import unsound
from psgc.plan.whatif.advise import advise

FAST = CostCurve((1.0, 1 << 20), (1.0, 10.0), (1.0, 10.0))
TENSORS = (TensorProfile("last", 1 << 20, 0.0), TensorProfile("first", 1 << 20, 1000.0))
SLOW = Cluster("slow", nodes=2, gpus_per_node=1, intra=Link(100, 5), inter=Link(0.1, 20), servers=1)
CODECS = (
    *(name for name in (*registered_codecs(), *registered_schemes()) if name not in ("none", "powersgd")), *PUBLISHED_BYTES,
    "int4:ef=0", "int8/none", "onebit/int8", "int8/onebit", "int8/relay", "topk/relay", "int8:momentum=nesterov", "onebit:ef=0,scale=unit",
)  # fmt: skip


REPRESENTATIVES = (
    "bf16",
    "int8",
    "int4:ef=0",
    "onebit/int8",
    "int8/onebit",
    "topk/relay",
    "int8:momentum=nesterov",
    "onebit:ef=0,scale=unit",
)


@pytest.mark.parametrize("codec", [pytest.param(codec, marks=() if codec in REPRESENTATIVES else pytest.mark.long) for codec in CODECS])
def test_plan_and_advise_agree_on_every_codec_under_both_optimizers(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assessment, "lower_bounds", lambda *_: Bounds(0.0, 0.0, 0.0))  # which take most of the time, and are not asked for
    bare = codec.partition("/")[0].partition(":")[0]
    profile = Profile("two", TENSORS, codecs={bare: {"cpu": FAST, "gpu": FAST}})
    problem = Problem(profile, SLOW, codec_costs(codec, profile, 2), Constraints(servers=True))
    for standard in (SAFELY, Standard(EXACT), Standard(LEVEL_FAST), LENIENTLY):
        planned = assess(Job(problem, ()), "psgc", compare=False, standard=standard, force=True)
        candidates = advise(profile, SLOW, standard=standard, codecs=(codec,))["candidates"]
        advised = next(one for one in candidates if one["kind"] == "compress")
        assert advised["sound"] == (not unsound(planned)) == standard.keeps(codec), (codec, standard)


def test_sound_under_adam_are_the_codecs_that_docs_name() -> None:
    """docs/optimizers.md, docs/quality.md: a small error in every payload; int4 with its feedback; no momentum before the codec."""
    sound = {codec for codec in CODECS if is_sound(codec, adam=True)}
    assert sound == {"bf16", "fp16", "int8", "int4", "fp8", "shared", "int8/none", "int8/relay"}
    assert is_sound("none", adam=True) and is_sound("int4:rotate=1", adam=True)
    assert {codec for codec in CODECS if not is_sound(codec, adam=False)} == {"onebit:ef=0,scale=unit"}
    with pytest.raises(CodecError):
        is_sound("zip", adam=False)


def test_the_codec_that_is_planned_with_unasked_is_sound() -> None:
    timed = {name: {"cpu": FAST} for name in ("onebit", "topk", "dgc")}
    profile = Profile("two", TENSORS, codecs=timed)
    assert default_codec(profile, ("cpu",), standard=SAFELY) == "none"
    assert default_codec(profile, ("cpu",), standard=LENIENTLY) == "onebit"
    for codec in ("int8", "bf16", "fp16", "int4"):
        more = replace(profile, codecs={**timed, codec: {"cpu": FAST}})
        assert default_codec(more, ("cpu",), standard=SAFELY) == codec
