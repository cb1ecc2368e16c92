"""CrossBarrier: the losses of DistributedOptimizer, bit for bit; what waits for what; what is refused, and what is said then."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import psgc.torch as psgc
from psgc.errors import UsageError
from tests.torch.small_models import batch, seeded

WIDTH = 6


class Attention(nn.Module):
    """Reads a layer's weight without calling the layer, as MultiheadAttention does, and has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.unused = nn.Linear(2, 2)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2))

    def forward(self, x: torch.Tensor) -> Any:
        x = x.unsqueeze(1)
        return self.head(self.attention(x, x, x)[0] * self.gain)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


def losses(
    rank: int, wrap: Callable[[nn.Module, torch.optim.Optimizer], torch.optim.Optimizer], make: Callable[[], nn.Module], kind: str
) -> list[float]:
    """A run with two parameter groups, a falling learning rate, evaluations in between, and two backwards a step."""
    model = seeded(make)
    psgc.broadcast_parameters(model.state_dict())
    parameters = list(model.parameters())
    optimizer = wrap(model, OPTIMIZERS[kind]([{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.02}]))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    found = []
    for step in range(5):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for part in range(2):
            loss = model(batch(rank, 2 * step + part, WIDTH)).square().mean()
            loss.backward()
            found.append(loss.item())
        optimizer.step()
        scheduler.step()
        if step == 2:
            with torch.no_grad():
                found.append(model(batch(7, 7, WIDTH)).sum().item())
            found += [value.sum().item() for value in model.state_dict().values()]
    return found


@pytest.mark.parametrize("make", [mlp, Attention])
def test_losses_are_those_with_a_barrier_bit_for_bit(ranks: Any, make: Callable[[], nn.Module]) -> None:
    for kind in OPTIMIZERS:
        crossing = ranks.run(
            2,
            lambda r, kind=kind: losses(
                r, lambda m, o: psgc.CrossBarrier(m, o, m.named_parameters(), backward_passes_per_step=2), make, kind
            ),
        )
        assert {s.layout for s in ranks.steps if not s.layout.startswith("broadcast")} == {"crossing0"}
        waiting = ranks.run(
            2, lambda r, kind=kind: losses(r, lambda m, o: psgc.DistributedOptimizer(o, m.named_parameters(), None, 2), make, kind)
        )
        assert crossing == waiting, kind


def train(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(rank, step, WIDTH)).square().mean().backward()
        optimizer.step()


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return psgc.CrossBarrier(model, torch.optim.SGD(model.parameters(), lr=0.5), **options)


def test_what_forward_needs_first_has_the_highest_priority_and_layers_wait_for_their_own(ranks: Any) -> None:
    def work(rank: int) -> list[list[float]]:
        class Reversed(nn.Module):  # forward's order is not that of registration
            def __init__(self) -> None:
                super().__init__()
                self.last, self.first = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

            def forward(self, x: torch.Tensor) -> Any:
                return self.last(self.first(x))

        model = seeded(Reversed)
        before = [model.first.weight.clone(), model.last.weight.clone()]
        optimizer = sgd(model)
        train(rank, model, optimizer)
        seen = [[float(torch.equal(a, b)) for a, b in zip(before, (model.first.weight, model.last.weight), strict=True)]]
        model.first(batch(rank, 1, WIDTH))
        seen.append([float(torch.equal(a, b)) for a, b in zip(before, (model.first.weight, model.last.weight), strict=True)])
        optimizer.synchronize()
        seen.append([float(torch.equal(a, b)) for a, b in zip(before, (model.first.weight, model.last.weight), strict=True)])
        return seen

    assert ranks.run(2, work, fuse_bytes=0) == [[[1, 1], [0, 1], [0, 0]]] * 2
    layout = ranks.sessions[0].job.layouts["crossing0"]
    names = {bucket.priority: layout.tensors[bucket.tensors[0]].name for bucket in layout.buckets}
    assert names[max(names)] == "first.weight"


def test_gradients_leave_during_backward_from_the_second_step_on(ranks: Any) -> None:
    def work(rank: int) -> list[int]:
        from psgc.torch.session import api

        model = seeded(mlp)
        optimizer, session = sgd(model), api.current_session()
        counts = []
        for step in range(2):
            model(batch(rank, step, WIDTH)).square().mean().backward()
            counts.append(len(session.submissions))
            optimizer.step()
            counts.append(len(session.submissions))
        return counts

    assert ranks.run(2, work, fuse_bytes=0) == [[0, 6, 12, 12]] * 2


