"""What planners take for sound: one judgement, which ``psgc plan`` and ``psgc advise`` share, for every codec and both optimizers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from psgc.codecs.registry import registered_codecs, registered_schemes
from psgc.errors import CodecError
from psgc.plan.inputs.cluster import Cluster, Link
from psgc.plan.inputs.profile import PUBLISHED_BYTES, CostCurve, Profile, TensorProfile
from psgc.plan.methods.bound import Bounds
from psgc.plan.model.job import Job, default_codec
from psgc.plan.model.level import EXACT
from psgc.plan.model.options import Constraints
from psgc.plan.model.problem import Problem, codec_costs
from psgc.plan.model.quality import FAST as LEVEL_FAST
from psgc.plan.model.quality import LENIENTLY, SAFELY, Standard, costs_under_adam, is_sound, known_loss, typical_error
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


@pytest.mark.parametrize(
    "codec", [*CODECS, "demo", "sparseloco", "powersgd", "powersgd:rank=16", "powersgd:ef=0,rank=16", "int8:ef=1,momentum=none"]
)
def test_running_jobs_are_warned_of_what_planners_do_not_take_for_sound_under_adam(codec: str) -> None:
    assert codec in PUBLISHED_BYTES or costs_under_adam(codec) == (not is_sound(codec, adam=True))


def test_powersgd_is_sound_under_adam_from_the_rank_on_that_was_within_the_spread_of_seeds() -> None:
    sound = {
        text for text in ("powersgd:rank=15", "powersgd:rank=16", "powersgd:rank=32", "powersgd:ef=0,rank=32") if is_sound(text, adam=True)
    }
    assert sound == {"powersgd:rank=16", "powersgd:rank=32"}


def test_nothing_is_said_of_codecs_of_others() -> None:
    assert not costs_under_adam("theirs@0123456789abcdef:k=1") and not costs_under_adam("mine/relay")


def test_a_codec_is_judged_by_what_it_is_not_by_how_it_is_written() -> None:
    for same, as_this in (
        ("int8:ef=1", "int8"), ("int8:rotate=1", "int8"), ("int4:residual=int8", "int4"), ("fp8:format=e5m2", "fp8"), ("topk:k=0.01,warmup=20", "topk"),
        ("onebit:ef=0", "onebit"), ("int8:momentum=none", "int8"), ("ternary", "dithering:k=1"),
    ):  # fmt: skip
        assert SAFELY.keeps(same) == SAFELY.keeps(as_this), same
        assert typical_error(same) is not None and known_loss(same, 9.0) < 9.0
    assert all(SAFELY.keeps(codec) for codec in ("int8:rotate=1", "int8:ef=0", "int4:residual=int8", "fp8:format=e5m2", "shared:ef=0"))
    assert not any(SAFELY.keeps(codec) for codec in ("int4:ef=0", "onebit:ef=0", "dithering:ef=1", "int8:momentum=nesterov"))
    assert known_loss("int8/relay", 9.0) == known_loss("int8", 9.0) and known_loss("int8/no-such", 9.0) == 9.0


def test_each_reason_is_said_of_the_codecs_that_it_is_of() -> None:
    told = SAFELY.told_of(["onebit", "topk:k=0.3", "int8/onebit", "int8:momentum=nesterov", "theirs"])
    assert [line.partition(": ")[0] for line in told] == ["onebit, int8/onebit", "topk:k=0.3, theirs", "int8:momentum=nesterov"]
    assert told[0].startswith("onebit, int8/onebit: each loses too much in a training's first steps")
    assert told[1].startswith("topk:k=0.3, theirs: each has an error that is not known")
    assert told[2].startswith("int8:momentum=nesterov: it applies momentum before compression")


def test_the_codec_that_is_planned_with_unasked_is_sound() -> None:
    timed = {name: {"cpu": FAST} for name in ("onebit", "topk", "dgc")}
    profile = Profile("two", TENSORS, codecs=timed)
    assert default_codec(profile, ("cpu",), standard=SAFELY) == "none"
    assert default_codec(profile, ("cpu",), standard=LENIENTLY) == "onebit"
    for codec in ("int8", "bf16", "fp16", "int4"):
        more = replace(profile, codecs={**timed, codec: {"cpu": FAST}})
        assert default_codec(more, ("cpu",), standard=SAFELY) == codec
