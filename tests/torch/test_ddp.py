"""What DDP's buckets become on their way through the job, whatever their order and make-up; what is refused, and how it is said."""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_post_hooks

import psgc.torch as psgc
from psgc.errors import CodecError, ConfigError, JobFailed, UsageError
from psgc.plan.model.plan import Plan, PlannedBucket
from psgc.program.ranks import Ranks
from psgc.torch.ddp import wrappers
from psgc.torch.ddp.completions import Arrival, Completer, Completion
from psgc.torch.ddp.gradients import DdpGradients
from psgc.torch.ddp.parameters import laid_out
from psgc.torch.plans.choice import Choice
from psgc.torch.session import api
from psgc.torch.state.residuals import Residuals
from tests.preloaded import run_preloaded

SHAPES = {"a": (4, 3), "b": (5,), "empty": (0,), "c": (2, 2), "d": (7,)}
Grads = dict[str, torch.Tensor]


class Model:
    """One rank's parameters under a DDP that this test plays."""

    def __init__(self) -> None:
        self.session: Any = api.current_session()
        self.parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
        names = {parameter: name for name, parameter in self.parameters.items()}
        self.gradients = DdpGradients(self.session, 0, Choice(), names, Completer(self.session))

    def step(self, grads: Grads, buckets: Sequence[str], unused: str = "") -> Grads:
        """One backward. buckets: names of the tensors in each, as DDP has them now. Returns what DDP would give to p.grad."""
        futures = []
        for number, names in enumerate(buckets):
            members = names.split()
            self.gradients._next.coming()
            flat = torch.cat([grads[name].reshape(-1) for name in members])
            views = [piece.view(SHAPES[name]) for piece, name in zip(flat.split([grads[n].numel() for n in members]), members, strict=True)]
            for name in members:
                self.parameters[name].grad = None if name in unused.split() else grads[name]
            completion = Completion(flat)
            parameters = [self.parameters[name] for name in members]
            self.gradients.take(Arrival(parameters, views, completion, number + 1 == len(buckets)))
            futures.append((members, views, completion.future))
        result = {}
        for members, views, future in futures:
            future.wait()
            result |= dict(zip(members, views, strict=True))
        return result


def grads_of(rank: int, step: int) -> Grads:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


FIRST, REBUILT = ("d c", "empty b", "a"), ("a d empty", "c", "b")


@pytest.mark.parametrize("fuse_bytes", [0, 40, 1 << 20])
def test_the_mean_comes_back_whatever_ddp_puts_into_its_buckets(ranks: Any, fuse_bytes: int) -> None:
    def work(rank: int) -> None:
        model = Model()
        for step, buckets in enumerate((FIRST, REBUILT, REBUILT, ("b c d a empty",))):
            mine, other = grads_of(rank, step), grads_of(1 - rank, step)
            wanted = {name: (mine[name] + other[name]) / 2 for name in SHAPES}
            for name, got in model.step(mine, buckets).items():
                assert torch.equal(got, wanted[name]), (step, name)

    ranks.run(2, work, fuse_bytes=fuse_bytes)
    assert {step.layout for step in ranks.steps} == {"ddp0"}, "one layout, however often DDP makes new buckets"


def test_gradients_have_left_before_their_results_are_said_to_be_there(ranks: Any) -> None:
    seen: list[list[str]] = []

    class AtOnce:
        """Results are there before DDP's hook returns."""

        def complete_after(self, tickets: Sequence[Any], completion: Completion, then: Callable[[], None]) -> None:
            api.current_session().wait(tickets)
            then()
            completion.complete()

    class Observer:
        def __init__(self) -> None:
            self.told: list[str] = []

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_: self.told.append(name)

    def work(rank: int) -> None:
        model, observer = Model(), Observer()
        model.gradients._order._completer = AtOnce()  # type: ignore[assignment]
        model.gradients.exchange.observer = observer  # type: ignore[assignment]
        for step, buckets in enumerate((FIRST, REBUILT)):
            model.step(grads_of(rank, step), buckets)
        seen.append([name for name in observer.told if name != "ready"])

    ranks.run(2, work)
    assert seen == [["begins", "leaving", "delivered"] * 2] * 2


