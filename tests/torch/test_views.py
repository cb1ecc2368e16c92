"""``gradient_as_bucket_view``: p.grad are views of the memory that gradients travel from. Nothing else changes: every p.grad and every weight is what it is
without, bit for bit, whatever a script does with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import psgc.torch as psgc
from psgc.errors import UsageError
from tests.cases import for_each
from tests.torch.conftest import FakeSession
from tests.torch.small_models import batch, seeded, weights

LR = 0.1
VIEWS: dict[str, Any] = {"gradient_as_bucket_view": True}


class Model(nn.Module):
    """Layers of several sizes, one of which a rank may leave out, a parameter in another order of memory and one in another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.aside, self.last = nn.Linear(3, 7), nn.Linear(7, 7), nn.Linear(7, 2)
        self.turned = nn.Parameter(torch.ones(5, 7).t().contiguous().t())
        self.rough = nn.Parameter(torch.ones(7, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor, aside: bool = True) -> torch.Tensor:
        x = self.first(x).tanh() * self.rough.float() + self.turned.sum(0)
        return self.last(self.aside(x) if aside else x)


class Script:
    """A rank's script, which notes p.grad and weights as it goes."""

    def __init__(self, rank: int, wrap: Callable[[nn.Module], Any]) -> None:
        self.rank, self.model = rank, seeded(Model)
        self.optimizer, self.noted = wrap(self.model), list[Any]()

    def loss(self, step: int, aside: bool = True) -> torch.Tensor:
        return self.model(batch(self.rank, step), aside).square().mean()

    def backward(self, step: int, aside: bool = True, **options: Any) -> None:
        self.loss(step, aside).backward(**options)
        self.note()

    def note(self) -> None:
        self.noted.append(
            [None if p.grad is None else p.grad.detach().float().numpy().tobytes() for p in self.model.parameters()] + weights(self.model)
        )

    def step(self, *arguments: Any) -> None:
        self.optimizer.step(*arguments)
        self.note()


def plain(script: Script, step: int) -> None:
    script.optimizer.zero_grad()
    script.backward(step)
    nn.utils.clip_grad_norm_(script.model.parameters(), 0.1)
    script.step()


def zeroed_in_place(script: Script, step: int) -> None:
    script.optimizer.zero_grad(set_to_none=False)
    script.backward(step)
    script.step()


def now_zeroed_and_now_none(script: Script, step: int) -> None:
    script.optimizer.zero_grad(set_to_none=step % 2 == 0)
    script.backward(step, aside=step != 3)
    script.step()


def never_cleared(script: Script, step: int) -> None:
    """The last mean stays in p.grad, and is added to."""
    script.backward(step, aside=step != 2)
    script.step()


def several_backwards(script: Script, step: int) -> None:
    script.optimizer.zero_grad()
    script.backward(step)
    script.backward(step + 10)
    script.step()


def summed_here(script: Script, step: int) -> None:
    script.optimizer.zero_grad(set_to_none=step % 2 == 0)
    with script.optimizer.no_sync():
        script.backward(step)
        script.backward(step + 20)
    script.backward(step + 10)
    script.step()


def left_out_by_one_rank(script: Script, step: int) -> None:
    script.optimizer.zero_grad(set_to_none=step < 3)
    script.backward(step, aside=script.rank == 0 or step == 0)
    script.step()


def left_out_by_all(script: Script, step: int) -> None:
    script.optimizer.zero_grad(set_to_none=step < 3)
    script.backward(step, aside=step % 2 == 0)
    script.step()


def put_back(script: Script, step: int) -> None:
    script.optimizer.zero_grad()
    script.backward(step)
    if step % 2:
        script.optimizer.put_back()
    script.step()


def discarded(script: Script, step: int) -> None:
    script.backward(step)
    if step % 2:
        script.optimizer.discard()
    else:
        script.step()


def set_by_hand(script: Script, step: int) -> None:
    """Other tensors in p.grad, some written in place."""
    script.optimizer.zero_grad()
    script.backward(step)
    for number, parameter in enumerate(script.model.parameters()):
        if number % 2:
            parameter.grad = torch.full_like(parameter, script.rank + step)
        elif parameter.grad is not None:
            parameter.grad.mul_(2)
    script.optimizer.synchronize()
    script.step()


def all_set_by_hand(script: Script, step: int) -> None:
    for parameter in script.model.parameters():
        parameter.grad = torch.full_like(parameter, script.rank + step)
    script.optimizer.synchronize()
    script.note()
    script.step()


def part_of_a_graph(script: Script, step: int) -> None:
    script.optimizer.zero_grad()
    script.backward(step, create_graph=True)
    script.step()


def switched(script: Script, step: int) -> None:
    script.backward(step)
    script.step()
    if step == 1:
        script.optimizer.switch_plan("bf16")
    if step == 2:
        script.optimizer.switch_plan("none")


def frozen_for_a_while(script: Script, step: int) -> None:
    script.optimizer.zero_grad()
    script.model.aside.requires_grad_(step not in (2, 3))
    script.backward(step)
    script.step()


def raising(script: Script, step: int) -> None:
    """A backward that raises on all ranks when some gradients have been made."""
    script.optimizer.zero_grad(set_to_none=step < 4)
    if step == 2:
        handle = script.model.first.weight.register_hook(lambda _: 1 / 0)
        with suppress(ZeroDivisionError):
            script.loss(step).backward()
        handle.remove()
        script.optimizer.zero_grad(set_to_none=False)
    script.backward(step)
    script.step()


def with_a_closure(script: Script, step: int) -> None:
    def closure() -> torch.Tensor:
        script.optimizer.zero_grad()
        loss = script.loss(step)
        loss.backward()
        return loss

    script.step(closure)


def later_group(script: Script, step: int) -> None:
    if step == 2:
        script.optimizer.add_param_group({"params": [script.model.turned]})
    script.optimizer.zero_grad()
    script.backward(step)
    script.step()


SCRIPTS = [
    plain, zeroed_in_place, now_zeroed_and_now_none, never_cleared, several_backwards, summed_here, left_out_by_one_rank, left_out_by_all, put_back,
    discarded, set_by_hand, all_set_by_hand, part_of_a_graph, switched, frozen_for_a_while, raising, with_a_closure, later_group,
]  # fmt: skip


@contextmanager
def lent_memory(patch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Sessions that have memory for buckets."""
    lent: list[Any] = []

    def memory(_session: FakeSession, layout: Any, bucket: int) -> Any:
        one = layout.buckets[bucket]
        itemsize = {"float32": 4, "bfloat16": 2}[one.dtype]
        if layout.scheme(one).array_dtype == np.float32 and itemsize == 2:
            return None
        lent.append(np.full(itemsize * one.numel, 77, np.uint8))
        return lent[-1]

    with patch.context() as inside:
        inside.setattr(FakeSession, "memory", memory)
        yield lent


def wrapped(script: Callable[..., None], late: bool, **views: Any) -> Callable[[nn.Module], Any]:
    def wrap(model: nn.Module) -> Any:
        parameters = [p for p in model.parameters() if script is not later_group or p is not model.turned]
        named = [(name, p) for name, p in model.named_parameters()]
        base = torch.optim.SGD(parameters, lr=LR, momentum=0.9)
        named = [(name, p) for name, p in named if any(p is each for each in parameters)]
        return psgc.DistributedOptimizer(base, named, late_synchronization=late, **views)

    return wrap


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph")
@for_each(script=SCRIPTS, fuse_bytes=[0, 100, 4 << 20], lends=[False, True])
def test_every_gradient_and_weight_is_what_it_is_without(
    ranks: Any, monkeypatch: pytest.MonkeyPatch, script: Any, fuse_bytes: int, lends: bool
) -> None:
    def train(rank: int, **views: Any) -> list[Any]:
        one = Script(rank, wrapped(script, late=False, **views))
        for step in range(6):
            script(one, step)
        return one.noted

    wanted = ranks.run(2, train, fuse_bytes=fuse_bytes)
    with lent_memory(monkeypatch) if lends else nullcontext():
        assert ranks.run(2, lambda rank: train(rank, **VIEWS), fuse_bytes=fuse_bytes) == wanted


@for_each(script=[plain, never_cleared, left_out_by_one_rank, switched, raising], fuse_bytes=[0, 100, 4 << 20])
def test_gradients_that_are_no_views_are_packed_in_the_sessions_memory_and_are_the_same(
    ranks: Any, monkeypatch: pytest.MonkeyPatch, script: Any, fuse_bytes: int
) -> None:
    def train(rank: int) -> list[Any]:
        one = Script(rank, wrapped(script, late=False))
        for step in range(6):
            script(one, step)
        return one.noted

    wanted = ranks.run(2, train, fuse_bytes=fuse_bytes)
    with lent_memory(monkeypatch) as lent:
        assert ranks.run(2, train, fuse_bytes=fuse_bytes) == wanted
    written = [memory for memory in lent if not (memory == 77).all()]
    assert bool(written) == (fuse_bytes > 0), "a lone gradient is not packed"


@for_each(script=[plain, zeroed_in_place, never_cleared, left_out_by_one_rank, put_back], lends=[False, True])
def test_late_synchronization_gives_the_same_too(ranks: Any, monkeypatch: pytest.MonkeyPatch, script: Any, lends: bool) -> None:
    def train(rank: int, **views: Any) -> list[Any]:
        one = Script(rank, wrapped(script, late=True, **views))
        for step in range(5):
            one.optimizer.zero_grad(set_to_none=script is not zeroed_in_place)
            one.loss(step, aside=rank == 0 or step == 0).backward()
            one.optimizer.synchronize()
            one.note()
            one.step()
        return one.noted

    wanted = ranks.run(2, train, fuse_bytes=100)
    with lent_memory(monkeypatch) if lends else nullcontext():
        assert ranks.run(2, lambda rank: train(rank, **VIEWS), fuse_bytes=100) == wanted


def test_gradients_of_a_bucket_lie_one_behind_the_other_in_its_memory_each_with_a_version_of_its_own(
    ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(rank: int) -> None:
        model = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)))
        optimizer: Any = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=LR), model.named_parameters(), **VIEWS)
        seen = set()
        for step in range(3):
            optimizer.zero_grad()
            model(batch(rank, step)).sum().backward()
            gradients: list[Any] = sorted((p.grad for p in model.parameters()), key=torch.Tensor.data_ptr)
            ends = [g.data_ptr() + g.nbytes for g in gradients]
            assert [g.data_ptr() for g in gradients[1:]] == ends[:-1]
            seen.add(gradients[0].data_ptr())
            before = [g._version for g in gradients]
            gradients[1].mul_(2)
            assert [g._version - was for g, was in zip(gradients, before, strict=True)] == [0, 1, 0, 0]
            optimizer.step()
        assert len(seen) == 1

    with lent_memory(monkeypatch) as lent:
        ranks.run(2, train)
    assert [memory.size for memory in lent] == [4 * (3 * 4 + 4 + 4 * 5 + 5)] * 2


def test_a_bucket_of_one_gradient_is_that_gradient_unless_the_session_has_memory_for_it(
    ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(rank: int) -> set[int]:
        model = seeded(lambda: nn.Linear(3, 4, bias=False))
        optimizer: Any = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=LR), model.named_parameters(), **VIEWS)
        own: list[Any] = []
        for step in range(3):
            optimizer.zero_grad()
            own.append(None)
            handle = model.weight.register_post_accumulate_grad_hook(lambda p: own.__setitem__(-1, p.grad))
            model(batch(rank, step)).sum().backward()
            handle.remove()
            own[-1] = model.weight.grad
            optimizer.step()
        return {gradient.data_ptr() for gradient in own}

    assert all(len(places) > 1 for places in ranks.run(2, train))
    with lent_memory(monkeypatch) as lent:
        assert all(len(places) == 1 for places in ranks.run(2, train))
    assert len(lent) == 2


def test_memory_that_is_given_up_with_its_layout_has_no_gradient_left_in_it(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers take it back, and it reads as zeros."""

    def train(rank: int) -> None:
        model = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)))
        optimizer: Any = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=LR), model.named_parameters(), **VIEWS)
        model(batch(rank, 0)).sum().backward()
        kept = model[1].bias.grad
        optimizer.step()
        optimizer.switch_plan("bf16")
        model[0](batch(rank, 1)).sum().backward()  # the mean of the other layer stays in p.grad
        assert model[1].bias.grad.data_ptr() != kept.data_ptr()
        assert torch.equal(model[1].bias.grad, kept)

    with lent_memory(monkeypatch):
        ranks.run(2, train)


