"""The critical buckets: those with a task on a critical path of the simulated step.

A task is critical if the step ends with it, or if a critical task of the same chain, or on a resource that both hold, began the moment it ended. A
critical task that waited for no other task waited for backward, which all earlier tasks on the GPU have delayed; so these are critical, too. Another
option for a bucket that is not critical can shorten the step only by changing the order of tasks, which is rare, so descents skip such buckets.
Owns the critical paths, which are found backwards through the run's events.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from psgc.codecs.jit.kernel import helper
from psgc.plan.model.costs import ALL_LINKS, GPU, IN_FLIGHT, INTRA, RECEIVE, SEND
from psgc.plan.model.timeline import EVENTS, STEP, TOLERANCE


@helper
def _last_on(run: Any, slot: Any, last: Any, start: Any, slack: Any) -> Any:
    """The event that ended at ``start``, of those that were last on a resource's threads; -1 if none did. slot: the range of the threads in
    ``last``."""
    for place in range(slot[0], slot[1]):
        event = last[place]
        if event >= 0 and abs(run.event_us[event] + run.us[run.event_task[event]] - start) <= slack:
            return event
    return -1


@helper
def _put_on(run: Any, slot: Any, last: Any, event: Any) -> None:
    """Note an event as the last on the thread that was free first."""
    own, least = slot[0], np.inf
    for place in range(slot[0], slot[1]):
        end = run.event_us[last[place]] + run.us[run.event_task[last[place]]] if last[place] >= 0 else -1.0
        if end < least:
            own, least = place, end
    last[own] = event


@helper
def _holds(held: Any, resource: Any) -> Any:
    """Whether a task on ``held`` holds this resource."""
    if held >= 0 or held == IN_FLIGHT:
        return held == resource
    return resource in (SEND, RECEIVE) or (resource == INTRA and held == ALL_LINKS)


@helper
def _waited_for(run: Any, slack: Any) -> Any:
    """For each event, the events that ended when it began: in its chain (column 0), and on each resource r (column 1 + r); -1 for none."""
    events, resources = int(run.state[EVENTS]), run.threads.size
    before = np.full((events, resources + 1), -1)
    slots = np.zeros(resources + 1, np.int64)
    slots[1:] = np.cumsum(run.threads)
    of_chain, last = np.full(run.ready_us.size, -1), np.full(slots[-1], -1)
    for event in range(events):
        chain, start, held = run.event_chain[event], run.event_us[event], run.resource[run.event_task[event]]
        before[event, 0] = _last_on(run, (chain, chain + 1), of_chain, start, slack)
        of_chain[chain] = event
        for resource in range(resources):
            if _holds(held, resource):
                before[event, 1 + resource] = _last_on(run, slots[resource : resource + 2], last, start, slack)
                _put_on(run, slots[resource : resource + 2], last, event)
    return before


@helper
def critical_events(run: Any) -> Any:
    """For each event of a finished run, the events that ended when it began (``_waited_for``), and whether it is critical."""
    events, step = int(run.state[EVENTS]), run.state[STEP]
    slack = TOLERANCE * step
    before, is_critical = _waited_for(run, slack), np.zeros(events, np.bool_)
    delayed_us = -1.0  # tasks on the GPU that began before this are critical, because they delayed backward
    for event in range(events - 1, -1, -1):
        task, start = run.event_task[event], run.event_us[event]
        is_last, delays = start + run.us[task] >= step - slack, run.resource[task] == GPU and start < delayed_us
        if not (is_last or delays or is_critical[event]):
            continue
        is_critical[event] = True
        waited = False
        for other in before[event]:
            if other >= 0:
                is_critical[other] = waited = True
        if not waited:
            delayed_us = max(delayed_us, start)
    return before, is_critical


@helper
def buckets_of(run: Any, chain: Any) -> Any:
    """Each chain's bucket. chain: index of each bucket's first chain, then the number of chains."""
    bucket_of = np.empty(run.ready_us.size, np.int64)
    for bucket in range(chain.size - 1):
        bucket_of[chain[bucket] : chain[bucket + 1]] = bucket
    return bucket_of


@helper
def note_critical(run: Any, chain: Any, critical: Any) -> None:
    """Set ``critical`` to whether each bucket has a critical task in a finished run. chain: see ``buckets_of``."""
    bucket_of = buckets_of(run, chain)
    is_critical = critical_events(run)[1]
    critical[:] = False
    for event in range(is_critical.size):
        if is_critical[event]:
            critical[bucket_of[run.event_chain[event]]] = True
