"""What a method's plan is worth: beside uncompressed plans and other methods', against the bound, and in one sentence.

``psgc plan`` is this, in JSON, as a table and as a page. Gains are shares of the other's step: 0.2 is a fifth less time. Whether compression
pays is asked of the best plans found with it and without, over the same freedom to fuse and cut; so what fusing alone brings does not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from psgc.errors import UsageError
from psgc.plan.inputs.cluster import Cluster
from psgc.plan.methods.anytime import search_for
from psgc.plan.methods.bound import Bounds, lower_bounds
from psgc.plan.methods.espresso import espresso
from psgc.plan.methods.registry import METHODS, find
from psgc.plan.methods.result import Found
from psgc.plan.model.job import Job
from psgc.plan.model.lanes import busy_us, overlap, spans
from psgc.plan.model.options import encodes
from psgc.plan.model.plan import UNCOMPRESSED, Plan, PlannedBucket
from psgc.plan.model.problem import Problem, Simulated, simulate
from psgc.plan.model.vary import Change, faster, varied
from psgc.plan.report.reasons import all_encoded
from psgc.plan.report.wording import longer, ms, percent

BEST: Final = "psgc"
BASELINE: Final = "fp32"
# Links and codecs may be a tenth faster or slower than they were measured; and a step varies by a hundredth however well it is known.
FACTORS: Final = (0.9, 1.1)
LEAST_MARGIN: Final = 0.01
RUNS: Final = 3
# A search that takes longer is not timed again: what else the machine does matters less to it.
LONG_US: Final = 1e5
WARM_UP_TENSORS: Final = 8
WORTH_TELLING: Final = 10.0  # times a bound, below which it says something
PATIENCE_S: Final = 5.0  # with Espresso, which takes minutes for thousands of tensors


@dataclass(frozen=True)
class Assessment:
    """plain: the best plan found without compression; best: the best with it allowed; encoded: the plan that ``gain`` and ``margin`` compare
    with ``plain``: the one that the search found, or, where that encodes nothing, its buckets encoded all the same; rivals: other methods' plans by name, or
    why there is none."""

    job: Job
    method: str
    found: Found
    simulated: Simulated
    plain: Found
    best: Found
    encoded: tuple[PlannedBucket, ...] | None
    gain: float
    margin: float
    rivals: Mapping[str, Found | UsageError]
    bounds: Bounds

    @property
    def problem(self) -> Problem:
        return self.job.problem

    @property
    def steps_us(self) -> dict[str, float]:
        """The step of every plan that was found, by method; ``uncompressed`` is ``plain``'s."""
        others = {name: rival.step_us for name, rival in self.rivals.items() if isinstance(rival, Found)}
        return {self.method: self.found.step_us, "uncompressed": self.plain.step_us, **others}


def assess(job: Job, method: str, *, compare: bool, seconds: float | None = None) -> Assessment:
    """The method's plan for the job, assessed. compare: beside all methods, else only beside fp32; seconds: how long psgc's own method may
    search, with compression and without. Raises UsageError for unknown methods,
    and for one whose plan cannot be run where that is asked for."""
    problem = job.problem
    found, plain = _found_in(seconds, method, problem), _found_in(seconds, BEST, _without_compression(problem))
    _check_carried(method, found, problem)
    sought = found if method == BEST else find(BEST, problem)
    best = _unless_for_nothing(sought, plain)
    found = best if method == BEST else found
    others = METHODS if compare else (BASELINE,)
    rivals = {name: _rival(name, problem) for name in others if name != method}
    encoded = sought.buckets if _encodes(sought.buckets) else all_encoded(problem, sought.buckets)
    gain, margin = (0.0, 0.0) if encoded is None else _gain_and_margin(problem, encoded, plain.buckets)
    return Assessment(
        job, method, found, simulate(problem, found.buckets), plain, best, encoded, gain, margin, rivals,
        lower_bounds(problem, found.buckets, found.step_us),
    )  # fmt: skip


def _check_carried(method: str, found: Found, problem: Problem) -> None:
    """``fp32`` keeps to no constraints, since it is what others are compared with."""
    for bucket in found.buckets if problem.constraints.runtime else ():
        if bucket.option not in problem.options:
            raise UsageError(
                f"method {method}: its plan takes {' '.join(bucket.option)}, which no job carries; choose {BEST} for a plan to run"
            )


def _found_in(seconds: float | None, method: str, problem: Problem) -> Found:
    """The method's answer, after about so many seconds if it is psgc's own and they are given."""
    return _found_warm(method, problem) if seconds is None or method != BEST else search_for(problem, seconds)


def _found_warm(method: str, problem: Problem) -> Found:
    """The method's answer, timed as in a process that has planned before: after a warm-up on a few tensors, the least of ``RUNS``."""
    few = problem.profile.tensors[:WARM_UP_TENSORS]
    find(method, replace(problem, profile=replace(problem.profile, tensors=few)))
    runs = [find(method, replace(problem))]
    while len(runs) < RUNS and runs[0].select_us < LONG_US:
        runs.append(find(method, replace(problem)))
    return min(runs, key=lambda run: run.select_us)


