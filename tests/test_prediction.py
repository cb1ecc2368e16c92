"""Predictions for the testbed: what hosts that share cores do to one another, and what is reported of errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from psgc.plan.inputs.cluster import Link
from psgc.plan.inputs.profile import CostCurve, Profile, TensorProfile
from psgc.plan.model.costs import BOTH_WAYS, GPU, SEND
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
    return float(prediction.predict_ms(problem(gbps, codec, cores, workers), layout))


def problem(gbps: float | None, codec: str, cores: int, workers: int = 2, **more: Any) -> Any:
    return prediction.cell_problem(prediction.Cell(gbps, codec, workers, **more), PROFILE, cores)


def test_hosts_with_cores_of_their_own_are_predicted_by_the_planners_model(tmp_path: Path) -> None:
    found = problem(1.0, "none", cores=3)
    assert found.sharing is None
    assert found.cluster.inter == Link(1448 / 1514, 100.0)


def test_hosts_that_share_cores_are_slower(tmp_path: Path) -> None:
    for gbps in (0.1, 1.0):
        assert predicted_ms(tmp_path, gbps, cores=2) > predicted_ms(tmp_path, gbps, cores=3)


def test_the_more_workers_share_cores_the_longer_their_codecs_take() -> None:
    def encode_us(workers: int, cores: int) -> float:
        job = problem(1.0, "int8", cores, workers)
        tasks = job.part_tasks(ENCODED, 1_000_000, job.codec)
        return float(next(us for action, resource, us in tasks if action == "comp@cpu" and resource == GPU))

    assert encode_us(workers=4, cores=2) == pytest.approx(2 * encode_us(workers=2, cores=2))
    assert encode_us(workers=2, cores=2) == pytest.approx(1000.0)


def test_messages_delay_backward_by_what_cores_do_for_them() -> None:
    """4 MB, each at two ends, at loopback's 8 Gbit/s, and half of what the next part takes; two workers on two cores have one each."""
    job = problem(0.1, "none", cores=2)
    tasks = job.part_tasks(PLAIN, 1_000_000, job.codec)
    pulled = [us for action, resource, us in tasks if action == "flat.pull" and resource == GPU]
    # its handling, its bytes, and the copy out of its slot
    assert pulled == [pytest.approx(40.0), pytest.approx(2 * 4000.0), pytest.approx(1000.0)]


def test_cores_alone_limit_messages_without_a_limit_on_links(tmp_path: Path) -> None:
    """Two buckets, each pushed and pulled: 4 x 8.04 ms of messages, and copies and sums, with backward."""
    found = predicted_ms(tmp_path, None, cores=2)
    assert 5 + 10 + 32 < found < 5 + 10 + 32 + 10


def test_slow_links_get_fewer_iterations_but_never_too_few() -> None:
    steps = [prediction.steps_for(prediction.Cell(gbps, "none"), PROFILE) - prediction.WARM_UP - 1 for gbps in (0.001, 0.1, 1.0, None)]
    assert steps[0] == prediction.LEAST_STEPS
    assert steps == sorted(steps)
    assert steps[-1] == prediction.MOST_STEPS


def test_servers_have_hosts_of_their_own_or_share_the_workers() -> None:
    apart, beside = prediction.Cell(1.0, "none", 4, 2), prediction.Cell(1.0, "none", 4, 2, beside=True)
    assert (apart.hosts, beside.hosts) == (6, 4)
    assert [prediction.cell_problem(cell, PROFILE, 2).cluster.servers_on_nodes for cell in (apart, beside)] == [False, True]
    for where in (True, False):
        assert problem(1.0, "none", cores=6, workers=4, servers=2, beside=where).sharing is None
        assert problem(1.0, "none", cores=5, workers=4, servers=2, beside=where).sharing is not None


def test_a_message_costs_cores_for_the_bytes_that_leave_its_host_however_servers_share_the_link() -> None:
    """4 MB at two ends at loopback's 8 Gbit/s: 8 ms; beside two servers half of it stays on the host. Four workers share two cores."""

    def bytes_us(workers: int, servers: int, beside: bool) -> float:
        job = problem(0.1, "none", 2, workers, servers=servers, beside=beside)
        tasks = job.part_tasks(PLAIN, 1_000_000, job.codec)
        return float(
            next(us for at, (action, resource, us) in enumerate(tasks) if action == "flat.push" and tasks[at + 1][1] in links(beside))
        )

    def links(beside: bool) -> tuple[int, ...]:
        return (BOTH_WAYS,) if beside else (SEND,)

    assert bytes_us(2, 1, False) == pytest.approx(8000.0)
    assert bytes_us(2, 2, False) == pytest.approx(8000.0)
    assert bytes_us(4, 2, False) == pytest.approx(16000.0)
    assert bytes_us(2, 2, True) == pytest.approx(4000.0)
    assert bytes_us(4, 4, True) == pytest.approx(12000.0)


