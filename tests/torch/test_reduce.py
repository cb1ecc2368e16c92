"""``reduce``: means and sums among groups of ranks. Real processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import psgc.torch as psgc
from psgc.errors import UsageError


@pytest.mark.parametrize("servers", [1, 0])
def test_each_group_has_its_own_means_and_sums_and_bad_groups_are_told(make_job: Callable[..., Any], servers: int) -> None:
    for text in make_job(nodes=4, servers=servers).said(job="reduces.py"):
        told = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
        assert told["overlap"] == "reduce: groups [0, 1], [1, 2]: expected ranks from 0 to 3, each in one group at most, and no empty group"
        assert told["absent"] == "reduce: groups [0, 4]: expected ranks from 0 to 3, each in one group at most, and no empty group"
        assert told["again"] == "reduce: 'gradients' was of other tensors, groups or codecs before; give each reduction its own name"


@pytest.mark.parametrize("servers", [1, 0])
def test_in_a_meshs_group_ranks_of_no_group_keep_their_tensors_and_means_are_of_the_groups_ranks_alone(
    make_job: Callable[..., Any], servers: int
) -> None:
    texts = make_job(nodes=6, servers=servers).said(job="mesh_reduces.py")
    assert [f"all right in {[rank % 2, rank % 2 + 2, rank % 2 + 4]}" in text for rank, text in enumerate(texts)] == [True] * 6


@pytest.mark.parametrize("loss", ["wait", "shrink"])
def test_where_a_process_may_take_a_dead_workers_place_it_is_refused(ranks: Any, loss: str) -> None:
    def work(rank: int) -> None:
        tensor = torch.full((3,), float(rank))
        with pytest.raises(
            UsageError, match=rf"^reduce: under PSGC_ON_WORKER_LOSS={loss} .*; push_pull over all ranks can, in the loop of"
        ):
            psgc.reduce([tensor], [(0, 1)], "gradients")
        assert torch.equal(tensor, torch.full((3,), float(rank)))

    ranks.run(2, work, on_worker_loss=loss)
