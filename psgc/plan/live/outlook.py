"""Predicts the steps of other codecs and plans from measurements of a running job. Pure.

Links are not probed. Their rate is fitted instead: it is the rate at which the planner's model gives the measured step, so what the model leaves out
counts as slowness of the links. If nodes have several ranks, sums within nodes run in hosts' memory, at the rate of copies and sums there, and at no
less than the links' rate. Gradients on GPUs are encoded there, or copied to the host; what ranks exchange with each other passes the hosts'
memory, or goes from GPU to GPU.
Codecs' costs are those measured on rank 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from psgc.errors import UsageError
from psgc.plan.inputs.cluster import Cluster, Link
from psgc.plan.inputs.estimates import DEFAULT_CARRIERS
from psgc.plan.inputs.profile import Profile
from psgc.plan.live.levels import loss_of, loss_of_codec
from psgc.plan.methods.search import QUICK, search
from psgc.plan.model.options import Constraints
from psgc.plan.model.plan import UNCOMPRESSED, Plan, PlannedBucket
from psgc.plan.model.problem import Problem, codec_costs, simulate
from psgc.plan.planfile.completing import placed, whole_plan

PLAN: Final = "plan"  # the candidate whose buckets and options the planner chose
PRESENT_PLAN: Final = "the present plan"  # the candidate that the job has now, if that is a plan
LEAST_GAIN: Final = 0.05  # share of the step that a prediction must save for anything to be tried
NEAR: Final = 1.0  # predictions up to twice as long as the best are tried, too, because the model leaves out most of a short step
MOST_TRIED: Final = 3
LEAST_GBPS, MOST_GBPS, HALVINGS = 1e-4, 400.0, 24  # the range in which the links' rate is sought, and the steps of bisection
LATENCY_US: Final = 50.0
MEMORY_GBPS: Final = (
    20.0  # between ranks of one node, if it has not been measured: the rate of a reduce_scatter of 25 MB on a machine with two cores
)
MOST_ENCODES: Final = 2  # encodings of a planned bucket; over servers there are two, by a worker and by a server


@dataclass(frozen=True, slots=True)
class Machines:
    """The job's machines and processes, as far as its workers know them.

    workers_per_node: of the largest node; even: whether all nodes have the same number.
    cores:            cores of a node.
    within_gbps:      rate at which ranks of one node sum in its memory.
    gpus:             whether gradients lie on GPUs.
    host:             the link between a GPU and its host's memory; None if not known.
    one_machine:      whether all of the job's processes run on one machine; over_tcp: whether they exchange over TCP all the same.
    connected:        whether collectives go from GPU to GPU. GPUs of one node are then assumed to reach each other at no less than the host link's rate."""

    nodes: int
    workers_per_node: int
    servers: int
    cores: int
    codec_threads: int = 0
    even: bool = True
    within_gbps: float = MEMORY_GBPS
    gpus: bool = False
    host: Link | None = None
    connected: bool = False
    one_machine: bool = False
    over_tcp: bool = False

    def cluster(self, gbps: float) -> Cluster:
        link = Link(gbps, LATENCY_US)
        inside_gbps = self.host.gbps if self.connected and self.host is not None else self.within_gbps
        within = Link(max(gbps, inside_gbps), LATENCY_US) if self.nodes > 1 else link
        collectives = ("nccl" if self.connected else "host") if self.gpus else ""
        return Cluster(
            "this job", self.nodes, self.workers_per_node, within, link, self.servers, cores=self.cores, codec_threads=self.codec_threads,
            server_threads=self.cores, host=self.host, collectives=collectives, one_machine=self.one_machine, over_tcp=self.one_machine and self.over_tcp,
        )  # fmt: skip

    @property
    def constraints(self) -> Constraints:
        """Constraints that allow only options that this job can run."""
        return Constraints(("gpu", "cpu") if self.gpus else ("cpu",), MOST_ENCODES, servers=self.servers > 0, runtime=True)


class Outlook(NamedTuple):
    """gbps: the fitted rate of the links; predicted_ms: the whole step, by candidate; tried: the candidates worth a trial, the most promising first: those that
    would save LEAST_GAIN of the step, and those that lose less than the present buckets and would take no longer; plan: the plan of the candidate PLAN, if
    it is among them."""

    gbps: float
    predicted_ms: Mapping[str, float]
    tried: tuple[str, ...]
    plan: Plan | None = None

    @property
    def best(self) -> str:
        return min(self.predicted_ms, key=lambda name: self.predicted_ms[name])


