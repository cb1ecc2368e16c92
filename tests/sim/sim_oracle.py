"""What every rank says of every step, and what must come of it: the published order of sums, written down a second time, one step after
another, without messages. Payloads are names of numbers, not numbers: two results are equal only if they were made the same way.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from psgc.layout import Layout
from psgc.server.step import KeySpec
from psgc.wire.frames import Flag

BLOCK_RANKS = 8


@dataclass(frozen=True, slots=True)
class Chances:
    """How often the odd things happen: each is a probability, per step and what it is about."""

    skip: float = 0.0
    poison: float = 0.0
    previous_skipped: float = 0.0
    rescale: float = 0.0
    overflow: float = 0.0


@dataclass(frozen=True, slots=True)
class Word:
    """What all ranks say of one step of one bucket. Sets of ranks; poisoned: by part number. overflow: parts whose sum is not finite."""

    skipping: frozenset[int]
    poisoned: tuple[frozenset[int], ...]
    overflow: frozenset[int]
    previous_skipped: bool = False
    rescale: float = 1.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What every rank must get from one step of a key."""

    flags: int
    contributors: int
    value: Any = None


@dataclass(slots=True)
class _History:
    """One key's residual and last result, as a single careful server would keep them."""

    step: int = 0
    residual: Any = None
    last_value: Any = None  # name of the newest result with a payload
    last_had_payload: bool = False
    owed: Any = None  # that result, if the trainer did not apply it and it is not added back yet
    rescale: float = 1.0


def payload_of(key: int, step: int, rank: int) -> tuple[Any, ...]:
    """The name of what a rank pushes."""
    return ("m", key, step, rank)


def name_of_result(key: int, step: int) -> tuple[Any, ...]:
    return ("r", key, step)


def name_of_residual(key: int, step: int) -> tuple[Any, ...]:
    return ("e", key, step)


def name_of_unit(rescale: float) -> tuple[Any, ...]:
    """What multiplies the late contributions in front of it."""
    return ("u", rescale)


def name_of_restored(key: int, firsts: set[int]) -> tuple[Any, ...]:
    """A residual that was set before the first step, from these elements on."""
    return ("x", key, tuple(sorted(firsts)))


def restored_of(residual: Any) -> tuple[int, ...]:
    """From which elements on a residual has been set since it was last written as a whole."""
    return residual[2] if residual is not None and residual[0] == "x" else ()


