"""One question to the closed model and its answer in words: does this method pay on this link, by how much, and how sure is that?

The margin is what the answer moves by when the inputs that nobody knows well do: the slow-down of an overlapped backward (1.04 to 1.1, as
published), and a tenth in bandwidth. An answer within its margin is a tie. Owns the words; the equations are ``utility``'s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from psgc.errors import UsageError
from psgc.plan.architectures import architecture
from psgc.plan.utility import (
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


@dataclass(frozen=True, slots=True)
class Question:
    """model: a name, for shapes; grad_mib: MiB of fp32, where shapes do not matter."""

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


def scenarios(question: Question) -> tuple[Scenario, Scenario]:
    """Without compression, and with the method. Raises UsageError naming what is missing or wrong."""
    if question.model is None and question.grad_mib is None:
        raise UsageError("whatif: give --model or --grad-mib: how large the gradient is")
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
    return sync, method


def verdict(question: Question) -> dict[str, Any]:
    """The answer, with ``gain`` and ``margin`` as shares of the uncompressed time, and a sentence under ``verdict``."""
    sync, method = scenarios(question)
    if question.method == "sync":
        raise UsageError("whatif: --method sync is what others are compared with; ask for powersgd, mstopk, signsgd or sync_compressed")
    gains = [
        1 - time_ms(replace(method, gamma=gamma).at(question.bandwidth_gbps * factor))
        / time_ms(replace(sync, gamma=gamma).at(question.bandwidth_gbps * factor))
        for gamma in GAMMAS for factor in BANDWIDTH_FACTORS
    ]  # fmt: skip
    gain = 1 - time_ms(method) / time_ms(sync)
    margin = max(abs(one - gain) for one in gains)
    crossover, ratio = crossover_gbps(sync, method), hide_ratio(sync)
    return {
        "sync_ms": time_ms(sync), "method_ms": time_ms(method), "gain": gain, "margin": margin,
        "crossover_gbps": crossover if math.isfinite(crossover) else None, "required_ratio": ratio if math.isfinite(ratio) else None,
        "encode_budget_ms": encode_budget_ms(sync, method), "warnings": warnings(sync), "verdict": sentence(question, gain, margin, sync, method),
    }  # fmt: skip


def sentence(question: Question, gain: float, margin: float, sync: Scenario, method: Scenario) -> str:
    """What to do, in one line."""
    budget = encode_budget_ms(sync, method)
    if abs(gain) <= margin:
        word = f"a tie: {abs(gain):.0%} {'faster' if gain > 0 else 'slower'}, +-{margin:.0%}; measure before you choose"
    elif gain > 0:
        word = f"pays: {gain:.0%} less time, +-{margin:.0%}"
    elif budget > 0:
        word = f"does not pay: {-gain:.0%} slower, +-{margin:.0%}; it must encode and decode in under {budget:.3g} ms, and takes {question.encode_ms:.3g}"
    else:
        word = f"does not pay: {-gain:.0%} slower, +-{margin:.0%}, and would not if it encoded in no time; leave compression off"
    return f"{question.method} at {question.bandwidth_gbps:g} Gbit/s on {question.gpus} GPUs {word}"


def warnings(sync: Scenario) -> list[str]:
    """Inputs that contradict one another, with the arithmetic."""
    found = []
    sizes = buckets(sync)
    latency = all_reduce_ms(sync, 0.0) * len(sizes)
    moving = time_ms(replace(sync, alpha_us=0.0))
    if sizes and latency > moving:
        found.append(
            f"latency alone is {latency:.3g} ms: 2 x {sync.alpha_us:g} us x {sync.gpus - 1} messages x {len(sizes)} buckets, more than all else "
            f"together ({moving:.3g} ms); a ring over so many GPUs with such a latency is not what anybody runs"
        )
    return found


def picture(question: Question, path: Path) -> None:
    """Times against bandwidth, a tenth to ten times the question's, as PNG (or what the name's end says)."""
    try:
        import matplotlib
    except ImportError:
        raise UsageError("whatif: --plot needs matplotlib; install psgc[demo]") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    sync, method = scenarios(question)
    rates = np.geomspace(question.bandwidth_gbps / 10, question.bandwidth_gbps * 10, 200)
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for scenario, name in ((sync, "uncompressed"), (method, question.method)):
        axes.loglog(rates, [time_ms(scenario.at(float(rate))) for rate in rates], label=name)
    axes.axvline(question.bandwidth_gbps, color="grey", linewidth=0.8, linestyle="--")
    axes.set_xlabel("Gbit/s")
    axes.set_ylabel("backward and synchronization, ms")
    axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"whatif: --plot {path}: {error}") from None
    pyplot.close(figure)
