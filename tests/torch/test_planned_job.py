"""Plans over a real scheduler, server and workers: mixed codecs, cuts and priorities; and the layout of a job, run as a plan."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from psgc.plan.planfile.reading import load_plan
from psgc.plan.planfile.runtime import ENCODED, PLAIN
from tests.plan.commands import psgc

JOB = str(Path(__file__).parent / "job_planned.py")
SIZES = {"0.weight": 19200, "0.bias": 300, "2.weight": 60000, "2.bias": 200, "4.weight": 20000, "4.bias": 100}
# in no order of readiness; fused, cut unevenly, and each codec of another kind
MIXED: tuple[tuple[tuple[str, ...], int, int, str], ...] = (
    (("0.bias", "4.weight"), 3, -7, "none"),
    (("2.weight",), 4, 40, "int8"),
    (("4.bias", "0.weight"), 2, 5, "onebit/int8"),
    (("2.bias",), 1, 40, "none"),
)


# the server of each part: not what turns would give
PLACES = ((1, 1, 1), (1, 0, 1, 1), (0, 1), (1,))


def bucket(tensors: tuple[str, ...], parts: int, priority: int, codec: str) -> dict[str, Any]:
    return {
        "tensors": list(tensors), "numel": sum(SIZES[name] for name in tensors), "parts": parts, "priority": priority, "codec": codec,
        "option": list(PLAIN if codec == "none" else ENCODED),
    }  # fmt: skip


def digests(texts: list[str]) -> dict[str, list[str]]:
    """Of each thing that the two workers print, its digests."""
    found: dict[str, list[str]] = {}
    for text in texts:
        for what, digest in re.findall(r"(weights|gradient \S+) (\w+)$", text, re.MULTILINE):
            found.setdefault(what, []).append(digest)
    return found


@pytest.fixture
def run(make_job: Callable[..., Any]) -> Callable[..., dict[str, list[str]]]:
    return lambda **env: digests(make_job(env=env).said(job=JOB))


@pytest.mark.timeout(500)
def test_a_plan_of_mixed_codecs_cuts_priorities_and_places_trains_and_its_plain_sums_are_the_plain_ones(
    make_job: Callable[..., Any], run: Callable[..., Any], tmp_path: Path
) -> None:
    path, used = tmp_path / "plan.json", tmp_path / "used"
    old = {"version": 1, "model": "m", "cluster": "", "buckets": [bucket(*each) for each in MIXED], "prediction": {}}
    buckets = [{**one, "servers": list(places)} for one, places in zip(old["buckets"], PLACES, strict=True)]
    path.write_text(json.dumps({**old, "version": 2, "cluster": {"name": "two and two", "workers": 2, "servers": 2}, "buckets": buckets}))
    default = run()
    job = make_job(servers=2, env={"PSGC_PLAN": str(path), "PSGC_LAYOUT_OUT": str(used)})
    workers = job.whole(job=JOB, PSGC_LOG_LEVEL="debug")
    assert set(job.end().values()) == {0}, job.text()
    planned = digests([worker.text for worker in workers])
    assert planned.keys() == default.keys()
    assert all(first == second for first, second in planned.values())
    same = {what.removeprefix("gradient ") for what in planned if planned[what] == default[what]}
    assert same == {"0.bias", "4.weight", "2.bias"}, "those without a codec, and no others"
    document = load_plan(str(used)).to_json()
    assert document["cluster"] == {"name": "2 workers", "workers": 2, "servers": 2}
    by_priority = sorted(buckets, key=lambda one: -one["priority"])
    assert document["buckets"] == by_priority

    # each server serves the parts that lie on it by the plan, and refuses others
    for server in (0, 1):
        (text,) = (process.text for process in job.processes if process.name == f"server {server}")
        (serving,) = re.findall(r"serving layout=\d+ name=optimizer0 parts=(.*)$", text, re.MULTILINE)
        here = {(number, part) for number, one in enumerate(by_priority) for part, place in enumerate(one["servers"]) if place == server}
        assert {tuple(map(int, key.split(".")[1:])) for key in serving.split()} == here


@pytest.mark.timeout(500)
def test_a_plan_for_another_job_ends_each_worker_with_a_line_and_one_that_no_job_carries_starts_none(
    make_job: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    whole = {"version": 2, "model": "m", "cluster": {"name": "three", "workers": 3}, "buckets": [bucket(tuple(SIZES), 1, 0, "none")]}
    path.write_text(json.dumps(whole))
    job = make_job(env={"PSGC_PLAN": str(path)})
    workers = job.whole(job=JOB)
    assert 0 not in {job.end()[worker.name] for worker in workers}
    assert all("plan: it is for a job of 3 workers (three), this job has 2; make a plan for this job" in worker.text for worker in workers)
    whole["buckets"][0] |= {"codec": "onebit:residual=int8", "option": ["comp@gpu", "flat.push.c", "flat.pull.c", "decomp@gpu"]}
    path.write_text(json.dumps(whole))
    started = psgc("run", "--workers", "2", "--plan", str(path), "--", "python", "-c", "print('started')")
    assert started.returncode == 2
    assert "buckets[0] (of '0.weight'): action 'comp@gpu', but codec onebit:residual=int8 has no GPU side" in started.stderr
    assert started.stderr.count("\n") == 1
    assert "started" not in started.stdout


@pytest.mark.timeout(500)
def test_the_layout_of_a_job_run_as_a_plan_gives_the_same_layout_and_sums(run: Callable[..., Any], tmp_path: Path) -> None:
    small = {"PSGC_PART_BYTES": "65536", "PSGC_FUSE_BYTES": "100000", "PSGC_MIN_COMPRESS_BYTES": "2000"}
    first = run(PSGC_CODEC="topk:k=0.02", PSGC_LAYOUT_OUT=str(tmp_path / "first"), **small)
    again = run(PSGC_PLAN=str(tmp_path / "first"), PSGC_LAYOUT_OUT=str(tmp_path / "again"))
    assert again == first
    assert (tmp_path / "again").read_text() == (tmp_path / "first").read_text()
    assert {b.codec for b in load_plan(str(tmp_path / "first")).buckets} == {"topk:k=0.02"}


PLACED = str(Path(__file__).parent / "job_placed.py")


def plan_with(codecs: tuple[str, ...], places: tuple[tuple[int, ...], ...], servers: int) -> dict[str, Any]:
    """The buckets of MIXED with these codecs, each part on the server that is named."""
    made = [bucket(names, parts, priority, codec) for (names, parts, priority, _), codec in zip(MIXED, codecs, strict=True)]
    buckets = [{**one, "servers": list(where)} for one, where in zip(made, places, strict=True)]
    return {"version": 2, "model": "m", "cluster": {"name": "c", "workers": 2, "servers": servers}, "buckets": buckets, "prediction": {}}


@pytest.mark.timeout(500)
def test_ddp_under_a_plan_and_across_switches_trains_as_stock_ddp_bit_by_bit(make_job: Callable[..., Any], tmp_path: Path) -> None:
    path, used = tmp_path / "plan.json", tmp_path / "used"
    plan = plan_with(("none",) * len(MIXED), PLACES, 2)
    path.write_text(json.dumps(plan))
    job = make_job(servers=2, env={"PSGC_PLAN": str(path), "PSGC_LAYOUT_OUT": str(used)})
    said = [re.findall(r"^weights (\w+) (\w+)$", text, re.MULTILINE) for text in job.said("ddp", job=PLACED)]
    ((stock, mine),) = said[0]
    assert said == [[(stock, mine)]] * 2
    assert mine == stock
    assert load_plan(str(used)).to_json()["buckets"] == sorted(plan["buckets"], key=lambda one: -one["priority"])


@pytest.mark.timeout(500)
def test_a_job_whose_plan_places_parts_on_other_servers_goes_on_bit_by_bit(make_job: Callable[..., Any], tmp_path: Path) -> None:
    """Servers have residuals of their own under these codecs, which move with the parts."""
    codecs = ("int8", "onebit", "topk:k=0.05", "none")
    ended = []
    for verb, places, servers in (("save", PLACES, 2), ("load", ((2, 0, 1), (0, 0, 2, 2), (1, 1), (0,)), 3)):
        path = tmp_path / f"{verb}.json"
        path.write_text(json.dumps(plan_with(codecs, places, servers)))
        job = make_job(servers=servers, env={"PSGC_PLAN": str(path)})
        ended += [re.findall(r"^weights (\w+)$", text, re.MULTILINE) for text in job.said(str(tmp_path), verb, job=PLACED)]
    assert len(ended) == 4
    assert ended[0] and ended == [ended[0]] * 4
