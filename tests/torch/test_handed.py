"""Rank 0's plan for other ranks: whole in as many pieces as it takes, and refused where it is not what rank 0 published."""

from __future__ import annotations

import json
import random
import zlib
from typing import Any

import pytest

from psgc.errors import UsageError
from psgc.plan.model.plan import Plan, PlannedBucket
from psgc.plan.planfile.runtime import ENCODED
from psgc.torch.plans.handed import MAX_PIECES, hand_out, handed_out
from psgc.wire.messages import MAX_VALUE_BYTES
from psgc.worker.published import check_value


class Published:
    """What a session keeps of what is published."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def publish(self, name: str, value: bytes) -> None:
        check_value(name, value)
        self.values[name] = value

    def lookup(self, name: str) -> bytes:
        return self.values[name]


def plan_of(tensors: int, letters: int = 20) -> Plan:
    """Names that hardly compress."""
    numbers = random.Random(tensors)
    names = [f"{number}.{numbers.randbytes(letters // 2).hex()}" for number in range(tensors)]
    return Plan("m", "", tuple(PlannedBucket((name,), 4096, 1, -number, "int8", ENCODED) for number, name in enumerate(names)))


@pytest.mark.parametrize(("tensors", "pieces"), [(1, 1), (6_000, 2)])
def test_a_plan_arrives_as_it_was_in_as_many_pieces_as_it_takes(tensors: int, pieces: int) -> None:
    session: Any = Published()
    plan = plan_of(tensors)
    hand_out(session, "plan 1 of optimizer0", plan)
    assert handed_out(session, "plan 1 of optimizer0").to_json() == plan.to_json()
    assert len(session.values) >= pieces + 1
    assert max(map(len, session.values.values())) <= MAX_VALUE_BYTES


def test_what_is_not_rank_0s_plan_is_refused_by_name() -> None:
    session: Any = Published()
    hand_out(session, "p", plan_of(3))
    whole = dict(session.values)

    def refused(said: str, **values: bytes) -> None:
        session.values = whole | values
        with pytest.raises(UsageError, match=said):
            handed_out(session, "p")

    refused("p: what arrived is not what rank 0 published", **{"p, piece 0": zlib.compress(b"{}")})
    refused("p: its number of pieces and digest are", p=b'{"a": 1}')
    refused("p: its number of pieces and digest are", p=json.dumps([MAX_PIECES + 1, ""]).encode())


def test_a_plan_that_is_too_large_to_hand_out_is_refused_before_it_is_published() -> None:
    session: Any = Published()
    with pytest.raises(UsageError, match=r"are too many to hand out: at most .* fuse tensors into fewer buckets"):
        hand_out(session, "p", plan_of(8_000, letters=1000))
    assert not session.values
