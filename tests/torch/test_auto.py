"""``auto`` in jobs: every rank switches at the same step, to what is quickest, again when the job changes, and to no codec that does not suit the optimizer."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import psgc.torch as psgc
from psgc.errors import UsageError
from psgc.plan.inputs.cluster import load_cluster
from psgc.plan.inputs.profile import load_profile
from psgc.plan.live.levels import STAGE_STEPS
from psgc.plan.model.plan import check_fits
from psgc.plan.planfile.reading import load_plan
from psgc.torch.auto import candidates, measuring
from psgc.torch.device import engines
from tests.device.recording import RecordingRuntime
from tests.device.steps import use_recorded
from tests.torch.auto_table import TIMES, Table, choice_of
from tests.torch.small_models import batch, seeded


class Slow(Table):
    """A table whose steps take ``factor`` times as long."""

    factor = 1.0

    def step(self, exchange: Any) -> None:
        self.passes(TIMES[choice_of(exchange)] * self.factor)


@pytest.fixture
def slow() -> Iterator[Slow]:
    table = Slow(threading.local())
    measuring.use(table)
    yield table
    measuring.use()


def codecs_of(exchange: Any) -> str:
    """What the gradients travel by, of a plan, too; the exchange's choice is of the next step."""
    return " ".join(sorted({bucket.codec for layout in exchange.layouts for bucket in layout.buckets}))


def train(
    slow: Slow,
    rank: int,
    steps: int,
    make: Callable[..., Any] = torch.optim.SGD,
    change: int = -1,
    see: Callable[[Any], str] = choice_of,
    **options: Any,
) -> list[str]:
    """The choice of each step. change: the step from which on everything takes ten times as long. see: what to note in place of the choice."""
    model = seeded(lambda: nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 256)))
    optimizer: Any = psgc.DistributedOptimizer(
        make(model.parameters(), lr=0.01), model.named_parameters(), **{"compression": "auto", **options}
    )
    chosen = []
    for step in range(steps):
        if step == change:
            slow.factor = 10.0
        slow.step(optimizer._psgc_gradients.exchange)
        optimizer.zero_grad()
        model(batch(rank, step, 64)).square().mean().backward()
        optimizer.step()
        chosen.append(see(optimizer._psgc_gradients.exchange))
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


def test_for_lbfgs_it_loses_nothing(ranks: Any, slow: Slow) -> None:
    def work(rank: int, optimizer: Any) -> str:
        model = seeded(lambda: nn.Linear(4, 4))
        made: Any = psgc.DistributedOptimizer(
            optimizer(model.parameters(), lr=0.1), model.named_parameters(), compression="auto:quality=fast"
        )
        return str(made._psgc_gradients.exchange.choice.quality)

    assert ranks.run(2, lambda rank: work(rank, torch.optim.LBFGS)) == ["exact"] * 2
    assert ranks.run(2, lambda rank: work(rank, torch.optim.SGD)) == ["fast"] * 2


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
        told = "codec times on the GPU: not known" if behind else "codec times on the GPU: bf16, int4, int8 measured"
        assert told in caplog.text
        assert (set(first) == {"none"}) == behind, "only what has known times is tried"


@pytest.mark.parametrize("asked", ["host", "auto", "nccl"])
def test_it_plans_with_what_collectives_of_gradients_on_gpus_go_through(
    ranks: Any, slow: Slow, caplog: pytest.LogCaptureFixture, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank's thread has a GPU of its own; NCCL is asked for, and can be had, or one of them cannot have it."""
    caplog.set_level("INFO", "psgc.run")
    connected: list[bool] = []
    real = candidates.outlook

    def outlook(profile: Any, machines: Any, *arguments: Any, **options: Any) -> Any:
        connected.append(machines.connected)
        return real(profile, machines, *arguments, **options)

    monkeypatch.setattr(candidates, "outlook", outlook)
    for shared in (False, True):
        caplog.clear()
        connected.clear()
        use_recorded(RecordingRuntime(gpus=lambda shared=shared: "the only one" if shared else threading.current_thread().name))  # type: ignore[misc]
        try:
            ranks.run(2, lambda rank: train(slow, rank, 12), min_compress_bytes=0, collectives=asked)
        finally:
            engines.use()
        if asked == "nccl" and shared:
            assert "nothing is changed: rank 0 has PSGC_COLLECTIVES=nccl, but the group of ranks 0, 1 cannot have it" in caplog.text
            continue
        assert connected == [asked != "host" and not shared]
        reason = "rank 0 has PSGC_COLLECTIVES=host" if asked == "host" else "ranks 0 and 1 share a GPU"
        told = f"collectives go through the hosts' memory: {reason}"
        assert ("collectives go from GPU to GPU: 2 ranks have a GPU each" if connected[0] else told) in caplog.text


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD])
def test_unless_it_is_asked_for_nothing_is_tried_that_is_not_safe(ranks: Any, slow: Slow, make: Any) -> None:
    (found, _) = ranks.run(2, lambda rank: train(slow, rank, 60, make), min_compress_bytes=0)
    assert set(found) <= {"none", "bf16", "int8", "int4", "plan"}
    assert found[-1] != "none"


