"""The answer to "does this method pay on this link, by how much, and how sure is that?", in one sentence and in figures.

The margin is how much the answer changes with inputs that are not well known: the slow-down of an overlapped backward, a tenth of the bandwidth,
a codec's times. An answer within its margin is a tie. The method is compared with uncompressed fp32 gradients, and with bf16 ones, which halve the
bytes at no cost. Owns the sentences and the questions. Does not know whether the closed model or the timeline gives the times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, Protocol

from psgc.plan.model.gains import share_saved
from psgc.plan.model.vary import SAME, Change
from psgc.plan.report.wording import ms

FASTER: Final = (2.0, 4.0)
LEAST_MARGIN: Final = 0.005  # neither model is more exact
TRADES: Final = (0.25, 0.5, 1.0, 2.0, 4.0)


class Times(Protocol):
    """Milliseconds of backward and synchronization, without compression and with the method, for the given inputs and for changed ones."""

    @property
    def name(self) -> str:
        """The method's name."""

    @property
    def place(self) -> str:
        """The link and the number of GPUs, in words."""

    @property
    def gbps(self) -> float: ...

    @property
    def codec_ms(self) -> float:
        """Milliseconds that encoding and decoding take."""

    def sync_ms(self, change: Change) -> float: ...

    def method_ms(self, change: Change) -> float: ...

    def gains_elsewhere(self) -> Sequence[float]:
        """The gains with other values of the inputs that are not well known."""

    def crossover_gbps(self) -> float:
        """Bandwidth below which the method is faster; 0: never, infinity: always."""

    def required_ratio(self) -> float:
        """The compression ratio at which communication hides behind backward."""

    def encode_budget_ms(self) -> float:
        """Milliseconds that encoding and decoding may take for the method to pay; negative: it never does."""

    @property
    def over_bf16(self) -> Times | None:
        """The same question with bf16 gradients as the uncompressed side; None if that is already so."""

    def warnings(self) -> list[str]:
        """Warnings about inputs that contradict each other, with the arithmetic."""


def gain(times: Times, change: Change = SAME) -> float:
    """The share of the uncompressed time that the method saves."""
    return share_saved(times.method_ms(change), times.sync_ms(change))


def margin_of(times: Times, saved: float) -> float:
    """How much the gain changes with the inputs that are not well known."""
    return max(LEAST_MARGIN, *(abs(one - saved) for one in times.gains_elsewhere()))


def verdict(times: Times) -> dict[str, Any]:
    """The answer. gain, margin: shares of the uncompressed time; verdict: a sentence; bf16_ms: the time of uncompressed bf16 gradients, with the gain
    over it."""
    saved = gain(times)
    margin, budget = margin_of(times, saved), times.encode_budget_ms()
    return {
        "sync_ms": times.sync_ms(SAME), "method_ms": times.method_ms(SAME), "gain": saved, "margin": margin, **_beside_bf16(times),
        "codec_ms": times.codec_ms, "crossover_gbps": _finite(times.crossover_gbps()), "required_ratio": _finite(times.required_ratio()),
        "encode_budget_ms": budget, "faster_compute": [{"factor": factor, "gain": gain(times, Change(compute=factor))} for factor in FASTER],
        "trade_off": [
            {"codec_factor": codec, "payload_factor": payload, "gain": gain(times, Change(codec=codec, payload=payload))}
            for codec in TRADES for payload in TRADES
        ],
        "warnings": times.warnings(), "verdict": f"{sentence(times, saved, margin, budget)}{_bf16_sentence(times, saved, margin)}",
    }  # fmt: skip


def _beside_bf16(times: Times) -> dict[str, float]:
    half = times.over_bf16
    if half is None:
        return {}
    saved = gain(half)
    return {"bf16_ms": half.sync_ms(SAME), "gain_over_bf16": saved, "margin_over_bf16": margin_of(half, saved)}


def _bf16_sentence(times: Times, saved: float, margin: float) -> str:
    """The time of bf16 gradients, and whether the method is faster than they are."""
    found = _beside_bf16(times)
    if not found:
        return ""
    over, around = found["gain_over_bf16"], found["margin_over_bf16"]
    said = f"; bf16 gradients take {_ms(found['bf16_ms'])} ms uncompressed"
    if over > around:
        return f"{said}, and {times.name} saves {over:.0%} of that, +-{around:.0%}"
    if saved > margin:
        return (
            f"{said}, so all of the gain is bf16's ({times.name} takes {abs(over):.0%} {'less' if over > 0 else 'longer'}, +-{around:.0%})"
        )
    return said


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def sentence(times: Times, saved: float, margin: float, budget: float) -> str:
    """Whether the method pays over fp32, in one line, with both times."""
    if not times.sync_ms(SAME):
        return f"{times.name} {times.place} does not pay: a step takes no time without it"
    both = f"{_ms(times.method_ms(SAME))} ms in place of {_ms(times.sync_ms(SAME))} uncompressed"
    if abs(saved) <= margin:
        said = f"is a tie: {abs(saved):.0%} {'faster' if saved > 0 else 'slower'}, +-{margin:.0%}; measure before you choose"
    elif saved > 0:
        said = (
            f"pays: {saved:.0%} less time, +-{margin:.0%}; it would with up to {_ms(budget)} ms of encoding and decoding, and takes "
            f"{times.codec_ms:.3g}"
        )
    elif budget > 0:
        said = f"does not pay: {-saved:.0%} slower, +-{margin:.0%}; it must encode and decode in under {budget:.3g} ms, and takes {times.codec_ms:.3g}"
    else:
        said = f"does not pay: {-saved:.0%} slower, +-{margin:.0%}, and would not if it encoded in no time; leave compression off"
    return f"{times.name} {times.place} {said}; {both}"


def _ms(value: float) -> str:
    return ms(1e3 * value)
