"""Assesses a method's plan: against uncompressed plans, other methods' plans and the lower bound; its quality and memory; whether a job can run it.

A gain is a share of the other plan's step: 0.2 is a fifth less time. To decide whether compression pays, the best plan found with it is compared
with the best one found without it, and both may fuse and cut tensors alike; so a gain from fusing alone does not count. The uncompressed gradients
are fp32 or, with half the bytes, bf16. Owns the figures; ``sentences`` turns them into text, ``document`` into JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from psgc.errors import UsageError
from psgc.plan.inputs.cluster import Cluster
from psgc.plan.methods.anytime import search_for
from psgc.plan.methods.bound import Bounds, lower_bounds
from psgc.plan.methods.espresso import espresso
from psgc.plan.methods.once import WARM_UP_TENSORS, search_once
from psgc.plan.methods.registry import METHODS, find
from psgc.plan.methods.result import Found
from psgc.plan.model.gains import share_saved
from psgc.plan.model.job import Job
from psgc.plan.model.options import encodes
from psgc.plan.model.plan import UNCOMPRESSED, PlannedBucket
from psgc.plan.model.problem import Problem, Simulated, simulate
from psgc.plan.model.quality import SAFELY, Standard, is_cast
from psgc.plan.model.vary import Change, faster, in_halves, varied
from psgc.plan.report.reasons import all_encoded
from psgc.plan.report.running import Running, running
from psgc.plan.report.usual import usual

BEST: Final = "psgc"
BASELINE: Final = "fp32"
# Links and codecs may be a tenth faster or slower than measured, and the time of a step always varies by a hundredth.
FACTORS: Final = (0.9, 1.1)
LEAST_MARGIN: Final = 0.01
# By how much of an iteration a plan to run must be predicted quicker than what its codec does without a plan, as long as nobody has verified predictions: of
# models that were drawn (docs/predicted-and-measured.md), half of the plans took that much longer, beside their plain codec, than they were predicted to.
UNVERIFIED: Final = 0.25
RUNS: Final = 3
# A search that takes longer is not timed again, because other work on the machine matters less to it.
LONG_US: Final = 1e5
PATIENCE_S: Final = 5.0  # for Espresso, which takes minutes for thousands of tensors


@dataclass(frozen=True)
class Gain:
    """The share of another plan's step that a plan saves, and how much it changes if the inputs are a little off."""

    gain: float
    margin: float

    @property
    def sure(self) -> bool:
        """Whether the gain is larger than its margin."""
        return self.gain > self.margin


NO_GAIN: Final = Gain(0.0, 0.0)


@dataclass(frozen=True)
class Assessment:
    """A method's plan, and the plans that it is compared with.

    found:     the method's plan, which is written. For psgc's own method it is uncompressed unless compression pays or is forced.
    held_back: psgc's own plan, where predictions are not verified and it is predicted quicker by too little: ``found`` has its codec's usual buckets then.
    plain:     the best plan found without compression.
    peer:      the best one without compression that need not run in psgc, such as an all-reduce; bf16: the same with bf16 gradients, None if the
               codec is only such a cast.
    best:      the plan of psgc's own method.
    encoded:   the compressed plan, to which ``gain``, ``margin`` and ``over_bf16`` refer: the one that the search found, or, if that encodes nothing
               (``searched_encodes`` is false), its buckets encoded nevertheless.
    once:      the best plan that encodes no bucket twice; None if ``encoded`` encodes none twice.
    rivals:    other methods' plans by name, or the error why there is none."""

    job: Job
    method: str
    found: Found
    held_back: Found | None
    simulated: Simulated
    plain: Found
    peer: Found
    bf16: Found | None
    best: Found
    encoded: tuple[PlannedBucket, ...] | None
    searched_encodes: bool
    gain: float
    margin: float
    over_bf16: Gain
    once: Found | None
    standard: Standard
    running: Running
    rivals: Mapping[str, Found | UsageError]
    bounds: Bounds

    @property
    def problem(self) -> Problem:
        return self.job.problem

    @property
    def steps_us(self) -> dict[str, float]:
        """Each plan's step in microseconds, by method; ``uncompressed`` is ``plain``'s."""
        others = {name: rival.step_us for name, rival in self.rivals.items() if isinstance(rival, Found)}
        return {self.method: self.found.step_us, "uncompressed": self.plain.step_us, **others}

    @property
    def encoded_us(self) -> float:
        """The step of the compressed plan in microseconds."""
        return simulate(self.problem, self.encoded).step_us if self.encoded is not None else self.plain.step_us


