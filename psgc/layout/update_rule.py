"""The rule by which servers update the weights that they hold: its name and options, as a declaration carries them.

Owns the text form and the allowed dtypes of a rule. ``psgc/server/weights/rules.py`` has the arithmetic.

| text                             | of each push, or of a round's pushes                                             |
|----------------------------------|----------------------------------------------------------------------------------|
| ``add``                          | weights += delta, at once                                                        |
| ``average``                      | weights += mean of the round's deltas                                            |
| ``nesterov:lr=0.7,momentum=0.9`` | an outer step of SGD with Nesterov momentum, whose gradient is minus that mean   |

``round=0`` applies every delta at once, as a round of its own; ``round=1`` waits until every rank that is still in the job has pushed.
``staleness=s``, of rules without rounds: a rank may be at most s pushes ahead of the slowest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from psgc.diagnostics.spelling import did_you_mean
from psgc.errors import UsageError

NAMES: Final = ("add", "average", "nesterov")
UNBOUNDED: Final = -1
DTYPES: Final = ("float32", "float64", "int8", "int16", "int32", "int64", "uint8")  # weights; sums of the integers wrap


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """name: one of NAMES. in_rounds: whether deltas wait for the round's others. staleness: how many pushes a rank may be ahead of the slowest, UNBOUNDED for
    any number. lr, momentum: of ``nesterov``; the defaults are those of DiLoCo (Douillard et al. 2023)."""

    name: str = "add"
    in_rounds: bool = False
    staleness: int = UNBOUNDED
    lr: float = 0.7
    momentum: float = 0.9

    @classmethod
    def parse(cls, text: str) -> UpdateRule:
        """Raises UsageError naming the rule or the option that is wrong."""
        name, _, given = text.partition(":")
        if name not in NAMES:
            raise UsageError(f"unknown update rule {name!r}{did_you_mean(name, NAMES)}; choose one of {', '.join(NAMES)}")
        options = dict(pair.partition("=")[::2] for pair in given.split(",") if pair)
        known = ("round", "staleness", *(("lr", "momentum") if name == "nesterov" else ()))
        for option in options:
            if option not in known:
                raise UsageError(f"update rule {name}: unknown option {option!r}; it takes {', '.join(known)}")
        rounds = options.get("round", "0" if name == "add" else "1")
        staleness, lr, momentum = options.get("staleness", str(UNBOUNDED)), options.get("lr", "0.7"), options.get("momentum", "0.9")
        try:
            rule = cls(name, {"0": False, "1": True}[rounds], int(staleness), float(lr), float(momentum))
        except (ValueError, KeyError):
            raise UsageError(f"update rule {text!r}: expected round=0 or 1, a whole staleness, and numbers for lr and momentum") from None
        if not (0 < rule.lr < float("inf") and 0 <= rule.momentum < 1 and rule.staleness >= UNBOUNDED):
            raise UsageError(f"update rule {text!r}: expected lr above 0, momentum from 0 to below 1, and staleness of at least 0")
        if rule.in_rounds and rule.staleness != UNBOUNDED:
            raise UsageError(f"update rule {text!r}: in rounds no rank is ahead of another; leave staleness out, or set round=0")
        return rule

    @property
    def keeps_momentum(self) -> bool:
        """Whether servers keep a momentum that a rank may save and restore: between two rounds it stands still."""
        return self.name == "nesterov" and self.in_rounds

    @property
    def canonical(self) -> str:
        """The text form, without options that are at their defaults."""
        options = []
        if self.name == "nesterov":
            options += [f"lr={self.lr!r}", f"momentum={self.momentum!r}"]
        if self.in_rounds != (self.name != "add"):
            options.append(f"round={int(self.in_rounds)}")
        if self.staleness != UNBOUNDED:
            options.append(f"staleness={self.staleness}")
        return f"{self.name}:{','.join(options)}" if options else self.name

    def check_dtype(self, dtype: str) -> None:
        """Raise UsageError unless weights of this dtype can be updated by the rule."""
        allowed = DTYPES if self.name == "add" else DTYPES[:2]
        if dtype not in allowed:
            raise UsageError(f"update rule {self.name} works on {', '.join(allowed)}, not {dtype}; convert the tensor")
