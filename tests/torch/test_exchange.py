"""How DistributedOptimizer's gradients travel: what is sent when, with what, and what every rank gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import psgc.torch as psgc
from psgc.errors import JobFailed, UsageError
from tests.torch.small_models import batch, linear, seeded, sgd, weights

TINY: dict[str, Any] = {"fuse_bytes": 0}  # every tensor a bucket of its own
LATE: dict[str, Any] = {"late_synchronization": True}
MODES = pytest.mark.parametrize("late", [False, True], ids=["at the end of backward", "late"])


@MODES
@pytest.mark.parametrize("fuse_bytes", [0, 4 << 20])
@pytest.mark.parametrize("size", [1, 3])
def test_all_ranks_step_with_the_mean_gradient(ranks: Any, size: int, fuse_bytes: int, late: bool) -> None:
    def train(rank: int) -> list[float]:
        model = linear()
        optimizer = sgd(model, momentum=0.9)
        for step in range(4):
            optimizer.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            optimizer.step()
        return weights(model)

    results = ranks.run(size, train, fuse_bytes=fuse_bytes, late_synchronization=late)
    reference = linear()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        (sum(reference(batch(rank, step)).square().mean() for rank in range(size)) / size).backward()
        optimizer.step()
    assert all(result == results[0] for result in results)
    assert results[0] == pytest.approx(weights(reference), abs=1e-6)


def test_from_the_second_step_on_buckets_leave_during_backward(ranks: Any) -> None:
    def train(rank: int) -> list[int]:
        model = linear()
        optimizer = sgd(model)
        sent = []
        for step in range(2):
            optimizer.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            sent.append(len(psgc.session.api.current_session().submissions))
            optimizer.step()
        return sent

    assert ranks.run(2, train, **TINY, **LATE) == [[0, 4]] * 2


def test_the_layout_follows_the_order_in_which_gradients_became_ready(ranks: Any) -> None:
    def train(rank: int) -> None:
        model = seeded(lambda: nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)))
        optimizer = sgd(model)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    ranks.run(2, train, **TINY)
    assert [s.tensors for s in ranks.steps] == [("1.weight",), ("0.weight",)]


@MODES
def test_clip_then_step_pushes_once(ranks: Any, late: bool) -> None:
    def train(rank: int) -> float:
        model = linear()
        optimizer = sgd(model)
        for step in range(3):
            optimizer.zero_grad()
            (100 * model(batch(rank, step))).square().mean().backward()
            optimizer.synchronize()
            optimizer.synchronize()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return float(norm)

    first, second = ranks.run(2, train, late_synchronization=late)
    assert first == second > 1.0
    assert len(ranks.steps) == 3


def test_skip_synchronize_steps_with_what_synchronize_brought(ranks: Any) -> None:
    def train(rank: int) -> list[float]:
        model = linear()
        optimizer = sgd(model)
        model(batch(rank, 0)).square().mean().backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        return weights(model)

    results = ranks.run(2, train)
    assert results[0] == results[1] != weights(linear())
    assert len(ranks.steps) == 1


def test_skip_synchronize_without_synchronize_is_refused(ranks: Any) -> None:
    def train(rank: int) -> None:
        model = linear()
        optimizer = sgd(model)
        model(batch(rank, 0)).sum().backward()
        with optimizer.skip_synchronize(), pytest.raises(UsageError, match=r"call synchronize\(\) first"):
            optimizer.step()

    ranks.run(1, train, **LATE)


def test_late_clipping_before_synchronize_is_refused_and_names_the_parameter(ranks: Any) -> None:
    def train(rank: int) -> None:
        model = linear()
        optimizer = sgd(model)
        for _ in range(2):
            optimizer.zero_grad()
            model(batch(rank, 0)).sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        (100 * model(batch(rank, 0))).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(UsageError, match=r"'weight' was changed between .* after optimizer.synchronize\(\)"):
            optimizer.step()

    ranks.run(1, train, **LATE)


@MODES
def test_a_rank_that_skips_a_branch_gets_the_others_mean(ranks: Any, late: bool) -> None:
    def train(rank: int) -> list[float]:
        model = nn.ModuleList([linear(0), linear(1)])
        optimizer = sgd(model)
        for step in range(3):
            optimizer.zero_grad()
            used = [0, 1] if rank == 0 else [0]
            sum(model[i](torch.ones(1, 3)).sum() for i in used).backward()
            optimizer.step()
            assert torch.equal(model[1].weight.grad, torch.full((2, 3), 0.5)), step
        return weights(model)

    results = ranks.run(2, train, **TINY, late_synchronization=late)
    assert results[0] == results[1]
    assert [s.skip for s in ranks.sessions[1].submissions if s.tensors[0].startswith("1.")] == [True] * 6
    assert not any(s.skip for s in ranks.steps)


@MODES
def test_a_branch_that_no_rank_used_keeps_its_gradient_as_it_was(ranks: Any, late: bool) -> None:
    def train(rank: int) -> list[bool]:
        model = nn.ModuleList([linear(0), linear(1)])
        optimizer = sgd(model, weight_decay=0.1)
        before = weights(model[1])
        for _ in range(2):
            optimizer.zero_grad()
            model[0](torch.ones(1, 3)).sum().backward()
            optimizer.step()
        return [model[1].weight.grad is None, weights(model[1]) == before]

    assert ranks.run(2, train, late_synchronization=late) == [[True, True]] * 2


@MODES
def test_unused_tensors_of_a_used_bucket_count_as_zeros(ranks: Any, late: bool) -> None:
    def train(rank: int) -> list[float]:
        model = nn.ModuleList([linear(0), linear(1)])
        optimizer = sgd(model)
        for step in range(2):
            optimizer.zero_grad()
            used = [0, 1] if rank == 0 or step == 0 else [0]
            sum(model[i](torch.ones(1, 3)).sum() for i in used).backward()
            optimizer.step()
        return model[1].weight.grad.reshape(-1).tolist()

    assert ranks.run(2, train, late_synchronization=late) == [[0.5] * 6] * 2
    assert len(ranks.steps) == 2  # one bucket, two steps


@MODES
def test_a_rank_without_any_backward_still_takes_part(ranks: Any, late: bool) -> None:
    def train(rank: int) -> list[float]:
        model = linear()
        optimizer = sgd(model)
        for step in range(3):
            optimizer.zero_grad()
            if rank == 0 or step != 1:
                model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        return weights(model)

    results = ranks.run(2, train, late_synchronization=late)
    assert results[0] == results[1]


def test_late_two_backwards_over_disjoint_parameters_make_one_step(ranks: Any) -> None:
    def train(rank: int) -> list[float]:
        model = nn.ModuleList([linear(0), linear(1)])
        optimizer = sgd(model)
        for _ in range(3):
            optimizer.zero_grad()
            model[0](torch.ones(1, 3)).sum().backward()
            model[1](torch.ones(1, 3)).sum().backward()
            optimizer.step()
        return weights(model)

    results = ranks.run(2, train, **LATE)
    assert results[0] == results[1]
    assert len(ranks.steps) == 3


@MODES
def test_passes_are_summed_and_pushed_once(ranks: Any, late: bool) -> None:
    def train(rank: int) -> list[float]:
        model = linear()
        optimizer = sgd(model, passes=2)
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(2):
                model(torch.full((1, 3), float(rank + 1))).sum().backward()
            optimizer.step()
        return model.weight.grad.reshape(-1).tolist()

    assert ranks.run(2, train, late_synchronization=late) == [[3.0] * 6] * 2  # 2 * (1 + 2) / 2
    assert len(ranks.steps) == 3


@MODES
def test_fewer_passes_than_announced_push_what_there_is(ranks: Any, late: bool) -> None:
    def train(rank: int) -> list[float]:
        model = linear()
        optimizer = sgd(model, passes=4)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.full((1, 3), float(rank + 1))).sum().backward()
            optimizer.step()
        return model.weight.grad.reshape(-1).tolist()

    assert ranks.run(2, train, late_synchronization=late) == [[1.5] * 6] * 2


def test_late_a_backward_too_many_is_refused_from_backward_itself(ranks: Any) -> None:
    def train(rank: int) -> None:
        model = linear()
        optimizer = sgd(model)
        model(batch(rank, 0)).sum().backward()
        with pytest.raises(UsageError, match=r"'(weight|bias)' was computed 2 times .* backward_passes_per_step is 1"):
            model(batch(rank, 0)).sum().backward()
        del optimizer

    ranks.run(1, train, **LATE)


@MODES
def test_the_number_of_passes_can_change_between_steps(ranks: Any, late: bool) -> None:
    def train(rank: int) -> None:
        model = linear()
        optimizer = sgd(model)
        optimizer.set_backward_passes_per_step(2)
        for passes in (2, 3):
            model(batch(rank, 0)).sum().backward()
            with pytest.raises(UsageError, match="between backward"):
                optimizer.set_backward_passes_per_step(3)
            for _ in range(1, passes):
                model(batch(rank, 0)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.set_backward_passes_per_step(3)

    ranks.run(2, train, late_synchronization=late)
    assert len(ranks.steps) == 2


@MODES
def test_gradients_set_by_hand_are_averaged_too(ranks: Any, late: bool) -> None:
    def train(rank: int) -> list[float]:
        model = linear()
        optimizer = sgd(model)
        for step in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, rank + step)
            optimizer.step()
        return model.weight.grad.reshape(-1).tolist()

    assert ranks.run(2, train, late_synchronization=late) == [[1.5] * 6] * 2


@MODES
def test_gradients_accumulate_over_steps_as_in_torch_where_nobody_zeroes_them(ranks: Any, late: bool) -> None:
    def train(rank: int) -> list[float]:
        model = linear()
        optimizer = sgd(model)
        for _ in range(2):
            model(torch.full((1, 3), float(rank + 1))).sum().backward()
            optimizer.step()
        return model.weight.grad.reshape(-1).tolist()

    assert ranks.run(2, train, late_synchronization=late) == [[3.0] * 6] * 2


@MODES
@pytest.mark.parametrize("set_to_none", [True, False])
def test_both_kinds_of_zero_grad_work(ranks: Any, set_to_none: bool, late: bool) -> None:
    def train(rank: int) -> list[float]:
        model = linear()
        optimizer = sgd(model)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            model(torch.full((1, 3), float(rank + 1))).sum().backward()
            optimizer.step()
        return model.weight.grad.reshape(-1).tolist()

    assert ranks.run(2, train, late_synchronization=late) == [[1.5] * 6] * 2


@MODES
def test_zeros_that_zero_grad_left_are_skipped_not_sent(ranks: Any, late: bool) -> None:
    def train(rank: int) -> None:
        model = nn.ModuleList([linear(0), linear(1)])
        optimizer = sgd(model)
        for used in ([0, 1], [0], [0]):
            optimizer.zero_grad(set_to_none=False)
            sum(model[i](torch.ones(1, 3)).sum() for i in used).backward()
            optimizer.step()
            assert model[1].weight.grad.abs().sum() == (6.0 if 1 in used else 0.0)

    ranks.run(2, train, **TINY, late_synchronization=late)
    assert [s.skip for s in ranks.steps if s.tensors == ("1.weight",)] == [False, True, True]


def test_late_zero_grad_while_gradients_are_under_way_is_refused(ranks: Any) -> None:
    def train(rank: int) -> None:
        model = linear()
        optimizer = sgd(model)
        model(batch(rank, 0)).sum().backward()
        with pytest.raises(UsageError, match=r"zero_grad\(\) while the gradient of 'weight' is under way"):
            optimizer.zero_grad()

    ranks.run(1, train, **LATE)


@MODES
def test_incomplete_passes_can_be_thrown_away(ranks: Any, late: bool) -> None:
    def train(rank: int) -> list[float]:
        model = linear()
        optimizer = sgd(model, passes=2)
        for _ in range(2):
            model(torch.full((1, 3), 100.0)).sum().backward()
            optimizer.zero_grad()
            for _ in range(2):
                model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        optimizer.zero_grad()
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
        optimizer.synchronize()
        return model.weight.grad.reshape(-1).tolist()

    assert ranks.run(2, train, late_synchronization=late) == [[2.0] * 6] * 2


@MODES
def test_a_step_that_is_put_back_is_told_with_every_submission_of_the_next(ranks: Any, late: bool) -> None:
    def train(rank: int) -> None:
        model = linear()
        optimizer = sgd(model)
        for step in range(4):
            optimizer.zero_grad()
            model(batch(rank, step)).sum().backward()
            optimizer.synchronize()
            if step != 1:
                optimizer.step()
            else:
                optimizer.put_back()

    ranks.run(2, train, **TINY, late_synchronization=late)
    assert [s.previous_skipped for s in ranks.steps] == [False, False, False, False, True, True, False, False]


def test_on_request_residuals_are_rescaled_with_the_learning_rate_of_their_group(ranks: Any) -> None:
    def train(rank: int) -> None:
        model = nn.ModuleList([linear(0), linear(1)])
        groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 1.0}]
        plain = torch.optim.SGD(groups, lr=0.5)
        optimizer = psgc.DistributedOptimizer(plain, model.named_parameters(), residuals_follow_lr=True)
        for rates in ((0.5, 1.0), (0.25, 1.0), (0.25, 0.0), (0.5, 4.0), (0.5, 8.0)):
            optimizer.zero_grad()
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            (model[0](torch.ones(1, 3)) + model[1](torch.ones(1, 3))).sum().backward()
            optimizer.step()

    ranks.run(2, train)
    by_group = [[s.rescale for s in ranks.steps if s.tensors[0].startswith(group)] for group in "01"]
    assert by_group == [[1.0, 2.0, 1.0, 0.5, 1.0], [1.0, 1.0, 1.0, 1.0, 0.5]]


def test_a_rate_set_between_backward_and_step_is_the_same_news_on_every_rank(ranks: Any) -> None:
    def train(rank: int) -> None:
        model = nn.ModuleList([linear(0), linear(1)])
        optimizer = sgd(model)
        for step in range(3):
            optimizer.zero_grad()
            used = [0, 1] if rank == 0 or step == 0 else [0]
            sum(model[i](torch.ones(1, 3)).sum() for i in used).backward()
            optimizer.param_groups[0]["lr"] = 0.1 * 2**step
            optimizer.step()

    ranks.run(2, train, **TINY)
    first, second = ({(s.tensors, i // 4): s.rescale for i, s in enumerate(x.submissions)} for x in ranks.sessions)
    assert first == second


def test_a_different_model_on_one_rank_is_named(ranks: Any) -> None:
    def train(rank: int) -> None:
        model = linear(width=3 + rank)
        optimizer = sgd(model)
        model(torch.ones(1, 3 + rank)).sum().backward()
        optimizer.step()

    with pytest.raises(Exception, match=r"shape of tensor 'weight' on rank"):
        ranks.run(2, train)


@MODES
def test_a_failed_job_surfaces_from_the_next_step(ranks: Any, late: bool) -> None:
    def train(rank: int) -> None:
        model = linear()
        optimizer = sgd(model)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(rank, step)).sum().backward()
            if step == 1 and rank == 1:
                ranks.sessions[1].fail("rank 1 ended with ValueError: lost")
            optimizer.step()

    with pytest.raises(JobFailed, match="rank 1 ended with ValueError: lost"):
        ranks.run(2, train, late_synchronization=late)


@MODES
def test_hooks_of_an_optimizer_that_is_gone_do_nothing(ranks: Any, late: bool) -> None:
    def train(rank: int) -> None:
        model = linear()
        for _ in range(3):
            optimizer = sgd(model)
            for step in range(2):
                optimizer.zero_grad()
                model(batch(rank, step)).sum().backward()
                optimizer.step()
            model.zero_grad()
            del optimizer

    ranks.run(2, train, late_synchronization=late)
    assert [s.layout for s in ranks.steps] == ["optimizer0"] * 2 + ["optimizer1"] * 2 + ["optimizer2"] * 2
