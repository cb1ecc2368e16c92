"""Choosing every bucket's option on the timeline: change all buckets from one on together, then one by one, as long as that helps.
At last encode nothing that gains nothing.

Owns the search's inner loops, compiled. Buckets may differ in which options they can have at all: a change of all from one on leaves those
as they are that cannot follow. A change to a bucket leaves all that happens before it is computed as it was, so each trial goes on
from a copy of the run's state there (``timeline.resume``), not from the beginning. What is minimised is the step, and a little of when
buckets are done on average: of plans with equal steps one that is done earlier leaves more room for the next change.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import types

from psgc.codecs.jit.kernel import I64, helper, kernel
from psgc.plan.model.costs import BOTH_WAYS, GPU, RECEIVE, RESOURCES, SEND
from psgc.plan.model.timeline import STATE, begin, resume

_F64: Final = types.Array(types.float64, 1, "C")
_I64: Final = types.Array(types.int64, 1, "C")
_BOOL_2D: Final = types.Array(types.boolean, 2, "C")
_I64_2D: Final = types.Array(types.int64, 2, "C")
_RESULT: Any = types.Tuple((types.float64, types.float64, I64))  # type: ignore[no-untyped-call]
SMALL: Final = 1e-3  # what a microsecond of the mean weighs beside one of the step


@helper
def _set(bucket: Any, option: Any, chain: Any, kind: Any, first: Any, length: Any, begins: Any, last: Any) -> None:
    """Give a bucket's chains an option's tasks."""
    for one in range(chain[bucket], chain[bucket + 1]):
        begins[one] = first[kind[bucket], option]
        last[one] = begins[one] + length[option]


@helper
def _set_all(bucket: Any, end: Any, option: Any, chain: Any, kind: Any, first: Any, length: Any, begins: Any, last: Any) -> None:
    """Give buckets up to ``end`` an option, those that can have it."""
    for one in range(bucket, end):
        if first[kind[one], option] >= 0:
            _set(one, option, chain, kind, first, length, begins, last)


@helper
def _set_each(choice: Any, chain: Any, kind: Any, first: Any, length: Any, begins: Any, last: Any) -> None:
    """Give every bucket the option that is chosen for it."""
    for bucket in range(choice.size):
        _set(bucket, choice[bucket], chain, kind, first, length, begins, last)


@helper
def _loads(chain: Any, kind: Any, first: Any, length: Any, resource: Any, us: Any, load: Any) -> None:
    """How long each bucket (row) would hold each resource under each option."""
    load[:] = 0.0
    for bucket in range(kind.size):
        parts = chain[bucket + 1] - chain[bucket]
        for option in range(length.size):
            begins = first[kind[bucket], option]
            for task in range(begins, begins + (length[option] if begins >= 0 else 0)):
                if resource[task] == BOTH_WAYS:
                    load[bucket, option, SEND] += parts * us[task]
                    load[bucket, option, RECEIVE] += parts * us[task]
                else:
                    load[bucket, option, resource[task]] += parts * us[task]


@helper
def _hopeless(
    bucket: Any, end: Any, option: Any, choice: Any, kind: Any, first: Any, load: Any, ready: Any, chain: Any, best: Any, total: Any
) -> Any:
    """Whether the step is over ``best`` if the buckets up to ``end`` take the option, by what each resource has to do alone."""
    total[:] = 0.0
    for one in range(choice.size - 1, -1, -1):
        taken = option if bucket <= one < end and first[kind[one], option] >= 0 else choice[one]
        at = ready[chain[one]]
        for resource in range(total.size):
            total[resource] += load[one, taken, resource]
            if resource != GPU and at + total[resource] > best:
                return True
    return ready[-1] + total[GPU] > best


@kernel(_RESULT(_F64, _I64, _I64, _I64, _BOOL_2D, _I64_2D, _I64, _I64, _F64, _F64, _I64_2D, _I64, _I64, I64))
def descend(
    ready: Any, chain: Any, until: Any, kind: Any, fits: Any, first: Any, length: Any, resource: Any, us: Any, rest: Any, starts: Any, order: Any, choice: Any,
    budget: Any,
) -> Any:  # fmt: skip
    """Find each bucket's option, ``choice``, from the best of ``starts`` (rows). Returns the step, what was minimised, and how many timelines
    were run.

    ready: of each chain; chain: where each bucket's chains begin, and their number; until: of each bucket, the first chain that is ready when
    it is; kind: of each bucket, its row of ``fits``, which has what options (columns) are worth trying, and of ``first``, which has where their
    tasks begin in ``resource``, ``us`` and ``rest``, -1 where buckets of this kind cannot have the option.
    """
    buckets, options, chains = kind.size, length.size, ready.size
    begins, last, alike = np.empty(chains, np.int64), np.empty(chains, np.int64), np.empty(chains, np.int64)
    state, available, nexts = np.empty(STATE), np.empty(chains), np.empty(chains, np.int64)
    start, backward = np.empty(us.size), np.empty(chains)
    kept_state, kept_available, kept_nexts = np.empty((buckets, STATE)), np.empty((buckets, chains)), np.empty((buckets, chains), np.int64)
    load, total = np.empty((buckets, options, len(RESOURCES))), np.empty(len(RESOURCES))
    _loads(chain, kind, first, length, resource, us, load)
    for bucket in range(buckets):
        alike[chain[bucket] : chain[bucket + 1]] = chain[bucket + 1]
    best, best_step, trials, improved = np.inf, np.inf, 0, True
    for row in range(starts.shape[0]):
        _set_each(starts[row], chain, kind, first, length, begins, last)
        begin(begins, state, available, nexts)
        step = resume(ready, begins, last, alike, resource, us, rest, state, available, nexts, chains, best, start, backward)
        trials += 1
        worth = step + SMALL * available.mean() if step < best else np.inf
        if worth < best:
            best, best_step = worth, step
            choice[:] = starts[row]
    _set_each(choice, chain, kind, first, length, begins, last)
    while improved and trials < budget:
        improved = False
        for tail in (True, False):
            stale = True
            for place in range(buckets):
                bucket = buckets - 1 - place if tail else order[place]
                if stale:  # the run of what is chosen now, kept where each bucket is about to be computed
                    begin(begins, state, available, nexts)
                    for one in range(buckets):
                        resume(ready, begins, last, alike, resource, us, rest, state, available, nexts, until[one], np.inf, start, backward)
                        kept_state[one], kept_available[one], kept_nexts[one] = state, available, nexts
                    stale = False
                end = buckets if tail else bucket + 1
                chosen = -1
                for option in range(options):
                    if (
                        not fits[kind[bucket], option]
                        or (not tail and option == choice[bucket])
                        or _hopeless(bucket, end, option, choice, kind, first, load, ready, chain, best, total)
                    ):
                        continue
                    _set_all(bucket, end, option, chain, kind, first, length, begins, last)
                    state[:], available[:], nexts[:] = kept_state[bucket], kept_available[bucket], kept_nexts[bucket]
                    nexts[chain[bucket] :] = begins[chain[bucket] :]
                    step = resume(ready, begins, last, alike, resource, us, rest, state, available, nexts, chains, best, start, backward)
                    trials += 1
                    worth = step + SMALL * available.mean() if step < best else np.inf
                    if worth < best * (1 - 1e-12):
                        best, best_step, chosen, improved = worth, step, option, True
                for one in range(bucket, end):
                    if chosen >= 0 and first[kind[one], chosen] >= 0:
                        choice[one] = chosen
                    _set(one, choice[one], chain, kind, first, length, begins, last)
                stale = chosen >= 0 and not tail
                if trials >= budget:
                    break
    return best_step, best, trials


@kernel(types.float64(_F64, _I64, _I64, _I64, _I64_2D, _I64, _I64, _F64, _F64, I64, _I64))
def simplify(ready: Any, chain: Any, until: Any, kind: Any, first: Any, length: Any, resource: Any, us: Any, rest: Any, simple: Any, choice: Any
) -> Any:  # fmt: skip
    """Give buckets one of the first ``simple`` options in place of their ``choice``, wherever the step gets no longer by it. Returns the step."""
    buckets, chains = kind.size, ready.size
    begins, last, alike = np.empty(chains, np.int64), np.empty(chains, np.int64), np.arange(1, chains + 1)
    state, available, nexts = np.empty(STATE), np.empty(chains), np.empty(chains, np.int64)
    start, backward = np.empty(us.size), np.empty(chains)
    kept_state, kept_available, kept_nexts = np.empty(STATE), np.empty(chains), np.empty(chains, np.int64)
    load, total = np.empty((buckets, length.size, len(RESOURCES))), np.empty(len(RESOURCES))
    _loads(chain, kind, first, length, resource, us, load)
    _set_each(choice, chain, kind, first, length, begins, last)
    begin(begins, state, available, nexts)
    best = resume(ready, begins, last, alike, resource, us, rest, state, available, nexts, chains, np.inf, start, backward)
    begin(begins, kept_state, kept_available, kept_nexts)
    for bucket in range(buckets):
        resume(
            ready, begins, last, alike, resource, us, rest, kept_state, kept_available, kept_nexts, until[bucket], np.inf, start, backward
        )
        for option in range(simple):
            if choice[bucket] < simple:
                break
            if _hopeless(bucket, bucket + 1, option, choice, kind, first, load, ready, chain, best, total):
                continue
            _set(bucket, option, chain, kind, first, length, begins, last)
            state[:], available[:], nexts[:] = kept_state, kept_available, kept_nexts
            nexts[chain[bucket] :] = begins[chain[bucket] :]
            step = resume(ready, begins, last, alike, resource, us, rest, state, available, nexts, chains, best, start, backward)
            if step <= best:
                best, choice[bucket] = step, option
        _set(bucket, choice[bucket], chain, kind, first, length, begins, last)
        kept_nexts[chain[bucket] :] = begins[chain[bucket] :]
    return best
