"""The ways of training that exchange rarely, or next to nothing, and how long an iteration takes with each: local steps, and DeMo.

They are other optimizers than the one that exchanges gradients in every step, so they are priced and never advised. Owns their arithmetic, and what was
measured of their losses. Each GPU exchanges for itself, as psgc.DiLoCo, DeMo and Decoupled do, without a plan.

    local-H       psgc.DiLoCo: all parameters' progress in every H-th step, while nothing is computed (Douillard et al. 2023, algorithm 1)
    stream-H      fragments in turn, each of which travels for DELAY steps before anybody waits (Douillard et al. 2025)
    sparse-H      local-H with codec sparseloco, relayed by servers (Sarfi et al. 2025)
    syncer-H      psgc.Decoupled: learners around a process whose link they share; none waits, and a push stays while its last one travels
    demo          psgc.DeMo: dct64, relayed by servers in every step, encoded and decoded on one core (Peng et al. 2024)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from psgc.codecs.outer import numel_in_squares
from psgc.plan.inputs.cluster import Cluster
from psgc.plan.inputs.estimates import Timed
from psgc.plan.inputs.profile import Profile
from psgc.plan.methods.result import Found
from psgc.plan.methods.search import search
from psgc.plan.model.problem import Problem, simulate
from psgc.plan.model.vary import in_halves, varied
from psgc.plan.report.running import uncut, with_servers
from psgc.plan.whatif.candidates import (
    BF16,
    ESTIMATED,
    NOMINAL,
    PSGC,
    Candidate,
    Corner,
    change,
    compressed_share,
    plain_problem,
    problem_of,
)

# DiLoCo (Douillard et al. 2023) exchanges every 500 steps, INTELLECT-1 (Jaghouar et al. 2024) every 100, in int8.
LOCAL_STEPS: Final = (10, 30, 100, 300, 500)
EXCHANGE_SHARE: Final = 0.05  # local steps are the fewest with which exchanges take at most this share of the computing time
OUTER_CODEC: Final = "int8"
FRAGMENTS: Final = 8  # of streaming, each of which travels for DELAY steps, as published
DELAY: Final = 5
# One-way delays that an exchange of relayed payloads takes beyond the two of its messages, since TCP sends little at first after each pause. Measured with
# DeMo over 50 ms, for 70 kB a rank (benchmarks/far_apart.jsonl).
SLOW_START: Final = 4
SYNCER_BYTES: Final = (0.5, 4.0)  # an element that a learner pushes (int4), and that comes back


@dataclass(frozen=True, slots=True)
class Relayed:
    """A codec whose payloads servers relay. bytes_per_element: of one rank's payload; encode_us, decode_us: of a million elements on one core of an AMD EPYC,
    the former with the residual, the latter of each rank's payload (of dct64 as ``psgc bench kernels --codec dct64 --numel 1048576`` has them)."""

    bytes_per_element: float
    encode_us: float
    decode_us: float

    def bytes_carried(self, ranks: int) -> float:
        """Bytes an element and exchange, as the mean of both ways: a rank's own payload is sent, and those of all ranks, its own too, come back."""
        return (1 + ranks) / 2 * self.bytes_per_element

    def exchange_us(self, numel: int, cluster: Cluster, corner: Corner) -> float:
        """The time of one exchange of so many elements. Servers are on the nodes: each sends on to all ranks what it has of every rank, so a node's link
        carries, each way, its GPUs' own payloads and, for each of its GPUs, those of all others. It does so while TCP begins slowly, or takes longer."""
        ranks, link = cluster.gpus, cluster.inter
        payload = self.bytes_per_element * numel
        spread = ESTIMATED**corner.codec
        sending = cluster.gpus_per_node * ranks * payload * link.us_per_byte / corner.link
        travels = 2 * link.latency_us + max(SLOW_START * link.latency_us, sending) if cluster.nodes > 1 else 0.0
        return travels + spread * (self.encode_us + ranks * self.decode_us) * numel / 1e6


