"""The recorder keeps what it is given, of the steps that are wanted, in bounded memory, from any thread; a timeline's file gives it back."""

from __future__ import annotations

import json
import threading
from itertools import pairwise
from pathlib import Path

import pytest

from psgc.config import Config
from psgc.errors import ConfigError, UsageError
from psgc.layout import make_key
from psgc.observe import lanes
from psgc.observe.lanes import DECODE, ENCODE, PULL, PUSH, Described, Line
from psgc.observe.recorder import Recorded, Recorder
from psgc.observe.timeline import About, Name, read_folder, read_timeline, write_timeline
from psgc.plan.model.costs import RESOURCES
from psgc.plan.model.lanes import BACKWARD
from psgc.plan.model.options import OVER_SERVERS

ABOUT = About("rank", 1, "host/1/2", "host", (1, 1), 3, 5, 6)
NAMES = {
    (1, 0): Name("optimizer0", 0, Described("a", 1, 10, "int8")),
    (1, 1): Name("optimizer0", 1, Described("b", 2, 20, "none")),
    (1, 2): Name("optimizer0", 2, Described("c", 1, 5, "none", ("intra.reduce", "inter.all_reduce", "flat.broadcast"))),
}


def test_spans_come_back_as_they_were_recorded() -> None:
    recorder = Recorder(3, 5)
    wanted = [
        Recorded(make_key(65535, (1 << 24) - 1, (1 << 24) - 1), 3, Line.SEND, 255, PUSH, 1 << 60, (1 << 60) + 7, 1 << 40),
        Recorded(make_key(1, 0, 0), 5, Line.CPU, 0, 0, 5, 5, 0),
    ]
    for span in wanted:
        recorder.add(Line(span.line), span.track, span.action, span.key, span.step, span.began_ns, span.ended_ns, span.nbytes)
    assert recorder.spans() == wanted
    assert len(recorder) == 2


def test_only_wanted_steps_are_kept() -> None:
    recorder = Recorder(3, 5)
    for step in range(1, 9):
        assert recorder.wants(step) == (3 <= step <= 5)
        recorder.add(Line.CPU, 0, ENCODE, 0, step, 1, 2)
    assert [span.step for span in recorder.spans()] == [3, 4, 5]


def test_a_full_recorder_counts_what_it_drops() -> None:
    recorder = Recorder(1, 1, capacity=3)
    for began in range(5):
        recorder.add(Line.CPU, 0, ENCODE, 0, 1, began, began + 1)
    assert [span.began_ns for span in recorder.spans()] == [0, 1, 2]
    assert recorder.dropped == 2


