"""The model of large jobs: what it must say where the answer is plain, and that its costs come out of jobs that were made by it; two small real jobs."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmark_scripts import FOLDER, load

model = load("scale_model")
sys.path.insert(0, str(FOLDER))
try:
    scale = load("scale")
finally:
    sys.path.remove(str(FOLDER))
PARTS = [(0, 1_000_000)]


def costs(**given: Any) -> Any:
    none = model.Phase(worker=0.0, scheduler=0.0, server=0.0)
    plain = dict.fromkeys(("launcher", "worker", "server", "scheduler", "again", "reached", "compute", "send", "contribution"), 0.0)
    return model.Costs(**{**plain, "join": none, "first": none, "replan": none, **given})


def shape(workers: int = 1, servers: int = 1, **given: Any) -> Any:
    return model.Shape(**{"workers": workers, "servers": servers, "parts": PARTS, "cores": 1.0, **given})


@pytest.mark.parametrize(("cores", "ends"), [(1.0, [3.0, 4.0]), (2.0, [1.5, 2.5]), (0.5, [6.0, 8.0]), (8.0, [1.5, 2.5])])
def test_threads_share_a_machines_cores_evenly_and_none_has_more_than_one(cores: float, ends: list[float]) -> None:
    clock, found = model.Clock(), []
    machine = model.Machine(clock, cores)
    for seconds in (2.5, 1.5):
        model.Thread(machine).do(seconds, lambda: found.append(clock.now))
    clock.run()
    assert found == pytest.approx(ends)


def test_a_thread_does_one_task_after_the_other() -> None:
    clock, found = model.Clock(), []
    thread = model.Thread(model.Machine(clock, 8.0))
    for seconds in (2.0, 1.0):
        thread.do(seconds, lambda: found.append(clock.now))
    clock.run()
    assert found == pytest.approx([2.0, 3.0])


def test_a_step_of_one_worker_is_the_sum_of_what_follows_on_one_another() -> None:
    told = costs(compute=3.0, send=0.5, contribution=0.25, step_beyond=0.125)
    apart = shape(cores=4.0, gbps=8.0, latency_s=0.01, servers=2, parts=[(1, 500_000_000)])  # half a second each way
    assert model.Simulated(apart, told).step() == pytest.approx(3.0 + 0.5 + (0.5 + 0.01) + 0.25 + (0.5 + 0.01) + 0.5 + 0.125)
    assert model.Simulated(shape(one_machine=True), told).step() == pytest.approx(3.0 + 0.5 + 0.25 + 0.5 + 0.125)


@pytest.mark.parametrize("workers", [2, 5, 16])
def test_on_one_machine_a_step_takes_the_work_of_all_over_the_cores_and_elsewhere_the_servers_link(workers: int) -> None:
    told = costs(compute=1.0, send=0.1, contribution=0.2)
    work = workers * (1.0 + 0.1 + 0.2 + 0.1)
    assert model.Simulated(shape(workers, one_machine=True, cores=1.0), told).step() == pytest.approx(work)
    assert (
        work / 2 <= model.Simulated(shape(workers, one_machine=True, cores=2.0), told).step() <= work / 2 + workers * 0.2 + 1.4
    )  # the server's thread is one
    free = shape(workers, workers, cores=8.0, gbps=1.0)
    assert model.Simulated(free, costs()).step() == pytest.approx(2 * (workers - 1) * 1_000_000 * 8e-9)  # in, and then out again


def test_all_join_when_the_last_process_has_started_and_the_scheduler_has_heard_and_answered_everyone() -> None:
    told = costs(launcher=0.5, worker=2.0, server=1.0, scheduler=0.75, join=model.Phase(worker=0.0, scheduler=0.2, server=0.1))
    apart = shape(4, 4, cores=8.0, latency_s=0.01)
    assert model.Simulated(apart, told).start() == pytest.approx(0.5 + 2.0 + 0.01 + 4 * 0.2 + 0.02 + 4 * 0.1, abs=0.3)
    together = shape(4, 1, one_machine=True, cores=1.0)
    assert model.Simulated(together, told).start() == pytest.approx(0.5 + 4 * 2.0 + 1.0 + 0.75 + 4 * (0.2 + 0.1))


@pytest.mark.parametrize("event", ["start", "first_step", "step", "recovery", "replan"])
def test_nothing_gets_shorter_with_more_workers(event: str) -> None:
    phase = model.Phase(worker=0.1, scheduler=0.01, server=0.02)
    told = costs(
        launcher=0.1, worker=1.0, again=0.5, reached=0.01, join=phase, first=phase, replan=phase, compute=0.1, send=0.01, contribution=0.01
    )
    times = [getattr(model.Simulated(shape(workers, 1, one_machine=True, cores=2.0), told), event)() for workers in (1, 2, 4, 8)]
    assert times == sorted(times) and times[0] > 0


def test_a_recovery_is_another_process_connections_and_the_lost_servers_contributions_again() -> None:
    told = costs(
        again=2.0, reached=0.5, send=0.25, contribution=0.125, recovery_beyond=1.0, join=model.Phase(worker=0.0, scheduler=0.0, server=9.0)
    )
    assert model.Simulated(shape(one_machine=True, parts=[(0, 1), (1, 1)], servers=2), told).recovery() == pytest.approx(
        2.0 + 0.5 + 0.25 + 0.125 + 0.25 + 1.0
    )


def test_learners_queue_for_the_syncers_one_thread_and_its_link() -> None:
    one = model.Rarely(learners=1, every_s=10.0, learner=0.2, syncer=0.1, nbytes=1000, cores=8.0, gbps=8e-6, latency_s=0.05)
    mean, longest, busy = model.exchanges(one, 3)
    assert [mean, longest] == pytest.approx([0.2 + 0.1 + 2 * 1.0 + 2 * 0.05] * 2)
    assert busy == pytest.approx(0.1 * 3 / (3 * mean + 2 * 10.0))
    many = dataclasses.replace(one, learners=50, every_s=0.0, nbytes=0, latency_s=0.0, learner=0.0)
    assert model.exchanges(many, 4)[0] == pytest.approx(50 * 0.1, rel=0.2)
    assert model.exchanges(many, 4)[2] == pytest.approx(1.0)


def made(workers: int, told: Any, contribution: float) -> Any:
    """A real job's record, as it would be if the model were right."""
    parts = len(scale.parts_of(scale.NUMEL, 1, workers))
    roles = {
        "start": {
            "launcher": told.launcher, "scheduler": told.scheduler + workers * told.join.scheduler, "worker": workers * told.worker,
            "server": told.server + workers * told.join.server,
        },
        "first": {"scheduler": workers * told.first.scheduler, "server": workers * told.first.server, "worker": workers * told.first.worker},
        "steps": {"server": scale.STEPS * workers * parts * contribution, "worker": scale.STEPS * workers * (told.compute + 2 * parts * told.send)},
        "recoveries": {}, "replans": {},
    }  # fmt: skip
    phases = {
        name: scale.Used(1.0, sum(of.values()), {**dict.fromkeys(("launcher", "scheduler", "server", "worker"), 0.0), **of})
        for name, of in roles.items()
    }
    blank = scale.Job(workers, 0, 0, 0, 0, 0, phases, told.compute, told.again + workers * (told.reached + parts * contribution))
    times = dict(zip(("start", "first", "step", "recovery", "replan"), scale.predicted(blank, told).values(), strict=True))
    return dataclasses.replace(blank, **times)


