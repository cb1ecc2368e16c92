"""The ways to send gradients over a slow link, and how long an iteration takes with each.

Owns the candidates that exchange gradients in every step: no compression, bf16, and each codec. Each has the best plan that runs today, and the best
plan that only a later version could run. Owns the corners, too: variations of the inputs that are not well known. ``rarely`` has the candidates that are
other optimizers; ``advise`` chooses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final, NamedTuple

from psgc.plan.inputs.cluster import Cluster
from psgc.plan.inputs.estimates import Timed
from psgc.plan.inputs.profile import PUBLISHED_BYTES, Profile
from psgc.plan.methods.once import search_once
from psgc.plan.methods.result import Found
from psgc.plan.model.options import Constraints, encodes
from psgc.plan.model.plan import UNCOMPRESSED
from psgc.plan.model.problem import Problem, codec_costs, is_of_a_node, simulate
from psgc.plan.model.quality import CASTS, Standard, encodings, residual_bytes, server_residual_bytes
from psgc.plan.model.vary import Change, in_halves, varied
from psgc.plan.report.running import as_jobs_run, is_whole, uncut, why_not_encoded, with_servers

BF16: Final = "bf16"
ALL_REDUCE, PSGC = "all-reduce", "psgc"  # what runs a plan: DistributedDataParallel and similar libraries, or a job of psgc
LEAST_FASTER: Final = 0.005  # share of the iteration that a plan must save to be mentioned although it cannot run yet
DEFAULT_CODECS: Final = ("int8", "int4", "onebit", "topk")
BY_SHAPE: Final = "powersgd:rank=4"  # its payload depends on the tensors' shapes, which not every profile has
# The factor by which a codec's times may be off. Measured times vary between runs; estimated kernels reach 50 to 100 % of the assumed bandwidth.
MEASURED, ESTIMATED = 1.1, 1.5


class Corner(NamedTuple):
    """A variation of the inputs. link: factor of the bandwidth; backward: factor of backward's time due to concurrent communication, 1.04 to 1.1 as
    published (Agarwal et al. 2022); codec: 1, 0 or -1, for a codec at the slow limit, as given, or at the fast limit of its times; host: factor of the
    bandwidth between GPUs and their hosts."""

    link: float = 1.0
    backward: float = 1.0
    codec: int = 0
    host: float = 1.0


NOMINAL: Final = Corner()
CORNERS: Final = (*(Corner(*values) for values in product((0.9, 1.1), (1.0, 1.1), (-1, 1))), Corner(host=0.9), Corner(host=1.1))


Iteration = Callable[[Corner], float]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to send gradients.

    name:              ``none``, ``bf16``, a codec, or one of ``rarely``'s.
    bytes_per_element: payload bytes per element and iteration; the mean of both ways where they differ.
    sound:             whether quality is kept; None if that is not judged.
    times:             where the codec's times come from.
    iteration_us:      forward, backward and synchronization in each corner, with the best plan that runs today, or with the best of any if ``runs``
                       is "".
    compressed_share:  share of the elements in encoded buckets.
    residual_bytes:    a worker's memory for residuals; server_bytes: that of all servers.
    encodes:           encodings of the bucket that is encoded most often.
                       (These four are the larger ones of the plan and of the plan of ``later_us``.)
    runs:              what runs the plan: ALL_REDUCE, PSGC (of ``rarely``'s: its DiLoCo, DeMo or Decoupled), or "" for nothing.
    later_us:          like ``iteration_us``, with a faster plan that no job runs yet; None if there is none.
    lacking:           why none of the codec's plans runs."""

    name: str
    kind: str
    bytes_per_element: float
    sound: bool | None
    times: str
    iteration_us: Iteration
    compressed_share: float
    residual_bytes: float = 0.0
    server_bytes: float = 0.0
    encodes: int = 0
    runs: str = ALL_REDUCE
    later_us: Iteration | None = None
    lacking: str = ""

    @property
    def in_any_version(self) -> Candidate:
        """The candidate with the times of its fastest plan, whether that runs today or not."""
        return self if self.later_us is None else replace(self, iteration_us=self.later_us)


def ladder(timed: Timed, cluster: Cluster, codecs: Sequence[str], *, standard: Standard) -> list[Candidate]:
    """The candidates that exchange gradients in every step: fp32, bf16 and the codecs, those that send most bytes first."""
    plain = plain_problem(timed, cluster)
    sizes = (each.bytes_per_element for each in (timed.profile, timed.profile.narrowed(2)))
    found = [
        _uncompressed(name, each, timed, size) for name, each, size in zip(("none", BF16), (plain, in_halves(plain)), sizes, strict=True)
    ]
    encoded = [_encoded(name, timed, cluster, standard=standard) for name in codecs]
    return found + sorted(encoded, key=lambda one: -one.bytes_per_element)