def test_buckets_leave_as_soon_as_they_are_complete_once_there_is_a_layout(ranks: Any) -> None:
    seen: list[list[int]] = []

    def work(rank: int) -> None:
        model = Model()
        model.step(grads_of(rank, 0), FIRST)
        taken, left = model.gradients.take, []

        def take(arrival: Arrival) -> None:
            taken(arrival)
            left.append(len(model.session.submissions) - 4)

        model.gradients.take = take  # type: ignore[method-assign]
        model.step(grads_of(rank, 1), ("a d", "c", "b empty"))
        seen.append(left)

    ranks.run(2, work, fuse_bytes=0)
    assert seen == [[2, 3, 4]] * 2


def test_what_no_rank_used_is_skipped_and_what_one_left_out_counts_as_zeros(ranks: Any) -> None:
    def work(rank: int) -> None:
        model = Model()
        for step, unused in enumerate(("c", "c" if rank else "b c", "")):
            grads = grads_of(rank, step)
            grads |= {name: torch.zeros(SHAPES[name]) for name in unused.split()}
            other = grads_of(1 - rank, step)["b"]
            got = model.step(grads, FIRST, unused)
            if step == 1:
                assert torch.equal(got["b"], (other if rank == 0 else grads["b"]) / 2)
            if step < 2:
                assert not got["c"].any()

    ranks.run(2, work)
    skipped = {step.tensors: step.skip for step in ranks.steps[:3]}
    assert skipped == {("d", "b", "a"): False, ("c",): True}, "stands alone: not everybody has it"


def test_residuals_follow_the_loss_scale_and_a_dropped_step_is_told_once(ranks: Any) -> None:
    def work(rank: int) -> None:
        model, scale = Model(), [0.0]
        for step, scale[0] in enumerate((8.0, 8.0, 16.0, 4.0, 4.0)):
            model.step(grads_of(rank, step), ("a b c d empty",))
            model.gradients.scale_with(lambda: scale[0])
            model.gradients.end_step(applied=step != 2)

    ranks.run(2, work, fuse_bytes=1 << 20)
    told = [(step.previous_skipped, step.rescale) for step in ranks.steps]
    assert told == [(False, 1.0), (False, 1.0), (False, 2.0), (True, 0.25), (False, 1.0)]


def test_loaded_residuals_change_to_the_unit_of_gradients_that_no_scaler_multiplies(ranks: Any) -> None:
    def work(rank: int) -> None:
        model = Model()
        model.step(grads_of(rank, 0), FIRST)
        model.gradients.end_step(applied=True)
        model.gradients.go_on([model.gradients.state() | {"loss_scale": 8.0}])
        for step in (1, 2):
            model.step(grads_of(rank, step), FIRST)
            model.gradients.end_step(applied=True)

    ranks.run(2, work, fuse_bytes=1 << 20)
    assert [step.rescale for step in ranks.steps] == [1.0, 0.125, 1.0]


def test_of_two_optimizers_one_that_applies_counts(ranks: Any) -> None:
    def work(rank: int) -> None:
        model = Model()
        for step in range(3):
            model.step(grads_of(rank, step), FIRST)
            for applied in ((True, False), (False, False), (True, True))[step]:
                model.gradients.end_step(applied)

    ranks.run(2, work, fuse_bytes=1 << 20)
    assert [step.previous_skipped for step in ranks.steps] == [False, False, True]


def test_a_result_that_is_put_back_is_told_once_and_one_that_is_left_is_not(ranks: Any) -> None:
    def work(rank: int) -> None:
        model = Model()
        for step, then in enumerate(("put back", "leave", "step", "put back", "step")):
            model.step(grads_of(rank, step), FIRST)
            assert model.gradients.exchange.last.waits
            if then == "put back":
                model.gradients.put_back()
                model.gradients.clear()
                assert all(parameter.grad is None for parameter in model.parameters.values())
            if then == "step":
                model.gradients.end_step(applied=True)
            assert model.gradients.exchange.last.waits == (then == "leave")

    ranks.run(2, work, fuse_bytes=1 << 20)
    assert [step.previous_skipped for step in ranks.steps] == [False, True, False, False, True]


