"""Optimizers that exchange otherwise than gradients, where a loss scaler drops a step on one rank alone: the others go on with it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.parametrize("optimizer", ["demo", "diloco", "wrapped"])
def test_an_overflow_on_one_rank_leaves_all_ranks_in_step(make_job: Callable[..., Any], optimizer: str) -> None:
    texts = make_job(nodes=2, servers=1).said(optimizer, job="scaled_apart.py")
    (first,), (second,) = (re.findall(r"parameters (\w+)", text) for text in texts)
    assert first == second
    moved = [[float(each) for each in re.findall(r"moved (\S+)", text)] for text in texts]
    if (
        optimizer == "demo"
    ):  # rank 0's gradients are -3 each and rank 1's are 1: the sum's sign is rank 0's, but in the step in which it has none
        assert moved[0] == moved[1] == [0.001, 0.001, -0.001, 0.001, 0.001, 0.001, 0.001]
    else:
        assert moved[0][2] != moved[1][2], "each has steps of its own, but for those after which they exchange"
