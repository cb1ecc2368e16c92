"""What steps that do not wait for every rank (PSGC_BACKUP_WORKERS) are for, and what refuses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import psgc.torch as psgc
from psgc.config import Config
from psgc.errors import ConfigError, UsageError


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 3))


def sgd(of: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(of.parameters(), lr=0.1)


OTHERS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "DistributedDataParallel": psgc.DistributedDataParallel,
    "CrossBarrier": lambda of: psgc.CrossBarrier(of, sgd(of), of.named_parameters()),
    "an optimizer that sends momenta": lambda of: psgc.OneBitAdam(of.parameters(), warmup_steps=1),
    "DeMo": lambda of: psgc.DeMo(of.named_parameters()),
    "DiLoCo": lambda of: psgc.DiLoCo(of, sgd(of), every=2),
    'DistributedOptimizer by "auto"': lambda of: psgc.DistributedOptimizer(sgd(of), of.named_parameters(), compression="auto"),
    "DistributedOptimizer with sparse gradients": lambda of: psgc.DistributedOptimizer(sgd(of), of.named_parameters(), sparse=["0.weight"]),
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_front_ends_refuse_in_a_line(ranks: Any, what: str) -> None:
    def work(rank: int) -> None:
        with pytest.raises(
            UsageError, match=f"^{what}.*: PSGC_BACKUP_WORKERS=1 is for gradients that DistributedOptimizer averages; .* or unset it$"
        ):
            OTHERS[what](model())

    ranks.run(2, work, backup_workers=1)


def test_lbfgs_refuses(ranks: Any) -> None:
    def work(rank: int) -> None:
        with pytest.raises(UsageError, match="PSGC_BACKUP_WORKERS does not work with LBFGS"):
            psgc.DistributedOptimizer(torch.optim.LBFGS(model().parameters()))

    ranks.run(2, work, backup_workers=1)


def test_only_an_optimizers_gradients_are_declared_so(ranks: Any) -> None:
    found: dict[str, int] = {}

    def work(rank: int) -> None:
        of = model()
        psgc.broadcast_parameters(of.state_dict(), root_rank=0)
        optimizer: Any = psgc.DistributedOptimizer(sgd(of), of.named_parameters())
        of(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        psgc.push_pull(torch.ones(3), name="metric")
        found.update({layout.name: layout.backup for layout in ranks.sessions[rank].job.layouts.values()})  # type: ignore[attr-defined]
        with pytest.raises(UsageError, match=r"^switch_plan\(\): under PSGC_BACKUP_WORKERS=1 a gradient may come after its step"):
            optimizer.switch_plan("onebit")

    ranks.run(2, work, backup_workers=1)
    assert {name for name, backup in found.items() if backup} == {"optimizer0"}, found
    assert len(found) > 2


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"async_mode": True}, "asynchronous training waits for nobody"),
        ({"on_worker_loss": "wait"}, "a worker that dies may owe a step to the others"),
        ({"verify": "v.json"}, "would be lost between two codecs"),
        ({"wire": "pslite"}, "servers of that wire await every worker"),
    ],
)
def test_settings_that_do_not_go_together_are_named(other: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"^PSGC_BACKUP_WORKERS=1 and PSGC_.*{words}"):
        Config(backup_workers=1, **other)
    Config(backup_workers=1)
