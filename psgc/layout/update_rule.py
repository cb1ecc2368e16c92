"""The rule by which servers update the weights that they hold: its name and options, as a declaration carries them.

Owns the text form and the allowed dtypes of a rule. ``psgc/server/weights/rules.py`` has the arithmetic.

| text                             | of each push, or of a round's pushes                                             |
|----------------------------------|----------------------------------------------------------------------------------|
| ``add``                          | weights += delta, at once                                                        |
| ``average``                      | weights += mean of the round's deltas                                            |
| ``nesterov:lr=0.7,momentum=0.9`` | an outer step of SGD with Nesterov momentum, whose gradient is minus that mean   |
| ``delayed:learners=4``           | weights += lr * weight * delta / learners at once, and Nesterov momentum with every learners-th |

``round=0`` applies every delta at once, as a round of its own; ``round=1`` waits until every rank that is still in the job has pushed.
``staleness=s``, of rules without rounds: a rank may be at most s pushes ahead of the slowest.

``delayed`` (``lr=0.7,momentum=0.3,learners=2,slack=2 learners,decline=0.1``) is for pushes that come when they like. Each is applied at once, as one of
``learners``; the momentum follows after so many, so that among learners of equal speed a round of pushes is one step of ``nesterov``. A delta whose base
lacks ``s`` later updates has the weight 1 up to s = slack, and 1 / (1 + decline (s - slack)) beyond. Its momentum is less than that of ``nesterov``: pushes
are made from values that lack most of a round's others, and such staleness acts as momentum itself. With 0.9, what learners solve within a round swings
further from 4 learners on, and grows without end with 8.
Sources: Liu et al. 2024 (arXiv 2401.09135), Delayed Nesterov with c = 0; Xie, Koyejo and Gupta 2019 (FedAsync, arXiv 1903.03934), the hinge of staleness;
Mitliagkas et al. 2016 (arXiv 1605.09774), that asynchrony acts as momentum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from psgc.diagnostics.spelling import did_you_mean
from psgc.errors import UsageError

NAMES: Final = ("add", "average", "nesterov", "delayed")
_OF_STEPS: Final = ("lr", "momentum")
UNBOUNDED: Final = -1
MOMENTUM: Final = {"nesterov": "0.9", "delayed": "0.3"}  # where the text gives none
DTYPES: Final = ("float32", "float64", "int8", "int16", "int32", "int64", "uint8")  # weights; sums of the integers wrap


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """name: one of NAMES. in_rounds: whether deltas wait for the round's others. staleness: how many pushes a rank may be ahead of the slowest, UNBOUNDED for
    any number. lr, momentum: of ``nesterov`` and ``delayed``; the defaults are those of DiLoCo (Douillard et al. 2023), but for the momentum of ``delayed``
    (MOMENTUM). learners, slack, decline: of ``delayed``; slack -1 stands for twice the learners."""

    name: str = "add"
    in_rounds: bool = False
    staleness: int = UNBOUNDED
    lr: float = 0.7
    momentum: float = 0.9
    learners: int = 2
    slack: int = -1
    decline: float = 0.1

    @classmethod
    def parse(cls, text: str) -> UpdateRule:
        """Raises UsageError naming the rule or the option that is wrong."""
        name, _, given = text.partition(":")
        if name not in NAMES:
            raise UsageError(f"unknown update rule {name!r}{did_you_mean(name, NAMES)}; choose one of {', '.join(NAMES)}")
        options = dict(pair.partition("=")[::2] for pair in given.split(",") if pair)
        known = {"nesterov": ("round", "staleness", *_OF_STEPS), "delayed": (*_OF_STEPS, "learners", "slack", "decline")}.get(
            name, ("round", "staleness")
        )
        for option in options:
            if option not in known:
                raise UsageError(f"update rule {name}: unknown option {option!r}; it takes {', '.join(known)}")
        rounds = options.get("round", "0" if name in ("add", "delayed") else "1")
        staleness, lr, momentum = (
            options.get("staleness", str(UNBOUNDED)),
            options.get("lr", "0.7"),
            options.get("momentum", MOMENTUM.get(name, "0.9")),
        )
        learners, slack, decline = options.get("learners", "2"), options.get("slack", "-1"), options.get("decline", "0.1")
        try:
            rule = cls(
                name, {"0": False, "1": True}[rounds], int(staleness), float(lr), float(momentum), int(learners), int(slack), float(decline)
            )
        except (ValueError, KeyError):
            raise UsageError(
                f"update rule {text!r}: expected round=0 or 1, a whole staleness, whole learners and slack, and numbers for lr, momentum and decline"
            ) from None
        if rule.learners < 1 or rule.slack < -1 or not 0 <= rule.decline < float("inf"):
            raise UsageError(f"update rule {text!r}: expected learners of at least 1, and slack and decline of at least 0")
        if not (0 < rule.lr < float("inf") and 0 <= rule.momentum < 1 and rule.staleness >= UNBOUNDED):
            raise UsageError(f"update rule {text!r}: expected lr above 0, momentum from 0 to below 1, and staleness of at least 0")
        if rule.in_rounds and rule.staleness != UNBOUNDED:
            raise UsageError(f"update rule {text!r}: in rounds no rank is ahead of another; leave staleness out, or set round=0")
        return rule

    @property
    def keeps_momentum(self) -> bool:
        """Whether servers keep a momentum that a rank may save and restore: between two rounds it stands still."""
        return self.name == "nesterov" and self.in_rounds

    def weight(self, staleness: int) -> float:
        """Of a delta whose base lacks so many later updates; 1 for every rule but ``delayed``."""
        slack = 2 * self.learners if self.slack < 0 else self.slack
        if self.name != "delayed" or staleness <= slack:
            return 1.0
        return 1.0 / (1.0 + self.decline * (staleness - slack))

    @property
    def canonical(self) -> str:
        """The text form, without options that are at their defaults."""
        options = []
        if self.name in ("nesterov", "delayed"):
            options += [f"lr={self.lr!r}", f"momentum={self.momentum!r}"]
        if self.name == "delayed":
            options += [f"learners={self.learners}", *([f"slack={self.slack}"] if self.slack >= 0 else []), f"decline={self.decline!r}"]
        elif self.in_rounds != (self.name != "add"):
            options.append(f"round={int(self.in_rounds)}")
        if self.staleness != UNBOUNDED:
            options.append(f"staleness={self.staleness}")
        return f"{self.name}:{','.join(options)}" if options else self.name

    def check_dtype(self, dtype: str) -> None:
        """Raise UsageError unless weights of this dtype can be updated by the rule."""
        allowed = DTYPES if self.name == "add" else DTYPES[:2]
        if dtype not in allowed:
            raise UsageError(f"update rule {self.name} works on {', '.join(allowed)}, not {dtype}; convert the tensor")
