"""Weights outlive the server's process: whatever it was doing, the next one finds a version that was committed, and all that belongs to it."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from psgc.errors import PsgcError
from psgc.layout import Declaration, TensorSpec, build_layout
from psgc.layout.update_rule import UpdateRule
from psgc.server.blocks import Blocks
from psgc.server.step import NO_SLOT, Fold
from psgc.server.weights.kept import AnswerCommit, KeptRank, KeptWeights, VersionCommit
from psgc.server.weights.memory import ANSWER_FIELDS, WeightsMemory
from psgc.server.weights.rules import RuleState
from psgc.server.weights.versions import Versions
from psgc.transport.memory.segment import Place, Segment

NUMEL, RANKS = 5001, 3
ADD = RuleState(UpdateRule(), 0, np.float32)
FIRST = VersionCommit(7, 1, 0, 1, 20, False, ((0, 1),))
SECOND = VersionCommit(7, 2, 1, 2, 20, False, ((2, 2), (1, 5)))
POISON = VersionCommit(7, 2, 1, 2, 20, True, ((1, 6),))
RULES = ("add", "average", "nesterov:lr=0.7,momentum=0.9", "delayed:learners=3")


def memory() -> tuple[WeightsMemory, Any]:
    block = np.zeros(WeightsMemory.bytes_needed(RANKS, ADD), np.uint8)
    return WeightsMemory(Place(None, 0, block), RANKS, ADD), block


def again(block: Any) -> WeightsMemory:
    return WeightsMemory(Place(None, 0, block), RANKS, ADD)


def test_what_was_committed_is_what_the_next_process_finds() -> None:
    first, block = memory()
    assert first.kept is None and again(block).kept is None
    for commit in (FIRST, SECOND, POISON):
        first.commit(commit)
    for step in (1, 2, 3):
        first.answer(AnswerCommit(7, 1, step, 2 * step, step % 2, 1))
    first.answer(AnswerCommit(7, 2, 1, 2, NO_SLOT, 3))
    ranks = (KeptRank(1, 0), KeptRank(6, 2, 3, 6, 1, 1), KeptRank(2, 1, 1, 2, NO_SLOT, 3))
    assert first.kept == again(block).kept == KeptWeights(2, 1, 2, 20, True, ranks)
    following = again(block)
    following.commit(VersionCommit(7, 3, 0, 1, 20, True, ((0, 2),)))
    kept = again(block).kept
    assert kept is not None and kept.version == 3 and kept.ranks[0] == KeptRank(2, 1) and kept.ranks[1:] == ranks[1:]


@pytest.mark.parametrize("commit", [FIRST, SECOND, POISON])
def test_wherever_the_process_ends_in_a_record_the_one_before_counts_or_the_whole_new_one(commit: VersionCommit) -> None:
    first, block = memory()
    for each in (FIRST, SECOND, POISON)[: (FIRST, SECOND, POISON).index(commit)]:
        first.commit(each)
    old, before = block.copy().view(np.uint64), first.kept
    first.commit(commit)
    new, after = block.view(np.uint64), first.kept
    assert before != after
    changed = np.flatnonzero(old != new)
    words = 6 + 2 * RANKS + 1
    at = changed[0] // words * words
    assert changed[-1] < at + words, "one of the two records is written"
    for written in range(words):  # the last word is cleared, all before it is written, then itself
        torn = old.copy()
        torn[at + words - 1] = 0
        torn[at : at + written] = new[at : at + written]
        assert again(torn.view(np.uint8)).kept == before
    assert again(new.view(np.uint8)).kept == after


def test_wherever_the_process_ends_in_an_answer_the_one_before_counts_or_the_whole_new_one() -> None:
    first, block = memory()
    first.commit(FIRST)
    for step in (1, 2, 3):
        old, before = block.copy().view(np.uint64), first.kept
        first.answer(AnswerCommit(7, 1, step, 2 * step, step % 2, 1))
        new = block.view(np.uint64)
        at = np.flatnonzero(old != new)[0]
        for written in range(ANSWER_FIELDS):
            torn = old.copy()
            torn[at + ANSWER_FIELDS - 1] = 0
            torn[at : at + written] = new[at : at + written]
            assert again(torn.view(np.uint8)).kept == before, (step, written)
        assert first.kept != before


def held(rule: str, blocks: Blocks, numel: int = NUMEL) -> Versions:
    declaration = Declaration("weights.w", "weights", (TensorSpec("w", (numel,), "float32"),), "none", False, rule=rule)
    layout = build_layout(declaration, layout_id=1, servers=1, workers=RANKS)
    (bucket,) = layout.buckets
    return Versions(7, UpdateRule.parse(rule), layout.scheme(bucket).rounds(numel)[0].pair, numel, RANKS, blocks)


def left_by(blocks: Blocks) -> Blocks:
    """What the process's successor finds, though it has closed nothing."""
    return Blocks("test-again", [Segment(os.dup(segment.fd), segment.nbytes) for segment in blocks.segments.values()])


@pytest.mark.parametrize("rule", RULES)
def test_a_process_that_follows_makes_the_versions_that_the_first_would_have_made(rule: str) -> None:
    draw = np.random.default_rng(3)
    deltas = [draw.normal(size=NUMEL).astype(np.float32).view(np.uint8) for _ in range(9)]

    def run(ends: bool) -> list[bytes]:
        blocks, found, current = Blocks("test-weights"), [], NO_SLOT
        weights = held(rule, blocks)
        for version, delta in enumerate(deltas, 1):
            slot = 1 - max(current, 0)
            fold = Fold(7, version, (delta,), True, True, slot, current, staleness=version)
            weights.prepare(slot)
            nbytes = weights.update(fold, [(0, 4096), (4096, NUMEL)] if version % 2 else [(0, NUMEL)])
            if ends:  # before the commit: the next process makes the same version again
                blocks = left_by(blocks)
                weights = held(rule, blocks)
                assert (0 if weights.kept is None else weights.kept.version) == version - 1
                weights.prepare(slot)
                weights.update(fold, [(0, NUMEL)])
            weights.commit(VersionCommit(7, version, slot, 1, nbytes, False, ((0, version),)))
            if ends:  # and behind it
                blocks = left_by(blocks)
                weights = held(rule, blocks)
                assert weights.kept is not None and weights.kept.version == version
            current = slot
            found.append(weights.place(slot).bytes.tobytes())
        return found

    assert run(True) == run(False)


def test_a_momentum_that_was_restored_is_there_again() -> None:
    blocks = Blocks("test-weights")
    held("nesterov", blocks).restore(2, np.ones(3, np.float32).tobytes())
    assert held("nesterov", left_by(blocks)).momentum()[:6].tolist() == [0, 0, 1, 1, 1, 0]


def test_weights_of_another_shape_are_not_taken_up() -> None:
    blocks = Blocks("test-weights")
    weights = held("add", blocks)
    weights.prepare(0)
    with pytest.raises(PsgcError, match="former process"):
        held("add", left_by(blocks), NUMEL + 1)
    with pytest.raises(PsgcError, match="former process"):
        held("nesterov", left_by(blocks))
