"""The memory of one key's weights: a buffer for each version that somebody may read, and how the next one is made.

Buffers are made when they are first needed, in shared memory that outlives the process, and used again once nobody reads them. ``WeightsKey`` says which
is free.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psgc.codecs import CodecPair
from psgc.errors import PayloadError
from psgc.layout.update_rule import UpdateRule
from psgc.server.blocks import BlockId, Blocks, Of, Written
from psgc.server.step import NO_SLOT, Fold
from psgc.server.weights.kept import AnswerCommit, KeptWeights, VersionCommit
from psgc.server.weights.memory import WeightsMemory
from psgc.server.weights.rules import RuleState
from psgc.transport.memory.segment import Place

Bytes = NDArray[np.uint8]
MOST_AT_ONCE = 8  # payloads that a codec folds in one call


class Versions:
    """pair: the codecs of deltas, and of the weights as they travel (``none``: their own bytes). What a former process has left in ``blocks`` is taken up."""

    def __init__(self, key: int, rule: UpdateRule, pair: CodecPair, numel: int, ranks: int, blocks: Blocks) -> None:
        self.key, self.rule, self.pair, self.numel = key, rule, pair, numel
        self._blocks = blocks
        self._nbytes = pair.pull.payload_bound(numel)
        self._state = RuleState(rule, numel, pair.push.acc_dtype)
        needed = WeightsMemory.bytes_needed(ranks, self._state)
        self._memory = WeightsMemory(blocks.block(BlockId(Of.WEIGHTS, key), (ranks, needed), needed), ranks, self._state)
        self._places: dict[int, Place] = {}
        self._populated: set[int] = set()
        for slot in blocks.left(Of.VERSION, key):
            self.prepare(slot)
        kept = self._memory.kept
        self._state.take_up(0 if kept is None else max(kept.version - 1, 0))

    @property
    def kept(self) -> KeptWeights | None:
        """As of the last commits, whichever process made them; None before the first."""
        return self._memory.kept

    def commit(self, commit: VersionCommit | AnswerCommit) -> None:
        """Make durable that a version is the key's, or that a rank was answered with one."""
        if isinstance(commit, VersionCommit):
            self._memory.commit(commit)
        else:
            self._memory.answer(commit)

    def written(self, commit: VersionCommit | AnswerCommit | None = None) -> Iterator[Written]:
        """What the last commit has written, its record last. commit: None: all that the weights' state consists of, whichever commit wrote it."""
        kept = self.kept
        if kept is None:  # at most the momentum was restored
            yield from self._memory.written(self._state, answers=False)
            return
        if isinstance(commit, AnswerCommit):
            yield self._memory.written_answer(commit.rank, commit.step)
            return
        slots = {kept.slot} if commit is not None else {kept.slot, *(of.slot for of in kept.ranks)}
        for slot in sorted(slots.difference({NO_SLOT})):
            yield Written(self._places[slot], 0, self.place(slot).bytes)
        yield from self._memory.written(self._state, answers=commit is None)

    def prepare(self, slot: int) -> None:
        """Have buffer ``slot``. Called in the loop's thread, before ``update``."""
        if slot not in self._places:
            self._places[slot] = self._blocks.block(BlockId(Of.VERSION, self.key, slot), (self._nbytes, 0), self._nbytes)

    def place(self, slot: int) -> Place:
        """Where a version lies."""
        return self._places[slot].part(0, self._nbytes)

    def update(self, fold: Fold, slices: list[tuple[int, int]]) -> int:
        """Make the version in buffer ``fold.slot`` from the one in ``fold.add_back`` and the payloads; without one, the payload has the initial values. slices:
        elements to work on at a time. Returns the payload's bytes. Raises PayloadError."""
        push, pull, numel = self.pair.push, self.pair.pull, self.numel
        place = self.place(fold.slot)
        if fold.slot not in self._populated:
            place.populate()
            self._populated.add(fold.slot)
        if fold.add_back == NO_SLOT:
            pull.validate(fold.payloads[0], numel)
            place.bytes[:] = fold.payloads[0]
            return self._nbytes
        for payload in fold.payloads:
            push.validate(payload, numel)
        old, new = self._values(fold.add_back), self._values(fold.slot)
        self._state.begin(fold.staleness)
        total = np.empty(slices[0][1], push.acc_dtype)
        for lo, hi in slices:
            part = total[: hi - lo]
            for first in range(0, len(fold.payloads), MOST_AT_ONCE):
                push.fold(fold.payloads[first : first + MOST_AT_ONCE], numel, lo, hi, part, first == 0)
            self._state.apply(lo, hi, old[lo:hi], part, len(fold.payloads), new[lo:hi])
        return self._nbytes

    def momentum(self) -> NDArray[Any]:
        """[numel] of the accumulator's dtype: what ``nesterov`` keeps between two rounds; zeros before the first."""
        assert self._state.momentum is not None
        return self._state.momentum

    def restore(self, first: int, payload: Any) -> None:
        """Set elements of the momentum, from ``first`` on. Raises PayloadError for NaN and infinity."""
        values = np.frombuffer(payload, np.float32)
        if not np.isfinite(values).all():
            raise PayloadError("a momentum to be restored holds NaN or infinity")
        self.momentum()[first : first + values.size] = values

    def restored(self, first: int, numel: int) -> Iterator[Written]:
        """What the last ``restore`` has written."""
        yield self._memory.piece(self.momentum()[first : first + numel])

    def _values(self, slot: int) -> NDArray[Any]:
        return self.place(slot).bytes.view(self.pair.pull.array_dtype)