def plain_problem(timed: Timed, cluster: Cluster) -> Problem:
    return Problem(timed.profile, cluster, codec_costs(UNCOMPRESSED, timed.profile), Constraints(), by_library=True)


def problem_of(profile: Profile, cluster: Cluster, codec: str) -> Problem:
    costs = codec_costs(codec, profile, cluster.gpus)
    if is_of_a_node(costs):  # the published times: no thread is faster than the node
        cluster = replace(cluster, cores=0, codec_threads=0)
    return Problem(profile, cluster, costs, Constraints(servers=True))


def considered(profile: Profile) -> tuple[str, ...]:
    """The codecs that are considered by default: the usual ones, and those that the profile has measured times for."""
    low_rank = BY_SHAPE.partition(":")[0]
    own = (name for name in profile.codecs if name not in (UNCOMPRESSED, *CASTS, *PUBLISHED_BYTES) and name.partition(":")[0] != low_rank)
    by_shape = (BY_SHAPE,) if all(tensor.shape is not None for tensor in profile.tensors) else ()
    return tuple(dict.fromkeys((*DEFAULT_CODECS, *own, *by_shape)))


def change(corner: Corner, times: str) -> Change:
    spread = ESTIMATED if times == "estimated" else MEASURED
    return Change(link=corner.link, backward=corner.backward, codec=spread**corner.codec, host=corner.host)


def _uncompressed(name: str, problem: Problem, timed: Timed, size: float) -> Candidate:
    """The candidate without a codec: an all-reduce among the GPUs, or servers if they are faster."""
    plans = [(ALL_REDUCE, problem, search_once(problem))]
    if problem.cluster.servers:
        served = as_jobs_run(problem_of(timed.profile, problem.cluster, UNCOMPRESSED))
        plans.append((PSGC, served, search_once(served)))
    runs, judged, plan = min(plans, key=lambda each: each[2].step_us)
    return Candidate(name, name, size, True, "", _iteration(judged, plan, ""), 0.0, runs=runs)


def _encoded(name: str, timed: Timed, cluster: Cluster, *, standard: Standard) -> Candidate:
    """The candidate of a codec, with the best plan that psgc's jobs run; ``later_us`` has the best plan of all if that is faster."""
    problem, times = problem_of(timed.profile, cluster, name), timed.times(name)
    if is_whole(problem.codec.name):
        return _uncut(problem, times, standard=standard)
    codec, lacking = problem.codec, why_not_encoded(problem.codec)
    plans, runs, later = [search_once(problem)], "", None
    iteration_us = _iteration(problem, plans[0], times)
    if not lacking:
        limited, later, runs = as_jobs_run(problem), iteration_us, PSGC
        carried = search_once(limited)
        iteration_us = _iteration(limited, carried, times)
        if later(NOMINAL) < (1 - LEAST_FASTER) * iteration_us(NOMINAL):
            plans.append(carried)
        else:
            plans, later = [carried], None
    return Candidate(
        codec.name, "compress", codec.bytes_per_element, standard.keeps(codec.name), times, iteration_us, max(map(compressed_share, plans)),
        max(residual_bytes(plan.buckets) for plan in plans), max(server_residual_bytes(plan.buckets) for plan in plans),
        max(encodings(bucket) for plan in plans for bucket in plan.buckets), runs, later, lacking,
    )  # fmt: skip


def _uncut(problem: Problem, times: str, *, standard: Standard) -> Candidate:
    """A codec that does not cut tensors, as psgc run --codec runs it."""
    plan, codec = uncut(problem), problem.codec
    served = replace(problem, cluster=with_servers(problem.cluster))
    return Candidate(
        codec.name, "compress", codec.bytes_per_element, standard.keeps(codec.name), times, _iteration(served, plan, times), 1.0,
        residual_bytes(plan.buckets), 0.0, 1, PSGC,
    )  # fmt: skip


def _iteration(problem: Problem, plan: Found, times: str) -> Iteration:
    forward = problem.profile.forward_us or 0.0

    @functools.cache
    def iteration_us(corner: Corner) -> float:
        return forward + simulate(varied(problem, change(corner, times)), plan.buckets).step_us

    return iteration_us


def compressed_share(plan: Found) -> float:
    return sum(bucket.numel for bucket in plan.buckets if encodes(bucket.option)) / sum(bucket.numel for bucket in plan.buckets)