def test_the_costs_are_found_in_jobs_that_the_model_has_made_and_a_job_of_another_kind_is_told_by_its_error() -> None:
    phase = model.Phase(worker=0.5, scheduler=0.01, server=0.02)
    told = costs(
        launcher=0.1, worker=1.5, server=0.5, scheduler=0.4, again=0.3, reached=0.02, join=dataclasses.replace(phase, worker=0.0, beyond=0.3), first=phase,
        replan=dataclasses.replace(phase, worker=0.0), compute=0.002, send=0.0001, contribution=0.0002, step_beyond=0.001, recovery_beyond=0.2,
    )  # fmt: skip
    jobs = {workers: made(workers, told, told.contribution) for workers in (2, 4, 8, 16)}
    found = scale.costs_of(jobs[2], jobs[4])
    for workers in (8, 16):
        assert scale.predicted(jobs[workers], found) == pytest.approx(scale.measured(jobs[workers]), rel=0.02)
    learners = {count: scale.Learners(count, 0.001 * count, 0.0005, 0.0005, 0.0) for count in (2, 4)}
    jobs[16] = dataclasses.replace(jobs[16], step=2 * jobs[16].step)
    _, _, errors = scale.validation(jobs, learners, found, (0.0005, 0.0005))
    assert errors["step"][-1] == pytest.approx(-0.5, abs=0.02) and abs(errors["step"][0]) < 0.02


def test_the_page_has_the_stored_jobs_and_their_errors() -> None:
    ran, exchanged = scale.stored(FOLDER / "scale.jsonl")
    jobs = {size: scale.middle_job(of) for size, of in ran.items()}
    learners = {size: scale.middle_learners(of) for size, of in exchanged.items()}
    own = scale.learners_costs(learners[2], learners[4])
    first, second, errors = scale.validation(jobs, learners, scale.costs_of(jobs[2], jobs[4]), own)
    page = (FOLDER.parent / "docs" / "results" / "scale.md").read_text()
    assert first in page and second in page, "python benchmarks/scale.py --results benchmarks/scale.jsonl --report > docs/results/scale.md"
    ghosts = scale.stored_ghosts(FOLDER / "scale.jsonl")
    assert scale.ghosts_report.measured(ghosts) in page and scale.ghosts_report.flat(ghosts, scale.FLAT_FROM) in page
    assert sorted(jobs) == [2, 4, 8, 16]
    for event, each in errors.items():
        assert f"{event} {max(each, key=abs):+.0%}" in page