class Oracle:
    """Words are drawn when they are first asked for, for all ranks at once."""

    def __init__(self, rng: random.Random, workers: int, chances: Chances) -> None:
        self.rng, self.workers, self.chances = rng, workers, chances
        self.words: dict[tuple[int, int, int], Word] = {}
        self._layouts: dict[int, Layout] = {}
        self._history: dict[int, _History] = {}
        self._outcomes: dict[tuple[int, int], Outcome] = {}
        self._specs: dict[int, KeySpec] = {}
        self._places: dict[int, tuple[int, int, int]] = {}  # key -> layout, bucket, part
        self.left_out: dict[
            tuple[int, int], frozenset[int]
        ] = {}  # key and step -> ranks without which it was taken; told before its result is sent
        self.late: dict[tuple[int, int], frozenset[int]] = {}  # the same, of ranks whose contribution belongs to the next step then

    def know(self, layout: Layout, specs: list[KeySpec]) -> None:
        """A layout as servers have it, and the specs of its keys on one server."""
        self._layouts[layout.id] = layout
        self._specs.update({spec.key: spec for spec in specs})
        for bucket in layout.buckets:
            for number, part in enumerate(bucket.parts):
                self._places[part.key] = (layout.id, bucket.index, number)

    def word(self, layout: Layout, bucket: int, step: int) -> Word:
        at = (layout.id, bucket, step)
        found = self.words.get(at)
        if found is None:
            parts = len(layout.buckets[bucket].parts)
            found = self.words[at] = self._broadcast(layout, parts) if layout.kind == "broadcast" else self._drawn(parts)
        return found

    def layout(self, key: int) -> Layout:
        return self._layouts[self._places[key][0]]

    def number(self, key: int) -> int:
        """The key's place among its bucket's."""
        return self._places[key][2]

    def overflows(self, key: int, step: int) -> bool:
        layout, bucket, part = self._places[key]
        return part in self.word(self._layouts[layout], bucket, step).overflow

    def outcome(self, key: int, step: int) -> Outcome:
        """The only right result of a step."""
        history = self._history.setdefault(key, _History())
        while history.step < step:
            history.step += 1
            self._outcomes[key, history.step] = self._next(key, history)
        return self._outcomes[key, step]

    def keeps_residual(self, key: int) -> bool:
        return self._specs[key].pull_feedback

    def numel(self, key: int) -> int:
        return self._specs[key].numel

    def restore(self, key: int, firsts: set[int], rescale: float) -> None:
        """The key's residual is set before its first step."""
        self._history[key] = _History(residual=name_of_restored(key, firsts), rescale=rescale)

    def kept(self, key: int, step: int, dropped: bool) -> tuple[Any, float]:
        """What a rank that is past ``step`` must hear of the server's residual: its name with what is added back to it, and the unit's
        change that is still to come. dropped: the trainer did not apply that step."""
        if step:
            self.outcome(key, step)
        history = self._history.setdefault(key, _History())
        assert history.step == step, "nobody can be further than a rank that has not pushed"
        owed = history.last_value if dropped and history.last_had_payload else history.owed
        return (history.residual, owed), history.rescale

    def _broadcast(self, layout: Layout, parts: int) -> Word:
        return Word(frozenset(range(self.workers)) - {layout.root}, (frozenset(),) * parts, frozenset())

    def _drawn(self, parts: int) -> Word:
        rng, chances = self.rng, self.chances
        everyone = range(self.workers)
        skip = 1.0 if chances.skip and rng.random() < chances.skip / 4 else chances.skip  # now and then all of them
        skipping = frozenset(rank for rank in everyone if rng.random() < skip)
        poisoned = tuple(frozenset(rank for rank in everyone if rng.random() < chances.poison) for _ in range(parts))
        overflow = frozenset(part for part in range(parts) if rng.random() < chances.overflow)
        rescale = rng.choice((0.5, 2.0, 4.0)) if rng.random() < chances.rescale else 1.0
        return Word(skipping, poisoned, overflow, rng.random() < chances.previous_skipped, rescale)

    def _next(self, key: int, history: _History) -> Outcome:
        layout_id, bucket, part = self._places[key]
        layout, spec, step = self._layouts[layout_id], self._specs[key], history.step
        word = self.word(layout, bucket, step)
        if word.previous_skipped and history.last_had_payload and spec.pull_feedback:
            history.owed = history.last_value
        history.rescale *= word.rescale
        history.last_had_payload = False
        left_out = self.left_out.get((key, step), frozenset()) | self.late.get((key, step), frozenset())
        pushing = [rank for rank in spec.ranks if rank not in word.skipping and rank not in left_out]
        before = self.word(layout, bucket, step - 1) if self.late.get((key, step - 1)) else word
        late = sorted(self.late.get((key, step - 1), frozenset()) - before.skipping)
        if late and (self._outcomes[key, step - 1].flags == Flag.NONFINITE or (word.previous_skipped and not spec.pull_feedback)):
            late = []  # of a step that all others have dropped
        contributors = len(pushing) + len(late)
        if not contributors:
            return Outcome(Flag.SKIPPED, 0)
        if word.poisoned[part].intersection(pushing) or before.poisoned[part].intersection(late) or part in word.overflow:
            return Outcome(Flag.NONFINITE, contributors)
        value = self._value(key, history, pushing, late, word.rescale)
        history.last_value, history.last_had_payload = name_of_result(key, step), True
        if spec.pull_feedback:
            history.residual, history.owed, history.rescale = name_of_residual(key, step), None, 1.0
        return Outcome(Flag.NONE, contributors, value)

    def _value(self, key: int, history: _History, pushing: list[int], late: list[int], unit: float) -> Any:
        spec = self._specs[key]
        if spec.root is not None:
            return payload_of(key, history.step, spec.root)
        ranks_of = (spec.ranks[first : first + BLOCK_RANKS] for first in range(0, len(spec.ranks), BLOCK_RANKS))
        blocks = [tuple(payload_of(key, history.step, rank) for rank in ranks if rank in pushing) for ranks in ranks_of]
        come_late = [payload_of(key, history.step - 1, rank) for rank in late]
        first = [tuple(come_late[at : at + BLOCK_RANKS]) for at in range(0, len(late), BLOCK_RANKS)]
        if late and unit != 1:
            first.append((name_of_unit(unit),))
        tree = (*first, *(block for block in blocks if block))
        name = name_of_result(key, history.step)
        return (*name, tree, history.residual, history.owed, history.rescale) if spec.pull_feedback else (*name, tree)
