"""When gradients become ready, of a model on its own and inside a job."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import psgc.torch as psgc
from psgc.errors import ConfigError, UsageError
from psgc.plan.inputs.profile import load_profile
from psgc.torch.gradients import profiler
from psgc.torch.gradients.profiler import PAUSE_S, WARM_UP, Recorder


class Net(nn.Module):
    """Two layers, one of them used twice, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.unused = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        self.frozen = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.twice(self.twice(self.first(x).relu()))
        return found


TRAINED = {"first.weight": 64, "first.bias": 8, "twice.weight": 64, "unused.weight": 64, "unused.bias": 8}


def training(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()


def assert_profile(profile: Any) -> None:
    assert {tensor.name: tensor.numel for tensor in profile.tensors} == TRAINED
    assert len(profile.tensors) == len(TRAINED)
    assert {tensor.shape for tensor in profile.tensors} == {(8, 8), (8,)}, "PowerSGD is advised from shapes"
    ready = [tensor.ready_us for tensor in profile.tensors]
    assert ready == sorted(ready)
    assert ready[0] == 0
    assert profile.tensors[0].name == "twice.weight"
    assert profile.forward_us > 0
    assert {"unused.weight", "unused.bias"} <= {tensor.name for tensor in profile.tensors if tensor.ready_us == ready[-1]}
    assert "cores" in profile.hardware
    assert profile.date.endswith("+00:00")
    assert set(profile.spread) == {"backward_us", "tail_us", "forward_us", "compute_us"}


def test_a_model_s_gradients_are_profiled_in_the_order_of_their_readiness() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    profile = psgc.profile_model(model, lambda: training(model, optimizer), iterations=4)
    assert_profile(profile)
    assert profile.itemsizes == (4,)
    assert profile.model == "Net"
    assert "of 4 iterations" in profile.source


def test_a_profile_has_the_bytes_of_each_gradients_type() -> None:
    model = nn.Sequential(nn.Linear(8, 8, dtype=torch.bfloat16), nn.Linear(8, 8, dtype=torch.float64))
    sizes = {"0.weight": 2, "0.bias": 2, "1.weight": 8, "1.bias": 8}

    def step() -> None:
        model[1](model[0](torch.ones(2, 8, dtype=torch.bfloat16)).double()).square().mean().backward()

    assert psgc.profile_model(model, step, iterations=3).itemsize_of == sizes


def test_what_varies_much_is_one_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(profiler, "unsteady", lambda _: "backward varies")
    model = Net()
    psgc.profile_model(model, lambda: model(torch.ones(1, 8)).sum().backward(), iterations=3, warm_up=0)
    assert [record.getMessage() for record in caplog.records] == ["backward varies"]


def test_profiling_leaves_no_hooks_behind() -> None:
    model = Net()
    psgc.profile_model(model, lambda: model(torch.ones(1, 8)).sum().backward(), iterations=3, warm_up=0)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_what_cannot_be_profiled_is_refused() -> None:
    model = Net()
    with pytest.raises(UsageError, match="step_fn computed no gradient"):
        psgc.profile_model(model, lambda: model(torch.ones(1, 8)), iterations=3)
    with pytest.raises(UsageError, match="expected at least 3"):
        psgc.profile_model(model, lambda: None, iterations=2)
    with pytest.raises(UsageError, match="no parameter of the model requires a gradient"):
        psgc.profile_model(nn.ReLU(), lambda: None)


def test_what_is_neither_backward_nor_communication_counts_as_forward() -> None:
    marks = iter(1000 * us for us in (10, 14, 15, 40, 47, 60, 61, 62, 90, 100))  # the host's clock counts nanoseconds
    recorder = Recorder(lambda: next(marks))
    for _ in range(2):
        recorder.ready("last")
        recorder.ready("first")
        recorder.leaving()
        recorder.delivered()
        recorder.delivered()  # without gradients since
    assert recorder.complete == 2
    (iteration,) = recorder.iterations(leave_out=0)
    assert iteration.ready_us == {"last": 0, "first": 4}
    assert (iteration.tail_us, iteration.forward_us, iteration.compute_us) == (1, 20, 25)


def test_of_several_backwards_the_last_makes_a_gradient_ready() -> None:
    marks = iter(1000 * us for us in (0, 5, 50, 57, 100))
    recorder = Recorder(lambda: next(marks))
    for name in ("last", "first", "last", "first"):
        recorder.ready(name)
    recorder.backward_over()
    recorder.ready("last")
    recorder.backward_over()
    (iteration,) = recorder.iterations(leave_out=0)
    assert iteration.ready_us == {"last": 0, "first": 7}
    assert (iteration.tail_us, iteration.forward_us) == (0, 43)


def test_iterations_follow_a_pause_that_is_not_counted() -> None:
    marks = iter(1000 * us for us in (0, 5, 6, 10, 30, 45, 50, 51, 60))
    slept = list[float]()
    recorder = Recorder(lambda: next(marks))
    for _ in range(2):
        recorder.ready("last")
        recorder.ready("first")
        recorder.leaving()
        recorder.delivered() if recorder.complete == 0 else recorder.backward_over()
        if recorder.complete == 1:
            recorder.pause(0.02, slept.append)
    assert slept == [0.02]
    (iteration,) = recorder.iterations(leave_out=0)
    assert (iteration.tail_us, iteration.forward_us) == (1, 50 - 10 - 15)


def test_a_profile_is_of_iterations_after_pauses() -> None:
    model, began = Net(), time.perf_counter()
    profile = psgc.profile_model(model, lambda: model(torch.ones(1, 8)).sum().backward(), iterations=4, warm_up=0)
    took_us = (time.perf_counter() - began) * 1e6
    assert took_us >= 4 * PAUSE_S * 1e6
    assert profile.forward_us is not None
    assert profile.forward_us < took_us - 4 * PAUSE_S * 1e6, "the pauses are none of its time"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_gradients_are_ready_when_its_stream_has_computed_them() -> None:
    model, x = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).cuda(), torch.ones(8192, 2048, device="cuda")
    profile = psgc.profile_model(model, lambda: model(x).square().mean().backward(), iterations=5)
    flops = 2 * 2 * 8192 * 2048**2 * 7  # two products a layer lie between the first gradient and the last
    assert profile.backward_us > flops / 2e15 * 1e6  # faster than any GPU: hooks were timed
    assert torch.cuda.get_device_name() in profile.hardware


