"""Predictions for the testbed: what hosts that share cores do to one another, and what is reported of errors."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from psgc.plan.inputs.cluster import Link
from psgc.plan.inputs.profile import CostCurve, Profile, TensorProfile
from psgc.plan.model.costs import GPU
from psgc.plan.model.plan import Plan, PlannedBucket
from tests.benchmark_scripts import load

PLAIN = ("flat.push", "flat.pull")
ENCODED = ("comp@cpu", "flat.push.c", "flat.pull.c", "decomp@cpu")


prediction = load("prediction")
# one microsecond for every 1000 elements of anything; a message takes 100 us, and 40 us of cores
CURVE = CostCurve((1000.0, 2000.0), (1.0, 2.0), (1.0, 2.0))
DEVICES = {"cpu": CURVE, "server": CURVE}
PROFILE = Profile(
    "two", (TensorProfile("late", 1_000_000, 0.0), TensorProfile("early", 1_000_000, 10_000.0)), forward_us=5_000.0,
    codecs={"none": DEVICES, "int8": DEVICES}, overheads={"next_part_us": 80.0}, links={"loopback": Link(8.0, 100.0)},
)  # fmt: skip


def predicted_ms(tmp_path: Path, gbps: float | None, cores: int, codec: str = "none", workers: int = 2) -> float:
    option = PLAIN if codec == "none" else ENCODED
    buckets = tuple(PlannedBucket((t.name,), t.numel, 1, 0, codec, option) for t in PROFILE.tensors)
    layout = tmp_path / "layout.json"
    layout.write_text(json.dumps(Plan("two", "", buckets).to_json()))
    return float(prediction.predict_ms(prediction.problem_for(gbps, codec, workers, PROFILE, cores), layout))


def test_hosts_with_cores_of_their_own_are_predicted_by_the_planners_model(tmp_path: Path) -> None:
    problem = prediction.problem_for(1.0, "none", 2, PROFILE, cores=3)
    assert type(problem) is prediction.Problem
    assert problem.cluster.inter == Link(1448 / 1514, 100.0)


def test_hosts_that_share_cores_are_slower(tmp_path: Path) -> None:
    for gbps in (0.1, 1.0):
        assert predicted_ms(tmp_path, gbps, cores=2) > predicted_ms(tmp_path, gbps, cores=3)


def test_the_more_workers_share_cores_the_longer_their_codecs_take() -> None:
    def encode_us(workers: int, cores: int) -> float:
        problem = prediction.problem_for(1.0, "int8", workers, PROFILE, cores)
        tasks = problem.part_tasks(ENCODED, 1_000_000, problem.codec)
        return float(next(us for action, resource, us in tasks if action == "comp@cpu" and resource == GPU))

    assert encode_us(workers=4, cores=2) == pytest.approx(2 * encode_us(workers=2, cores=2))
    assert encode_us(workers=2, cores=2) == pytest.approx(1000.0)


def test_messages_delay_backward_by_what_cores_do_for_them() -> None:
    """4 MB, each at two ends, at loopback's 8 Gbit/s, and half of what the next part takes; two workers on two cores have one each."""
    problem = prediction.problem_for(0.1, "none", 2, PROFILE, cores=2)
    tasks = problem.part_tasks(PLAIN, 1_000_000, problem.codec)
    pulled = [us for action, resource, us in tasks if action == "flat.pull" and resource == GPU]
    assert pulled == [pytest.approx(40.0 + 2 * 4000.0), pytest.approx(1000.0)]  # the message, and the copy out of its slot


def test_cores_alone_limit_messages_without_a_limit_on_links(tmp_path: Path) -> None:
    """Two buckets, each pushed and pulled: 4 x 8.04 ms of messages, and copies and sums, with backward."""
    found = predicted_ms(tmp_path, None, cores=2)
    assert 5 + 10 + 32 < found < 5 + 10 + 32 + 10


def test_slow_links_get_fewer_iterations_but_never_too_few() -> None:
    steps = [prediction.steps_for(gbps, 2, PROFILE) - prediction.WARM_UP - 1 for gbps in (0.001, 0.1, 1.0, None)]
    assert steps[0] == prediction.LEAST_STEPS
    assert steps == sorted(steps)
    assert steps[-1] == prediction.MOST_STEPS


def test_times_before_and_after_a_job_count_by_half_each_whatever_their_order() -> None:
    first, second = TensorProfile("late", 1_000_000, 0.0), TensorProfile("early", 1_000_000, 10_000.0)
    after = replace(PROFILE, tensors=(replace(second, ready_us=2_000.0), replace(first, ready_us=18_000.0)), forward_us=7_000.0)
    mean = prediction.mean_of(PROFILE, after)
    assert [(tensor.name, tensor.ready_us) for tensor in mean.tensors] == [("early", 6_000.0), ("late", 9_000.0)]
    assert mean.forward_us == 6_000.0
    assert mean.codecs == PROFILE.codecs
    assert prediction.drift_of(PROFILE, after) == prediction.drift_of(after, PROFILE) == pytest.approx((18 + 7) / (10 + 5) - 1)


def test_the_summary_has_the_size_of_errors_whatever_their_sign() -> None:
    rows = [prediction.Row("1 Gbit/s", "none", 0, 0, 0, 0, error, 0) for error in (-0.3, 0.1, 0.02)]
    assert prediction.summary(rows) == {"median_error": 0.1, "worst_error": 0.3}


def test_others_are_whoever_worked_and_was_not_ours() -> None:
    before, after = prediction.Busy(10, 100, 1), prediction.Busy(20, 120, 6)
    assert prediction.others_share(before, after) == pytest.approx(5 / 20)


def test_a_command_that_fails_is_told_by_its_last_line() -> None:
    with pytest.raises(prediction.PredictionError, match=r"^-c: no such luck$"):
        prediction.call([sys.executable, "-c", "print('much'); raise SystemExit('no such luck')"], {})
