"""What could be done about gradients on a slow link, and how long an iteration then takes.

Owns the candidates: no compression, bf16, each codec every step, and local steps with an exchange every so often; for each the best plan that
can run today, and the best that only a later version could; and the corners of what nobody knows well. Which of them is advised is ``advise``'s.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final, NamedTuple

from psgc.plan.inputs.cluster import Cluster
from psgc.plan.inputs.profile import Profile, TensorProfile
from psgc.plan.methods.result import Found
from psgc.plan.methods.search import search
from psgc.plan.model.options import Constraints, encodes
from psgc.plan.model.plan import UNCOMPRESSED
from psgc.plan.model.problem import PUBLISHED_BYTES, Problem, codec_costs, is_of_a_node, simulate
from psgc.plan.model.quality import CASTS, encodings, is_sound, residual_bytes, server_residual_bytes
from psgc.plan.model.vary import Change, varied, with_halved_bytes
from psgc.plan.report.running import as_jobs_run, is_whole, uncut, why_not_encoded, with_servers

BF16: Final = "bf16"
ALL_REDUCE, PSGC = "all-reduce", "psgc"  # what runs a plan: DistributedDataParallel and its like, or a job of psgc
LEAST_FASTER: Final = 0.005  # a plan that cannot run yet is worth telling of from here on
DEFAULT_CODECS: Final = ("int8", "int4", "onebit", "topk")
BY_SHAPE: Final = "powersgd:rank=4"  # its payload depends on the tensors' shapes, which not every profile has
# DiLoCo (Douillard et al. 2023) exchanges every 500 steps, INTELLECT-1 (Jaghouar et al. 2024) every 100, in int8.
LOCAL_STEPS: Final = (10, 30, 100, 300, 500)
EXCHANGE_SHARE: Final = 0.05  # the fewest local steps are taken with which exchanges cost no more than this of computing
OUTER_CODEC: Final = "int8"
# By how much a codec's times may be off: measured ones as another run's, estimated ones as kernels that reach 50 to 100 % of what is assumed.
MEASURED, ESTIMATED = 1.1, 1.5


class Corner(NamedTuple):
    """What may be otherwise. link: of the bandwidth; backward: how much longer it takes while communication runs beside it, 4 to 10 % as
    published (Agarwal et al. 2022); codec: -1, 0 or 1, for as fast and as slow as a codec may be; host: of
    the bandwidth between GPUs and their hosts."""

    link: float = 1.0
    backward: float = 1.0
    codec: int = 0
    host: float = 1.0


NOMINAL: Final = Corner()
CORNERS: Final = (*(Corner(*values) for values in product((0.9, 1.1), (1.0, 1.1), (-1, 1))), Corner(host=0.9), Corner(host=1.1))


Iteration = Callable[[Corner], float]


@dataclass(frozen=True, slots=True)
class Candidate:
    """name: ``none``, ``bf16``, a codec, or ``local-H``. bytes_per_element: in payloads, of an iteration; iteration_us: forward, backward
    and synchronization, in each corner, by the best plan that runs today, or, where ``runs`` is "", by the best of any. sound: whether it keeps
    quality, None where that is not judged; times: where the codec's come from. compressed_share: of the elements, in buckets that are encoded;
    residual_bytes: of a worker's memory, for what the codec has not sent yet; server_bytes: the same over all servers; encodes: of the bucket
    that is encoded most often: these four of the plan, or of the one that ``later_us`` is of, whichever has more. runs: by what, ALL_REDUCE or
    PSGC. later_us: by a plan that is faster but that no job runs yet, None if there is none; lacking: why none of the codec's plans runs."""

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
        """With the times of its fastest plan, whether that runs or not."""
        return self if self.later_us is None else replace(self, iteration_us=self.later_us)


@dataclass(frozen=True, slots=True)
class Timed:
    """A profile, and which of its codecs' times are estimates."""

    profile: Profile
    estimated: frozenset[str]

    def times(self, codec: str) -> str:
        return "estimated" if {codec, codec.partition("/")[0].partition(":")[0]} & self.estimated else "measured"


def candidates(free: Timed, hosts: Timed, cluster: Cluster, codecs: Sequence[str], *, adam: bool) -> list[Candidate]:
    """All candidates, those that give up least first: by what they send, local steps last. free: with codec times wherever they are known;
    hosts: with those of CPUs, where jobs encode. codecs: those that one of the two has times for."""
    profile = free.profile
    plain = Problem(profile, cluster, codec_costs(UNCOMPRESSED, profile), Constraints())
    found = [_uncompressed("none", plain, hosts, 4.0), _uncompressed(BF16, _halved(plain), hosts, 2.0)]
    encoded = [_encoded(name, free, hosts, cluster, adam=adam) for name in codecs]
    found += sorted(encoded, key=lambda one: -one.bytes_per_element)
    outer = OUTER_CODEC in profile.codecs and OUTER_CODEC in codecs
    exchange = _problem(free.profile, cluster, OUTER_CODEC) if outer else _halved(plain)
    found.append(_local_steps(exchange, OUTER_CODEC if outer else BF16, free.times(OUTER_CODEC) if outer else ""))
    return found


def _halved(problem: Problem) -> Problem:
    return replace(problem, cluster=with_halved_bytes(problem.cluster))