def _unless_for_nothing(found: Found, plain: Found) -> Found:
    """The uncompressed plan where compression brings nothing, for it costs accuracy; both were looked for then."""
    if not _encodes(found.buckets) or found.step_us < plain.step_us:
        return found
    return replace(plain, select_us=found.select_us + plain.select_us, options_considered=found.options_considered)


def _rival(name: str, problem: Problem) -> Found | UsageError:
    try:
        return espresso(problem, patience_s=PATIENCE_S) if name == "espresso" else find(name, replace(problem))
    except UsageError as error:  # this codec or cluster is none for this method
        return error


def _without_compression(problem: Problem) -> Problem:
    """Free to fuse what would have codecs of its own, too."""
    return replace(problem, constraints=replace(problem.constraints, devices=()), others=())


def _encodes(buckets: Iterable[PlannedBucket]) -> bool:
    return any(encodes(bucket.option) for bucket in buckets)


def _gain_and_margin(problem: Problem, encoded: Sequence[PlannedBucket], plain: Sequence[PlannedBucket]) -> tuple[float, float]:
    """The share of time that the first plan saves, and by how much that moves with what is not well known."""
    gain = _gain(problem, encoded, plain)
    moved = [abs(_gain(near, encoded, plain) - gain) for near in _nearby(problem)]
    return gain, max(LEAST_MARGIN, *moved)


def _gain(problem: Problem, encoded: Sequence[PlannedBucket], plain: Sequence[PlannedBucket]) -> float:
    before = simulate(problem, plain).step_us
    return 1 - simulate(problem, encoded).step_us / before if before else 0.0


def _nearby(problem: Problem) -> list[Problem]:
    """The problem with links, and with codecs, a little slower and a little faster."""
    links = [replace(problem, cluster=_with_speed(problem.cluster, factor)) for factor in FACTORS]
    return [*links, *(varied(problem, Change(codec=factor)) for factor in FACTORS)]


def _with_speed(cluster: Cluster, factor: float) -> Cluster:
    server = faster(cluster.server, factor) if cluster.server else None
    return replace(cluster, intra=faster(cluster.intra, factor), inter=faster(cluster.inter, factor), server=server)


def verdict(assessed: Assessment) -> str:
    """Whether to compress, by how much it pays, how sure that is, and what the method's plan is beside the best."""
    said = _compression_verdict(assessed)
    if assessed.method == BEST or not assessed.best.step_us:
        return said
    more = assessed.found.step_us / assessed.best.step_us - 1
    return f"{said}; the plan of {assessed.method} takes {longer(more)} than that of {BEST}"


def _compression_verdict(assessed: Assessment) -> str:
    if assessed.encoded is None:
        return f"compression is ruled out: {ms(assessed.plain.step_us)} ms without it"
    if not assessed.plain.step_us:
        return "do not compress: a step takes no time without it"
    gain, margin, codec = assessed.gain, assessed.margin, codec_names(assessed.problem)
    step = simulate(assessed.problem, assessed.encoded).step_us
    said = f"with {codec} the step takes {longer(-gain)}, +-{percent(margin)}: {ms(step)} ms in place of {ms(assessed.plain.step_us)} uncompressed"
    if abs(gain) > margin:
        return f"{'compress' if gain > 0 else 'do not compress'}: {said}"
    if not _encodes(assessed.best.buckets):
        return f"do not compress, there is nothing to gain: {said}"
    return f"a tie: {said}; do not compress unless you measured a gain"


def document(assessed: Assessment) -> dict[str, Any]:
    """The plan and what is said of it, as ``psgc plan --json`` prints it. Times in milliseconds."""
    problem, found, bounds = assessed.problem, assessed.found, assessed.bounds
    busy = spans(assessed.simulated)
    steps = {name: us / 1e3 for name, us in assessed.steps_us.items()}
    prediction = {
        "method": assessed.method, "codec": codec_names(problem), "step_ms": found.step_us / 1e3, "methods": steps,
        "gain": assessed.gain, "margin": assessed.margin, "verdict": verdict(assessed), "overlap": overlap(busy),
        "lanes": [{"lane": lane, "busy_ms": us / 1e3} for lane, us in busy_us(busy).items()], "notes": list(assessed.job.notes),
    }  # fmt: skip
    plan = Plan(problem.profile.model, problem.cluster.name, found.buckets, prediction)
    return {
        **plan.to_json(), "select_ms": found.select_us / 1e3, "bound_ms": bounds.bound_ms, "options_considered": found.options_considered,
        "step_ms": found.step_us / 1e3, "fp32_step_ms": steps[BASELINE],
        "lower_bound_ms": bounds.given_us / 1e3, "lower_bound_any_bucketing_ms": bounds.any_us / 1e3,
    }  # fmt: skip


def codec_names(problem: Problem) -> str:
    """What buckets may be encoded with: one codec, or several."""
    return " and ".join(codec.name for codec in problem.used) or UNCOMPRESSED


def from_best(assessed: Assessment) -> str:
    """How far the plan can be from the best there is, in words."""
    words = []
    for bound, space in ((assessed.bounds.given_us, "with these buckets"), (assessed.bounds.any_us, "with any buckets")):
        told = assessed.found.step_us < bound * WORTH_TELLING
        words.append(
            f"at most {percent(max(assessed.found.step_us / bound - 1, 0.0))} from the best {space}" if told else f"no bound {space}"
        )
    return "; ".join(words)
