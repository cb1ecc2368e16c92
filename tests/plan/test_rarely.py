"""What rare exchanges cost, against sums by hand, and what is told of their losses, against the measured ones."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from psgc.codecs.outer import numel_in_squares
from psgc.plan.inputs.estimates import with_codec_times
from psgc.plan.inputs.profile import TensorProfile, computed_profile
from psgc.plan.whatif.candidates import NOMINAL, Candidate, Corner
from psgc.plan.whatif.rarely import (
    DEMO,
    LOCAL_STEPS,
    MEASURED_LOSSES,
    SPARSELOCO,
    computing_us,
    exposed_in_fragments_us,
    rarely,
    told_of_intervals,
    told_of_losses,
)
from tests.plan.test_advise import cluster_of

GPT2 = computed_profile("gpt2", "a100", 65536)
FAR_APART = Path(__file__).parents[2] / "benchmarks" / "far_apart.jsonl"
# The shapes of examples/gpt_model.py, which was measured:
GPT_OUTSIDE = ((256, 160), (128, 160), (160,), (160,))
GPT_BLOCK = (*((160,),) * 4, (480, 160), (480,), (160, 160), (160,), (640, 160), (640,), (160, 640), (160,))
COMPUTING = (GPT2.forward_us or 0.0) + GPT2.backward_us


def found(gbps: float, nodes: int = 4, gpus: int = 1, latency_us: float = 50.0) -> dict[str, Candidate]:
    timed = with_codec_times(GPT2, ["int8"], gpu="a100")
    return {one.name.partition("-")[0]: one for one in rarely(timed, cluster_of("a100", nodes, gpus, gbps, latency_us), ["int8"])}


def steps_of(one: Candidate) -> int:
    return int(one.name.partition("-")[2])


@pytest.mark.parametrize(
    ("exchange", "fragment", "fragments", "delay", "steps", "waited"),
    [
        (100.0, 100.0, 1, 0, 10, 100.0),  # nothing hides it
        (100.0, 25.0, 4, 2, 100, 4 * (25.0 - 20.0)),  # each fragment is awaited after two steps of 10
        (100.0, 40.0, 4, 2, 100, 4 * (40.0 - 20.0)),  # latency is each fragment's own
        (100.0, 25.0, 4, 3, 100, 0.0),
        (5000.0, 1250.0, 4, 300, 100, 4000.0),  # all travel longer than the steps take
    ],
)
def test_what_is_waited_for_is_what_steps_do_not_hide(
    exchange: float, fragment: float, fragments: int, delay: int, steps: int, waited: float
) -> None:
    assert exposed_in_fragments_us(exchange, fragment, fragments, delay, steps, computing=10.0) == waited


@pytest.mark.parametrize("codecs", [["int8"], []])
def test_every_fragment_of_a_stream_pays_the_whole_latency(codecs: list[str]) -> None:
    tensors = tuple(TensorProfile(f"t{number}", 1000, 0.0) for number in range(4))
    profile = replace(GPT2, tensors=tensors, forward_us=10e3, codecs=GPT2.codecs if codecs else {})
    timed, latency_us = with_codec_times(profile, codecs, gpu="a100" if codecs else ""), 1e6
    local, stream = rarely(timed, cluster_of("a100", 2, 1, 100.0, latency_us), codecs)[:2]
    exchange = (local.iteration_us(NOMINAL) - 10e3) * steps_of(local)
    assert exchange >= 2 * latency_us
    waited = (stream.iteration_us(NOMINAL) - 10e3) * steps_of(stream)
    assert waited == pytest.approx(8 * (exchange - 5 * 10e3), rel=0.01)


@pytest.mark.parametrize(("nodes", "gpus", "latency_us"), [(2, 1, 50.0), (4, 1, 50.0), (2, 4, 50.0), (2, 1, 1e8)])
def test_relayed_payloads_pass_a_nodes_link_once_for_each_of_its_gpus_and_of_all_ranks(nodes: int, gpus: int, latency_us: float) -> None:
    ranks = nodes * gpus
    squares = sum(numel_in_squares(one.shape or (one.numel,)) for one in GPT2.tensors)
    for name, codec, numel in (("sparse", SPARSELOCO, GPT2.numel), ("demo", DEMO, squares)):
        one = found(1.0, nodes, gpus, latency_us)[name]
        steps = steps_of(one) if name == "sparse" else 1
        sent = gpus * ranks * codec.bytes_per_element * numel * 8 / 1e9 * 1e6
        encoding = (codec.encode_us + ranks * codec.decode_us) * numel / 1e6
        travelling = 2 * latency_us + max(sent, 4 * latency_us)
        assert one.iteration_us(NOMINAL) == pytest.approx(COMPUTING + (travelling + encoding) / steps)
        assert one.iteration_us(Corner(codec=1)) > one.iteration_us(NOMINAL) > one.iteration_us(Corner(codec=-1, link=1.1))


def test_squares_are_counted_by_shape_where_that_is_known() -> None:
    shapes = [(65, 3), (64, 64), (1,), (4097,)]  # 2, 1, 1 and 2 squares; as vectors 1, 1, 1 and 2
    tensors = tuple(TensorProfile(f"t{number}", math.prod(shape), 0.0, shape) for number, shape in enumerate(shapes))
    for given, squares in ((tensors, 6), (tuple(replace(one, shape=None) for one in tensors), 5)):
        profile = replace(GPT2, tensors=given)
        timed = with_codec_times(profile, ["int8"], gpu="a100")
        demo = rarely(timed, cluster_of("a100", 1, 1, 1.0, 50.0), ["int8"])[-1]
        encoding = (DEMO.encode_us + DEMO.decode_us) * squares * 4096 / 1e6
        assert demo.name == "demo" and demo.iteration_us(NOMINAL) == pytest.approx(computing_us(profile) + encoding)


def far_apart(system: str, mbit: float) -> float:
    """The median of the measured seconds of 300 steps on two learners; with a limit, over 50 ms each way."""
    rows = (json.loads(line) for line in FAR_APART.read_text().splitlines())
    measured = ((*json.loads(row["of"])[:2], row["row"]["seconds"]) for row in rows)
    return statistics.median(
        took for name, job, took in measured if name == system and (job["learners"], job["steps"], job["mbit"]) == (2, 300, mbit)
    )


@pytest.mark.parametrize("mbit", [0.0, 10.0, 100.0])
def test_demo_takes_about_as_long_as_it_was_measured_to_take(mbit: float) -> None:
    """Within 15 %: the measured seconds are of one run each over the slow links, and computing is what DDP took without a limit, synchronization included."""
    shapes = [*GPT_OUTSIDE, *GPT_BLOCK * 4]
    assert sum(map(math.prod, shapes)) == pytest.approx(1.3e6, rel=0.01)
    assert sum(map(numel_in_squares, shapes)) == 424 * 4096
    computing = far_apart("ddp", 0.0) / 300 * 1e6
    tensors = tuple(
        TensorProfile(f"t{number}", math.prod(shape), computing * 2 / 3 * (number + 1) / len(shapes), shape)
        for number, shape in enumerate(shapes)
    )
    profile = replace(GPT2, tensors=tensors, forward_us=computing / 3)
    assert computing_us(profile) == pytest.approx(computing)
    link = (mbit / 1e3, 50e3) if mbit else (100.0, 20.0)
    timed = with_codec_times(profile, ["int8"], gpu="a100")
    one = next(one for one in rarely(timed, cluster_of("a100", 2, 1, *link), ["int8"]) if one.name == "demo")
    assert 300 * one.iteration_us(NOMINAL) / 1e6 == pytest.approx(far_apart("psgc demo", mbit), rel=0.15)


def test_a_faster_link_exchanges_more_often_and_none_makes_an_iteration_shorter_than_computing() -> None:
    links = [found(gbps) for gbps in (0.01, 0.1, 1.0, 10.0, 100.0)]
    for name in ("local", "stream", "sparse", "syncer"):
        steps = [steps_of(one[name]) for one in links if name in one]
        assert steps == sorted(steps, reverse=True) and steps[0] > steps[-1]
    for of_link in links:
        assert all(one.iteration_us(NOMINAL) >= COMPUTING and one.sound is None for one in of_link.values())
        if "syncer" in of_link:
            assert of_link["syncer"].iteration_us(NOMINAL) == COMPUTING, "nobody waits"
        hidden, local = of_link["stream"], of_link["local"]
        if steps_of(hidden) == steps_of(local):
            assert hidden.iteration_us(NOMINAL) <= local.iteration_us(NOMINAL)


def test_pushes_around_a_syncer_are_as_rare_as_its_link_wants_and_none_is_named_where_that_is_rarer_than_considered() -> None:
    for gbps in (0.001, 0.1, 1.0, 10.0):
        returned = 4 * 4.0 * GPT2.numel * 8 / (gbps * 1e9) * 1e6
        enough = [steps for steps in LOCAL_STEPS if returned <= steps * COMPUTING]
        one = found(gbps).get("syncer")
        assert (one and steps_of(one)) == (enough[0] if enough else None)
    assert "syncer" not in found(0.001)


def test_where_nothing_is_computed_there_is_no_interval_for_a_syncer() -> None:
    at_once = replace(GPT2, forward_us=0.0, tensors=tuple(replace(one, ready_us=0.0) for one in GPT2.tensors))
    timed = with_codec_times(at_once, ["int8"], gpu="a100")
    names = [one.name for one in rarely(timed, cluster_of("a100", 4, 1, 1.0, 50.0), ["int8"])]
    assert "local-500" in names and not [name for name in names if name.startswith("syncer")]


@pytest.mark.parametrize(("nodes", "gpus"), [(2, 1), (16, 1), (2, 4)])
def test_bytes_are_counted_both_ways(nodes: int, gpus: int) -> None:
    one, ranks = found(10.0, nodes, gpus), nodes * gpus
    squares = sum(numel_in_squares(each.shape or (each.numel,)) for each in GPT2.tensors)
    assert one["demo"].bytes_per_element * GPT2.numel == pytest.approx((1 + ranks) / 2 * 4 / 97.6 * squares)
    assert one["sparse"].bytes_per_element == pytest.approx((1 + ranks) / 2 * 0.18 / 8 / steps_of(one["sparse"]))
    if gpus == 1:
        assert one["syncer"].bytes_per_element == pytest.approx((0.5 + 4) / 2 / steps_of(one["syncer"]))


def test_a_line_names_those_whose_rarest_exchanges_take_more_than_their_share() -> None:
    assert not told_of_intervals(list(found(10.0).values()), GPT2)
    slow = found(0.01)
    (told,) = told_of_intervals(list(slow.values()), GPT2)
    assert slow["local"].iteration_us(NOMINAL) > 1.05 * COMPUTING and told.startswith("local-500, ")
    assert "more than 5% of computing even in every 500th step" in told


def test_learners_around_a_syncer_are_one_process_each() -> None:
    assert "syncer" not in found(1.0, 4, gpus=2)
    assert "syncer" not in found(1.0, 1)


def test_without_times_of_a_codec_halves_are_exchanged() -> None:
    timed = with_codec_times(replace(GPT2, codecs={}), [])
    local = rarely(timed, cluster_of("a100", 4, 1, 1.0, 50.0), [])[0]
    assert local.bytes_per_element == pytest.approx(2 / steps_of(local))


def test_what_is_told_of_losses_was_measured() -> None:
    """python benchmarks/far_apart.py --results benchmarks/far_apart.jsonl --report"""
    losses: dict[str, list[float]] = {}
    for line in FAR_APART.read_text().splitlines():
        document = json.loads(line)
        system, job, _ = json.loads(document["of"])
        if (job["learners"], job["steps"], job["every"], job["mbit"]) == (2, 300, 50, 0.0):
            losses.setdefault(system, []).append(document["row"]["loss"])
    for name, system in {"DDP": "ddp", "local": "psgc none", "sparseloco": "psgc sparseloco", "demo": "psgc demo"}.items():
        assert statistics.mean(losses[system]) == pytest.approx(MEASURED_LOSSES[name], abs=6e-4)
        assert f"{MEASURED_LOSSES[name]:.2f}" in told_of_losses()
