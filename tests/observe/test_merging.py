"""Merged timelines are on one clock, with the simulated step beside them; their summary says what was measured."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from psgc.observe.lanes import PULL, PUSH, READY, WAIT, Line
from psgc.observe.merging import align, merge
from psgc.observe.summary import summarize
from psgc.observe.timeline import Timeline
from tests.observe.jobs import grouped, served, span, timeline
from tests.plan.commands import psgc

SHIFTS = {"rank 0": 2e6, "rank 1": -1e6, "server 0": 5e5}


def store(folder: Path, timelines: list[Timeline]) -> None:
    folder.mkdir()
    for one in timelines:
        names = [{"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": name}} for tid, name in one.tracks.items()]
        document = {"otherData": asdict(one.about), "traceEvents": [*names, *one.events]}
        (folder / one.about.file_name).write_text(json.dumps(document))


def test_on_one_clock_nothing_is_received_before_it_is_sent() -> None:
    timelines, _ = served(SHIFTS, 7)
    align(timelines)
    made = merge(timelines)["traceEvents"]
    names = {event["args"]["name"]: event["pid"] for event in made if event["name"] == "process_name"}
    assert list(names) == ["rank 0", "rank 1", "server 0"]
    spans = [event for event in made if event["ph"] == "X"]
    assert min(event["ts"] for event in spans) == 0.0

    def one(member: str, lane: str, step: int, **more: int) -> float:
        (ts,) = [
            event["ts"] + event["dur"] for event in spans
            if (event["pid"], event["cat"], event["args"]["step"], event["args"]["bucket"]) == (names[member], lane, step, 1)
            and more.items() <= event["args"].items() and event["args"]["action"] != "decomp@cpu"
        ]  # fmt: skip
        return float(ts)

    for rank in (0, 1):
        for step in range(1, 5):
            moments = [
                one(f"rank {rank}", "cpu", step), one("server 0", "inter-receive", step, peer=rank), one("server 0", "inter-send", step, peer=rank),
                one(f"rank {rank}", "inter-receive", step),
            ]  # fmt: skip
            assert moments == sorted(moments)


def test_a_summary_has_the_step_what_backward_hides_and_the_slowest_rank() -> None:
    def rank(number: int, late_us: float) -> Timeline:
        rows = []
        for step in (1, 2, 3):
            t = 1000.0 * step
            rows += [
                span(Line.BACKWARD, 0, READY, 0, step, t, t + 100), span(Line.BACKWARD, 0, READY, 1, step, t + 100, t + 300 + late_us),
                span(Line.SEND, 0, PUSH, 0, step, t + 250, t + 350 + late_us, 10),
                span(Line.RECEIVE, 0, PULL, 0, step, t + 350 + late_us, t + 400 + late_us, 30),
                span(Line.WAITING, 0, WAIT, 0, step, t + 300 + late_us, t + 400 + late_us),
            ]  # fmt: skip
        return timeline("rank", number, rows, clock="one")

    summary = summarize([rank(0, 0.0), rank(1, 50.0)])
    first, second = summary.ranks
    assert (first.step_us, first.exchange_us, first.waiting_us, first.exposed_us, first.bytes) == pytest.approx((1000, 400, 100, 100, 40))
    assert first.overlap == pytest.approx(50 / 150)
    assert second.overlap == pytest.approx(100 / 200)
    assert (summary.slowest, summary.slowest_in, summary.compared) == (1, 3, 3)
    assert (first.late_us, second.late_us) == pytest.approx((0, 50))
    assert summary.lanes == pytest.approx({"backward": 325, "inter-send": 125, "inter-receive": 50, "waiting": 100})


def test_a_collective_that_holds_several_lanes_counts_its_bytes_once() -> None:
    assert [rank.bytes for rank in summarize(grouped([0.0, 0.0], 1)).ranks] == [800, 800]


def test_the_command_writes_the_trace_and_prints_the_tables_beside_the_prediction(tmp_path: Path) -> None:
    timelines, _ = served(SHIFTS, 7)
    store(tmp_path / "trace", timelines)
    (tmp_path / "table.csv").write_text("name,numel,ready_us\nb,100,0\na,200,900\n")
    (tmp_path / "two.toml").write_text(
        "nodes = 2\ngpus_per_node = 1\nintra = {gbps = 100, latency_us = 5}\ninter = {gbps = 1, latency_us = 20}\n"
    )
    bucket = {"tensors": ["b", "a"], "numel": 300, "parts": 1, "priority": 0, "codec": "none", "option": ["flat.all_reduce"]}
    (tmp_path / "plan.json").write_text(json.dumps({"version": 1, "model": "m", "cluster": "two", "buckets": [bucket], "prediction": {}}))
    out, folder = tmp_path / "out.json", str(tmp_path / "trace")
    beside = ("--plan", str(tmp_path / "plan.json"), "--profile", str(tmp_path / "table.csv"), "--cluster", str(tmp_path / "two.toml"))
    done = psgc("trace", "merge", folder, "-o", str(out), *beside)
    assert done.returncode == 0, done.stderr
    made = json.loads(out.read_text())["traceEvents"]
    named = [event["args"]["name"] for event in made if event["name"] == "process_name"]
    assert named == ["m on two, simulated", "rank 0", "rank 1", "server 0"]
    simulated = [event for event in made if event["pid"] == 1 and event["ph"] == "X" and event["name"] == "0/0/flat.all_reduce"]
    assert len(simulated) == 2 * 4, "on both links, at each of rank 0's four steps"
    assert "predicted" in done.stdout
    assert "was the last to have its gradients in" in done.stdout
    shown = psgc("trace", "show", folder, *beside, "--json")
    answer = json.loads(shown.stdout)
    assert answer["predicted"]["exchange_ms"] == pytest.approx(0.9 + 0.0096 + 0.04)
    assert {row["lane"] for row in answer["lanes"]} >= {"backward", "cpu", "inter-send", "server"}
    assert [clock["member"] for clock in answer["clocks"]] == ["rank 0", "rank 1", "server 0"]
    assert answer["clocks"][2]["offset_ms"] == pytest.approx(-1500, abs=0.5)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    timelines, _ = served(SHIFTS, 7)
    lacking = [timelines[0], timelines[2]]
    for one in lacking:
        one.events, one.about.steps, one.about.dropped = [], 4, 7
    store(tmp_path / "trace", lacking)
    said = " ".join(psgc("trace", "show", str(tmp_path / "trace")).stdout.split())
    for text in (
        "no spans: the job's longest count of steps was 4, and steps 1 to 99 were traced", "the timelines of rank 1 are not there",
        "rank 0 had no room for 7 spans", "nothing relates the clock of server 0 to that of rank 0",
    ):  # fmt: skip
        assert text in said
    for arguments, text in (
        (("trace", "show", str(tmp_path / "nothing")), "nothing has no timelines"),
        (("trace", "show", str(tmp_path / "trace"), "--plan", "p"), "--plan and --profile belong together"),
    ):
        refused = psgc(*arguments)
        assert refused.returncode == 2
        assert text in refused.stderr
