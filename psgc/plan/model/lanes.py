"""The spans of a simulated step: when backward computes, and when each resource works for which part.

Owns spans of time by lane, and two sums over them: how long each lane works, and how much of the communication backward hides. Does not draw.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from psgc.observe.intervals import length, union
from psgc.plan.model.costs import GPU, LINKS, RESOURCES, resources_of
from psgc.plan.model.problem import Simulated

BACKWARD: Final = "backward"
LANES: Final = (BACKWARD, *RESOURCES)


class Span(NamedTuple):
    """One piece of work on one lane. bucket: its index in the plan; bucket and part are -1 for backward of tensors that need no
    communication; thread: index of the lane's thread that does it; threads: how many threads the lane has."""

    lane: str
    bucket: int
    part: int
    action: str
    start_us: float
    us: float
    thread: int = 0
    threads: int = 1

    @property
    def end_us(self) -> float:
        return self.start_us + self.us


def spans(simulated: Simulated) -> list[Span]:
    """Backward's spans, then those of the tasks in the order of the chains: one span for each lane that a task holds. Spans of zero length
    and messages in flight, which hold no lane, are left out."""
    chains, timeline, rows = simulated.chains, simulated.timeline, simulated.rows
    found = _backward(simulated)
    columns = (chains.resource.tolist(), timeline.start_us.tolist(), chains.us.tolist())
    for row, resource, start, us in zip(rows, *columns, strict=True):
        found += [Span(RESOURCES[one], *row, start, us) for one in (resources_of(resource))]
    return _on_threads(found, dict(zip(RESOURCES, chains.threads.tolist(), strict=True)))


def _backward(simulated: Simulated) -> list[Span]:
    """Backward, split where other tasks hold the GPU; each span belongs to the bucket that is computed next."""
    chains, start_us = simulated.chains, simulated.timeline.start_us
    on_gpu = sorted((start_us[task], chains.us[task]) for task in np.flatnonzero((chains.resource == GPU) & (chains.us > 0)))
    found, now, place = [], 0.0, 0
    for chain, computed in enumerate(simulated.timeline.computed_us.tolist()):
        first, after = int(chains.first[chain]), int(chains.first[chain + 1])
        bucket, part = simulated.rows[first][:2] if first < after else (-1, -1)
        while place < len(on_gpu) and on_gpu[place][0] < computed:
            start, us = map(float, on_gpu[place])
            if start > now:
                found.append(Span(BACKWARD, bucket, part, BACKWARD, now, start - now))
            now, place = max(now, start + us), place + 1
        if computed > now:
            found.append(Span(BACKWARD, bucket, part, BACKWARD, now, computed - now))
            now = computed
    return found


def _on_threads(found: list[Span], threads: Mapping[str, int]) -> list[Span]:
    """The spans, each assigned to the thread of its lane that was free first."""
    free = {lane: [0.0] * count for lane, count in threads.items() if count > 1}
    order = sorted((span.start_us, number) for number, span in enumerate(found) if span.lane in free)
    for _, number in order:
        span = found[number]
        times = free[span.lane]
        thread = times.index(min(times))
        times[thread] = span.end_us
        found[number] = span._replace(thread=thread, threads=len(times))
    return found


def busy_us(found: Iterable[Span]) -> dict[str, float]:
    """Microseconds that each lane works, by name, averaged over its threads; ``gpu`` without backward."""
    total = dict.fromkeys(LANES, 0.0)
    for span in found:
        total[span.lane] += span.us / span.threads
    return total


def overlap(found: Sequence[Span]) -> float:
    """The share of communication that backward hides: of the time in which at least one link works (``intra``, ``inter-send``,
    ``inter-receive``), the share in which backward computes too. 1 if no link works at all."""
    links = union((span.start_us, span.end_us) for span in found if span.lane in LINKS)
    backward = union((span.start_us, span.end_us) for span in found if span.lane == BACKWARD)
    total = length(links)
    if total == 0.0:
        return 1.0
    return min(1.0, (total + length(backward) - length(union((*links, *backward)))) / total)
