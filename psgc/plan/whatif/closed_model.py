"""A question to the closed model: one method on one link, described by a few numbers that a person has at hand.

Owns which inputs a question needs, and which contradict each other. ``closed_form`` has the equations, ``verdict`` the sentences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from psgc.errors import UsageError
from psgc.plan.inputs.architectures import architecture
from psgc.plan.model.gains import share_saved
from psgc.plan.model.vary import Change
from psgc.plan.whatif.closed_form import (
    Scenario,
    all_reduce_ms,
    buckets,
    crossover_gbps,
    encode_budget_ms,
    hide_ratio,
    powersgd_bytes,
    time_ms,
)

GAMMAS: Final = (1.04, 1.07, 1.1)
BANDWIDTH_FACTORS: Final = (0.9, 1.0, 1.1)
NEARLY_INFINITE_GBPS: Final = 1e12


@dataclass(frozen=True, slots=True)
class Question:
    """A question. model: a well-known model's name, for its shapes; grad_mib: MiB of the fp32 gradient, if shapes do not matter; measured_ms: the
    measured uncompressed time, if known; peer_bytes: bytes per uncompressed element, 2 for bf16."""

    model: str | None
    grad_mib: float | None
    method: str
    gpus: int
    bandwidth_gbps: float
    backward_ms: float
    encode_ms: float
    rank: int
    k: float
    ratio: float
    alpha_us: float
    measured_ms: float | None = None
    peer_bytes: float = 4.0


def scenarios(question: Question) -> tuple[Scenario, Scenario]:
    """The scenarios without compression and with the method. Raises UsageError naming what is missing or wrong."""
    if question.model is None and question.grad_mib is None:
        raise UsageError("whatif: give --model or --grad-mib: how large the gradient is")
    if question.method == "sync":
        raise UsageError("whatif: --method sync is what others are compared with; ask for powersgd, mstopk, signsgd or sync_compressed")
    shapes = [weight.shape for weight in architecture(question.model).weights] if question.model is not None else []
    nbytes = question.grad_mib * 2**20 if question.grad_mib is not None else 4.0 * sum(math.prod(shape) for shape in shapes)
    if question.method == "powersgd" and not shapes:
        raise UsageError("whatif: powersgd needs --model: its payload depends on the shapes of matrices")
    if question.rank < 1:
        raise UsageError(f"whatif: --rank {question.rank}: expected at least 1")
    p, q, plain = powersgd_bytes(shapes, question.rank) if shapes else (0, 0, 0)
    sync = Scenario("sync", question.backward_ms, question.gpus, question.bandwidth_gbps, grad_bytes=nbytes, alpha_us=question.alpha_us)
    method = replace(
        sync, method=question.method, encode_ms=question.encode_ms, k_fraction=question.k, ratio=question.ratio,
        p_bytes=float(p + plain), q_bytes=float(q),
    )  # fmt: skip
    if question.peer_bytes != 4:  # DistributedDataParallel's hook casts each bucket, so there are as many buckets, of fewer bytes
        sync = replace(sync, method="sync_compressed", ratio=4 / question.peer_bytes)
    return sync, method


@dataclass(frozen=True)
class ClosedTimes:
    """A question's times, as ``verdict`` asks for them."""

    question: Question

    @cached_property
    def scenarios(self) -> tuple[Scenario, Scenario]:
        return scenarios(self.question)

    @property
    def name(self) -> str:
        return self.question.method

    @property
    def place(self) -> str:
        return f"at {self.question.bandwidth_gbps:g} Gbit/s on {self.question.gpus} GPUs"

    @property
    def gbps(self) -> float:
        return self.question.bandwidth_gbps

    @property
    def codec_ms(self) -> float:
        return self.question.encode_ms

    def sync_ms(self, change: Change) -> float:
        return time_ms(_changed(self.scenarios[0], replace(change, codec=1.0, payload=1.0)))

    def method_ms(self, change: Change) -> float:
        return time_ms(_changed(self.scenarios[1], change))

    def gains_elsewhere(self) -> Sequence[float]:
        sync, method = self.scenarios
        gains = []
        for gamma in GAMMAS:
            for factor in BANDWIDTH_FACTORS:
                gbps = self.gbps * factor
                gains.append(share_saved(time_ms(replace(method, gamma=gamma).at(gbps)), time_ms(replace(sync, gamma=gamma).at(gbps))))
        return gains

    def crossover_gbps(self) -> float:
        return crossover_gbps(*self.scenarios)

    def required_ratio(self) -> float:
        return hide_ratio(self.scenarios[0])

    def encode_budget_ms(self) -> float:
        return encode_budget_ms(*self.scenarios)

    @property
    def over_bf16(self) -> ClosedTimes | None:
        return ClosedTimes(replace(self.question, peer_bytes=2.0)) if self.question.peer_bytes == 4 else None

    def warnings(self) -> list[str]:
        sync = self.scenarios[0]
        if self.question.measured_ms is not None:
            return ruled_out(sync, self.question.measured_ms)
        return unlikely_latency(sync)


def _changed(scenario: Scenario, change: Change) -> Scenario:
    """The scenario with this change. signSGD's payload follows from the gradient, so ``change.payload`` scales the gradient there."""
    faster = scenario.with_faster_compute(change.compute)
    faster = replace(faster, encode_ms=faster.encode_ms * change.codec, gamma=faster.gamma * change.backward)
    if scenario.bandwidth_gbps is not None:
        faster = faster.at(scenario.bandwidth_gbps * change.link)
    if scenario.method == "signsgd":
        return replace(faster, grad_bytes=faster.grad_bytes * change.payload)
    return faster.with_faster_encode(1.0, change.payload)


def unlikely_latency(sync: Scenario) -> list[str]:
    """Warnings, with the arithmetic, about a latency that takes longer than everything else together."""
    sizes = buckets(sync)
    latency = all_reduce_ms(sync, 0.0) * len(sizes)
    moving = time_ms(replace(sync, alpha_us=0.0))
    if not sizes or latency <= moving:
        return []
    return [
        f"latency alone is {latency:.3g} ms: 2 x {sync.alpha_us:g} us x {sync.gpus - 1} messages x {len(sizes)} buckets, more than all else "
        f"together ({moving:.3g} ms); nobody runs a ring over so many GPUs with such a latency"
    ]


def ruled_out(sync: Scenario, measured_ms: float) -> list[str]:
    """Warnings, with the arithmetic, about inputs that contradict the measured uncompressed time."""
    beside = sync.gamma * sync.backward_ms
    if measured_ms < sync.backward_ms:
        return [f"the measured {measured_ms:g} ms are less than backward alone takes ({sync.backward_ms:g} ms)"]
    count, messages = len(buckets(sync)), 2 * (sync.gpus - 1)
    least = time_ms(sync.at(NEARLY_INFINITE_GBPS))
    if sync.alpha_us and least > measured_ms:
        most = max(0.0, min(measured_ms - beside, measured_ms / count)) / messages * 1e3
        each = all_reduce_ms(sync, 0.0)
        return [
            f"a latency of {sync.alpha_us:g} us is ruled out by the measured {measured_ms:g} ms: one of {count} buckets waits 2 x {sync.alpha_us:g} us x "
            f"{sync.gpus - 1} messages = {each:.3g} ms, and the step would take {least:.3g} ms over links of any bandwidth; it is {most:.3g} us at most"
        ]
    predicted = time_ms(sync)
    if abs(predicted / measured_ms - 1) > 0.1:
        return [
            f"the model says {predicted:.3g} ms without compression where {measured_ms:g} ms were measured: a verdict from these inputs is about another set-up"
        ]
    return []