def _problem(profile: Profile, cluster: Cluster, codec: str) -> Problem:
    costs = codec_costs(codec, profile, cluster.gpus)
    if is_of_a_node(costs):  # the published times: no thread is faster than the node
        cluster = replace(cluster, cores=0, codec_threads=0)
    return Problem(profile, cluster, costs, Constraints(servers=True))


def considered(profile: Profile) -> tuple[str, ...]:
    """The codecs looked at unless others are asked for: the usual ones, and those that the profile has been measured with."""
    low_rank = BY_SHAPE.partition(":")[0]
    own = (name for name in profile.codecs if name not in (UNCOMPRESSED, *CASTS, *PUBLISHED_BYTES) and name.partition(":")[0] != low_rank)
    by_shape = (BY_SHAPE,) if all(tensor.shape is not None for tensor in profile.tensors) else ()
    return tuple(dict.fromkeys((*DEFAULT_CODECS, *own, *by_shape)))


def _change(corner: Corner, times: str) -> Change:
    spread = ESTIMATED if times == "estimated" else MEASURED
    return Change(link=corner.link, backward=corner.backward, codec=spread**corner.codec, host=corner.host)


def _uncompressed(name: str, problem: Problem, hosts: Timed, size: float) -> Candidate:
    """By an all-reduce among the GPUs, or over the servers if that is faster."""
    plans = [(ALL_REDUCE, problem, search(problem))]
    if problem.cluster.servers:
        served = as_jobs_run(_problem(hosts.profile, problem.cluster, UNCOMPRESSED))
        plans.append((PSGC, served, search(served)))
    runs, judged, plan = min(plans, key=lambda each: each[2].step_us)
    return Candidate(name, name, size, True, "", _iteration(judged, plan, ""), 0.0, runs=runs)


def _encoded(name: str, free: Timed, hosts: Timed, cluster: Cluster, *, adam: bool) -> Candidate:
    """By the best plan of those that psgc's jobs run; the best of all is told beside it if it is faster."""
    on_hosts = _problem(hosts.profile, cluster, name)
    if is_whole(on_hosts.codec.name):
        return _uncut(on_hosts, hosts.times(name), adam=adam)
    codec, lacking = on_hosts.codec, why_not_encoded(on_hosts.codec)
    anywhere = free if _times_of(name, free.profile) else hosts
    problem = _problem(anywhere.profile, cluster, name)
    times, plans, runs, later = anywhere.times(name), [search(problem)], "", None
    iteration_us = _iteration(problem, plans[0], times)
    if not lacking:
        limited, later, times, runs = as_jobs_run(on_hosts), iteration_us, hosts.times(name), PSGC
        carried = search(limited)
        iteration_us = _iteration(limited, carried, times)
        if later(NOMINAL) < (1 - LEAST_FASTER) * iteration_us(NOMINAL):
            plans.append(carried)
        else:
            plans, later = [carried], None
    return Candidate(
        codec.name, "compress", codec.bytes_per_element, is_sound(codec.name, adam=adam), times, iteration_us, max(map(_compressed_share, plans)),
        max(residual_bytes(plan.buckets) for plan in plans), max(server_residual_bytes(plan.buckets) for plan in plans),
        max(encodings(bucket) for plan in plans for bucket in plan.buckets), runs, later, lacking,
    )  # fmt: skip


def _uncut(problem: Problem, times: str, *, adam: bool) -> Candidate:
    """A codec that does not cut tensors, as psgc run --codec runs it."""
    plan, codec = uncut(problem), problem.codec
    served = replace(problem, cluster=with_servers(problem.cluster))
    return Candidate(
        codec.name, "compress", codec.bytes_per_element, is_sound(codec.name, adam=adam), times, _iteration(served, plan, times), 1.0,
        residual_bytes(plan.buckets), 0.0, 1, PSGC,
    )  # fmt: skip


def _times_of(name: str, profile: Profile) -> bool:
    return bool({name, name.partition("/")[0].partition(":")[0]} & profile.codecs.keys())


def _iteration(problem: Problem, plan: Found, times: str) -> Iteration:
    forward = problem.profile.forward_us or 0.0

    @functools.cache
    def iteration_us(corner: Corner) -> float:
        return forward + simulate(varied(problem, _change(corner, times)), plan.buckets).step_us

    return iteration_us


def _local_steps(problem: Problem, name: str, times: str) -> Candidate:
    """Exchanges of what H steps changed, beside no computing (Douillard et al. 2023, algorithm 1)."""
    profile = problem.profile
    computing = (profile.forward_us or 0.0) + profile.backward_us
    at_once = replace(problem, profile=replace(profile, tensors=tuple(TensorProfile(t.name, t.numel, 0.0) for t in profile.tensors)))
    plan = search(at_once)
    steps = next((h for h in LOCAL_STEPS if plan.step_us / h <= EXCHANGE_SHARE * computing), LOCAL_STEPS[-1])

    @functools.cache
    def iteration_us(corner: Corner) -> float:
        return computing + simulate(varied(at_once, _change(corner, times)), plan.buckets).step_us / steps

    size = (2.0 if name == BF16 else problem.codec.bytes_per_element) / steps
    return Candidate(f"local-{steps}", "infrequent", size, None, times, iteration_us, _compressed_share(plan), runs="")


def _compressed_share(plan: Found) -> float:
    return sum(bucket.numel for bucket in plan.buckets if encodes(bucket.option)) / sum(bucket.numel for bucket in plan.buckets)
