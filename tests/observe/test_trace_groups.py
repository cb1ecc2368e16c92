"""Ranks that aggregate among themselves trace each action of each part once, on the lanes that it holds, and the control word."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from psgc.config import Config
from psgc.observe.timeline import read_folder
from psgc.observe.worker_trace import WorkerTrace
from tests.observe.test_recorder import check_no_overlap
from tests.worker.over_groups import Job, integers

TWICE = ("comp@cpu", "flat.all_to_all.c", "decomp@cpu", "comp@cpu", "flat.all_gather.c", "decomp@cpu")
NESTED = ("intra.reduce_scatter", "inter.all_reduce", "intra.all_gather")
LANES = {"comp@cpu": ["cpu"], "decomp@cpu": ["cpu"], "control word": ["control"]}
LINKS = {"intra": ["intra"], "inter": ["inter-send", "inter-receive"], "flat": ["intra", "inter-send", "inter-receive"]}
STEPS, PARTS, NUMEL = 2, 3, 3 * 4096


def test_every_action_of_every_part_is_recorded_once_on_each_lane_that_it_holds(tmp_path: Path) -> None:
    nodes = (2, 2)
    traces = [WorkerTrace(Config(trace=str(tmp_path), trace_first=1, trace_last=STEPS)) for _ in range(4)]
    job = Job(nodes, traces=traces)
    layout = job.layout([TWICE, NESTED], NUMEL, "int8", parts=PARTS)
    for rank, trace in enumerate(traces):
        trace.joined(rank, nodes)
        trace.laid_out(layout)
    for _ in range(STEPS + 1):
        job.step(layout, integers(4, 2, NUMEL))
    job.close()
    for trace in traces:
        trace.close()
    assert not job.errors
    wanted = Counter(
        (number, part, step, action, lane)
        for number, option in enumerate((TWICE, NESTED))
        for part in range(PARTS)
        for step in range(1, STEPS + 1)
        for action in (*option, "control word")
        for lane in LANES.get(action) or LINKS[action.partition(".")[0]]
    )
    read = read_folder(tmp_path)
    assert [one.about.name for one in read] == [f"rank {rank}" for rank in range(4)]
    for one in read:
        check_no_overlap(Path(one.source))
        args = [(event["args"], event["cat"]) for event in one.events]
        assert Counter((each["bucket"], each["part"], each["step"], each["action"], lane) for each, lane in args) == wanted
        moved = sum(
            each.get("bytes", 0) for each, lane in args if lane in ("inter-send", "intra") and not each["action"].startswith("flat")
        )
        assert moved == STEPS * 3 * 4 * NUMEL, "in and out, of a ring"
