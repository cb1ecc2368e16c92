"""``auto`` in jobs: every rank switches at the same step, to what is quickest, again when the job changes, and to no codec that does not suit the optimizer."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import psgc.torch as psgc
from psgc.errors import UsageError
from psgc.plan.inputs.cluster import load_cluster
from psgc.plan.inputs.profile import load_profile
from psgc.plan.model.plan import check_fits
from psgc.plan.planfile.reading import load_plan
from psgc.torch.device import engines
from psgc.torch.gradients import auto
from tests.device.recording import RecordingRuntime
from tests.device.steps import use_recorded

# milliseconds a step, by choice
TIMES = {"none": 340.0, "bf16": 200.0, "int8": 120.0, "int4": 90.0, "onebit": 60.0, "topk": 75.0, "plan": 80.0}


class Slow:
    """Each rank's clock, which a step moves on by what its choice takes."""

    def __init__(self) -> None:
        self.own = threading.local()
        self.factor = 1.0

    def perf_counter_ns(self) -> int:
        return int(getattr(self.own, "ns", 0))

    def step(self, exchange: Any) -> None:
        choice = exchange.choice
        name = "plan" if choice.plan is not None or choice.awaited else choice.codec
        self.own.ns = self.perf_counter_ns() + int(1e6 * TIMES[name] * self.factor)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    clock = Slow()
    monkeypatch.setattr(auto, "time", SimpleNamespace(perf_counter_ns=clock.perf_counter_ns))
    return clock


def train(slow: Slow, rank: int, steps: int, make: Callable[..., Any] = torch.optim.SGD, change: int = -1, **options: Any) -> list[str]:
    """The choice of each step. change: the step from which on everything takes ten times as long."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 256))
    optimizer: Any = psgc.DistributedOptimizer(make(model.parameters(), lr=0.01), model.named_parameters(), compression="auto", **options)
    chosen = []
    for step in range(steps):
        if step == change:
            slow.factor = 10.0
        slow.step(optimizer._psgc_exchange)
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        choice = optimizer._psgc_exchange.choice
        chosen.append("plan" if choice.plan is not None or choice.awaited else choice.codec)
    return chosen


def test_every_rank_ends_with_the_quickest_choice_at_the_same_step(ranks: Any, slow: Slow, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "psgc.run")
    first, second = ranks.run(2, lambda rank: train(slow, rank, 50), min_compress_bytes=0)
    assert first == second
    assert first[:8] == ["none"] * 8
    tried = set(first)
    assert first[-1] == min(tried, key=lambda name: TIMES[name])
    assert len(tried) > 1
    assert re.search(
        r"auto, step 9: trying .*: a step takes 340\.0 ms by none, as over links of \S+ Gbit/s; predicted, in ms: ", caplog.text
    )
    assert f": {first[-1]} from now on; measured, in ms a step: none 340.0" in caplog.text


def test_on_gpus_codecs_are_timed_there_and_the_line_says_so(ranks: Any, slow: Slow, caplog: pytest.LogCaptureFixture) -> None:
    """Without times of the GPU, or its name, nothing is known of encoding there, so nothing that the job would do is tried."""
    caplog.set_level("INFO", "psgc.run")
    for behind in (False, True):
        caplog.clear()
        use_recorded(RecordingRuntime(behind=behind))
        try:
            first, second = ranks.run(2, lambda rank: train(slow, rank, 40), min_compress_bytes=0)
        finally:
            engines.use()
        assert first == second
        told = "codec times on the GPU: not known" if behind else "codec times on the GPU: bf16, int4, int8, onebit, topk measured"
        assert told in caplog.text
        assert (set(first) == {"none"}) == behind, "only what has known times is tried"


def test_under_adam_only_codecs_that_suit_it_are_tried(ranks: Any, slow: Slow) -> None:
    (found, _) = ranks.run(2, lambda rank: train(slow, rank, 60, torch.optim.Adam), min_compress_bytes=0)
    assert set(found) <= {"none", "bf16", "int8", "int4", "plan"}
    assert found[-1] != "none"


def test_it_plans_again_within_30_steps_of_a_change(ranks: Any, slow: Slow, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "psgc.run")
    ranks.run(2, lambda rank: train(slow, rank, 90, change=60), min_compress_bytes=0)
    assert re.search(r"auto, step \d+: a step takes \S+ ms instead of \S+: planning again", caplog.text)


def test_where_no_codec_carries_some_gradient_the_job_stays_as_it_is(
    ranks: Any, slow: Slow, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    caplog.set_level("INFO", "psgc.run")

    def work(rank: int) -> str:
        model = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64, dtype=torch.float64)])
        optimizer: Any = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), compression="auto")
        for _ in range(12):
            slow.step(optimizer._psgc_exchange)
            optimizer.zero_grad()
            sum(layer(torch.randn(4, 64, dtype=layer.weight.dtype)).square().mean() for layer in model).backward()
            optimizer.step()
        return str(optimizer._psgc_exchange.choice.codec)

    assert ranks.run(2, work, min_compress_bytes=0) == ["none", "none"]
    assert "none stays, since nothing else would save 5 %" in caplog.text


def test_switching_by_hand_ends_it(ranks: Any, slow: Slow) -> None:
    def work(rank: int) -> bool:
        model = nn.Linear(64, 64)
        optimizer: Any = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), compression="auto")
        with pytest.raises(UsageError, match="'auto' is chosen when the optimizer is made"):
            optimizer.switch_plan("auto")
        for step in range(12):
            slow.step(optimizer._psgc_exchange)
            optimizer.zero_grad()
            model(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()
            if step == 4:
                optimizer.switch_plan("bf16")
        return bool(optimizer._psgc_exchange.choice.codec == "bf16")

    assert ranks.run(2, work) == [True, True]


def test_profiles_refuse_it(ranks: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="PSGC_PROFILE times computation alone"):
        ranks.run(2, lambda rank: train(Slow(), rank, 1), profile=str(tmp_path / "p.json"))


def test_a_real_job_under_auto_trains_and_says_what_it_found(make_job: Callable[..., Any], tmp_path: Path) -> None:
    """What it finds is the machine's matter: every rank has the same weights at its end. Traced, it leaves what its prediction rests on."""
    job = make_job(env={"PSGC_PLAN": "auto", "PSGC_TRACE": str(tmp_path)})
    workers = job.whole("train", *["-"] * 5, job=str(Path(__file__).parent / "job_switch.py"))
    assert set(job.end().values()) == {0}, job.text()
    weights = {line for worker in workers for line in re.findall(r"^weights .*", worker.text, re.MULTILINE)}
    assert len(weights) == 1
    said = re.findall(r"psgc.run: optimizer0: auto, step .*", "\n".join(worker.text for worker in workers))
    assert said, job.text()
    assert all("Gbit/s" in line or "from now on" in line or "planning again" in line for line in said)
    cluster, profile = load_cluster(str(tmp_path / "cluster.toml")), load_profile(str(tmp_path / "profile.json"), "v100")
    assert (cluster.name, cluster.nodes * cluster.gpus_per_node) == ("this job", 2)
    check_fits(load_plan(str(tmp_path / "plan.json")), {tensor.name: tensor.numel for tensor in profile.tensors}, "the profile")
