"""Small keys: the result leaves with what completes the step, and is the acknowledgement."""

from __future__ import annotations

from typing import Any

import pytest

from psgc.layout import Declaration, TensorSpec, build_layout
from psgc.server.state import specs_of
from psgc.server.step import Commit, Fold, KeySpec, KeyState, Reply
from psgc.wire.frames import Flag, Header, Kind


def test_the_contribution_that_completes_a_small_keys_step_is_answered_with_the_result_alone() -> None:
    push, skip = Header(Kind.PUSH, flags=Flag.WANT_RESULT, step=1), Header(Kind.SKIP, flags=Flag.WANT_RESULT, step=1)

    def kinds(actions: list[Any]) -> list[Any]:
        return [(action.rank, Kind(action.header.kind)) if isinstance(action, Reply) else type(action) for action in actions]

    small, large = (KeyState(KeySpec(5, 1, (0, 2), 0, 0, at_once=at_once)) for at_once in (True, False))
    assert kinds(small.contribute(0, push, b"")) == kinds(large.contribute(0, push, b"")) == [(0, Kind.ACK)], (
        "credit must not wait for others"
    )
    assert kinds(small.contribute(2, push, b"")) == [Fold]
    assert kinds(large.contribute(2, push, b"")) == [(2, Kind.ACK), Fold], "the credit must not wait for the sum"
    assert kinds(small.folded(True, 4, slot=0)) == [Commit, (0, Kind.RESULT), (2, Kind.RESULT)]
    assert kinds(small.contribute(2, push, b"")) == [(2, Kind.ACK)], "a repeat: the result is on its way"
    nobody = KeyState(KeySpec(5, 1, (0, 2), 0, 0))
    nobody.contribute(0, skip, None)
    assert kinds(nobody.contribute(2, skip, None)) == [Commit, (0, Kind.RESULT), (2, Kind.RESULT)]


@pytest.mark.parametrize(
    ("numel", "workers", "at_once"), [(1024, 2, True), (2048, 8, True), (2048, 64, True), (2049, 64, False), (20_000, 2, False)]
)
def test_keys_whose_sums_take_less_time_than_a_hand_over_are_summed_at_once(numel: int, workers: int, at_once: bool) -> None:
    layout = build_layout(
        Declaration("t", "adhoc", (TensorSpec("t", (numel,), "float32"),), "none", False), layout_id=1, servers=1, workers=workers
    )
    assert [spec.at_once for spec in specs_of(layout, 0, workers)[0]] == [at_once]