SPARSELOCO: Final = Relayed(0.18 / 8, 4_400.0, 500.0)
DEMO: Final = Relayed(4 / 97.6, 10_000.0, 18_000.0)
# Validation losses, in nats a byte, of a GPT of 1.3 M parameters on 2 learners after 300 steps, with an exchange in every 50th; docs/far-apart.md.
MEASURED_LOSSES: Final[Mapping[str, float]] = {"DDP": 2.439, "local": 2.693, "sparseloco": 2.765, "demo": 2.327}


def rarely(timed: Timed, cluster: Cluster, codecs: Sequence[str]) -> list[Candidate]:
    """The candidates, ``local-H`` first. codecs: those that the profile has times for; without OUTER_CODEC among them, bf16 is exchanged in its place."""
    exchange, codec, times = _exchange(timed, cluster, codecs)
    found = [_in_fragments("local", exchange, codec, times, 1, 0), _in_fragments("stream", exchange, codec, times, FRAGMENTS, DELAY)]
    found.append(_relayed("sparse", SPARSELOCO, timed.profile, cluster))
    if cluster.gpus_per_node == 1 and cluster.nodes > 1:
        found += _around_a_syncer(timed.profile, cluster)
    return [*found, _demo(timed.profile, cluster)]


def _exchange(timed: Timed, cluster: Cluster, codecs: Sequence[str]) -> tuple[Problem, str, str]:
    """An exchange of all parameters, the name of what is sent, and where its times come from."""
    if OUTER_CODEC in timed.profile.codecs and OUTER_CODEC in codecs:
        return problem_of(timed.profile, cluster, OUTER_CODEC), OUTER_CODEC, timed.times(OUTER_CODEC)
    return in_halves(plain_problem(timed, cluster)), BF16, ""


def computing_us(profile: Profile) -> float:
    """Forward and backward."""
    return (profile.forward_us or 0.0) + profile.backward_us


def fewest(exposed_us: Callable[[int], float], computing: float) -> int:
    """The fewest of LOCAL_STEPS with which what is exposed in so many steps is at most EXCHANGE_SHARE of their computing; the most if none is enough."""
    return next((steps for steps in LOCAL_STEPS if exposed_us(steps) <= EXCHANGE_SHARE * computing * steps), LOCAL_STEPS[-1])


def exposed_in_fragments_us(exchange: float, fragment: float, fragments: int, delay: int, steps: int, computing: float) -> float:
    """What learners wait in so many steps, during which all is exchanged once: each fragment is waited for as far as it travels longer than ``delay`` steps,
    and where all together travel longer than the steps take, for the rest of that. exchange, fragment: the time of all at once, and of one alone."""
    waited = fragments * max(0.0, fragment - delay * computing)
    return max(waited, exchange - steps * computing) if delay else exchange


def _in_fragments(name: str, problem: Problem, codec: str, times: str, fragments: int, delay: int) -> Candidate:
    computing = computing_us(problem.profile)
    encoded = codec != BF16
    whole, plan = _at_once(problem, encoded)
    one, its_plan = _at_once(problem, encoded, fragments) if fragments > 1 else (whole, plan)
    steps = fewest(lambda steps: exposed_in_fragments_us(plan.step_us, its_plan.step_us, fragments, delay, steps, computing), computing)

    @functools.cache
    def iteration_us(corner: Corner) -> float:
        varying = change(corner, times)
        exchange, fragment = (simulate(varied(of, varying), found.buckets).step_us for of, found in ((whole, plan), (one, its_plan)))
        return computing + exposed_in_fragments_us(exchange, fragment, fragments, delay, steps, computing) / steps

    size = (problem.codec.bytes_per_element if encoded else 2.0) / steps
    return Candidate(f"{name}-{steps}", "infrequent", size, None, times, iteration_us, compressed_share(plan), runs=PSGC)