def test_of_several_jobs_of_a_size_every_number_is_the_median() -> None:
    def job(factor: int) -> Any:
        return scale.Job(
            4, *(float(factor),) * 5, {"steps": scale.Used(1.0, 2.0 * factor, {"worker": 3.0 * factor})}, 0.5 * factor, float(factor)
        )

    assert scale.middle_job([job(5), job(1), job(2)]) == job(2)
    assert scale.middle_learners([scale.Learners(4, t, t, 1 / t, 0.0) for t in (1.0, 2.0, 4.0)]) == scale.Learners(4, 2.0, 2.0, 0.5, 0.0)


def test_what_a_member_costs_the_scheduler_is_that_of_the_nearest_size_and_a_server_admits_as_in_a_dead_ones_place() -> None:
    phase = model.Phase(worker=0.5, scheduler=0.01, server=0.02, beyond=0.1)
    told = costs(reached=0.03, join=phase, first=phase, replan=phase)
    found = scale.among(told, 200, {16: 0.003, 64: 0.002, 256: 0.001})
    assert found.join == dataclasses.replace(phase, scheduler=0.001, server=0.03)
    assert found.first == found.replan == dataclasses.replace(phase, scheduler=0.001)
    assert scale.among(told, 16, {16: 0.003, 64: 0.002}).join.scheduler == 0.003


def test_the_table_of_ghosts_has_a_row_for_each_number_of_workers_and_says_how_flat_a_contributions_cost_is(tmp_path: Path) -> None:
    def sizes(codec: str, costs: dict[int, float]) -> str:
        found = [
            {"workers": workers, "server_us": cost, "server_mib": 1000.0 + workers, "step_s": 0.25, "scheduler_ms": 2.5, "messages": 9.0, "keys": 4,
             "payload_bytes": 32 << 10}
            for workers, cost in costs.items()
        ]  # fmt: skip
        return json.dumps({"kind": "ghosts", "ghosts": {"codec": codec, "sizes": found}})

    lines = [
        sizes("none", {8: 70.0, 64: 49.0, 1024: 90.0}),
        sizes("none", {8: 90.0, 64: 52.0, 1024: 54.0}),
        json.dumps({"kind": "job"}),
        sizes("onebit", {8: 90.0, 64: 60.0}),
        sizes("none", {8: 80.0, 64: 50.0, 1024: 55.0}),
    ]
    ghosts = scale.ghosts_report.ghosts_of(lines)
    assert scale.ghosts_report.members_of(ghosts) == {8: 0.0025, 64: 0.0025, 1024: 0.0025}, "of uncompressed ones"
    *_, eight, many, most = scale.ghosts_report.measured(ghosts).splitlines()
    assert eight == "| 8 | 80 | 1,008 | 0.250 | 90 | 1,008 | 0.250 | 2.50 | 9.0 |"
    assert many.startswith("| 64 | 50 | 1,064 | 0.250 | 60 |")
    assert most == "| 1,024 | 55 | 2,024 | 0.250 |  |  |  | 2.50 | 9.0 |"
    told = scale.ghosts_report.flat(ghosts, 64)
    assert told.endswith("`none` 50 us to 55, at most 10% apart; `onebit` 60 us to 60, at most 0% apart.")
    assert scale.ghosts_report.flat(ghosts, 2000) == ""
    scale.ghosts_report.draw(ghosts, tmp_path / "ghosts.svg")
    assert "<svg" in (tmp_path / "ghosts.svg").read_text()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_real_jobs_and_real_learners_give_costs_and_are_not_run_again(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(FOLDER / "scale.py"),
        "--results",
        str(tmp_path / "results"),
        "--real",
        "2,3",
        "--nodes",
        "4",
        "--ghosts",
        "8",
        "--plot",
        str(tmp_path / "ghosts.svg"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "results").read_text().splitlines()]
    assert [row["kind"] for row in rows] == ["job", "learners"] * 2 + ["ghosts"] * 2
    assert [row["ghosts"]["codec"] for row in rows[4:]] == ["none", "onebit"]
    assert "<svg" in (tmp_path / "ghosts.svg").read_text()
    for row in rows[:4:2]:
        assert min(row["job"][name] for name in ("start", "first", "step", "recovery", "replan", "restarted")) > 0
    again = subprocess.run([*command, "--report"], capture_output=True, text=True, timeout=500, check=False)
    assert again.returncode == 0 and again.stdout == done.stdout, again.stderr
    for heading in ("| workers | start, s", "| learners | an exchange", "| nodes | start, s"):
        assert heading in done.stdout
