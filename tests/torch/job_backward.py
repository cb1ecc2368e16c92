"""A worker of a real job whose loops look at p.grad when backward returns. Prints a line of JSON for each case. Run by test_backward_job.py.

A case trains one model under DistributedOptimizer, as the codec says, and its twin under stock DDP over gloo, on the same batches.
"""

from __future__ import annotations

import copy
import hashlib
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import psgc.torch as psgc

STEPS, WIDTH = 5, 64
Wrap = Callable[[nn.Module], tuple[Any, Any]]  # the model as the loop calls it, and its optimizer


class Layers(nn.Module):
    """Some of them checkpointed, on request."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.middle, self.head = nn.Linear(WIDTH, 200), nn.Linear(200, 150), nn.Linear(150, 10)

    def forward(self, x: torch.Tensor, reentrant: bool | None = None) -> torch.Tensor:
        x = self.stem(x).relu()
        x = self.middle(x) if reentrant is None else checkpoint(self.middle, x, use_reentrant=reentrant)
        return self.head(x.relu())


class Seen:
    """What a loop saw: losses, and a digest of all that p.grad held when it looked."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self._digest = hashlib.sha256()

    def look(self, *models: nn.Module) -> None:
        for model in models:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    self._digest.update(parameter.grad.numpy().tobytes())

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()[:16]


def data(step: int, features: int = WIDTH) -> torch.Tensor:
    """Other ones on every rank."""
    return torch.randn(8, features, generator=torch.Generator().manual_seed(10 * step + psgc.rank()))


def clipped(wrap: Wrap, seen: Seen, reentrant: bool | None = None) -> None:
    model, optimizer = wrap(seeded(Layers))
    for step in range(STEPS):
        optimizer.zero_grad()
        # Stock DDP is the reference, which does not know reentrant checkpoints without being told more.
        checkpointed = () if reentrant is None or isinstance(model, DistributedDataParallel) else (reentrant,)
        loss = (10 * model(data(step), *checkpointed)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        seen.look(model)
        optimizer.step()
        seen.losses.append(loss.item())


def reentrant(wrap: Wrap, seen: Seen) -> None:
    clipped(wrap, seen, reentrant=True)


def twice(wrap: Wrap, seen: Seen) -> None:
    model, optimizer = wrap(seeded(Layers))
    for step in range(STEPS):
        optimizer.zero_grad()
        for half in range(2):
            loss = model(data(2 * step + half)).square().mean()
            loss.backward()
            seen.look(model)
            seen.losses.append(loss.item())
        optimizer.step()


def gan(wrap: Wrap, seen: Seen) -> None:
    """The DCGAN tutorial's loop."""
    d, d_step = wrap(seeded(lambda: nn.Sequential(nn.Linear(WIDTH, 300), nn.LeakyReLU(0.2), nn.Linear(300, 1), nn.Sigmoid())))
    g, g_step = wrap(seeded(lambda: nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, WIDTH), nn.Tanh())))
    criterion = nn.BCELoss()
    for step in range(STEPS):
        d.zero_grad()
        errors = [criterion(d(data(step)).view(-1), torch.ones(8))]
        errors[0].backward()
        fake = g(data(step, 20))
        errors.append(criterion(d(fake.detach()).view(-1), torch.zeros(8)))
        errors[1].backward()
        seen.look(d)
        d_step.step()
        g.zero_grad()
        errors.append(criterion(d(fake).view(-1), torch.ones(8)))
        errors[2].backward()
        seen.look(d, g)
        g_step.step()
        seen.losses += [error.item() for error in errors]


CASES = {case.__name__: case for case in (clipped, reentrant, twice, gan)}


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def under_psgc(codec: str) -> Wrap:
    def wrap(model: nn.Module) -> tuple[Any, Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return model, psgc.DistributedOptimizer(optimizer, model.named_parameters(), compression=codec)

    return wrap


def under_ddp(model: nn.Module) -> tuple[Any, Any]:
    # A buffer of DDP's own, broadcast between a graph's forward and backward, would make the GAN's graph stale; there is none here.
    wrapper = DistributedDataParallel(model, gradient_as_bucket_view=False)
    return wrapper, torch.optim.SGD(wrapper.parameters(), lr=0.05, momentum=0.9)


def conserved() -> float:
    """Two backwards a step under a codec that leaves much behind: how far what was delivered and what is kept are, together, from what
    was computed, over the norm of that."""
    model = seeded(Layers)
    plain = copy.deepcopy(model)
    optimizer: Any = psgc.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(), compression="topk:k=0.01/none"
    )
    delivered: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        for half in range(2):
            for each in (model, plain):
                each(data(2 * step + half)).square().mean().backward()
        for name, parameter in model.named_parameters():
            delivered[name] = delivered.get(name, 0) + parameter.grad.clone()
        optimizer.step()
    kept = {name: memory["residual"] for name, memory in optimizer.residual_state_dict()["memories"]["gradients"].items()}
    assert len(kept) == 6, kept.keys()
    away = total = 0.0
    for name, parameter in plain.named_parameters():
        computed = psgc.push_pull(parameter.grad, average=True, name=f"computed {name}")
        left = psgc.push_pull(kept[name].reshape(parameter.shape).clone(), average=True, name=f"kept {name}")
        assert left.norm() > 0.1 * computed.norm(), "the codec leaves much behind"
        away += float((computed - delivered[name] - left).square().sum())
        total += float(computed.square().sum())
    return (away / total) ** 0.5


def main() -> None:
    torch.set_num_threads(1)
    psgc.init()
    dist.init_process_group("gloo", rank=psgc.rank(), world_size=psgc.size())
    said: dict[str, Any] = {"rank": psgc.rank(), "away": conserved(), "cases": {}}
    for name, case in CASES.items():
        stock = Seen()
        case(under_ddp, stock)
        said["cases"][name] = {"ddp": [stock.losses, stock.digest]}
        for codec in sys.argv[1:]:
            seen = Seen()
            case(under_psgc(codec), seen)
            said["cases"][name][codec] = [seen.losses, seen.digest]
    print(json.dumps(said), flush=True)
    psgc.barrier()
    dist.destroy_process_group()
    psgc.shutdown()


if __name__ == "__main__":
    main()
