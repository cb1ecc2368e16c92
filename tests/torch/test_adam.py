"""OneBitAdam and ZeroOneAdam: plain Adam while the variance learns, then averaged momenta, and the same parameters on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import psgc.torch as psgc
from psgc.errors import UsageError
from tests.torch.small_models import batch, linear, seeded, weights

OPTIONS = {"lr": 0.05, "betas": (0.8, 0.9), "weight_decay": 0.1}


def onebit(params: Any, **options: Any) -> psgc.OneBitAdam:
    return psgc.OneBitAdam(params, **{**OPTIONS, "warmup_steps": 3, **options})


def zero_one(params: Any, **options: Any) -> psgc.ZeroOneAdam:
    schedule = {"warmup_steps": 3, "local_growth": 2, "max_local_steps": 4, "variance_updates": 2}
    return psgc.ZeroOneAdam(params, **{**OPTIONS, **schedule, **options})


BOTH = pytest.mark.parametrize("make", [onebit, zero_one])


def train(model: nn.Module, optimizer: Any, rank: int, steps: range) -> list[float]:
    """The weights after these steps."""
    for step in steps:
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
    return weights(model)


def trained(make: Any, steps: int, **options: Any) -> Callable[[int], list[float]]:
    """What a rank does: ``steps`` steps of a small model, then all meet."""

    def work(rank: int) -> list[float]:
        model = linear()
        optimizer = make(model.named_parameters(), **options)
        train(model, optimizer, rank, range(steps))
        if isinstance(optimizer, psgc.ZeroOneAdam):
            optimizer.synchronize_parameters()
        return weights(model)

    return work


def adam_alone(kind: Any, size: int, steps: int, **options: Any) -> list[float]:
    """The weights after ``steps`` steps of torch's optimizer on the mean of ``size`` ranks' gradients."""
    model = linear()
    optimizer = kind(model.parameters(), **{**OPTIONS, **options})
    for step in range(steps):
        optimizer.zero_grad()
        (sum(model(batch(rank, step)).square().mean() for rank in range(size)) / size).backward()
        optimizer.step()
    return weights(model)


@BOTH
@pytest.mark.parametrize(("kind", "decoupled"), [(torch.optim.AdamW, True), (torch.optim.Adam, False)])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_warm_up_is_adam_on_the_mean_gradient(ranks: Any, make: Any, kind: Any, decoupled: bool, size: int) -> None:
    results = ranks.run(size, trained(make, 6, decoupled_weight_decay=decoupled, warmup_steps=6, **whole(make)))
    assert all(result == results[0] for result in results)
    assert results[0] == pytest.approx(adam_alone(kind, size, 6), abs=1e-6)


def whole(make: Any) -> dict[str, int]:
    """Options that keep every step of a warm-up averaging gradients."""
    return {"variance_updates": 100} if make is zero_one else {}


@BOTH
def test_alone_the_warm_up_is_torch_bit_for_bit(ranks: Any, make: Any) -> None:
    (alone,) = ranks.run(1, trained(make, 5, warmup_steps=5, **whole(make)))
    assert alone == adam_alone(torch.optim.AdamW, 1, 5)


@pytest.mark.parametrize("fuse_bytes", [0, 4 << 20])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_then_the_variance_stays_and_momenta_are_averaged(ranks: Any, size: int, fuse_bytes: int) -> None:
    results = ranks.run(size, trained(onebit, 8, codec="none"), fuse_bytes=fuse_bytes)
    assert all(result == results[0] for result in results)

    models = [linear() for _ in range(size)]  # each with its own rank's gradients
    lr, (beta1, beta2), decay = OPTIONS["lr"], OPTIONS["betas"], OPTIONS["weight_decay"]
    limit = max(1.0, (1 - beta1) / (1 - beta2) ** 0.5) * size**0.5
    momenta = [(torch.zeros_like(p), torch.zeros_like(p)) for p in models[0].parameters()]
    for step in range(8):
        for rank, model in enumerate(models):
            model.zero_grad()
            model(batch(rank, step)).square().mean().backward()
        for same, (m, v) in zip(zip(*(model.parameters() for model in models), strict=True), momenta, strict=True):
            mean = sum(p.grad for p in same) / size
            if step < 3:
                v.mul_(beta2).add_((1 - beta2) * mean**2)
            root = (v / (1 - beta2 ** min(step + 1, 3))).sqrt() + 1e-8
            if step < 3:
                m.lerp_(mean, 1 - beta1)
                update = m / root
            else:
                update = sum(((beta1 * m + (1 - beta1) * p.grad) / root).clamp(-limit, limit) for p in same) / size
                m.copy_(update * root)
            for p in same:
                p.data.mul_(1 - lr * decay).sub_(lr / (1 - beta1 ** (step + 1)) * update)
    assert results[0] == pytest.approx(weights(models[0]), abs=1e-5)


def test_gradients_leave_during_the_warm_up_only(ranks: Any) -> None:
    ranks.run(2, trained(onebit, 5))
    assert [s.layout for s in ranks.steps] == ["optimizer0"] * 3 + ["optimizer0.momentum"] * 2


def test_residuals_of_momenta_do_not_follow_the_learning_rate(ranks: Any) -> None:
    def work(rank: int) -> None:
        model = linear()
        optimizer = onebit(model.named_parameters(), warmup_steps=1)
        for step in range(4):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
            train(model, optimizer, rank, range(step, step + 1))

    ranks.run(2, work)
    assert [(s.rescale, s.previous_skipped, s.skip) for s in ranks.steps] == [(1.0, False, False)] * 4


def test_the_variance_of_zero_one_adam_is_updated_ever_more_rarely(ranks: Any) -> None:
    ranks.run(2, trained(zero_one, 20, warmup_steps=100))
    whole_gradients = [i for i, s in enumerate(ranks.steps) if s.layout == "optimizer0"]
    assert whole_gradients == [0, 1, 2, 4, 6, 10, 14]


def test_ranks_of_zero_one_adam_meet_ever_more_rarely(ranks: Any) -> None:
    def work(rank: int) -> list[int]:
        model = linear()
        optimizer = zero_one(model.named_parameters(), warmup_steps=1)
        met = []
        for step in range(21):
            before = len(psgc.session.api.current_session().submissions)
            train(model, optimizer, rank, range(step, step + 1))
            if len(psgc.session.api.current_session().submissions) > before:
                met.append(step)
        return met

    assert ranks.run(2, work) == [[0, 1, 2, 4, 8, 12, 16, 20]] * 2


def test_ranks_part_between_meetings_and_agree_after_them(ranks: Any) -> None:
    def work(rank: int) -> list[list[float]]:
        model = linear()
        optimizer = zero_one(model.named_parameters(), warmup_steps=1)
        seen = [train(model, optimizer, rank, range(step, step + 1)) for step in range(11)]
        optimizer.synchronize_parameters()
        optimizer.synchronize_parameters()
        return [*seen, weights(model)]

    first, second = ranks.run(2, work)
    assert [a == b for a, b in zip(first, second, strict=True)] == [
        True, True, True, False, True, False, False, False, True, False, False, True,
    ]  # fmt: skip
    assert len([s for s in ranks.steps if "momentum" in s.layout]) == 5


def test_without_compression_and_local_steps_zero_one_adam_is_one_bit_adam(ranks: Any) -> None:
    one = ranks.run(2, trained(onebit, 8, codec="none"))
    other = ranks.run(2, trained(zero_one, 8, codec="none", max_local_steps=1, variance_updates=3))
    assert one[0] == pytest.approx(other[0], abs=1e-6)


def test_local_steps_are_those_of_the_paper(ranks: Any) -> None:
    """Algorithm 1 of Lu et al. 2022 written out, without compression: anchors, what each rank moved, and the momentum that comes of it."""
    lr, (beta1, beta2), decay = 0.05, (0.9, 0.999), 0.1
    options = {"codec": "none", "variance_updates": 3, "betas": (beta1, beta2)}
    results = ranks.run(2, trained(zero_one, 11, **options))

    models = [linear(), linear()]
    parameters = [list(model.parameters()) for model in models]
    anchors = [p.detach().clone() for p in parameters[0]]
    momenta = [[torch.zeros_like(p) for p in anchors] for _ in models]
    moved = [[torch.zeros_like(p) for p in anchors] for _ in models]
    variance = [torch.zeros_like(p) for p in anchors]
    rates, kept = 0.0, 1.0
    for step in range(11):
        for rank, model in enumerate(models):
            model.zero_grad()
            model(batch(rank, step)).square().mean().backward()
        rate = lr / (1 - beta1 ** (step + 1))
        rates, kept = rates + rate, kept * (1 - lr * decay)
        meet = step in (0, 1, 2, 3, 4, 6, 10)
        for i, v in enumerate(variance):
            if step < 3:
                v.lerp_(((parameters[0][i].grad + parameters[1][i].grad) / 2) ** 2, 1 - beta2)
            root = (v / (1 - beta2 ** min(step + 1, 3))).sqrt() + 1e-8
            for rank in (0, 1):
                momenta[rank][i].lerp_(parameters[rank][i].grad, 1 - beta1)
                moved[rank][i] += rate * momenta[rank][i] / root
                parameters[rank][i].data.mul_(1 - lr * decay).sub_(rate * momenta[rank][i] / root)
            if meet:
                mean = (moved[0][i] + moved[1][i]) / 2
                anchors[i] = anchors[i] * kept - mean
                for rank in (0, 1):
                    momenta[rank][i] = mean * root / rates
                    parameters[rank][i].data.copy_(anchors[i])
                    moved[rank][i] = torch.zeros_like(mean)
        if meet:
            rates, kept = 0.0, 1.0
    assert results[0] == results[1] == pytest.approx(weights(models[0]), abs=1e-5)


def test_no_update_is_larger_than_adam_of_one_rank_could_make_it(ranks: Any) -> None:
    """An element that was quiet while the variance froze gets a gradient a million times as large."""

    def work(rank: int) -> float:
        weight = nn.Parameter(torch.zeros(2))
        optimizer = onebit([("weight", weight)], warmup_steps=2, betas=(0.9, 0.95), weight_decay=0.0)
        for step in range(3):
            weight.grad = torch.tensor([1.0, 1e-6 if step < 2 else 1.0])
            before = weight.detach().clone()
            optimizer.step()
        return float((weight - before).abs().max().detach() * (1 - 0.9**3) / 0.05)

    assert ranks.run(4, work) == pytest.approx([2.0] * 4, abs=1e-6)


@BOTH
def test_a_rank_without_a_gradient_counts_as_zeros(ranks: Any, make: Any) -> None:
    def work(rank: int) -> list[float]:
        model = nn.ModuleList([linear(seed=0), linear(seed=1)])
        optimizer = make(model.named_parameters())
        for step in range(9):
            optimizer.zero_grad()
            used = [0, 1] if rank == 0 or step == 0 else [0] if step != 5 else []
            if used:
                sum(model[i](batch(rank, step)).square().mean() for i in used).backward()
            optimizer.step()
        if make is zero_one:
            optimizer.synchronize_parameters()
        return weights(model)

    first, second = ranks.run(2, work)
    assert first == second


@BOTH
def test_a_branch_that_was_never_used_is_left_alone(ranks: Any, make: Any) -> None:
    def work(rank: int) -> bool:
        model = nn.ModuleList([linear(seed=0), linear(seed=1)])
        before = weights(model[1])
        train(model[0], make(model.named_parameters()), rank, range(6))
        return weights(model[1]) == before

    assert ranks.run(2, work) == [True, True]


@BOTH
def test_a_parameter_that_is_frozen_later_stops_moving(ranks: Any, make: Any) -> None:
    def work(rank: int) -> bool:
        model = linear()
        optimizer = make(model.named_parameters())
        train(model, optimizer, rank, range(4))
        model.bias.requires_grad_(False)
        model.bias.grad = None
        before = model.bias.detach().clone()
        train(model, optimizer, rank, range(4, 9))
        return torch.equal(model.bias, before)

    assert ranks.run(2, work) == [True, True]


@BOTH
def test_a_first_gradient_after_the_warm_up_is_refused_and_named(ranks: Any, make: Any) -> None:
    def work(rank: int) -> None:
        model = nn.ModuleList([linear(), linear(seed=1)])
        optimizer = make(model.named_parameters())
        for step in range(5):
            optimizer.zero_grad()
            model[min(step // 4, 1)](batch(rank, step)).sum().backward()
            optimizer.step()

    with pytest.raises(UsageError, match=r"parameter '1.weight' has its first gradient in step 5, when the variance is frozen"):
        ranks.run(1, work)


@BOTH
def test_empty_scalar_and_channels_last_parameters_are_no_trouble(ranks: Any, make: Any) -> None:
    def work(rank: int) -> list[float]:
        convolution = seeded(lambda: nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last)
        empty, scalar = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.tensor(2.0))
        optimizer = make([*convolution.parameters(), empty, scalar])
        for step in range(7):
            optimizer.zero_grad()
            image = batch(rank, step, 300).reshape(4, 3, 10, 10)
            (convolution(image).square().sum() * scalar + empty.sum()).backward()
            optimizer.step()
        if make is zero_one:
            optimizer.synchronize_parameters()
        return [*weights(convolution), scalar.item()]

    first, second = ranks.run(2, work)
    assert first == second


@BOTH
def test_groups_have_their_own_options(ranks: Any, make: Any) -> None:
    def work(rank: int) -> list[bool]:
        model = nn.ModuleList([linear(), linear(seed=1)])
        before = [weights(part) for part in model]
        groups = [{"params": model[0].named_parameters(prefix="a")}, {"params": model[1].named_parameters(prefix="b"), "lr": 0.0}]
        optimizer = make(groups)
        for step in range(7):
            optimizer.zero_grad()
            sum(part(batch(rank, step)).square().mean() for part in model).backward()
            optimizer.step()
        return [weights(part) == old for part, old in zip(model, before, strict=True)]

    assert ranks.run(2, work) == [[False, True]] * 2
    assert {s.tensors for s in ranks.steps if "momentum" in s.layout} == {("a.weight", "a.bias", "b.weight", "b.bias")}


@BOTH
@pytest.mark.parametrize("pause", [2, 4, 6, 7])
def test_a_saved_state_goes_on_as_if_nothing_had_happened(ranks: Any, make: Any, pause: int) -> None:
    def work(rank: int) -> list[list[float]]:
        model = linear()
        optimizer = make(model.named_parameters())
        train(model, optimizer, rank, range(pause))
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        uninterrupted = train(model, optimizer, rank, range(pause, 13))

        again = linear(seed=7)
        optimizer = make(again.named_parameters(), lr=9.0)
        again.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        return [uninterrupted, train(again, optimizer, rank, range(pause, 13))]

    for uninterrupted, resumed in ranks.run(2, work):
        assert uninterrupted == resumed


def test_training_begun_by_adamw_goes_on_from_its_state(ranks: Any) -> None:
    def work(rank: int) -> list[float]:
        model = linear()
        adamw = psgc.DistributedOptimizer(torch.optim.AdamW(model.parameters(), **OPTIONS), model.named_parameters())
        train(model, adamw, rank, range(2))
        saved = copy.deepcopy(adamw.state_dict())
        del adamw
        optimizer = onebit(model.named_parameters())
        optimizer.load_state_dict(saved)
        return train(model, optimizer, rank, range(2, 6))

    assert ranks.run(2, work)[0] == pytest.approx(ranks.run(2, trained(onebit, 6))[0], abs=1e-6)


@BOTH
def test_a_rank_without_state_gets_it_by_broadcast(ranks: Any, make: Any) -> None:
    def work(rank: int) -> list[float]:
        model = linear()
        optimizer = make(model.named_parameters())
        if rank == 0:
            saved = optimizer.state_dict()
            for index, parameter in enumerate(model.parameters()):
                moments = {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.ones_like(parameter)}
                saved["state"][index] = {**moments, "step": 5, "variance_steps": 3}
            saved["param_groups"][0]["steps"] = 5
            optimizer.load_state_dict(saved)
        psgc.broadcast_optimizer_state(optimizer)
        assert optimizer.steps == 5
        train(model, optimizer, rank, range(3))
        if make is zero_one:
            optimizer.synchronize_parameters()
        return weights(model)

    first, second = ranks.run(2, work)
    assert first == second


@BOTH
def test_schedulers_closures_hooks_and_passes_work_as_with_adamw(ranks: Any, make: Any) -> None:
    def work(rank: int) -> tuple[list[float], int, float]:
        model = linear()
        optimizer = make(model.named_parameters(), backward_passes_per_step=2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        hooked: list[int] = []
        optimizer.register_step_post_hook(lambda *_: hooked.append(1))
        loss = torch.tensor(0.0)
        for step in range(9):

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                for half in range(2):
                    loss = model(batch(rank, 2 * step + half)).square().mean() / 2
                    loss.backward()
                return loss

            loss = optimizer.step(closure)
            schedule.step()
        if make is zero_one:
            optimizer.synchronize_parameters()
        return weights(model), len(hooked), loss.item()

    first, second = ranks.run(2, work)
    assert first[0] == second[0] and first[1] == 9 and first[2] > 0


def test_backward_returns_with_the_mean_in_the_warm_up_and_with_each_ranks_own_gradient_after_it(ranks: Any) -> None:
    def work(rank: int) -> list[float]:
        model = linear()
        optimizer = onebit(model.named_parameters(), lr=0.0)
        seen = []
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.full((1, 3), rank + 1.0)).sum().backward()
            seen.append(model.weight.grad[0, 0].item())
            optimizer.step()
        return seen

    assert ranks.run(2, work) == [[1.5] * 3 + [1.0] * 2, [1.5] * 3 + [2.0] * 2]


@pytest.mark.parametrize("explicit", [True, False])
@BOTH
def test_clipping_works_in_every_phase_after_synchronize_or_without(ranks: Any, make: Any, explicit: bool) -> None:
    def work(rank: int) -> list[float]:
        model = linear()
        optimizer = make(model.named_parameters())
        for step in range(8):
            optimizer.zero_grad()
            (100 * model(batch(rank, step))).square().mean().backward()
            if explicit:
                optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize() if explicit else nullcontext():
                optimizer.step()
        if make is zero_one:
            optimizer.synchronize_parameters()
        return weights(model)

    first, second = ranks.run(2, work)
    assert first == second


@BOTH
@pytest.mark.parametrize("explicit", [True, False])
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: Any, make: Any, explicit: bool) -> None:
    def work(rank: int) -> tuple[list[bool], float, list[float]]:
        model = linear()
        optimizer, scaler = make(model.named_parameters()), torch.amp.GradScaler("cpu", init_scale=256.0)
        applied = []
        for step in range(10):
            before = weights(model)
            optimizer.zero_grad()
            loud = float("inf") if (rank, step) in ((1, 1), (0, 5), (1, 8)) else 1.0
            scaler.scale(model(batch(rank, step) * loud).square().mean()).backward()
            if explicit:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            applied.append(weights(model) != before)
        if make is zero_one:
            optimizer.synchronize_parameters()
        return applied, scaler.get_scale(), weights(model)

    first, second = ranks.run(2, work)
    assert first == second
    assert first[:2] == ([step not in (1, 5, 8) for step in range(10)], 32.0)
    assert all(map(torch.isfinite, map(torch.tensor, first[2])))


@BOTH
def test_nan_reaches_every_rank_as_under_adamw(ranks: Any, make: Any) -> None:
    def work(rank: int) -> bool:
        model = linear()
        optimizer = make(model.named_parameters(), max_local_steps=1) if make is zero_one else make(model.named_parameters())
        train(model, optimizer, rank, range(4))
        model.weight.grad = torch.full((2, 3), float("nan") if rank == 1 else 1.0)
        optimizer.step()
        return bool(model.weight.isnan().all())

    assert ranks.run(2, work) == [True, True]


def test_sparse_gradients_are_refused(ranks: Any) -> None:
    def work(rank: int) -> None:
        model = nn.Embedding(5, 2)
        optimizer = onebit(model.named_parameters(), warmup_steps=1)
        for sparse in (False, True):
            model.sparse = sparse
            optimizer.zero_grad()
            model(torch.tensor([1])).sum().backward()
            optimizer.step()

    with pytest.raises(UsageError, match="sparse=False"):
        ranks.run(1, work)
