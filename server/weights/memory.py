"""One key's weights as they outlive the server's process, but for the versions themselves: commit records, answers, and what the rule keeps.

    record, twice: u64 sequence, version, slot + 1, contributors, payload bytes, poisoned; of each rank: last step applied, pushes; sequence (written last)
    answer, of each rank twice: u64 step, version, slot + 1, contributors, step (written last), and 24 bytes that are not used
    what the rule keeps, each twice: momentum, and what ``delayed`` gathers

A commit writes the older of the two records, and an answer the older of the rank's two, so that a whole one is there wherever the process ends. What the rule
keeps is double for the same reason: an update that is begun again reads what the last one has left. Which of the two counts follows from the version.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psgc.server.blocks import Written
from psgc.server.weights.kept import AnswerCommit, KeptRank, KeptWeights, VersionCommit
from psgc.server.weights.rules import Pair, RuleState
from psgc.transport.memory.segment import Place, aligned

U64 = NDArray[np.uint64]
FIELDS: Final = 6  # of a record, before its ranks
ANSWER_WORDS: Final = 8  # a cache line
ANSWER_FIELDS: Final = 5


class WeightsMemory:
    """block: as long as ``bytes_needed`` says, as a former process has left it or of zeros. state: what the rule keeps; it gets its memory here."""

    def __init__(self, block: Place, ranks: int, state: RuleState) -> None:
        words = FIELDS + 2 * ranks + 1
        self._ranks, self._block = ranks, block
        at = aligned(2 * 8 * words)
        self._records: U64 = block.bytes[: 2 * 8 * words].view(np.uint64).reshape(2, words)
        self._answers: U64 = block.bytes[at : at + 2 * 8 * ANSWER_WORDS * ranks].view(np.uint64).reshape(ranks, 2, ANSWER_WORDS)
        at += self._answers.nbytes
        size = state.numel * np.dtype(state.dtype).itemsize
        pairs: list[Pair] = []
        for _ in range(arrays_kept(state)):
            first, second = (block.bytes[start : start + size].view(state.dtype) for start in (at, at + aligned(size)))
            pairs.append((first, second))
            at += 2 * aligned(size)
        state.momenta, state.gatherings = (*pairs, None, None)[:2]
        newest = self._newest()
        self._sequence = 0 if newest is None else int(newest[0])

    @staticmethod
    def bytes_needed(ranks: int, state: RuleState) -> int:
        size = state.numel * np.dtype(state.dtype).itemsize
        return aligned(2 * 8 * (FIELDS + 2 * ranks + 1)) + 2 * 8 * ANSWER_WORDS * ranks + 2 * arrays_kept(state) * aligned(size)

    def commit(self, commit: VersionCommit) -> None:
        """Make the version the key's. The older record is written; until its last word is, the other one counts."""
        self._sequence = sequence = self._sequence + 1
        record, before = self._records[sequence & 1], self._records[1 - (sequence & 1)]
        record[-1] = 0
        record[:FIELDS] = (sequence, commit.version, commit.slot + 1, commit.contributors, commit.payload_bytes, commit.poisoned)
        record[FIELDS:-1] = before[FIELDS:-1]
        for rank, step in commit.applied:
            record[FIELDS + 2 * rank] = step
            record[FIELDS + 2 * rank + 1] += step > 1
        record[-1] = sequence

    def answer(self, commit: AnswerCommit) -> None:
        answer = self._answers[commit.rank, commit.step & 1]
        answer[ANSWER_FIELDS - 1] = 0
        answer[: ANSWER_FIELDS - 1] = (commit.step, commit.version, commit.slot + 1, commit.contributors)
        answer[ANSWER_FIELDS - 1] = commit.step

    def written(self, state: RuleState, answers: bool) -> Iterator[Written]:
        """What the last update has written here, its record last. answers: the answers as well."""
        for array in (state.momentum, state.gathered):
            if array is not None:
                yield self.piece(array)
        if answers:
            yield from (self.written_answer(rank, step) for rank in range(self._ranks) for step in (0, 1))
        yield self._record(self._records[self._sequence & 1])

    def written_answer(self, rank: int, step: int) -> Written:
        return self._record(self._answers[rank, step & 1][:ANSWER_FIELDS])

    def piece(self, array: NDArray[Any]) -> Written:
        """A part of this memory."""
        piece = array.view(np.uint8)
        return Written(self._block, piece.ctypes.data - self._block.bytes.ctypes.data, piece)

    def _record(self, words: U64) -> Written:
        piece = self.piece(words)
        return piece._replace(bytes=piece.bytes.copy(), record=True)

    @property
    def kept(self) -> KeptWeights | None:
        """None: nothing was committed yet, neither a version nor an answer. (Ranks that push nothing are answered after initial values only.)"""
        newest = self._newest()
        if newest is None:
            return None
        _, version, slot, contributors, payload_bytes, poisoned = map(int, newest[:FIELDS])
        ranks = []
        for rank in range(self._ranks):
            applied, pushes = map(int, newest[FIELDS + 2 * rank : FIELDS + 2 * rank + 2])
            whole = [answer for answer in self._answers[rank] if answer[0] == answer[ANSWER_FIELDS - 1] > 0]
            step, of, at, by = map(int, max(whole, key=lambda answer: int(answer[0]))[: ANSWER_FIELDS - 1]) if whole else (0, 0, 0, 0)
            ranks.append(KeptRank(applied, pushes, step, of, at - 1, by))
        return KeptWeights(version, slot - 1, contributors, payload_bytes, bool(poisoned), tuple(ranks))

    def _newest(self) -> U64 | None:
        whole = [record for record in self._records if record[0] == record[-1] > 0]
        return max(whole, key=lambda record: int(record[0])) if whole else None


def arrays_kept(state: RuleState) -> int:
    """How many arrays the rule keeps between updates."""
    return {"nesterov": 1, "delayed": 2}.get(state.rule.name, 0)


__all__ = ["WeightsMemory", "arrays_kept"]