def test_a_second_backward_that_begins_with_another_head_adds_to_the_first(ranks: Any) -> None:
    """Only where nothing is left in any p.grad was the result left to the script."""

    def work(rank: int) -> None:
        model = Model()
        for step, (then, left) in enumerate((("add up", 0), ("clear", 0), ("zero", 1), ("step", 2))):
            model.step(grads_of(rank, step), FIRST, unused="d" if step % 2 == 0 else "c")
            assert model.gradients.exchange.last.skips.thrown == left, then
            for parameter in model.parameters.values() if then in ("clear", "zero") else ():
                parameter.grad = torch.zeros_like(parameter) if then == "zero" else None
        model.gradients.end_step(applied=True)
        assert model.gradients.exchange.last.skips.applied == 1

    ranks.run(2, work, fuse_bytes=1 << 20)


def test_a_state_has_what_is_still_in_p_grad_but_not_what_was_left_or_used_by_hand(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[int, list[tuple[bool, bool]]] = {0: [], 1: []}
    collect = Residuals.collect

    def noted(self: Residuals, dropped: bool, forgotten: bool = False) -> Any:
        asked[self._session.rank].append((dropped, forgotten))
        return collect(self, dropped, forgotten)

    monkeypatch.setattr(Residuals, "collect", noted)

    def work(rank: int) -> None:
        model = Model()
        for step, then in enumerate(("added to", "step", "clear", "put back", "clear", "clear", "clear")):
            model.step(grads_of(rank, step), FIRST)
            if then == "step":
                model.gradients.end_step(applied=True)
            elif then == "put back":
                model.gradients.put_back()
            elif then == "clear":
                model.gradients.clear()
            model.gradients.state()
        for updates in (True, False):
            other = Model()
            for step in range(2):  # its results are never stepped on
                other.step(grads_of(rank, step), FIRST)
                for parameter in other.parameters.values() if updates else ():
                    parameter.data.sub_(1.0)
                if step == 0 or not updates:
                    other.gradients.clear()
            other.gradients.state()

    ranks.run(2, work)
    assert asked[0] == asked[1]
    still_there, stepped, left, put_back, by_hand = (True, False), (False, False), (False, True), (True, False), (False, False)
    assert asked[0] == [still_there, stepped, left, put_back, left, left, (False, False), by_hand, left]


@pytest.mark.parametrize(
    ("buckets", "said"),
    [
        (("a b", "c empty"), "DDP did not reduce the gradient of 'd' in this step, as it did in the first"),
        (("a b", "b c d empty"), "DDP reduced the gradient of 'b' twice in a step"),
    ],
)
def test_buckets_that_would_never_be_complete_are_an_error_and_no_hang(ranks: Any, buckets: tuple[str, ...], said: str) -> None:
    def work(rank: int) -> None:
        model = Model()
        model.step(grads_of(rank, 0), FIRST)
        model.step(grads_of(rank, 1), buckets)

    with pytest.raises(UsageError, match=said):
        ranks.run(2, work)


def test_a_parameter_that_the_first_step_left_out_is_named(ranks: Any) -> None:
    with pytest.raises(UsageError, match=r"DDP did not reduce the gradient of 'c' in the first step"):
        ranks.run(1, lambda rank: Model().step(grads_of(rank, 0), ("a b", "d empty")))


def test_a_failed_job_fails_what_ddp_waits_for(ranks: Any) -> None:
    def work(rank: int) -> str:
        model = Model()
        if rank == 1:
            model.step(grads_of(rank, 0), FIRST)
            model.session.fail("rank 1 is out of data")
            return ""
        with pytest.raises((RuntimeError, JobFailed)) as caught:  # in the first step, too, if it comes late to its end
            [model.step(grads_of(rank, step), FIRST) for step in range(2)]
        return str(caught.value)

    assert "rank 1 is out of data" in ranks.run(2, work)[0]


@pytest.mark.parametrize(
    ("make", "dense"),
    [
        (lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (lambda: torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d), True),
        (lambda: torch.randn(6, 5).t(), True),
        (lambda: torch.randn(4, 1, 3).permute(2, 1, 0), True),
        (lambda: torch.randn(6, 5)[:, :3], False),
        (lambda: torch.randn(6, 5), True),
    ],
)
def test_a_gradient_is_read_in_the_parameters_order(make: Callable[[], torch.Tensor], dense: bool) -> None:
    parameter = make()
    grad = torch.randn(parameter.shape)
    # As DDP does: a dense parameter's gradient in the order of its memory, any other's row by row.
    bucket = torch.zeros(10 + grad.numel())
    strides = parameter.stride() if dense else torch.empty(parameter.shape).stride()
    bucket.as_strided(parameter.shape, strides, 10).copy_(grad)
    shown = bucket[10:].reshape(parameter.shape)
    assert torch.equal(laid_out(shown, parameter), grad)


# What is refused, under a process group of one.


@pytest.fixture
def group(alone: None, tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    wrappers.do_with_new(None)
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_an_installed_hook_serves_every_model_that_is_wrapped_from_then_on() -> None:
    hook = psgc.ddp_hook("int8").install()
    for number in range(2):
        model = DistributedDataParallel(nn.Linear(3, 2))
        model(torch.ones(1, 3)).sum().backward()
        assert torch.equal(model.module.weight.grad, torch.ones(2, 3))
        assert hook.statistics() == {"steps": number + 1, "gradient_bytes": 32 * (number + 1)}


@pytest.mark.usefixtures("group")
def test_a_model_that_is_wrapped_again_goes_on_with_its_residuals_and_one_with_more_parameters_does_not() -> None:
    hook, model = psgc.ddp_hook().install(), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    for wanted in (["ddp0"], ["ddp0"], ["ddp0", "ddp1"]):
        model[0].requires_grad_(len(wanted) == 2)
        wrapped = DistributedDataParallel(model)
        wrapped(torch.ones(1, 3)).sum().backward()
        assert [gradients.exchange.name for gradients in hook._models.all] == wanted


@pytest.mark.parametrize(
    ("codec", "kind", "smallest", "warned"),
    [
        ("onebit", torch.optim.AdamW, "0", True), ("int8", torch.optim.AdamW, "0", False), ("onebit", torch.optim.SGD, "0", False),
        ("onebit", torch.optim.AdamW, "1000", False),
    ],
)  # fmt: skip
def test_a_codec_that_does_not_suit_the_optimizer_is_warned_of_once(
    codec: str, kind: Any, smallest: str, warned: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setenv("PSGC_MIN_COMPRESS_BYTES", smallest)
    request.getfixturevalue("group")
    psgc.ddp_hook(codec).install()
    model = DistributedDataParallel(nn.Linear(3, 2))
    optimizer, other = kind(model.parameters(), lr=0.1), torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    for _ in range(4):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        other.step()
    assert caplog.text.count("codec onebit with AdamW") == warned


@pytest.mark.usefixtures("group")
def test_a_hook_puts_back_and_discards_the_gradients_of_one_model_or_of_all() -> None:
    hook = psgc.ddp_hook("int8").install()
    first, second = (DistributedDataParallel(nn.Linear(3, 2)) for _ in range(2))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]

    def present() -> list[bool]:
        return [model.module.weight.grad is not None for model in (first, second)]

    def backward() -> None:
        for model in (first, second):
            model(torch.ones(1, 3)).sum().backward()

    with pytest.raises(UsageError, match=r"put_back\(\): no averaged gradients wait for step\(\)"):
        hook.put_back()
    backward()
    hook.put_back(second.module)
    assert present() == [True, False]
    with pytest.raises(UsageError, match=r"put_back\(\): no averaged gradients wait for step\(\)"):
        hook.put_back(second)
    hook.put_back()
    assert present() == [False, False]
    backward()
    hook.discard(first)
    assert present() == [False, True]
    hook.discard()
    assert present() == [False, False]
    hook.discard()  # there is nothing, and nothing is said, as by zero_grad()
    backward()
    for optimizer in optimizers:
        optimizer.step()
    with pytest.raises(UsageError, match=r"put_back\(\): no averaged gradients wait for step\(\)"):
        hook.put_back()
    with pytest.raises(UsageError, match=r"discard\(\): this hook has averaged no gradients of the Linear"):
        hook.discard(nn.Linear(3, 2))


@pytest.mark.usefixtures("group")
def test_a_hook_goes_with_its_model_and_optimizers_tell_it_of_steps_no_more() -> None:
    def train() -> weakref.ref[Any]:
        hook, model = psgc.ddp_hook("int8"), DistributedDataParallel(nn.Linear(3, 2))
        model.register_comm_hook(None, hook)
        optimizer = torch.optim.SGD(model.parameters())
        model(torch.randn(1, 3)).sum().backward()
        optimizer.step()
        return weakref.ref(hook)

    def watching() -> int:
        gc.collect()
        return len(_global_optimizer_post_hooks)

    train()  # what watches for the whole process is there
    before = watching()
    hooks = [train() for _ in range(5)]
    assert watching() == before
    assert [hook() for hook in hooks] == [None] * 5


@pytest.mark.usefixtures("group")
def test_models_wrapped_before_are_found(caplog: pytest.LogCaptureFixture) -> None:
    early = DistributedDataParallel(nn.Linear(3, 2))
    hook = psgc.ddp_hook()
    hook.install()
    assert "install() comes after DistributedDataParallel has wrapped" in caplog.text
    early.register_comm_hook(None, hook)
    early(torch.ones(1, 3)).sum().backward()
    assert hook.statistics()["steps"] == 1


@pytest.mark.usefixtures("group")
def test_wrapped_models_are_refused_by_distributed_optimizer_also_when_wrapped_later() -> None:
    model = nn.Linear(3, 2)
    optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    wrapper = DistributedDataParallel(model)
    with pytest.raises(UsageError, match=r"parameter 'weight': DistributedDataParallel averages it already.*ddp_hook"):
        wrapper(torch.ones(1, 3)).sum().backward()
    with pytest.raises(UsageError, match=r"parameter 'weight': DistributedDataParallel averages it already.*ddp_hook"):
        optimizer.step()
    with pytest.raises(UsageError, match=r"parameter 'weight': DistributedDataParallel averages it already"):
        psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    with pytest.raises(UsageError, match=r"parameter 'param.0.0'"):
        psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    del wrapper
    psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))  # a wrapper that is gone averages nothing