def assess(
    job: Job, method: str, *, compare: bool, seconds: float | None = None, standard: Standard = SAFELY, force: bool = False
) -> Assessment:  # fmt: skip
    """Assess the method's plan for the job. Raises UsageError for an unknown method, and if the plan must be runnable but is not.

    compare: with all methods, else only with fp32.
    seconds: how long psgc's own method may search, each with compression and without.
    standard: of quality.
    force:   plan compression even if it does not pay."""
    problem = job.problem
    plain = _found_in(seconds, BEST, _without_compression(problem))
    found = _found_in(seconds, method, problem)
    _check_carried(method, found, problem)
    sought = found if method == BEST else search_once(problem)
    encoded = sought.buckets if _encodes(sought.buckets) else all_encoded(problem, sought.buckets)
    peer, bf16 = _peer(problem, plain), _bf16_peer(problem)
    over_fp32, over_bf16 = NO_GAIN, NO_GAIN
    if encoded is not None:
        over_fp32 = _gain(problem, encoded, problem if peer is plain else _by_others(problem), peer.buckets)
        if bf16 is not None:
            over_bf16 = _gain(problem, encoded, _with_half(problem), bf16.buckets)
    best = _best(sought, plain, encoded, problem, compresses=force or over_fp32.sure)
    own = _usual(best, problem) if method == BEST and not force else None
    held_back, best = (None, best) if own is None else (best, own)
    found = best if method == BEST else found
    others = METHODS if compare else (BASELINE,)
    rivals = {name: _rival(name, problem) for name in others if name != method}
    return Assessment(
        job, method, found, held_back, simulate(problem, found.buckets), plain, peer, bf16, best, encoded, _encodes(sought.buckets), over_fp32.gain,
        over_fp32.margin, over_bf16, _once(problem, encoded), standard, running(problem, found.buckets), rivals,
        lower_bounds(problem, found.buckets, found.step_us),
    )  # fmt: skip


def _peer(problem: Problem, plain: Found) -> Found:
    """The best uncompressed plan, even if psgc's jobs do not run it: DistributedDataParallel all-reduces."""
    if not problem.constraints.runtime:
        return plain
    return min(search_once(_without_compression(_by_others(problem))), plain, key=lambda found: found.step_us)


def _bf16_peer(problem: Problem) -> Found | None:
    """The best plan for bf16 gradients; None if the codec itself is such a cast, or if there is no such plan."""
    if all(is_cast(codec.name) for codec in problem.used):
        return None
    return search_once(_without_compression(_with_half(problem)))


def _with_half(problem: Problem) -> Problem:
    return _by_others(in_halves(problem))


def _by_others(problem: Problem) -> Problem:
    """The problem for what need not run in psgc: all options, at the costs of the cluster's links; beside what jobs run, as a library all-reduces."""
    limits = problem.constraints
    return replace(problem, constraints=replace(limits, runtime=False, among_workers=True), by_library=limits.runtime)


def _best(sought: Found, plain: Found, encoded: tuple[PlannedBucket, ...] | None, problem: Problem, *, compresses: bool) -> Found:
    """The recommended plan. It is the uncompressed one unless compression pays, because compression costs quality."""
    if encoded is None or not compresses:
        return replace(plain, select_us=sought.select_us + plain.select_us, options_considered=sought.options_considered)
    if encoded is sought.buckets:
        return sought
    return replace(sought, buckets=encoded, step_us=simulate(problem, encoded).step_us)


def _usual(best: Found, problem: Problem) -> Found | None:
    """What its codec does without a plan, if that is not known to be slower: a plan to run is not verified, and predicted to be quicker by too little."""
    if not problem.constraints.runtime or problem.profile.correction is not None or problem.others:
        return None
    buckets = usual(problem, problem.codec.name if _encodes(best.buckets) else UNCOMPRESSED)
    if buckets is None:
        return None
    step_us, rest_us = simulate(problem, buckets).step_us, problem.profile.forward_us or 0.0
    if rest_us + best.step_us < (1 - UNVERIFIED) * (rest_us + step_us):
        return None
    return replace(best, buckets=buckets, step_us=step_us)


