"""Timelines of made-up jobs: true times, seen by each member's own clock."""

from __future__ import annotations

import random
from collections.abc import Sequence

from psgc.layout import make_key
from psgc.observe.lanes import DECODE, ENCODE, PULL, PUSH, READY, WAIT, Described, Line
from psgc.observe.recorder import Recorded
from psgc.observe.timeline import About, Name, Timeline, events

US = 1000  # nanoseconds
NAMES = {(1, bucket): Name("optimizer0", bucket, Described(f"t{bucket}", 1, 100, "int8", ())) for bucket in range(3)}
OVER_GROUPS = {(1, 0): Name("optimizer0", 0, Described("t0", 1, 100, "none", ("flat.all_reduce",)))}


def timeline(
    role: str, index: int, spans: Sequence[Recorded], ahead_us: float = 0.0, clock: str = "", ranks: int = 2, names: dict[tuple[int, int], Name] = NAMES
) -> Timeline:  # fmt: skip
    """A member's, whose clock is ``ahead_us`` ahead of the true time."""
    made = list(events(spans, names, (1,) * ranks))
    tracks = {event["tid"]: event["args"]["name"] for event in made if event["name"] == "thread_name"}
    found = [event for event in made if event["ph"] == "X"]
    for event in found:
        event["ts"] += ahead_us
    return Timeline(About(role, index, "host", clock or f"{role} {index}", (1,) * ranks, 1, 99, 99), found, tracks)


def span(line: Line, track: int, action: int, bucket: int, step: int, began_us: float, ended_us: float, nbytes: int = 0) -> Recorded:
    return Recorded(make_key(1, bucket, 0), step, line, track, action, round(began_us * US), round(ended_us * US), nbytes)


def served(
    ahead_us: dict[str, float], seed: int, ranks: int = 2, servers: int = 1, steps: int = 4, least_us: float = 40.0, clocks: dict[str, str] | None = None
) -> tuple[list[Timeline], float]:  # fmt: skip
    """A job over servers, whose messages take ``least_us`` to ten times that. Returns its timelines and its least round trip."""
    drawn = random.Random(seed)
    spans: dict[str, list[Recorded]] = {f"{role} {n}": [] for role, many in (("rank", ranks), ("server", servers)) for n in range(many)}
    ways: dict[bool, list[float]] = {True: [], False: []}

    def delay(there: bool) -> float:
        ways[there].append(least_us * (1 + 9 * drawn.random() ** 3))
        return ways[there][-1]

    for step in range(1, steps + 1):
        for bucket in range(3):
            server, begin = bucket % servers, 10_000.0 * step + 1000 * bucket
            arrivals = []
            for rank in range(ranks):
                ready = begin + drawn.random() * 300
                arrivals.append(ready + 20 + delay(True))
                own = spans[f"rank {rank}"]
                own += [
                    span(Line.BACKWARD, 0, READY, bucket, step, begin - 100, ready),
                    span(Line.CPU, 0, ENCODE, bucket, step, ready, ready + 20, 64),
                    span(Line.SEND, server, PUSH, bucket, step, ready + 20, arrivals[-1] + least_us, 64),
                ]
                spans[f"server {server}"].append(span(Line.RECEIVE, rank, PUSH, bucket, step, arrivals[-1], arrivals[-1], 64))
            summed = max(arrivals) + 30
            spans[f"server {server}"].append(span(Line.SERVER, 0, PUSH, bucket, step, summed - 30, summed))
            for rank in range(ranks):
                back = summed + delay(False)
                spans[f"server {server}"].append(span(Line.SEND, rank, PULL, bucket, step, summed, summed, 64))
                spans[f"rank {rank}"] += [
                    span(Line.RECEIVE, server, PULL, bucket, step, back, back, 64),
                    span(Line.CPU, 0, DECODE, bucket, step, back, back + 15),
                ]
    for rank in range(ranks):
        last = max(row.ended_ns for row in spans[f"rank {rank}"]) / US
        spans[f"rank {rank}"].append(span(Line.WAITING, 0, WAIT, 0, steps, last - 50, last))
    made = [timeline(*_member(name), own, ahead_us.get(name, 0.0), (clocks or {}).get(name, ""), ranks) for name, own in spans.items()]
    return made, min(ways[True]) + min(ways[False])


def _member(name: str) -> tuple[str, int]:
    role, _, index = name.partition(" ")
    return role, int(index)


def grouped(ahead_us: Sequence[float], seed: int, steps: int = 6, least_us: float = 40.0) -> list[Timeline]:
    """A job without servers: each rank's control words."""
    drawn = random.Random(seed)
    spans: list[list[Recorded]] = [[] for _ in ahead_us]
    for step in range(1, steps + 1):
        begins = [10_000.0 * step + drawn.random() * 500 for _ in ahead_us]
        for rank, begin in enumerate(begins):
            end = max(begins) + least_us * (1 + drawn.random())
            spans[rank] += [
                span(Line.BACKWARD, 0, READY, 0, step, begin - 300, begin - 200),
                span(Line.FLAT, 0, 0, 0, step, begin - 150, begin, 800),
                span(Line.CONTROL, 0, 1, 0, step, begin, end),
            ]
    return [
        timeline("rank", rank, own, ahead_us[rank], ranks=len(ahead_us), names=OVER_GROUPS) for rank, own in enumerate(spans)
    ]  # fmt: skip