@pytest.mark.usefixtures("group")
def test_sharded_parameters_are_refused() -> None:
    from torch.distributed.tensor import distribute_module, init_device_mesh  # type: ignore[attr-defined]

    model = distribute_module(nn.Linear(3, 2), init_device_mesh("cpu", (1,)))
    with pytest.raises(UsageError, match=r"parameter 'weight' is a DTensor: .*use the optimizer as it is and psgc.torch.fsdp_hook"):
        psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.usefixtures("group")
def test_fsdps_parameters_are_refused(original: bool) -> None:
    from torch.distributed.fsdp._flat_param import FlatParameter

    model = nn.Linear(3, 2)
    if original:
        model.weight._fsdp_flattened = True  # as FSDP(use_orig_params=True) marks them
    else:
        model.weight = FlatParameter(torch.ones(6))
    with pytest.raises(UsageError, match=r"parameter 'weight' is .*FSDP's FlatParameter: .*leave FSDP out"):
        psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())


@pytest.mark.usefixtures("group")
def test_sparse_gradients_are_refused() -> None:
    psgc.ddp_hook().install()
    model = DistributedDataParallel(nn.Embedding(10, 3, sparse=True))
    with pytest.raises(UsageError, match="sparse gradient"):
        model(torch.tensor([1])).sum().backward()


