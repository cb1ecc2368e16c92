"""What could be done about gradients on a slow link, and how long an iteration then takes.

Owns the candidates: no compression, bf16, each codec every step, and local steps with an exchange every so often; and the corners of what
nobody knows well. Which of them is advised is ``advise``'s.
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
from psgc.plan.model.problem import PUBLISHED_BYTES, Problem, codec_costs, simulate
from psgc.plan.model.quality import is_sound, keeps_residual
from psgc.plan.model.vary import Change, varied, with_halved_bytes

BF16: Final = "bf16"
DEFAULT_CODECS: Final = ("int8", "int4", "onebit", "topk")
BY_SHAPE: Final = ("powersgd",)  # payloads depend on the tensors' shapes, which a profile does not have
# DiLoCo (Douillard et al. 2023) exchanges every 500 steps, INTELLECT-1 (Jaghouar et al. 2024) every 100, in int8.
LOCAL_STEPS: Final = (10, 30, 100, 300, 500)
EXCHANGE_SHARE: Final = 0.05  # the fewest local steps are taken with which exchanges cost no more than this of computing
OUTER_CODEC: Final = "int8"
# By how much a codec's times may be off: measured ones as another run's, estimated ones as kernels that reach 50 to 100 % of what is assumed.
MEASURED, ESTIMATED = 1.1, 1.5


class Corner(NamedTuple):
    """What may be otherwise. link: of the bandwidth; backward: how much longer it takes while communication runs beside it, 4 to 10 % as
    published (Agarwal et al. 2022); codec: -1, 0 or 1, for as fast and as slow as a codec may be."""

    link: float = 1.0
    backward: float = 1.0
    codec: int = 0


NOMINAL: Final = Corner()
CORNERS: Final = tuple(Corner(*values) for values in product((0.9, 1.1), (1.0, 1.1), (-1, 1)))


@dataclass(frozen=True, slots=True)
class Candidate:
    """name: ``none``, ``bf16``, a codec, or ``local-H``. bytes_per_element: in payloads, of an iteration; iteration_us: forward, backward
    and synchronization, in each corner. sound: whether it keeps quality, None where that is not judged; times: where the codec's come from;
    compressed_share: of the elements, in buckets that a plan would encode; residual_bytes: of a worker's memory, for what the codec has not sent
    yet."""

    name: str
    kind: str
    bytes_per_element: float
    sound: bool | None
    times: str
    iteration_us: Callable[[Corner], float]
    compressed_share: float
    residual_bytes: float = 0.0


def candidates(profile: Profile, cluster: Cluster, codecs: Sequence[str], estimated: frozenset[str], *, adam: bool) -> list[Candidate]:
    """Those there are, the ones that give up least first: by what they send, local steps last. codecs: those the profile has times for."""
    costs = [codec_costs(name, profile, cluster.gpus) for name in codecs]
    costs.sort(key=lambda codec: -codec.bytes_per_element)
    nothing = codec_costs(UNCOMPRESSED, profile)
    plain = Problem(profile, cluster, nothing, Constraints(servers=True))
    half = replace(plain, cluster=with_halved_bytes(cluster))
    found = [
        _every_step("none", "none", plain, 4.0),
        _every_step(BF16, BF16, half, 2.0),
    ]
    for codec in costs:
        times = "estimated" if codec.name in estimated else "measured"
        problem = Problem(profile, cluster, codec, Constraints(servers=True))
        sound = is_sound(codec.name, adam=adam)
        found.append(_every_step(codec.name, "compress", problem, codec.bytes_per_element, times=times, sound=sound))
    outer = next((codec for codec in costs if codec.name == OUTER_CODEC), None)
    exchange = half if outer is None else Problem(profile, cluster, outer, Constraints(servers=True))
    found.append(_local_steps(exchange, OUTER_CODEC if outer else BF16, "" if outer is None else found[2].times))
    return found


def considered(profile: Profile) -> tuple[str, ...]:
    """The codecs looked at unless others are asked for: the usual ones, and those that the profile has been measured with."""
    own = (name for name in profile.codecs if name not in (UNCOMPRESSED, "bf16", "fp16", *PUBLISHED_BYTES, *BY_SHAPE))
    return tuple(dict.fromkeys((*DEFAULT_CODECS, *own)))


def _change(corner: Corner, times: str) -> Change:
    spread = ESTIMATED if times == "estimated" else MEASURED
    return Change(link=corner.link, backward=corner.backward, codec=spread**corner.codec)


def _every_step(
    name: str, kind: str, problem: Problem, size: float, *, times: str = "", sound: bool = True
) -> Candidate:  # fmt: skip
    plan = search(problem)
    forward = problem.profile.forward_us or 0.0

    @functools.cache
    def iteration_us(corner: Corner) -> float:
        return forward + simulate(varied(problem, _change(corner, times)), plan.buckets).step_us

    share = _compressed_share(plan)
    kept = 4.0 * share * problem.profile.numel if kind == "compress" and keeps_residual(name) else 0.0
    return Candidate(name, kind, size, sound, times, iteration_us, share, kept)


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
    return Candidate(f"local-{steps}", "infrequent", size, None, times, iteration_us, _compressed_share(plan))


def _compressed_share(plan: Found) -> float:
    return sum(bucket.numel for bucket in plan.buckets if encodes(bucket.option)) / sum(bucket.numel for bucket in plan.buckets)
