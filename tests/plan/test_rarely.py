"""What rare exchanges cost, against sums by hand, and what is told of their losses, against the measured ones."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from psgc.plan.inputs.estimates import with_codec_times
from psgc.plan.inputs.profile import computed_profile
from psgc.plan.whatif.candidates import NOMINAL, Candidate, Corner
from psgc.plan.whatif.rarely import DEMO, LOCAL_STEPS, MEASURED_LOSSES, SPARSELOCO, exposed_in_fragments_us, rarely, told_of_losses
from tests.plan.test_advise import cluster_of

GPT2 = computed_profile("gpt2", "a100", 65536)
COMPUTING = (GPT2.forward_us or 0.0) + GPT2.backward_us


def found(gbps: float, nodes: int = 4, gpus: int = 1) -> dict[str, Candidate]:
    timed = with_codec_times(GPT2, ["int8"], gpu="a100")
    return {one.name.partition("-")[0]: one for one in rarely(timed, cluster_of("a100", nodes, gpus, gbps, 50.0), ["int8"])}


def steps_of(one: Candidate) -> int:
    return int(one.name.partition("-")[2])


@pytest.mark.parametrize(
    ("exchange", "fragments", "delay", "steps", "waited"),
    [
        (100.0, 1, 0, 10, 100.0),  # nothing hides it
        (100.0, 4, 2, 100, 4 * (25.0 - 20.0)),  # each fragment is awaited after two steps of 10
        (100.0, 4, 3, 100, 0.0),
        (5000.0, 4, 300, 100, 4000.0),  # all travel longer than the steps take
    ],
)
def test_what_is_waited_for_is_what_steps_do_not_hide(exchange: float, fragments: int, delay: int, steps: int, waited: float) -> None:
    assert exposed_in_fragments_us(exchange, fragments, delay, steps, computing=10.0) == waited


@pytest.mark.parametrize(("nodes", "gpus"), [(2, 1), (4, 1), (2, 4)])
def test_relayed_payloads_pass_a_nodes_link_once_for_each_of_its_gpus_and_of_all_ranks(nodes: int, gpus: int) -> None:
    numel, ranks, link = GPT2.numel, nodes * gpus, cluster_of("a100", nodes, gpus, 1.0, 50.0).inter
    for name, codec in (("sparse", SPARSELOCO), ("demo", DEMO)):
        one = found(1.0, nodes, gpus)[name]
        steps = steps_of(one) if name == "sparse" else 1
        sent = gpus * ranks * codec.bytes_per_element * numel * 8 / 1e9 * 1e6
        encoding = (codec.encode_us + ranks * codec.decode_us) * numel / 1e6
        assert one.iteration_us(NOMINAL) == pytest.approx(COMPUTING + (sent + encoding + 2 * link.latency_us) / steps)
        assert one.iteration_us(Corner(codec=1)) > one.iteration_us(NOMINAL) > one.iteration_us(Corner(codec=-1, link=1.1))


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
    for line in (Path(__file__).parents[2] / "benchmarks" / "far_apart.jsonl").read_text().splitlines():
        document = json.loads(line)
        system, job, _ = json.loads(document["of"])
        if (job["learners"], job["steps"], job["every"], job["mbit"]) == (2, 300, 50, 0.0):
            losses.setdefault(system, []).append(document["row"]["loss"])
    for name, system in {"DDP": "ddp", "local": "psgc none", "sparseloco": "psgc sparseloco", "demo": "psgc demo"}.items():
        assert statistics.mean(losses[system]) == pytest.approx(MEASURED_LOSSES[name], abs=6e-4)
        assert f"{MEASURED_LOSSES[name]:.2f}" in told_of_losses()