@pytest.mark.usefixtures("group")
def test_buckets_that_ddp_may_leave_out_are_refused() -> None:
    model = DistributedDataParallel(nn.Linear(3, 2))
    model.skip_all_reduce_unused_params = True
    model.register_comm_hook(None, psgc.ddp_hook())
    with pytest.raises(UsageError, match="leave skip_all_reduce_unused_params out"):
        model(torch.ones(1, 3)).sum().backward()


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ("onebitt", CodecError, "unknown codec 'onebitt'"),
        ("nowhere.json", UsageError, "nowhere.json"),
        (8, UsageError, "expected codec text"),
        (
            Plan(
                "m",
                "c",
                (PlannedBucket(("w",), 9, 1, 0, "onebit:residual=int8", ("comp@gpu", "flat.push.c", "flat.pull.c", "decomp@gpu")),),
            ),
            UsageError,
            r"ddp_hook: the plan: buckets\[0\] \(of 'w'\): action 'comp@gpu', but codec onebit:residual=int8 has no GPU side",
        ),
    ],
)
@pytest.mark.usefixtures("alone")
def test_a_codec_or_plan_that_is_none_is_refused_at_once(given: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        psgc.ddp_hook(given)


@pytest.mark.usefixtures("group")
def test_a_process_group_of_another_size_than_the_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    psgc.ddp_hook().install()
    monkeypatch.setattr(psgc.current_session(), "ranks", Ranks((1, 1, 1)))
    with pytest.raises(UsageError, match=r"averages over 1 process\(es\), but psgc's job has 3 worker\(s\)"):
        DistributedDataParallel(nn.Linear(3, 2))


@pytest.mark.usefixtures("group")
def test_a_state_that_no_model_has_taken_up_yet_is_saved_again() -> None:
    first = psgc.ddp_hook("topk:k=0.5")
    model = DistributedDataParallel(nn.Linear(3, 2))
    model.register_comm_hook(None, first)
    model(torch.ones(1, 3)).sum().backward()
    state = first.residual_state_dict()
    assert len(state["models"]) == 1
    second = psgc.ddp_hook("topk:k=0.5")
    second.load_residual_state_dict(state)
    assert second.residual_state_dict() == state
    second.load_residual_state_dict([state, state])
    with pytest.raises(UsageError, match="save after the first step"):
        second.residual_state_dict()
    with pytest.raises(UsageError, match="the ranks' states are of 0 and 1 models"):
        second.load_residual_state_dict([state, {"models": []}])


def test_a_plan_and_a_codec_of_the_script_are_not_both_followed(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PSGC_PLAN", str(tmp_path / "plan.json"))
    request.getfixturevalue("alone")
    with pytest.raises(UsageError, match=r"compression is 'int8', but PSGC_PLAN=.*plan\.json names each bucket's codec; leave one"):
        psgc.ddp_hook("int8")


@pytest.mark.usefixtures("group")
def test_a_state_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="expected what a hook's residual_state_dict"):
        psgc.ddp_hook().load_residual_state_dict({"memories": {}})


@pytest.mark.usefixtures("alone")
def test_a_job_of_another_size_than_torchs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    object.__setattr__(psgc.current_session().config, "world_size", 4)
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=4, but psgc's job has 1 worker.*start every worker of the script with `psgc run`"):
        psgc.ddp_hook()


def test_a_rank_that_dies_ends_the_others_with_psgcs_line() -> None:
    script = """
import os, sys, torch, torch.distributed as dist, psgc.torch as psgc
from torch.nn.parallel import DistributedDataParallel
psgc.ddp_hook("int8").install()
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(300, 300))
for step in range(100):
    if step == 3 and psgc.rank() == 1:
        raise ValueError("no more data")
    model(torch.ones(2, 300)).sum().backward()
"""
    command = ("-m", "psgc.launch", "run", "--workers", "2", "--", sys.executable, "-c", script)
    done = run_preloaded(*command, env={**os.environ, "PSGC_ABORT_GRACE_S": "20"}, timeout=300)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[-1].startswith("psgc run: rank 1 ended with ValueError: no more data"), done.stderr
    assert not any("Traceback" in line or "RuntimeError" in line for line in lines if line.startswith("[worker 0]")), done.stderr


class _NothingToWaitFor:
    def wait(self, tickets: Sequence[Any]) -> None:
        assert tickets == []


def test_an_observer_is_told_of_a_step_s_end_before_backward_can_return() -> None:
    completion = Completion(torch.zeros(1))
    told: list[bool] = []
    Completer(_NothingToWaitFor()).complete_after([], completion, lambda: told.append(completion.future.done()))  # type: ignore[arg-type]
    completion.future.wait()
    assert told == [False]