def test_a_delay_is_the_links_latency() -> None:
    assert problem(1.0, "none", 3, delay_ms=20.0).cluster.inter.latency_us == 20_100.0


def test_each_thing_that_the_cells_are_about_occurs_at_least_twice() -> None:
    cells = prediction.CELLS
    assert len(cells) == len({cell.title for cell in cells}) == 24
    kinds: list[Callable[[Any], bool]] = [
        *(lambda cell, gbps=gbps: cell.gbps == gbps for gbps in (0.1, 1.0, None)),
        *(lambda cell, codec=codec: cell.codec == codec for codec in ("none", "bf16", "int8", "onebit")),
        *(lambda cell, workers=workers: cell.workers == workers for workers in (2, 4)),
        *(lambda cell, servers=servers: cell.servers == servers for servers in (1, 2)),
        *(lambda cell, beside=beside: cell.beside == beside for beside in (True, False)),
        lambda cell: cell.delay_ms == 20,
        lambda cell: cell.small_parts,
        lambda cell: not cell.small_parts and not cell.delay_ms,
    ]
    assert min(sum(map(kind, cells)) for kind in kinds) >= 2


def test_times_before_and_after_a_job_count_by_half_each_whatever_their_order() -> None:
    first, second = TensorProfile("late", 1_000_000, 0.0), TensorProfile("early", 1_000_000, 10_000.0)
    after = replace(PROFILE, tensors=(replace(second, ready_us=2_000.0), replace(first, ready_us=18_000.0)), forward_us=7_000.0)
    mean = prediction.mean_of(PROFILE, after)
    assert [(tensor.name, tensor.ready_us) for tensor in mean.tensors] == [("early", 6_000.0), ("late", 9_000.0)]
    assert mean.forward_us == 6_000.0
    assert mean.codecs == PROFILE.codecs
    assert min(PROFILE, after, key=prediction.compute_us) is PROFILE, "bounds are of the quicker one"
    assert prediction.drift_of(PROFILE, after) == prediction.drift_of(after, PROFILE) == pytest.approx((18 + 7) / (10 + 5) - 1)


def row(cell: str = "a", error: float = 0.0, drift: float = 0.0, iqr_ms: float = 0.0, measured_ms: float = 100.0) -> Any:
    return prediction.Row(cell, 100.0 * (1 + error), measured_ms, 80.0, iqr_ms, 20, error, 0.0, drift)


def test_the_summary_has_the_size_of_errors_whatever_their_sign() -> None:
    found = prediction.summary([row(error=error) for error in (-0.3, 0.1, 0.02)] + [row(error=0.1, measured_ms=76.0)])
    assert found == {"median_error": 0.1, "worst_error": 0.3, "least_above_bound": pytest.approx(-0.05)}


def test_an_unsteady_cell_is_measured_twice_and_the_steadier_run_counts_whatever_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for runs, expected in (
        ([row(error=0.4)], (0.4, 1)),
        ([row(error=0.1, drift=0.06), row(error=0.3, drift=0.02)], (0.3, 2)),
        ([row(error=0.1, iqr_ms=11), row(error=0.3, iqr_ms=20)], (0.1, 2)),
    ):
        made = iter(runs)
        monkeypatch.setattr(prediction, "measure", lambda *_, made=made: next(made))
        found = prediction.row(prediction.CELLS[0], PROFILE, None)
        assert (found.error, found.runs) == expected
        assert next(made, None) is None


def test_a_run_goes_on_with_the_cells_that_its_file_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, done, lacking = tmp_path / "rows.jsonl", prediction.CELLS[0], prediction.CELLS[1]
    cut_off = json.dumps(asdict(row(lacking.title)))[:-20]
    out.write_text(json.dumps(asdict(row(done.title, error=0.2))) + "\n" + cut_off + "\n")
    measured = []

    def measure(cell: Any, *_: Any) -> Any:
        measured.append(cell)
        return row(cell.title)

    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(PROFILE.to_json()))
    monkeypatch.setattr(prediction, "measure", measure)
    for _ in range(2):
        found = prediction.run((done, lacking), profile, out)
        assert [(one.cell, one.error) for one in found] == [(done.title, 0.2), (lacking.title, 0.0)]
        assert measured == [lacking]


def test_others_are_whoever_worked_and_was_not_ours() -> None:
    before, after = prediction.Busy(10, 100, 1), prediction.Busy(20, 120, 6)
    assert prediction.others_share(before, after) == pytest.approx(5 / 20)


def test_a_command_that_fails_is_told_by_its_last_line() -> None:
    with pytest.raises(prediction.PredictionError, match=r"^-c: no such luck$"):
        prediction.call([sys.executable, "-c", "print('much'); raise SystemExit('no such luck')"], {})