def test_states_are_read_with_all_updates_applied_and_the_last_step_waits(ranks: Any) -> None:
    def work(rank: int) -> None:
        model, other = seeded(mlp), seeded(mlp)
        optimizer, plain = sgd(model, num_steps=2), torch.optim.SGD(other.parameters(), lr=0.5)
        train(rank, model, optimizer)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        kept = optimizer.state_dict()
        assert kept["param_groups"][0]["lr"] == 0.5 and type(optimizer).__name__ == "SGD" and isinstance(optimizer, torch.optim.SGD)
        optimizer.load_state_dict(kept)
        for r in range(2):
            (other(batch(r, 0, WIDTH)).square().mean() / 2).backward()
        plain.step()
        for name, value in other.state_dict().items():
            assert torch.allclose(value, state[name], atol=1e-6)
        train(rank, model, optimizer)
        last = copy.deepcopy(list(model.parameters()))
        optimizer.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(last, model.parameters(), strict=True))

    ranks.run(2, work)


def test_hooks_on_the_optimizer_run_once_a_step(ranks: Any) -> None:
    def work(rank: int) -> list[str]:
        calls: list[str] = []
        model = seeded(mlp)
        optimizer = sgd(model)
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        train(rank, model, optimizer, 2)
        optimizer.synchronize()
        return calls

    assert ranks.run(1, work) == [["before", "after"] * 2]


class Counting(torch.optim.SGD):
    """Counts its steps by itself, as some optimizers do."""

    taken = 0

    def step(self, closure: Any = None) -> Any:
        self.taken = self.taken + 1
        return super().step()


