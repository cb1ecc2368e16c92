"""What a running job may expect of other codecs and plans: predicted from what was measured of it. Pure.

Links are not probed: the rate is taken at which the planner's model gives the step that was measured, so that what the model leaves out counts as the
links' slowness. Where nodes have several ranks, sums within nodes run in hosts' memory, at the rate that copies and sums there have, and at no less than the
links'. Gradients on GPUs are copied to the host, or encoded there; what ranks exchange among themselves passes the hosts' memory.
Codecs' costs are those measured on rank 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from psgc.errors import UsageError
from psgc.plan.inputs.cluster import Cluster, Link
from psgc.plan.inputs.profile import Profile
from psgc.plan.methods.search import search
from psgc.plan.model.options import Constraints
from psgc.plan.model.plan import UNCOMPRESSED, Plan, PlannedBucket
from psgc.plan.model.problem import Problem, codec_costs, simulate
from psgc.plan.model.quality import is_sound
from psgc.plan.planfile.completing import placed, whole_plan

# By how much they lose, least first. Which of them are sound under the job's optimizer is ``quality``'s to say.
CODECS: Final = (UNCOMPRESSED, "bf16", "int8", "int4", "onebit", "topk")
PLAN: Final = "plan"  # among the candidates: buckets and options that the planner chose
PRESENT_PLAN: Final = "the present plan"  # what the job has, where that is one
LEAST_GAIN: Final = 0.05  # of a step; below it nothing is tried
NEAR: Final = 1.0  # predictions up to twice as long as the best are tried, too: what the model leaves out is most of a short step
MOST_TRIED: Final = 3
LEAST_GBPS, MOST_GBPS, HALVINGS = 1e-4, 400.0, 24  # where the links' rate is looked for
LATENCY_US: Final = 50.0
MEMORY_GBPS: Final = (
    20.0  # between ranks of one node, where nobody has measured it: what reduce_scatter of 25 MB reaches on a machine of two cores
)
MOST_ENCODES: Final = 2  # of a planned bucket: as often as a payload is encoded over servers, by a worker and by a server
OVERHEADS: Final = {"part_us": 200.0, "next_part_us": 60.0}  # of a part beyond its bytes, about as psgc profile --links measures them


@dataclass(frozen=True, slots=True)
class Machines:
    """The job's processes, as far as its workers know them. workers_per_node: of the largest node; cores: of a node. groups: whether workers may
    aggregate among themselves; even: whether all nodes have as many. within_gbps: at which ranks of one node sum in its memory; gpus: whether gradients lie on
    GPUs, and host: the link between a GPU and its host's memory, None where it is not known."""

    nodes: int
    workers_per_node: int
    servers: int
    cores: int
    codec_threads: int = 0
    groups: bool = True
    even: bool = True
    within_gbps: float = MEMORY_GBPS
    gpus: bool = False
    host: Link | None = None

    def cluster(self, gbps: float) -> Cluster:
        link = Link(gbps, LATENCY_US)
        within = Link(max(gbps, self.within_gbps), LATENCY_US) if self.nodes > 1 else link
        return Cluster(
            "this job", self.nodes, self.workers_per_node, within, link, self.servers, cores=self.cores, codec_threads=self.codec_threads,
            server_threads=self.cores, host=self.host, collectives="host" if self.gpus and self.groups else "",
        )  # fmt: skip

    @property
    def constraints(self) -> Constraints:
        """What jobs run, and this one may: with servers, or without."""
        return Constraints(("gpu", "cpu") if self.gpus else ("cpu",), MOST_ENCODES, servers=self.servers > 0, runtime=True)


class Outlook(NamedTuple):
    """gbps: of the links, as fitted. predicted_ms: of a whole step, by candidate. tried: the candidates worth a trial, most promising first. plan: what
    PLAN is, where it is among them."""

    gbps: float
    predicted_ms: Mapping[str, float]
    tried: tuple[str, ...]
    plan: Plan | None = None

    @property
    def best(self) -> str:
        return min(self.predicted_ms, key=lambda name: self.predicted_ms[name])


def sound_codecs(*, adam: bool) -> list[str]:
    """The codecs that may be tried unasked under such an optimizer."""
    return [codec for codec in CODECS if codec == UNCOMPRESSED or is_sound(codec, adam=adam)]


def outlook(
    profile: Profile, machines: Machines, step_ms: float, present: Sequence[PlannedBucket], layouts: Mapping[str, Sequence[PlannedBucket]],
    present_codec: str, plans: bool,
) -> Outlook:  # fmt: skip
    """profile: ready times, where gradients lie, and times of the codecs. step_ms: as measured, of a whole step; present: the buckets it was
    measured with; layouts: those that the job would have by each codec; present_codec: what the job has now, "" for a plan.
    plans: whether the planner's own buckets are considered, too. Raises UsageError where the profile has no times for a codec."""
    device = profile.device if machines.groups or machines.gpus else ""  # without groups no collectives in hosts' memory either
    profile = replace(profile, overheads=OVERHEADS, device=device)
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
        chosen, step_us = _planned(profile, machines, gbps, min(known.items(), key=lambda one: one[1])[0])
        planned_ms = (forward_us + step_us) / 1e3
        if planned_ms <= (1 - LEAST_GAIN) * min(predicted.values()):
            predicted[PLAN] = planned_ms
    paying = sorted((ms, name) for name, ms in predicted.items() if ms <= (1 - LEAST_GAIN) * step_ms)
    tried = tuple(name for ms, name in paying[:MOST_TRIED] if ms <= (1 + NEAR) * paying[0][0])
    return Outlook(gbps, predicted, tried, chosen if PLAN in tried else None)


def fitted_gbps(profile: Profile, machines: Machines, step_us: float, present: Sequence[PlannedBucket]) -> float:
    """The rate of all links at which these buckets take ``step_us`` from the first gradient on; the largest that is looked for where links do not matter."""
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
    """The planner's own plan by this codec, and its step; None where it knows no option that such a job runs."""
    problem = _problem(profile, machines, gbps, codec if codec in CODECS else UNCOMPRESSED)
    try:
        found = search(problem)
    except UsageError:
        return None, math.inf
    if not machines.even:  # a plan for a whole cluster is of nodes that are alike
        return Plan(profile.model, "auto", placed(problem, found.buckets)), found.step_us
    return whole_plan(problem, found.buckets, simulate(problem, found.buckets), {}), found.step_us


def losses(names: Sequence[str]) -> list[int]:
    """How much each candidate loses, as a number that is larger for more. A plan, of whose codecs nothing is known here, loses as much as any."""
    return [CODECS.index(name) if name in CODECS else len(CODECS) for name in names]
