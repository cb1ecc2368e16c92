"""Estimates the offsets between members' clocks from their timelines, because no message is received before it is sent.

Pure. If an event at time A of one clock happens before an event at time B of another, the other clock is ahead by at most B - A. A push gives such
a bound for a worker's and a server's clock, its result one in the opposite direction. A collective of all ranks, which no rank leaves before the last one
has begun, gives bounds for every two ranks. The tightest bounds in both directions, also through other members, give an interval for each offset. Its
middle is the estimate, which is wrong by at most half of the shortest round trip. Members of one machine share a clock.

Source: Marzullo 1984 and NTP for intervals from round trips; the bounds are a system of difference constraints (Cormen et al., 24.4).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from psgc.observe.lanes import BACKWARD, CONTROL, CPU, RECEIVE, SEND
from psgc.observe.timeline import Event, Timeline

Bounds = dict[tuple[int, int], float]  # (a, b) -> the most by which b's clock may be ahead of a's
Part = tuple[str, int, int, int]  # layout, bucket, part, step
FIRST_SLACK_US: Final = 1.0


class Offset(NamedTuple):
    """The time by which a member's clock is ahead of the first member's, and its uncertainty; None: nothing is known."""

    us: float
    uncertain_us: float | None


def offsets(timelines: Sequence[Timeline]) -> list[Offset]:
    """The offset of each timeline's clock from that of the first one."""
    return solve(len(timelines), bounds_of(timelines))


def bounds_of(timelines: Sequence[Timeline]) -> Bounds:
    """The bounds that the timelines give."""
    bounds: Bounds = {}
    clocks: dict[str, int] = {}
    for number, one in enumerate(timelines):
        same = clocks.setdefault(one.about.clock, number)
        if same != number:
            _tighten(bounds, same, number, 0.0)
            _tighten(bounds, number, same, 0.0)
    servers = {one.about.index: number for number, one in enumerate(timelines) if one.about.role == "server"}
    came = {number: _by_peer(timelines[number].events, RECEIVE) for number in servers.values()}
    left = {number: _by_peer(timelines[number].events, SEND) for number in servers.values()}
    controls: dict[int, dict[Part, Event]] = {}
    for number, one in enumerate(timelines):
        if one.about.role == "server":
            continue
        encoded = {_part(event): _end(event) for event in one.events if event["cat"] == CPU and _is_push(event)}
        ready = {_bucket(event): _end(event) for event in one.events if event["cat"] == BACKWARD}
        for event in one.events:
            server = servers.get(event["args"].get("peer", -1))
            if event["cat"] != RECEIVE or server is None:
                continue
            key = (one.about.index, *_part(event))
            if key in left[server]:
                _tighten(bounds, server, number, _end(event) - left[server][key]["ts"])
            before = encoded.get(_part(event), ready.get(_bucket(event)))  # behind sums within nodes, keys are not cut as parts are
            if key in came[server] and before is not None:
                _tighten(bounds, number, server, _end(came[server][key]) - before)
        controls[number] = {_part(event): event for event in one.events if event["cat"] == CONTROL}
    _from_collectives(bounds, controls)
    return bounds


def _from_collectives(bounds: Bounds, controls: Mapping[int, Mapping[Part, Event]]) -> None:
    """Add the bounds from control words: no rank has the outcome before every rank has begun. A rank whose timeline lacks a control word gets no bound
    from it."""
    first = next(iter(controls), None)
    for number, own in controls.items():
        if first is None or number == first:
            continue
        for part, event in own.items():
            other = controls[first].get(part)
            if other is not None:
                _tighten(bounds, first, number, _end(event) - other["ts"])
                _tighten(bounds, number, first, _end(other) - event["ts"])


def _by_peer(events: Iterable[Event], lane: str) -> dict[tuple[int, str, int, int, int], Event]:
    """A server's messages of one direction, by rank and part."""
    return {(event["args"]["peer"], *_part(event)): event for event in events if event["cat"] == lane and "peer" in event["args"]}


def _part(event: Event) -> Part:
    args = event["args"]
    return args["layout"], args["bucket"], args["part"], args["step"]


def _bucket(event: Event) -> tuple[str, int, int]:
    args = event["args"]
    return args["layout"], args["bucket"], args["step"]


def _is_push(event: Event) -> bool:
    """Whether the span on the CPU is before a push."""
    return event["args"]["action"] in ("comp@cpu", "flat.push")


def _end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def _tighten(bounds: Bounds, a: int, b: int, us: float) -> None:
    bounds[a, b] = min(us, bounds.get((a, b), us))


def solve(members: int, bounds: Bounds) -> list[Offset]:
    """The middle of each clock's interval. If bounds contradict each other because clocks drift, all bounds are widened equally until they agree."""
    slack = 0.0
    while True:
        wide = {pair: us + slack for pair, us in bounds.items()}
        most = _shortest(members, wide)
        least = _shortest(members, {(b, a): us for (a, b), us in wide.items()})
        if most is not None and least is not None:
            break
        slack = 2 * slack or FIRST_SLACK_US
    found = []
    for high, low in zip(most, least, strict=True):
        known = high is not None and low is not None
        found.append(Offset((high - low) / 2, (high + low) / 2) if known else Offset(0.0, None))  # type: ignore[operator]
    return found


def _shortest(members: int, weights: Bounds) -> list[float | None] | None:
    """The shortest paths from the first member (Bellman and Ford); None if there is a negative cycle."""
    distance: list[float | None] = [0.0, *[None] * (members - 1)]
    for _ in range(members + 1):
        changed = False
        for (a, b), us in weights.items():
            start, end = distance[a], distance[b]
            if start is not None and (end is None or start + us < end - 1e-9):
                distance[b], changed = start + us, True
        if not changed:
            return distance
    return None
