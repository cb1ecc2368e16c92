"""Verdicts of the timeline: the same questions, answered by what a profile and a cluster make of a codec."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import pytest

from psgc.plan.inputs.cluster import Cluster, Link
from psgc.plan.inputs.profile import CostCurve, computed_profile
from psgc.plan.model.costs import CodecCosts
from psgc.plan.model.problem import Problem, simulate
from psgc.plan.model.vary import SAME, Change, varied
from psgc.plan.whatif.on_timeline import TimelineTimes
from psgc.plan.whatif.verdict import gain, verdict

_WHOLE = computed_profile("gpt2", "a100")
# a tenth of the tensors, ten times as large: the same job, sooner simulated
GPT2 = replace(_WHOLE, tensors=tuple(replace(tensor, numel=_WHOLE.numel // 15) for tensor in _WHOLE.tensors[9::10]))
CODEC = CodecCosts("int8", 1.016, {"gpu": CostCurve((1.0, 2.0**30), (20.0, 2e4), (10.0, 1e4))})


def times(gbps: float, codec: CodecCosts = CODEC, **options: float) -> TimelineTimes:
    where = Cluster("test", 4, 1, Link(100, 5), Link(gbps, 20))
    return TimelineTimes(Problem(GPT2, where, codec), **options)


def slower(factor: float) -> CodecCosts:
    return varied(Problem(GPT2, times(1).problem.cluster, CODEC), Change(codec=factor)).codec


@functools.cache
def at_one_gbps(**options: float) -> dict[str, Any]:
    return verdict(times(1, **options))


def test_a_slow_link_pays_and_a_fast_one_does_not() -> None:
    assert "int8 at 1 Gbit/s on 4 x 1 GPUs pays: " in at_one_gbps()["verdict"]
    assert "does not pay: " in verdict(times(400, slower(500)))["verdict"]


def test_below_the_crossover_the_codec_is_faster_and_above_it_is_not() -> None:
    asked = times(10, slower(5))
    crossover = asked.crossover_gbps()
    assert 1 < crossover < 1e4
    # each plan is searched for by itself, so near the crossover the gain moves by what the searches leave
    assert gain(asked, Change(link=0.8 * crossover / 10)) > 0 > gain(asked, Change(link=1.25 * crossover / 10))
    assert times(10, slower(1e10)).crossover_gbps() == 0
    assert times(10, replace(slower(0), bytes_per_element=1.0)).crossover_gbps() == math.inf


@pytest.mark.parametrize("codec", [CODEC, slower(500)])
def test_the_budget_is_what_would_make_the_same_plan_take_as_long_as_none(codec: CodecCosts) -> None:
    asked = times(400, codec)
    change = Change(codec=asked.encode_budget_ms() / asked.codec_ms)
    assert simulate(varied(asked.problem, change), asked.plans[1].buckets).step_us / 1e3 == pytest.approx(asked.sync_ms(SAME), rel=0.01)


def test_no_time_is_short_enough_for_a_codec_that_saves_no_bytes() -> None:
    asked = times(10, replace(slower(10), bytes_per_element=8.0))
    assert asked.encode_budget_ms() < 0
    assert "would not if it encoded in no time" in verdict(asked)["verdict"]


def test_bf16_gradients_are_a_harder_peer_than_fp32() -> None:
    assert at_one_gbps(peer_bytes=2.0)["gain"] < at_one_gbps()["gain"]
    assert times(1, peer_bytes=2.0).required_ratio() == pytest.approx(times(1).required_ratio() / 2)


def test_bf16_gradients_are_told_beside_fp32_and_asked_for_alone_with_over() -> None:
    found, alone = at_one_gbps(), at_one_gbps(peer_bytes=2.0)
    assert found["bf16_ms"] == pytest.approx(alone["sync_ms"])
    assert (found["gain_over_bf16"], found["margin_over_bf16"]) == pytest.approx((alone["gain"], alone["margin"]))
    assert f"; bf16 gradients take {found['bf16_ms']:,.0f} ms uncompressed, and int8 saves" in found["verdict"]
    assert "bf16_ms" not in alone and "bf16 gradients" not in alone["verdict"]
    halves = verdict(times(1, replace(slower(0), bytes_per_element=2.0)))
    assert "so all of the gain is bf16's" in halves["verdict"]
    assert times(1, replace(CODEC, name="bf16")).over_bf16 is None  # the cast itself


def test_less_certain_codec_times_widen_the_margin() -> None:
    assert verdict(times(100, slower(5), spread=1.5))["margin"] > verdict(times(100, slower(5), spread=1.1))["margin"]


def test_a_measured_time_is_held_against_the_timelines() -> None:
    simulated = times(1).sync_ms(SAME)
    assert times(1, measured_ms=simulated).warnings() == []
    (other,) = times(1, measured_ms=2 * simulated).warnings()
    assert f"the timeline says {simulated:.3g} ms" in other
    (short,) = times(1, measured_ms=GPT2.backward_us / 2e3).warnings()
    assert "are less than the profile's backward alone" in short
    late = TimelineTimes(Problem(GPT2, Cluster("slow", 4, 1, Link(100, 5), Link(1, 1e5)), CODEC), measured_ms=100.0)
    (ruled_out,) = late.warnings()
    assert "a latency of 100000 us is ruled out by the measured 100 ms: the last bucket waits 2 x 3 messages = 600 ms" in ruled_out


def test_the_margin_counts_copies_to_the_host_that_are_a_little_faster_or_slower() -> None:
    on_cpus = CodecCosts("int8", 1.016, {"cpu": CostCurve((1.0, 2.0**30), (20.0, 2e4), (10.0, 1e4))})
    where = Cluster("test", 4, 1, Link(100, 5), Link(10, 20), host=Link(30, 10))
    asked = TimelineTimes(Problem(GPT2, where, on_cpus))
    plain, encoded = asked.plans
    gains = asked.gains_elsewhere()
    for factor in (0.9, 1.1):
        near = replace(where, host=Link(30 * factor, 10))
        steps = [simulate(replace(job, cluster=replace(job.cluster, host=near.host)), plan.buckets).step_us for job, plan in (
            (replace(asked.problem, cluster=where), encoded), (asked.peer, plain))]  # fmt: skip
        assert any(gained == pytest.approx(1 - steps[0] / steps[1], rel=1e-9) for gained in gains)
        assert steps[0] != encoded.step_us
    assert len(gains) == len(times(10).gains_elsewhere()) + 2