def test_exactly_means_that_nothing_is_tried(ranks: Any, slow: Slow, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "psgc.run")
    (found, _) = ranks.run(2, lambda rank: train(slow, rank, 30), min_compress_bytes=0, quality="exact")
    assert set(found) == {"none"}
    assert "none stays, since nothing else would save 5 %" in caplog.text


def of_groups(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """Each parameter a group of its own."""
    return torch.optim.SGD([{"params": [parameter]} for parameter in parameters], lr=lr)


def test_parameters_of_several_groups_may_be_planned_together(ranks: Any, slow: Slow, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "psgc.run")
    ranks.run(2, lambda rank: train(slow, rank, 20, of_groups), min_compress_bytes=0)
    assert "auto, step 9: trying plan" in caplog.text


def test_where_gradients_have_several_dtypes_it_looks_for_no_plan(ranks: Any, slow: Slow, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "psgc.run")

    def work(rank: int) -> None:
        model = seeded(lambda: nn.Linear(64, 256))
        model.register_parameter("scale", nn.Parameter(torch.ones(256, dtype=torch.bfloat16)))
        optimizer: Any = psgc.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), compression="auto"
        )
        for step in range(20):
            slow.step(optimizer._psgc_gradients.exchange)
            optimizer.zero_grad()
            (model(batch(rank, step, 64)) * model.scale.float()).square().mean().backward()
            optimizer.step()

    ranks.run(2, work, min_compress_bytes=0)
    assert "auto, step 9: trying int4" in caplog.text and not re.search(r"trying plan|\bplan \d", caplog.text)


def test_a_fast_job_comes_to_coarse_codecs_in_stages(ranks: Any, slow: Slow, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "psgc.run")

    options: dict[str, Any] = {"compression": "auto:quality=fast", "residuals_follow_lr": True}  # groups are apart: there are no plans
    first, second = ranks.run(2, lambda rank: train(slow, rank, 450, of_groups, see=codecs_of, **options), min_compress_bytes=0)
    assert first == second
    of_stages = [first[stage * STAGE_STEPS : (stage + 1) * STAGE_STEPS] for stage in range(4)]
    fine, *coarse = [{codec for codecs in of_stage for codec in codecs.split()} for of_stage in of_stages]
    assert fine <= {"none", "bf16", "int8", "int4"}
    assert ["topk:k=0.0625" in coarse[0], "onebit" in coarse[1], "topk" in coarse[2]] == [True] * 3, coarse
    assert not {"topk", "topk:k=0.02", "onebit"} & coarse[0] and "topk" not in coarse[1]


def test_a_codec_whose_error_grows_is_given_up_for_good(ranks: Any, slow: Slow, caplog: pytest.LogCaptureFixture) -> None:
    """From some step on every other small tensor of one rank has gradients so small that int4 rounds them to nothing beside their neighbours."""
    caplog.set_level("INFO", "psgc.run")

    def work(rank: int) -> list[str]:
        model = seeded(lambda: nn.ParameterList([nn.Parameter(torch.randn(8)) for _ in range(64)]))
        optimizer: Any = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-9), compression="auto")
        chosen = []
        for step in range(260):
            slow.step(optimizer._psgc_gradients.exchange)
            optimizer.zero_grad()
            scale = 1e-4 if step > 100 and rank == 1 else 1.0
            data = torch.randn(64, 8, generator=torch.Generator().manual_seed(2 * step + rank))
            torch.stack(
                [(p * x).sum() * (scale if number % 2 else 1.0) for number, (p, x) in enumerate(zip(model, data, strict=True))]
            ).sum().backward()
            optimizer.step()
            chosen.append(codecs_of(optimizer._psgc_gradients.exchange))
        return chosen

    first, second = ranks.run(2, work, min_compress_bytes=0)
    assert first == second
    assert "int4" in first[100]
    assert re.search(r"auto, step \d+: .* is given up: its relative error on the gradients is \S+ now; uncompressed again", caplog.text)
    left = next(step for step in range(100, 260) if first[step] == "none")
    assert not any("int4" in codecs for codecs in first[left:]) and "bf16" in first[-1], "nor int8, whose error is too large by now"


def test_it_plans_again_within_30_steps_of_a_change(ranks: Any, slow: Slow, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "psgc.run")
    ranks.run(2, lambda rank: train(slow, rank, 90, change=60), min_compress_bytes=0)
    assert re.search(r"auto, step \d+: a step takes \S+ ms instead of \S+: planning again", caplog.text)