def outlook(
    profile: Profile, machines: Machines, step_ms: float, present: Sequence[PlannedBucket], layouts: Mapping[str, Sequence[PlannedBucket]],
    present_codec: str, plans: bool, tries_plain: bool = False,
) -> Outlook:  # fmt: skip
    """Predict the steps of all candidates. Raises UsageError if the profile has no times for a codec.

    profile:       ready times, where gradients lie, and times of the codecs.
    step_ms:       the measured time of a whole step; present: the buckets it was measured with.
    layouts:       the buckets that the job would have with each codec.
    present_codec: the job's present codec; "" for a plan.
    plans:         whether plans with the planner's own buckets are candidates, too.
    tries_plain:   whether the job is tried uncompressed, whatever is predicted.
    """
    profile = with_costs(profile)
    forward_us = profile.forward_us or 0.0
    gbps = fitted_gbps(profile, machines, max(0.0, 1e3 * step_ms - forward_us), present)
    predicted = {
        codec: (forward_us + _step_us(profile, machines, gbps, buckets)) / 1e3
        for codec, buckets in layouts.items()
        if codec != present_codec
    }
    chosen: Plan | None = None
    if plans and predicted:
        known = {**predicted, present_codec: step_ms} if present_codec else predicted
        quickest = min(known.items(), key=lambda one: one[1])[0]
        chosen, step_us = _planned(profile, machines, gbps, quickest if quickest in layouts else UNCOMPRESSED)
        planned_ms = (forward_us + step_us) / 1e3
        if planned_ms <= (1 - LEAST_GAIN) * min(predicted.values()):
            predicted[PLAN] = planned_ms
    loses = loss_of(present)
    limits = {name: step_ms if loss_of_name(name, chosen) < loses else (1 - LEAST_GAIN) * step_ms for name in predicted}
    paying = sorted((ms, name) for name, ms in predicted.items() if ms <= limits[name])
    tried = tuple(name for ms, name in paying[:MOST_TRIED] if ms <= (1 + NEAR) * paying[0][0])
    if tries_plain and UNCOMPRESSED in predicted and UNCOMPRESSED not in tried:
        tried = (*tried[: MOST_TRIED - 1], UNCOMPRESSED)
    return Outlook(gbps, predicted, tried, chosen if PLAN in tried else None)


def with_costs(profile: Profile) -> Profile:
    """With the default costs of carriers, wherever gradients lie: a running job has measured none."""
    return replace(profile, carriers={**DEFAULT_CARRIERS, **profile.carriers})


def fitted_gbps(profile: Profile, machines: Machines, step_us: float, present: Sequence[PlannedBucket]) -> float:
    """The rate of all links at which these buckets take ``step_us`` from the first gradient on; MOST_GBPS if links do not matter."""
    low, high = math.log(LEAST_GBPS), math.log(MOST_GBPS)
    if _step_us(profile, machines, MOST_GBPS, present) >= step_us:
        return MOST_GBPS
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _step_us(profile, machines, math.exp(middle), present) > step_us:
            low = middle
        else:
            high = middle
    return math.exp(high)


def _step_us(profile: Profile, machines: Machines, gbps: float, buckets: Sequence[PlannedBucket]) -> float:
    return simulate(_problem(profile, machines, gbps, UNCOMPRESSED), buckets).step_us


def _problem(profile: Profile, machines: Machines, gbps: float, codec: str) -> Problem:
    cluster = machines.cluster(gbps)
    return Problem(profile, cluster, codec_costs(codec, profile, cluster.gpus), machines.constraints)


def _planned(profile: Profile, machines: Machines, gbps: float, codec: str) -> tuple[Plan | None, float]:
    """The planner's own plan with this codec, and its step; None if no option of the planner can be run by the job."""
    problem = _problem(profile, machines, gbps, codec)
    try:
        found = search(problem, QUICK)
    except UsageError:
        return None, math.inf
    if not machines.even:  # only a plan for a cluster of equal nodes can be completed
        return Plan(profile.model, "auto", placed(problem, found.buckets)), found.step_us
    return whole_plan(problem, found.buckets, simulate(problem, found.buckets), {}), found.step_us


def loss_of_name(name: str, plan: Plan | None) -> float:
    """A number that grows with a candidate's loss. plan: the plan of the candidate PLAN."""
    return loss_of_codec(name) if name != PLAN or plan is None else loss_of(plan.buckets)