class InGroups(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.b.weight = self.a.weight


def test_what_needs_all_gradients_at_once_is_refused_with_the_remedy(ranks: Any) -> None:
    def work(rank: int) -> None:
        def fresh(**options: Any) -> tuple[nn.Module, torch.optim.SGD]:
            model = seeded(mlp)
            return model, sgd(model, **options)

        model, optimizer = fresh()
        with pytest.raises(UsageError, match=r"step\(closure\) has to see its updates at once; use DistributedOptimizer"):
            optimizer.step(lambda: 0.0)
        with pytest.raises(UsageError, match="GradScaler looks at all gradients before a step"):
            torch.amp.GradScaler("cpu").step(optimizer)
        torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
        with pytest.raises(UsageError, match="parameters cannot be added"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
        model, optimizer = fresh()
        model(batch(rank, 0, WIDTH)).square().mean().backward()
        with pytest.raises(UsageError, match=r"zero_grad\(\) while gradients are under way"):
            optimizer.zero_grad()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        with pytest.raises(UsageError, match=r"'0\.weight' was changed between backward\(\) and step\(\).*clipping"):
            optimizer.step()
        model, optimizer = fresh()
        model(batch(rank, 0, WIDTH)).square().mean().backward()
        with pytest.raises(UsageError, match=r"was computed 2 times before step.*backward_passes_per_step is 1"):
            model(batch(rank, 0, WIDTH)).square().mean().backward()
        model = seeded(mlp)
        for wrapped in (sgd(model), psgc.DistributedOptimizer(torch.optim.SGD(seeded(mlp).parameters(), lr=0.1))):
            with pytest.raises(UsageError, match="this SGD averages gradients already"):
                psgc.CrossBarrier(model, wrapped)
        with pytest.raises(UsageError, match="'weight' of b is that of a, too"):
            sgd(Tied())
        with pytest.raises(UsageError, match=r"'param\.0\.0' of the optimizer is not the model's"):
            psgc.CrossBarrier(seeded(mlp), torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
        with pytest.raises(UsageError, match="does not work with LBFGS"):
            psgc.CrossBarrier(model, torch.optim.LBFGS(model.parameters()))
        with pytest.raises(UsageError, match="num_steps is 0"):
            fresh(num_steps=0)

    ranks.run(1, work)


@pytest.mark.parametrize(("kind", "what"), [(Counting, "its attribute 'taken'"), (InGroups, "the option 'count' of its groups")])
def test_optimizers_whose_step_is_more_than_that_of_each_parameter_are_refused(ranks: Any, kind: Any, what: str) -> None:
    def work(rank: int) -> None:
        model = seeded(mlp)
        optimizer = psgc.CrossBarrier(model, kind(model.parameters(), lr=0.1))
        train(rank, model, optimizer)
        with pytest.raises(UsageError, match=f"a step of {kind.__name__} changes {what}, which all parameters share"):
            optimizer.synchronize()

    ranks.run(1, work)


def test_a_parameter_that_is_used_without_its_layer_is_found_in_backward(ranks: Any) -> None:
    def work(rank: int) -> None:
        model = seeded(mlp)
        optimizer = sgd(model)
        train(rank, model, optimizer)
        with pytest.raises(UsageError, match=r"forward used '0\.weight' before its update of the last step had come"):
            nn.functional.linear(batch(rank, 1, WIDTH), model[0].weight).sum().backward()  # type: ignore[index,arg-type]

    ranks.run(1, work, fuse_bytes=0)


def test_a_rule_and_codecs_choose_what_gradients_travel_by(ranks: Any) -> None:
    def work(rank: int) -> list[float]:
        model = seeded(mlp)
        optimizer = sgd(model, compression={"*.bias": "none", "*": "int8"})
        train(rank, model, optimizer, 3)
        return [value.sum().item() for value in model.state_dict().values()]

    first, second = ranks.run(2, work, fuse_bytes=400)
    assert first == second
    layout = ranks.sessions[0].job.layouts["crossing0"]
    by_priority = sorted(layout.buckets, key=lambda bucket: -bucket.priority)
    assert {bucket.codec for bucket in layout.buckets} == {"none", "int8"}
    names = [[layout.tensors[i].name for i in bucket.tensors] for bucket in by_priority]
    assert names == [["0.weight"], ["0.bias"], ["2.weight", "4.weight"], ["2.bias", "4.bias"]]


def test_a_bias_travels_with_its_layers_weight_however_large_that_is(ranks: Any) -> None:
    def work(rank: int) -> None:
        model = seeded(lambda: nn.Sequential(nn.Linear(WIDTH, 32), nn.Linear(32, 32), nn.Linear(32, 32)))
        train(rank, model, sgd(model))

    ranks.run(1, work, fuse_bytes=1000)
    layout = ranks.sessions[0].job.layouts["crossing0"]
    assert [[layout.tensors[i].name for i in bucket.tensors] for bucket in layout.buckets] == [
        ["0.weight", "0.bias"], ["1.weight", "1.bias"], ["2.weight", "2.bias"]
    ]  # fmt: skip


@pytest.mark.parametrize("steps", [0, 2])
def test_a_parameter_that_is_unfrozen_later_is_refused_by_its_name(ranks: Any, steps: int) -> None:
    """No layer waits for it: it would never be averaged or updated, unsaid."""

    def work(rank: int) -> None:
        model = seeded(mlp)
        model[0].requires_grad_(False)
        optimizer = sgd(model)
        train(rank, model, optimizer, steps)
        model[0].requires_grad_(True)
        with pytest.raises(
            UsageError, match=r"parameter '0\.weight' requires a gradient only since CrossBarrier.*use DistributedOptimizer for it"
        ):
            train(rank, model, optimizer)

    ranks.run(1, work)


def test_a_parameter_that_joins_a_group_by_hand_is_refused(ranks: Any) -> None:
    def work(rank: int) -> None:
        model = seeded(mlp)
        optimizer = sgd(model)
        optimizer.param_groups[0]["params"].append(torch.nn.Parameter(torch.ones(1)))
        with pytest.raises(UsageError, match=r"parameter 'param\.0\.6' requires a gradient only since"):
            train(rank, model, optimizer)

    ranks.run(1, work)


def test_a_parameter_that_is_frozen_later_keeps_its_value(ranks: Any) -> None:
    def work(rank: int) -> None:
        model = seeded(mlp)
        optimizer = sgd(model)
        train(rank, model, optimizer, 2)
        optimizer.synchronize()
        model[0].requires_grad_(False)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        train(rank, model, optimizer, 2)
        optimizer.synchronize()
        moved = [not torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True)]
        assert moved == [False, False, True, True, True, True]

    ranks.run(2, work)