def test_where_no_codec_carries_some_gradient_the_job_stays_as_it_is(
    ranks: Any, slow: Slow, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    caplog.set_level("INFO", "psgc.run")

    def work(rank: int) -> str:
        model = seeded(lambda: nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64, dtype=torch.float64)]))
        optimizer: Any = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), compression="auto")
        for step in range(12):
            slow.step(optimizer._psgc_gradients.exchange)
            optimizer.zero_grad()
            sum(layer(batch(rank, step, 64).to(layer.weight.dtype)).square().mean() for layer in model).backward()
            optimizer.step()
        return str(optimizer._psgc_gradients.exchange.choice.codec)

    assert ranks.run(2, work, min_compress_bytes=0) == ["none", "none"]
    assert "none stays, since nothing else would save 5 %" in caplog.text


def test_two_optimizers_try_their_candidates_one_after_the_other(ranks: Any, slow: Slow) -> None:
    """They measure the same loop: what one tried would be taken for the other's gain."""

    def work(rank: int) -> list[tuple[str, str]]:
        models = [seeded(lambda: nn.Linear(64, 256), seed) for seed in range(2)]
        optimizers: list[Any] = [psgc.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.01), compression="auto") for m in models]
        exchanges = [optimizer._psgc_gradients.exchange for optimizer in optimizers]
        seen = []
        for step in range(90):
            for model, optimizer, exchange in zip(models, optimizers, exchanges, strict=True):
                slow.step(exchange)
                optimizer.zero_grad()
                model(batch(rank, step, 64)).square().mean().backward()
                optimizer.step()
            assert not all(exchange.observer.trying for exchange in exchanges)
            seen.append((choice_of(exchanges[0]), choice_of(exchanges[1])))
        return seen

    first, second = ranks.run(2, work, min_compress_bytes=0)
    assert first == second
    for of_one in zip(*first, strict=True):
        assert len(set(of_one)) > 1


def test_a_slow_ranks_computation_is_not_taken_for_slow_links(ranks: Any, slow: Slow, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "psgc.run")

    def work(rank: int) -> None:
        model = seeded(lambda: nn.Linear(64, 64))
        optimizer: Any = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), compression="auto")
        for step in range(10):
            slow.computes(30.0 * rank)
            slow.passes(20.0)
            optimizer.zero_grad()
            model(batch(rank, step, 64)).square().mean().backward()
            optimizer.step()

    ranks.run(2, work, min_compress_bytes=0)
    (line,) = [record.getMessage() for record in caplog.records if "none stays" in record.getMessage()]
    assert "a step takes 20.0 ms by none, as over links of 400 Gbit/s" in line, "the slow rank computes for all of it"
    (ms,) = re.findall(r"; rank 1 computes for (\S+) ms of it", line)
    assert float(ms) >= 30


def test_gradients_that_are_too_small_to_be_compressed_are_left_alone(ranks: Any, slow: Slow, caplog: pytest.LogCaptureFixture) -> None:
    """Of a step with so few bytes nearly all is something else than the link, to which the fit would put it down."""
    caplog.set_level("INFO", "psgc.run")
    slow.factor = 0.1  # a step that some link could explain

    def work(rank: int) -> str:
        model = seeded(lambda: nn.Linear(8, 4))
        optimizer: Any = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), compression="auto")
        for step in range(12):
            slow.step(optimizer._psgc_gradients.exchange)
            optimizer.zero_grad()
            model(batch(rank, step, 8)).square().mean().backward()
            optimizer.step()
        return choice_of(optimizer._psgc_gradients.exchange)

    assert ranks.run(2, work) == ["none", "none"]
    assert "none stays, since nothing else would save 5 %" in caplog.text


def test_switching_by_hand_ends_it(ranks: Any, slow: Slow) -> None:
    def work(rank: int) -> bool:
        model = seeded(lambda: nn.Linear(64, 64))
        optimizer: Any = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), compression="auto")
        with pytest.raises(UsageError, match="'auto' is chosen when the optimizer is made"):
            optimizer.switch_plan("auto")
        for step in range(12):
            slow.step(optimizer._psgc_gradients.exchange)
            optimizer.zero_grad()
            model(batch(rank, step, 64)).square().mean().backward()
            optimizer.step()
            if step == 4:
                optimizer.switch_plan("bf16")
        return bool(optimizer._psgc_gradients.exchange.choice.codec == "bf16")

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
    odd = [
        line
        for line in said
        if not re.search(r"Gbit/s|from now on|planning again|is given up: its relative error|the job ended while .* was tried", line)
    ]
    assert not odd, odd
    cluster, profile = load_cluster(str(tmp_path / "cluster.toml")), load_profile(str(tmp_path / "profile.json"), "v100")
    assert (cluster.name, cluster.nodes * cluster.gpus_per_node) == ("this job", 2)
    check_fits(load_plan(str(tmp_path / "plan.json")), {tensor.name: tensor.numel for tensor in profile.tensors}, "the profile")
