"""A simulated step as lanes, as shares, and as a trace for Perfetto."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from psgc.plan.inputs.cluster import Cluster, Link
from psgc.plan.inputs.profile import CostCurve, Profile, TensorProfile
from psgc.plan.model.costs import CodecCosts
from psgc.plan.model.lanes import BACKWARD, LANES, busy_us, overlap, spans
from psgc.plan.model.plan import PlannedBucket
from psgc.plan.model.problem import Problem, Simulated, simulate
from psgc.plan.model.timeline import busy_us as resources_busy_us
from psgc.plan.report.trace import trace

# between nodes a byte takes 1 us, encoding an element 1 us, decoding one 2 us; a payload is a byte an element
CLUSTER = Cluster("pair", nodes=2, gpus_per_node=1, intra=Link(8, 0), inter=Link(8e-3, 0))
CODEC = CodecCosts("bytes", 1.0, {"gpu": CostCurve((1.0, 2.0), (1.0, 2.0), (2.0, 4.0))})
PROFILE = Profile("tiny", (TensorProfile("c", 10, 0.0), TensorProfile("b", 10, 50.0), TensorProfile("a", 10, 100.0)))
ENCODED = PlannedBucket(("c", "b"), 20, 2, 0, "bytes", ("comp@gpu", "flat.all_gather.c", "decomp@gpu"))
PLAIN = PlannedBucket(("a",), 10, 1, 1, "none", ("flat.all_reduce",))


def step(*buckets: PlannedBucket, profile: Profile = PROFILE) -> Simulated:
    return simulate(Problem(profile, CLUSTER, CODEC), buckets)


def test_a_span_says_whose_and_which_part_it_is_and_a_ring_holds_the_link_both_ways() -> None:
    found = spans(step(ENCODED, PLAIN))
    assert [(span.bucket, span.part) for span in found if span.action == "comp@gpu"] == [(0, 0), (0, 1)]
    assert [span.lane for span in found if span.bucket == 1] == [BACKWARD, "inter-send", "inter-receive"]


def test_backward_has_a_lane_of_its_own_and_waits_while_the_gpu_encodes_and_decodes() -> None:
    backward = [span for span in spans(step(ENCODED, PLAIN)) if span.lane == BACKWARD]
    assert [(span.start_us, span.us) for span in backward] == [
        (0.0, 50.0),
        (150.0, 50.0),
    ]  # two parts: 10 us to encode, 40 to decode both ranks'


def test_lanes_work_as_long_as_their_resources_and_backward_together_with_the_gpu() -> None:
    simulated = step(ENCODED, PLAIN)
    lanes, resources = busy_us(spans(simulated)), resources_busy_us(simulated.chains)
    assert lanes.pop(BACKWARD) + lanes.pop("gpu") == resources.pop("gpu")
    assert lanes == resources


def test_overlap_is_the_share_of_communication_while_backward_computes() -> None:
    first = PlannedBucket(("c",), 10, 1, 0, "none", ("flat.all_reduce",))  # 40 us from 0 on; the last gradient is ready at 100
    rest = PlannedBucket(("b", "a"), 20, 1, 0, "none", ("flat.all_reduce",))  # 80 us from 100 on
    assert overlap(spans(step(first, rest))) == pytest.approx(40 / 120)


def test_communication_while_the_gpu_encodes_is_not_hidden_behind_backward() -> None:
    ring = PlannedBucket(("c",), 10, 1, 0, "none", ("flat.all_reduce",))
    gather = PlannedBucket(("b", "a"), 20, 1, 0, "bytes", ("comp@gpu", "flat.all_gather.c", "decomp@gpu"))
    early = Profile("tiny", (TensorProfile("c", 10, 0.0), TensorProfile("b", 10, 0.0), TensorProfile("a", 10, 10.0)))
    found = spans(step(ring, gather, profile=early))
    # backward until 10, encoding until 30, the ring until 40, the payloads' way until 60
    assert overlap(found) == pytest.approx(10 / 60)


def test_without_communication_nothing_is_left_to_hide() -> None:
    alone = Cluster("one", nodes=1, gpus_per_node=1, intra=Link(8, 0), inter=Link(8, 0))
    simulated = simulate(Problem(PROFILE, alone, CODEC), [PlannedBucket(("c", "b", "a"), 30, 1, 0, "none", ("flat.all_reduce",))])
    assert overlap(spans(simulated)) == 1.0
    assert [event["name"] for event in trace(simulated, [PLAIN])["traceEvents"] if event["ph"] == "X"] == [BACKWARD]


def test_a_trace_names_lanes_and_events_and_keeps_their_times() -> None:
    simulated = step(ENCODED, PLAIN)
    made = json.loads(json.dumps(trace(simulated, [ENCODED, PLAIN])))
    names = {event["tid"]: event["args"]["name"] for event in made["traceEvents"] if event["name"] == "thread_name"}
    assert list(names.values()) == list(LANES)
    events = [event for event in made["traceEvents"] if event["ph"] == "X"]
    assert {"0/backward", "0/1/comp@gpu", "1/0/flat.all_reduce"} <= {event["name"] for event in events}
    assert max(event["ts"] + event["dur"] for event in events) == simulated.step_us
    assert next(event["args"]["tensors"] for event in events if event["name"] == "0/1/comp@gpu") == "c .. b (2)"


def test_on_a_traces_lane_one_event_ends_before_the_next_begins() -> None:
    events = [event for event in trace(step(ENCODED, PLAIN), [ENCODED, PLAIN])["traceEvents"] if event["ph"] == "X"]
    for lane in range(len(LANES)):
        times = sorted((event["ts"], event["ts"] + event["dur"]) for event in events if event["tid"] == lane)
        assert all(before[1] <= after[0] for before, after in pairwise(times))