def _at_once(problem: Problem, encoded: bool, fragments: int = 1) -> tuple[Problem, Found]:
    """The exchange, beside no computing, of one of so many fragments, and its plan. A fragment is that share of every tensor, and so has the whole latency."""
    tensors = tuple(
        replace(t, ready_us=0.0, numel=-(-t.numel // fragments), shape=t.shape if fragments == 1 else None) for t in problem.profile.tensors
    )
    at_once = replace(problem, profile=replace(problem.profile, tensors=tensors))
    if not encoded:
        return at_once, search(at_once)
    return replace(at_once, cluster=with_servers(at_once.cluster)), uncut(at_once)


def _relayed(name: str, codec: Relayed, profile: Profile, cluster: Cluster) -> Candidate:
    computing, exchange = computing_us(profile), codec.exchange_us(profile.numel, cluster, NOMINAL)
    steps = fewest(lambda _: exchange, computing)

    def iteration_us(corner: Corner) -> float:
        return computing + codec.exchange_us(profile.numel, cluster, corner) / steps

    residual, size = 4.0 * profile.numel, codec.bytes_carried(cluster.gpus) / steps
    return Candidate(f"{name}-{steps}", "infrequent", size, None, "estimated", iteration_us, 1.0, residual, runs=PSGC)


def _demo(profile: Profile, cluster: Cluster) -> Candidate:
    numel = sum(
        numel_in_squares(tensor.shape or (tensor.numel,)) for tensor in profile.tensors
    )  # a tensor of unknown shape as a vector, the least

    def iteration_us(corner: Corner) -> float:
        return computing_us(profile) + DEMO.exchange_us(numel, cluster, corner)

    size = DEMO.bytes_carried(cluster.gpus) * numel / profile.numel
    return Candidate("demo", "infrequent", size, None, "estimated", iteration_us, 1.0, runs=PSGC)


def _around_a_syncer(profile: Profile, cluster: Cluster) -> list[Candidate]:
    """Computing alone, with the fewest of LOCAL_STEPS in which all learners' pushes, or what comes back, pass its link, however many: a push stays till then.
    None where the most are not enough."""
    computing = computing_us(profile)
    sent = max(SYNCER_BYTES) * profile.numel * cluster.nodes * cluster.inter.us_per_byte
    enough = [steps for steps in LOCAL_STEPS if sent <= steps * computing][:1]
    return [
        Candidate(f"syncer-{steps}", "infrequent", sum(SYNCER_BYTES) / 2 / steps, None, "", lambda corner: computing, 1.0, runs=PSGC)
        for steps in enough
    ]


def told_of_intervals(found: Sequence[Candidate], profile: Profile) -> list[str]:
    """Which candidates' exchanges take more than EXCHANGE_SHARE of computing, even with the most of LOCAL_STEPS: a line for people, or none."""
    computing, rarest = computing_us(profile), f"-{LOCAL_STEPS[-1]}"
    late = [one for one in found if one.kind == "infrequent" and one.name.endswith(rarest)]
    over = [one.name for one in late if one.iteration_us(NOMINAL) > (1 + EXCHANGE_SHARE) * computing]
    return (
        [f"{', '.join(over)}: exchanges take more than {EXCHANGE_SHARE:.0%} of computing even in every {LOCAL_STEPS[-1]}th step"]
        if over
        else []
    )


def told_of_losses() -> str:
    """What was measured of the losses, for people."""
    measured = MEASURED_LOSSES
    return (
        "what is exchanged rarely, and demo, are other optimizers. Measured once, a GPT of 1.3 M parameters on 2 learners ended its 300 steps, with an "
        f"exchange in every 50th, at a validation loss of {measured['local']:.2f} (local), {measured['sparseloco']:.2f} (sparseloco) and "
        f"{measured['demo']:.2f} (demo, in every step), DDP at {measured['DDP']:.2f}; docs/far-apart.md has more. They are never advised, since their quality "
        "depends on model and interval. What sparseloco and demo take to encode and decode, on "
        "one core, is estimated; those that would take longer than uncompressed gradients are left out"
    )


__all__ = ["LOCAL_STEPS", "MEASURED_LOSSES", "exposed_in_fragments_us", "rarely", "told_of_intervals", "told_of_losses"]
