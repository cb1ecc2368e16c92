"""A question's answer in words: does this method pay on this link, by how much, and how sure is that?

The margin is what the answer moves by when the inputs that nobody knows well do: the slow-down of an overlapped backward, a tenth in
bandwidth, a codec's times. An answer within its margin is a tie. Owns the words and what is asked; whose times they are, the closed model's
or the timeline's, it does not know.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, Protocol

from psgc.plan.model.vary import SAME, Change

FASTER: Final = (2.0, 4.0)
LEAST_MARGIN: Final = 0.005  # neither model is as good as that
TRADES: Final = (0.25, 0.5, 1.0, 2.0, 4.0)


class Times(Protocol):
    """Milliseconds of backward and synchronization, without compression and with the method, as things are and changed."""

    @property
    def name(self) -> str:
        """The method's."""

    @property
    def place(self) -> str:
        """Which link and how many GPUs, in words."""

    @property
    def gbps(self) -> float: ...

    @property
    def codec_ms(self) -> float:
        """What encoding and decoding take."""

    def sync_ms(self, change: Change) -> float: ...

    def method_ms(self, change: Change) -> float: ...

    def gains_elsewhere(self) -> Sequence[float]:
        """The gain where what nobody knows well is otherwise."""

    def crossover_gbps(self) -> float:
        """Bandwidth below which the method is faster; 0: never, infinity: always."""

    def required_ratio(self) -> float:
        """How many times fewer bytes than without compression would hide behind backward."""

    def encode_budget_ms(self) -> float:
        """What encoding and decoding may take; negative: no time is short enough."""

    def warnings(self) -> list[str]:
        """Inputs that contradict one another, with the arithmetic."""


def gain(times: Times, change: Change = SAME) -> float:
    """The share of the uncompressed time that the method saves."""
    return 1 - times.method_ms(change) / times.sync_ms(change)


def verdict(times: Times) -> dict[str, Any]:
    """The answer, with ``gain`` and ``margin`` as shares of the uncompressed time, and a sentence under ``verdict``."""
    saved = gain(times)
    margin = max(LEAST_MARGIN, *(abs(one - saved) for one in times.gains_elsewhere()))
    budget = times.encode_budget_ms()
    return {
        "sync_ms": times.sync_ms(SAME), "method_ms": times.method_ms(SAME), "gain": saved, "margin": margin, "codec_ms": times.codec_ms,
        "crossover_gbps": _finite(times.crossover_gbps()), "required_ratio": _finite(times.required_ratio()), "encode_budget_ms": budget,
        "faster_compute": [{"factor": factor, "gain": gain(times, Change(compute=factor))} for factor in FASTER],
        "trade_off": [
            {"codec_factor": codec, "payload_factor": payload, "gain": gain(times, Change(codec=codec, payload=payload))}
            for codec in TRADES for payload in TRADES
        ],
        "warnings": times.warnings(), "verdict": sentence(times, saved, margin, budget),
    }  # fmt: skip


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def sentence(times: Times, saved: float, margin: float, budget: float) -> str:
    """What to do, in one line."""
    if abs(saved) <= margin:
        word = f"is a tie: {abs(saved):.0%} {'faster' if saved > 0 else 'slower'}, +-{margin:.0%}; measure before you choose"
    elif saved > 0:
        word = f"pays: {saved:.0%} less time, +-{margin:.0%}; it would with up to {budget:,.3g} ms of encoding and decoding, and takes {times.codec_ms:.3g}"
    elif budget > 0:
        word = f"does not pay: {-saved:.0%} slower, +-{margin:.0%}; it must encode and decode in under {budget:.3g} ms, and takes {times.codec_ms:.3g}"
    else:
        word = f"does not pay: {-saved:.0%} slower, +-{margin:.0%}, and would not if it encoded in no time; leave compression off"
    return f"{times.name} {times.place} {word}"
