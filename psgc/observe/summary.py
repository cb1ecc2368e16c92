"""Summarizes timelines: each rank's step, how long each lane works, how much of the communication backward hides, and which rank others wait for.

Pure. Times are in microseconds, and medians over the traced steps. Only steps count that a timeline has from the first gradient to the last mean.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from psgc.observe.intervals import Interval, length, union
from psgc.observe.lanes import BACKWARD, CPU, INTRA, LANES, RECEIVE, SEND, SERVER, WAITING
from psgc.observe.timeline import Event, Timeline

LINKS: Final = (INTRA, SEND, RECEIVE)
THREADED: Final = (CPU, SERVER)  # whose tracks are threads: they count on average, as in a simulation


@dataclass(slots=True)
class RankSummary:
    """One rank's figures.

    step_us:     from one step's first gradient to the next one's; None if only one step was traced.
    exchange_us: from a step's first gradient to its last mean.
    exposed_us:  time in which links work while backward does not.
    overlap:     share of the links' work that backward hides; 1 if no link works.
    bytes:       bytes that the rank sends and receives in a step.
    late_us:     how much later than on the first rank its last gradient is ready."""

    rank: int
    steps: int
    step_us: float | None
    exchange_us: float
    waiting_us: float
    exposed_us: float
    overlap: float
    bytes: float
    late_us: float = 0.0


@dataclass(slots=True)
class Summary:
    """A job's figures. lanes: microseconds that each lane works in a step, averaged over the ranks (``server``: over the servers); slowest: the rank whose
    last gradient is ready last in most steps, None with a single rank; slowest_in: in how many of the ``compared`` steps it is last."""

    ranks: list[RankSummary] = field(default_factory=list)
    lanes: dict[str, float] = field(default_factory=dict)
    slowest: int | None = None
    slowest_in: int = 0
    compared: int = 0

    @property
    def step_us(self) -> float | None:
        known = [rank.step_us for rank in self.ranks if rank.step_us is not None]
        return statistics.median(known) if known else None

    @property
    def exchange_us(self) -> float:
        return statistics.median([rank.exchange_us for rank in self.ranks]) if self.ranks else 0.0


def summarize(timelines: Sequence[Timeline]) -> Summary:
    """The summary of a job's timelines, whose times are those of one clock (``Timeline.shift_us`` is added)."""
    summary = Summary()
    lanes: dict[str, list[float]] = defaultdict(list)
    ready: dict[int, dict[int, float]] = defaultdict(dict)  # step -> rank -> when its last gradient was ready
    for one in timelines:
        steps = _by_step(one.events)
        for lane in LANES:
            if (lane == SERVER) != (one.about.role == "server") or not steps:
                continue
            tracks = len({event["tid"] for event in one.events if event["cat"] == lane})
            works = [_works(events, lane, tracks) for events in steps.values()]
            if any(works):
                lanes[lane].append(statistics.median(works))
        if one.about.role != "rank" or not steps:
            continue
        summary.ranks.append(_of_rank(one, steps))
        for step, events in steps.items():
            last = [_end(event) for event in events if event["cat"] == BACKWARD]
            if last:
                ready[step][one.about.index] = max(last) + one.shift_us
    summary.lanes = {lane: statistics.mean(lanes[lane]) for lane in LANES if lanes[lane]}
    _find_slowest(summary, [moments for moments in ready.values() if len(moments) == len(summary.ranks) > 1])
    return summary


def _by_step(events: Sequence[Event]) -> dict[int, list[Event]]:
    """Events by step: those of layouts that backward fills, or of all layouts if there are none."""
    filled = {event["args"]["layout"] for event in events if event["cat"] == BACKWARD}
    found: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if not filled or event["args"]["layout"] in filled:
            found[event["args"]["step"]].append(event)
    return dict(sorted(found.items()))


def _of_rank(one: Timeline, steps: dict[int, list[Event]]) -> RankSummary:
    begins = {step: min(event["ts"] for event in events) for step, events in steps.items()}
    follows = [begins[later] - begins[step] for step, later in pairwise(steps) if later == step + 1]
    exposed, hidden, exchange, nbytes, waiting = [], [], [], [], []
    for step, events in steps.items():
        backward = union(_intervals(events, (BACKWARD,)))
        links = union(_intervals(events, LINKS))
        outside = length(union([*links, *backward])) - length(backward)
        exposed.append(outside)
        hidden.append(1.0 - outside / length(links) if length(links) else 1.0)
        exchange.append(max(_end(event) for event in events) - begins[step])
        waiting.append(sum(event["dur"] for event in events if event["cat"] == WAITING))
        carried = {(event["name"], event["ts"]): event["args"].get("bytes", 0) for event in events if event["cat"] in LINKS}
        nbytes.append(sum(carried.values()))  # a collective that holds several lanes counts once
    return RankSummary(
        one.about.index, len(steps), statistics.median(follows) if follows else None, statistics.median(exchange), statistics.median(waiting),
        statistics.median(exposed), statistics.median(hidden), statistics.median(nbytes),
    )  # fmt: skip


def _find_slowest(summary: Summary, moments: Sequence[dict[int, float]]) -> None:
    if not moments:
        return
    last = Counter(max(by_rank, key=by_rank.__getitem__) for by_rank in moments)
    summary.compared = len(moments)
    summary.slowest, summary.slowest_in = last.most_common(1)[0]
    for rank in summary.ranks:
        rank.late_us = statistics.median([by_rank[rank.rank] - min(by_rank.values()) for by_rank in moments])


def _works(events: Sequence[Event], lane: str, tracks: int) -> float:
    if lane in THREADED:
        return float(sum(event["dur"] for event in events if event["cat"] == lane)) / max(tracks, 1)
    return length(union(_intervals(events, (lane,))))


def _intervals(events: Sequence[Event], lanes: Sequence[str]) -> list[Interval]:
    return [(event["ts"], _end(event)) for event in events if event["cat"] in lanes]


def _end(event: Event) -> float:
    return float(event["ts"] + event["dur"])