def test_threads_record_at_once_and_each_has_a_number_of_its_own() -> None:
    recorder, each, together = Recorder(1, 1), 500, threading.Barrier(4)

    def record(number: int) -> None:
        together.wait()
        for began in range(each):
            recorder.add(Line.CPU, recorder.thread(), ENCODE, number, 1, began, began + 1)

    threads = [threading.Thread(target=record, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans = recorder.spans()
    assert len(spans) == 4 * each
    for number in range(4):
        own = [span for span in spans if span.key == number]
        assert [span.began_ns for span in own] == list(range(each))
        assert len({span.track for span in own}) == 1
    assert {span.track for span in spans} == {0, 1, 2, 3}


def test_lanes_and_tasks_are_named_as_the_simulator_names_them() -> None:
    assert lanes.BACKWARD == BACKWARD
    assert set(lanes.LANES) - {lanes.CONTROL, lanes.WAITING, BACKWARD} <= set(RESOURCES)
    for codec, option in (("none", OVER_SERVERS[0]), ("int8", OVER_SERVERS[1])):
        named = dict.fromkeys(Described("a", 1, 1, codec).action(action) for action in (ENCODE, PUSH, PULL, DECODE))
        assert tuple(named) == option
    assert lanes.lanes_of(Line.FLAT, (2,)) == ("intra",)
    assert lanes.lanes_of(Line.FLAT, (1, 1)) == lanes.lanes_of(Line.INTER, (1, 2)) == ("inter-send", "inter-receive")
    assert lanes.lanes_of(Line.FLAT, (1, 2)) == ("intra", "inter-send", "inter-receive")


def test_a_file_opens_as_a_trace_and_is_read_back(tmp_path: Path) -> None:
    spans = [
        Recorded(make_key(1, 0, 1), 3, Line.CPU, 0, ENCODE, 1500, 2000, 12),
        Recorded(make_key(1, 1, 0), 3, Line.CPU, 1, ENCODE, 1500, 2500, 80),
        Recorded(make_key(1, 0, 1), 3, Line.SEND, 0, PUSH, 2000, 3000, 12),
        Recorded(make_key(1, 2, 0), 4, Line.INTER, 0, 1, 4000, 5000, 40),
        Recorded(make_key(1, 2, 0), 4, Line.CONTROL, 0, 3, 5000, 5500, 0),
        Recorded(make_key(7, 0, 0), 4, Line.CONTROL, 0, 3, 5000, 5500, 0),  # of a layout that has no name
    ]
    path = write_timeline(str(tmp_path / "new"), ABOUT, spans, NAMES)
    assert [file.name for file in path.parent.iterdir()] == ["rank1.json"], "and no unfinished file"
    document = json.loads(path.read_text())
    assert {event["args"]["name"] for event in document["traceEvents"] if event["name"] == "process_name"} == {"rank 1"}
    (read,) = read_folder(path.parent)
    assert read.about == ABOUT
    assert [(event["name"], event["cat"], read.tracks[event["tid"]], event["ts"], event["dur"]) for event in read.events] == [
        ("0/1/comp@cpu", "cpu", "cpu 0", 1.5, 0.5),
        ("1/0/flat.push", "cpu", "cpu 1", 1.5, 1.0),
        ("0/1/flat.push.c", "inter-send", "inter-send 0", 2.0, 1.0),
        ("2/0/inter.all_reduce", "inter-send", "inter-send 1", 4.0, 1.0),
        ("2/0/inter.all_reduce", "inter-receive", "inter-receive", 4.0, 1.0),
        ("2/0/control word", "control", "control", 5.0, 0.5),
    ]
    assert read.events[0]["args"] == {
        "layout": "optimizer0", "step": 3, "bucket": 0, "part": 1, "action": "comp@cpu", "tensor": "a", "bytes": 12, "codec": "int8",
    }  # fmt: skip


def test_what_is_no_timeline_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no timelines .*PSGC_TRACE"):
        read_folder(tmp_path)
    with pytest.raises(UsageError, match="has no timelines"):
        read_folder(tmp_path / "absent")
    path = tmp_path / "rank0.json"
    for text in ("", "[]", "{}", '{"otherData": {}, "traceEvents": []}', '{"otherData": 3}'):
        path.write_text(text)
        with pytest.raises(UsageError, match=r"rank0\.json is no timeline of a member"):
            read_timeline(path)
    written = write_timeline(str(tmp_path), ABOUT, [], {})
    written.write_text(written.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(UsageError, match=r"rank1\.json is of format 2"):
        read_timeline(written)


def test_bytepss_names_switch_tracing_on() -> None:
    assert Config.from_env({}).trace_folder == ""
    assert Config.from_env({"BYTEPS_TRACE_DIR": "there"}).trace_folder == ""
    assert Config.from_env({"BYTEPS_TRACE_ON": "1"}).trace_folder == "./trace"
    config = Config.from_env(
        {"BYTEPS_TRACE_ON": "1", "BYTEPS_TRACE_DIR": "there", "BYTEPS_TRACE_START_STEP": "3", "BYTEPS_TRACE_END_STEP": "4"}
    )
    assert (config.trace_folder, config.trace_first, config.trace_last) == ("there", 3, 4)
    assert Config.from_env({"PSGC_TRACE": "here", "BYTEPS_TRACE_ON": "1"}).trace_folder == "here"
    with pytest.raises(ConfigError, match="PSGC_TRACE_END_STEP=4 is before PSGC_TRACE_START_STEP=10"):
        Config.from_env({"PSGC_TRACE_END_STEP": "4", "PSGC_TRACE": "here"})
    assert Config.from_env({"BYTEPS_TRACE_START_STEP": "100", "BYTEPS_TRACE_ON": "0"}).trace_folder == "", "then its steps do not matter"


def check_no_overlap(path: Path) -> None:
    """On each track of a file one span ends before the next begins."""
    read = read_timeline(path)
    for track, name in read.tracks.items():
        times = sorted((event["ts"], event["ts"] + event["dur"]) for event in read.events if event["tid"] == track)
        for before, after in pairwise(times):
            assert before[1] <= after[0] + 0.01, f"{path.name}: {name}: {before} and {after}"  # files have microseconds in floating point