def test_a_place_that_cannot_be_written_is_refused_at_once(ranks: Any, tmp_path: Path) -> None:
    def work(rank: int) -> None:
        model = Net()
        psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())

    with pytest.raises(ConfigError, match=r"PSGC_PROFILE=.*missing/p.json: cannot write in .*missing"):
        ranks.run(1, work, profile=str(tmp_path / "missing" / "p.json"))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
def test_in_a_job_rank_0_writes_the_profile_and_buckets_wait_for_the_end_of_backward_until_then(
    ranks: Any, tmp_path: Path, passes: int, late: bool
) -> None:  # fmt: skip
    path, iterations = tmp_path / "profile.json", 3
    early: list[bool] = []

    def work(rank: int) -> None:
        model = Net()
        optimizer = psgc.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), backward_passes_per_step=passes
        )
        sent = [0]  # when backward made the last gradient

        def note(parameter: torch.Tensor) -> None:
            sent[0] = len(ranks.sessions[rank].submissions)

        model.first.weight.register_post_accumulate_grad_hook(note)
        for _ in range(WARM_UP + iterations + 3):
            optimizer.zero_grad()
            before = len(ranks.sessions[rank].submissions)
            for _ in range(passes):
                model(torch.ones(2, 8)).square().mean().backward()
            if rank == 0:
                early.append(sent[0] > before)
            optimizer.step()

    ranks.run(2, work, profile=str(path), profile_iterations=iterations, fuse_bytes=0, late_synchronization=late)
    assert_profile(load_profile(str(path)))
    assert early == [False] * (WARM_UP + iterations + 1) + [True] * 2
    assert sorted(tmp_path.iterdir()) == [path]


def test_the_warm_up_of_one_bit_adam_is_profiled_too(ranks: Any, tmp_path: Path) -> None:
    path, iterations = tmp_path / "profile.json", 3

    def work(rank: int) -> None:
        model = Net()
        optimizer = psgc.OneBitAdam(model.named_parameters(), warmup_steps=100)
        for _ in range(WARM_UP + iterations + 2):
            optimizer.zero_grad()
            model(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()

    ranks.run(1, work, profile=str(path), profile_iterations=iterations)
    assert_profile(load_profile(str(path)))


@pytest.mark.parametrize("late", [False, True])
def test_where_nothing_but_the_profile_is_wanted_every_rank_exits_after_the_same_step(
    ranks: Any, tmp_path: Path, late: bool
) -> None:  # fmt: skip
    path, iterations, steps = tmp_path / "profile.json", 3, [0, 0]
    codes: list[Any] = [None, None]

    def work(rank: int) -> None:
        model = Net()
        optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        while True:
            optimizer.zero_grad()
            steps[rank] += 1
            time.sleep(0.05 if steps[rank] % 2 == rank else 0.0)  # the slower one is another in each step
            try:
                model(torch.ones(2, 8)).square().mean().backward()
                optimizer.step()
            except SystemExit as ended:
                codes[rank] = ended.code
                return

    ranks.run(2, work, profile=str(path), profile_iterations=iterations, profile_only=True, late_synchronization=late)
    profile = load_profile(str(path))
    assert_profile(profile)
    assert profile.source.endswith("each of the slowest of 2 ranks")
    assert profile.spread["compute_us"].median >= 50_000, "every iteration is as long as that of the rank that slept"
    assert (steps, codes) == ([WARM_UP + iterations + 1] * 2, [0, 0])