def _once(problem: Problem, encoded: Sequence[PlannedBucket] | None) -> Found | None:
    """The best plan with at most one encoding per bucket; None if the given plan has no bucket with more."""
    if encoded is None or all(encodes(bucket.option) <= 1 for bucket in encoded):
        return None
    return search_once(replace(problem, constraints=replace(problem.constraints, most_encodes=1)))


def _check_carried(method: str, found: Found, problem: Problem) -> None:
    """Raise UsageError if the plan must be runnable but is not. (``fp32``, the baseline of comparisons, ignores constraints.)"""
    for bucket in found.buckets if problem.constraints.runtime else ():
        if bucket.option not in problem.options:
            raise UsageError(
                f"method {method}: its plan takes {' '.join(bucket.option)}, which no job carries; choose {BEST} for a plan to run"
            )


def _found_in(seconds: float | None, method: str, problem: Problem) -> Found:
    """The method's plan. seconds: how long psgc's own method may search."""
    return _found_warm(method, problem) if seconds is None or method != BEST else search_for(problem, seconds)


def _found_warm(method: str, problem: Problem) -> Found:
    """The method's plan, with the planning time of a process that has planned before: after a warm-up on a few tensors, the minimum of ``RUNS``."""
    if method != BEST:
        find(method, replace(problem, profile=replace(problem.profile, tensors=problem.profile.tensors[:WARM_UP_TENSORS])))
    runs = [search_once(problem) if method == BEST else find(method, replace(problem))]
    while len(runs) < RUNS and runs[0].select_us < LONG_US:
        runs.append(find(method, replace(problem)))
    return min(runs, key=lambda run: run.select_us)


def _rival(name: str, problem: Problem) -> Found | UsageError:
    try:
        return espresso(problem, patience_s=PATIENCE_S) if name == "espresso" else find(name, replace(problem))
    except UsageError as error:  # the method cannot plan for this codec or cluster
        return error


def _without_compression(problem: Problem) -> Problem:
    """The problem without compression; tensors that have codecs of their own may then be fused with others."""
    return replace(problem, constraints=replace(problem.constraints, devices=()), others=())


def _encodes(buckets: Iterable[PlannedBucket]) -> bool:
    return any(encodes(bucket.option) for bucket in buckets)


def _gain(problem: Problem, mine: Sequence[PlannedBucket], other: Problem, theirs: Sequence[PlannedBucket]) -> Gain:
    """The share of the other plan's step that this plan saves, each simulated on its own problem, and the margin of that share: by the model's measured
    error where the profile has one, else if the inputs are a little off."""
    gain = _saved(problem, mine, other, theirs)
    correction = problem.profile.correction
    if correction is not None:  # each step is within the measured error, so their ratio within twice that
        return Gain(gain, max(LEAST_MARGIN, 2 * correction.error * (1 - gain)))
    near = zip(_nearby(problem), _nearby(other), strict=True)
    return Gain(gain, max(LEAST_MARGIN, *(abs(_saved(one, mine, two, theirs) - gain) for one, two in near)))


def _saved(problem: Problem, mine: Sequence[PlannedBucket], other: Problem, theirs: Sequence[PlannedBucket]) -> float:
    return share_saved(simulate(problem, mine).step_us, simulate(other, theirs).step_us)


def _nearby(problem: Problem) -> list[Problem]:
    """The problem with links, and with codecs, a little slower and a little faster; and with copies between GPUs and hosts, if they take time."""
    cluster = problem.cluster
    clusters = [_with_speed(cluster, factor) for factor in FACTORS]
    if cluster.host is not None:
        clusters += [replace(cluster, host=faster(cluster.host, factor)) for factor in FACTORS]
    return [*(replace(problem, cluster=one) for one in clusters), *(varied(problem, Change(codec=factor)) for factor in FACTORS)]


def _with_speed(cluster: Cluster, factor: float) -> Cluster:
    server = faster(cluster.server, factor) if cluster.server else None
    return replace(cluster, intra=faster(cluster.intra, factor), inter=faster(cluster.inter, factor), server=server)