def test_a_model_that_psgc_wraps_and_layers_that_wait_give_the_same(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrapping(rank: int, **views: Any) -> list[Any]:
        model = psgc.DistributedDataParallel(seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))), **views)
        optimizer, found = torch.optim.SGD(model.parameters(), lr=LR), []
        for step in range(4):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            model(batch(rank, step)).square().sum().backward()
            found.append([p.grad.tolist() for p in model.parameters() if p.grad is not None])
            optimizer.step()
        return [found, weights(model)]

    def waiting(rank: int, **views: Any) -> list[Any]:
        model = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 5)))
        optimizer = psgc.CrossBarrier(model, torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9), model.named_parameters(), **views)
        found = []
        for step in range(4):
            optimizer.zero_grad()
            loss = model[:2](batch(rank, step)).square().sum() if rank and step == 2 else model(batch(rank, step)).square().sum()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        optimizer.synchronize()
        return [found, weights(model)]

    for work in (wrapping, waiting):
        wanted = ranks.run(2, work, fuse_bytes=100)
        assert ranks.run(2, lambda rank, work=work: work(rank, **VIEWS), fuse_bytes=100) == wanted
        with lent_memory(monkeypatch):
            assert ranks.run(2, lambda rank, work=work: work(rank, **VIEWS), fuse_bytes=100) == wanted


def test_asynchronous_training_has_no_buckets_of_gradients(ranks: Any) -> None:
    def train(rank: int) -> None:
        model = nn.Linear(3, 2)
        psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=LR), model.named_parameters(), **VIEWS)

    with pytest.raises(
        UsageError, match="gradient_as_bucket_view: under PSGC_ASYNC=1 gradients stay on their rank, and are in no bucket; leave it out"
    ):
        ranks.run(2, train, async_mode=True)


@pytest.mark.parametrize(("servers", "transport"), [(1, "shm"), (2, "tcp"), (0, "shm")])
def test_a_real_job_over_any_carrier_and_by_any_codec_gives_the_same(make_job: Callable[..., Any], servers: int, transport: str) -> None:
    env = {"PSGC_TRANSPORT": transport, "PSGC_MIN_COMPRESS_BYTES": "0", "PSGC_FUSE_BYTES": "60000", "PSGC_PART_BYTES": "65536"}
    said = make_job(servers=servers, env=env).said(job=str(Path(__file__).parent / "job_views.py"))
    assert all(text.count("the same") == 10 for text in said), said
