"""Real jobs write timelines of what they did: every part's steps once, in order, with the bytes that travelled; after a failure, what there is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from psgc.observe.timeline import Event, read_folder
from psgc.plan.inputs.profile import CostCurve, Profile, TensorProfile
from psgc.plan.planfile.reading import load_plan
from tests.jobs.tiny import NUMEL
from tests.launch.conftest import Launched, launched
from tests.launch.killing import Pace, children
from tests.launch.test_worker_loss import JOB, SAYS, WAIT
from tests.observe.test_recorder import check_no_overlap
from tests.plan.commands import psgc

__all__ = ["launched"]
STEPS = (3, 4, 5)


def by_part(events: list[Event], lane: str, action: str) -> dict[tuple[int, int, int], Event]:
    """Spans by step, bucket and part, each of which there is once."""
    own = [event for event in events if (event["cat"], event["args"]["action"]) == (lane, action)]
    found = {(event["args"]["step"], event["args"]["bucket"], event["args"]["part"]): event for event in own}
    assert len(found) == len(own)
    return found


def end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


@pytest.mark.timeout(300)
def test_a_job_over_a_server_traces_each_part_of_each_step(make_job: Callable[..., Any], tmp_path: Path) -> None:
    folder, used = tmp_path / "trace", tmp_path / "used.json"
    env = {
        "PSGC_TRACE": str(folder), "PSGC_TRACE_START_STEP": "3", "PSGC_TRACE_END_STEP": "5", "PSGC_CODEC": "int8",
        "PSGC_LAYOUT_OUT": str(used), "PSGC_FUSE_BYTES": "20000", "PSGC_MIN_COMPRESS_BYTES": "20000", "PSGC_TRANSPORT": "tcp",
    }  # fmt: skip
    make_job(env=env).said("8", job="tiny.py")
    buckets = load_plan(str(used)).buckets
    assert {bucket.codec for bucket in buckets} == {"none", "int8"}
    keys = {(step, number, part) for step in STEPS for number, bucket in enumerate(buckets) for part in range(bucket.parts)}
    first, second, server = read_folder(folder)
    assert [one.about.name for one in (first, second, server)] == ["rank 0", "rank 1", "server 0"]
    came: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for rank in (first, second):
        check_no_overlap(Path(rank.source))
        assert {event["args"]["layout"] for event in rank.events} == {"optimizer0"}
        chains = [("cpu", "flat.push", "inter-send", "flat.push", "inter-receive", "flat.pull", "cpu", "flat.pull"),
                  ("cpu", "comp@cpu", "inter-send", "flat.push.c", "inter-receive", "flat.pull.c", "cpu", "decomp@cpu")]  # fmt: skip
        seen = set()
        for chain in chains:
            encoded, pushed, pulled, decoded = (by_part(rank.events, *chain[at : at + 2]) for at in (0, 2, 4, 6))
            assert encoded.keys() == pushed.keys() == pulled.keys() == decoded.keys()
            seen |= encoded.keys()
            for key, push in pushed.items():
                assert end(encoded[key]) <= end(push) <= end(pulled[key]) + 0.01 <= decoded[key]["ts"] + 0.02
                came[key].append(push["args"]["bytes"])
                assert push["args"]["bytes"] == encoded[key]["args"]["bytes"] <= 4 * buckets[key[1]].numel
                assert pulled[key]["args"]["bytes"] > 0
        assert seen == keys
        assert Counter(event["args"]["step"] for event in rank.events if event["cat"] == "backward") == dict.fromkeys(STEPS, len(buckets))
        assert Counter(event["args"]["step"] for event in rank.events if event["cat"] == "waiting") == dict.fromkeys(STEPS, 1)
    folds = [event for event in server.events if event["cat"] == "server"]
    assert Counter((event["args"]["step"], event["args"]["bucket"], event["args"]["part"]) for event in folds) == dict.fromkeys(keys, 1)
    received = [event for event in server.events if event["cat"] == "inter-receive"]
    for key, nbytes in came.items():
        arrived = [e["args"]["bytes"] for e in received if (e["args"]["step"], e["args"]["bucket"], e["args"]["part"]) == key]
        assert sorted(arrived) == sorted(nbytes), "what ranks sent is what came"
    check_beside_the_prediction(folder, used, tmp_path)


def check_beside_the_prediction(folder: Path, plan: Path, where: Path) -> None:
    """The job's own plan, simulated beside what was measured: the same tasks on lanes of the same names, and a table of both."""
    curve = {
        "cpu": CostCurve((1000.0, 10_000.0), (5.0, 50.0), (5.0, 50.0)),
        "server": CostCurve((1000.0, 10_000.0), (5.0, 50.0), (5.0, 50.0)),
    }
    ready = [TensorProfile(name, numel, 100.0 * number) for number, (name, numel) in enumerate(reversed(NUMEL.items()))]
    profile, cluster, out = where / "profile.json", where / "cluster.toml", where / "merged.json"
    profile.write_text(json.dumps(Profile("tiny", tuple(ready), codecs={"int8": curve, "none": curve}).to_json()))
    cluster.write_text(
        "name = 'here'\nnodes = 2\ngpus_per_node = 1\nservers = 1\n[intra]\ngbps = 10\nlatency_us = 5\n[inter]\ngbps = 1\nlatency_us = 50\n"
    )
    done = psgc(
        "trace", "merge", str(folder), "-o", str(out), "--plan", str(plan), "--profile", str(profile), "--cluster", str(cluster), "--json"
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    both = {row["lane"]: row["predicted_over_measured"] for row in answer["lanes"] if row["busy_ms"] and row["predicted_ms"]}
    assert both.keys() >= {"backward", "cpu", "inter-send", "server"}
    assert "inter-receive" in {row["lane"] for row in answer["lanes"]}, "what came all at once has taken no time"
    assert all(ratio > 0 for ratio in both.values()) and answer["predicted"]["exchange_ms"] > 0 < answer["exchange_ms"]
    made = json.loads(out.read_text())["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in made if event["name"] == "process_name"}
    assert list(processes.values()) == ["optimizer0 on here, simulated", "rank 0", "rank 1", "server 0"]
    tasks = {
        pid: Counter((event["cat"], event["name"]) for event in made if event["ph"] == "X" and event["pid"] == pid) for pid in processes
    }
    simulated, first = list(tasks.values())[:2]
    links = {task for task in first if task[0] in ("inter-send", "inter-receive")}
    assert links and links == {task for task in simulated if task[0] in ("inter-send", "inter-receive")}, (
        "each push and pull is there twice"
    )
    assert {simulated[task] for task in links} == {first[task] for task in links} == {len(STEPS)}
    check_without_flags(folder, plan, (profile, cluster), answer["predicted"]["exchange_ms"])


def check_without_flags(folder: Path, plan: Path, files: tuple[Path, Path], predicted_ms: float) -> None:
    """The job left its plan in the folder; beside a profile and a cluster it is simulated, and by itself it is taken at its word."""

    def shown() -> dict[str, Any]:
        done = psgc("trace", "show", str(folder), "--json")
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    left = folder / "plan.json"
    assert load_plan(str(left)).buckets == load_plan(str(plan)).buckets
    assert "predicted" not in shown(), "a layout predicts nothing"
    for file in files:
        (folder / file.name).write_text(file.read_text())
    assert shown()["predicted"]["exchange_ms"] == pytest.approx(predicted_ms)
    (folder / "profile.json").write_text("{}")
    assert any(note.startswith("no prediction: ") for note in shown()["notes"])
    (folder / "profile.json").unlink()
    prediction = {"step_ms": 12.5, "overlap": 0.5, "lanes": [{"lane": "inter-send", "busy_ms": 7.0}]}
    left.write_text(json.dumps(load_plan(str(left)).to_json() | {"prediction": prediction}))
    said = shown()
    assert said["predicted"] == {"exchange_ms": 12.5, "overlap": 0.5}
    assert [row["predicted_ms"] for row in said["lanes"] if row["lane"] == "inter-send"] == [7.0]
    assert f"the prediction is what {left} says of its step" in said["notes"]


@pytest.mark.timeout(300)
def test_after_a_failure_there_is_what_was_recorded(make_job: Callable[..., Any], tmp_path: Path) -> None:
    env = {"PSGC_TRACE": str(tmp_path), "PSGC_TRACE_START_STEP": "2", "PSGC_TRACE_END_STEP": "50", "PSGC_ABORT_GRACE_S": "100"}
    job = make_job(env=env)
    job.whole("--fail-at", "5", job="trains.py")
    assert set(job.end().values()) == {1}
    for one in read_folder(tmp_path):
        steps = {event["args"]["step"] for event in one.events}
        assert {2, 3, 4} <= steps <= {2, 3, 4, 5}, one.about.name
        assert one.about.steps in (4, 5)
    assert {path.name for path in tmp_path.iterdir()} == {"rank0.json", "rank1.json", "server0.json", "plan.json"}


def pids_after(popen: subprocess.Popen[str], step: int) -> dict[int, int]:
    """Those of both ranks, once they have said that they have taken this step."""
    found: dict[int, int] = {}
    for line in popen.stdout or ():
        if (said := SAYS.match(line)) and int(said[2]) == step:
            found[int(said[1])] = int(said[4])
        if len(found) == 2:
            return found
    raise AssertionError(f"it ended before step {step}: {popen.communicate()[1]}")


@pytest.mark.timeout(300)
def test_a_process_that_follows_another_goes_on_counting_and_leaves_what_that_one_has_written(launched: Launched, tmp_path: Path) -> None:
    env = {"PSGC_TRACE": str(tmp_path), "PSGC_TRACE_START_STEP": "2", "PSGC_TRACE_END_STEP": "6", "PSGC_TRANSPORT": "tcp"}
    with Pace(ahead=3) as pace:
        popen = launched.psgc(
            "run", "--no-prefix", "--workers", "2", "--", sys.executable, JOB, "14", "none", "0", **WAIT, **env, **pace.env
        )
        os.kill(pids_after(popen, 2)[1], signal.SIGKILL)  # it has taken three steps
        pace.allow(12)  # it has taken more than six of its own, too
        pids = pids_after(popen, 11)
        files = [tmp_path / name for name in ("rank0.json", "rank1.json", "server0.json")]
        while not all(file.exists() for file in files):
            assert popen.poll() is None
            time.sleep(0.01)
        before = {file: file.read_text() for file in files}
        _guardian, _scheduler, server, *_ = children(popen)
        os.kill(server, signal.SIGKILL)
        os.kill(pids[1], signal.SIGKILL)
        pace.over()
        status, _, err = launched.end(popen)
    assert status == 0, err
    assert err.count("another process takes its place") == 2 and err.count("it is started again and goes on") == 1
    assert {file: file.read_text() for file in files} == before
    first, second, of_server = read_folder(tmp_path)
    taken = {
        lane: {event["args"]["step"] for event in second.events if event["cat"] == lane}
        for lane in ("backward", "inter-send", "inter-receive")
    }
    assert taken == {lane: {4, 5, 6} for lane in taken}, "by the job's count"
    assert {event["args"]["step"] for event in first.events} == {event["args"]["step"] for event in of_server.events} == {2, 3, 4, 5, 6}


STAGES = {"COPYD2H", "COMPRESS", "PUSH", "PULL", "DECOMPRESS", "COPYH2D"}


@pytest.mark.timeout(300)
def test_bytepss_switch_writes_its_file_with_each_tensors_stages_and_whole_steps(make_job: Callable[..., Any], tmp_path: Path) -> None:
    env = {
        "BYTEPS_TRACE_ON": "1", "BYTEPS_TRACE_DIR": str(tmp_path), "BYTEPS_TRACE_START_STEP": "3", "BYTEPS_TRACE_END_STEP": "5", "PSGC_CODEC": "int8",
        "PSGC_FUSE_BYTES": "20000", "PSGC_MIN_COMPRESS_BYTES": "20000", "PSGC_TRANSPORT": "tcp",
    }  # fmt: skip
    before = time.time()
    make_job(nodes=1, env={**env, "BYTEPS_LOCAL_SIZE": "1"}).said("8", job="tiny.py")
    after = time.time()
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()] == ["0/comm.json"]
    document = json.loads((tmp_path / "0" / "comm.json").read_text())
    assert document["displayTimeUnit"] == "ms"
    events = document["traceEvents"]
    assert all(event["ph"] == "X" and event["cat"] == "Comm" and event["pid"] == event["args"]["name"] for event in events)
    assert all(1e6 * before <= event["ts"] <= event["ts"] + event["dur"] <= 1e6 * after for event in events)
    gradients = [event for event in events if event["pid"].startswith("Comm.byteps.Gradient.")]
    by_tensor: dict[str, list[Any]] = defaultdict(list)
    for event in gradients:
        by_tensor[event["pid"]].append(event)
    assert len(by_tensor) > 1
    stages: set[str] = set()
    for tensor, own in by_tensor.items():
        totals = [event for event in own if event["tid"] == "total"]
        assert len(totals) == len(STEPS) and all(event["name"] == tensor for event in totals)
        for event in own:
            if event["tid"] != "total":
                assert any(total["ts"] <= event["ts"] and event["ts"] + event["dur"] <= total["ts"] + total["dur"] for total in totals)
        named = {event["name"].removeprefix(f"{tensor}.") for event in own if event["tid"].isdigit()}
        assert {"PUSH", "PULL"} < named <= STAGES
        stages |= named
    assert stages == STAGES
