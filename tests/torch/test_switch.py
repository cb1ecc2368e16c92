"""Switching plans while a job trains: all ranks at the same step, nothing lost, and the same training where nothing is lost."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import psgc.torch as psgc
from psgc.errors import LayoutMismatch, UsageError
from psgc.plan.planfile.reading import read_plan
from psgc.plan.planfile.runtime import ENCODED, PLAIN
from tests.torch.job_switch import NUMEL, STEPS
from tests.torch.test_options import REDUCED, TWICE
from tests.torch.test_planned import MODEL, WHOLE, build, planned, written
from tests.torch.test_planned_job import SIZES

JOB = str(Path(__file__).parent / "job_switch.py")
NODES = ("intra.reduce_scatter", "inter.all_reduce", "intra.all_gather")


def plan_of(sizes: dict[str, int], *buckets: tuple[str, str, Any]) -> dict[str, Any]:
    """A plan of (names, codec, option)."""
    return {
        "version": 1, "model": "m", "cluster": "", "prediction": {},
        "buckets": [
            {"tensors": names.split(), "numel": sum(sizes[name] for name in names.split()), "parts": 1, "priority": -number, "codec": codec,
             "option": list(option)}
            for number, (names, codec, option) in enumerate(buckets)
        ],
    }  # fmt: skip


def one_step(model: Any, optimizer: Any, rank: int, step: int) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + rank))).square().mean().backward()
    optimizer.step()


def train(rank: int, *switches: Any, passes: int = 1) -> list[float]:
    """Two steps by each choice; None leaves it as it is."""
    model = build()
    optimizer: Any = psgc.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters(), backward_passes_per_step=passes
    )
    step = 0
    for switch in switches:
        if switch is not None:
            optimizer.switch_plan(switch)
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(passes):
                inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + rank))
                model(inputs).square().mean().backward()
                step += 1
            optimizer.step()
    return [x for p in model.parameters() for x in p.detach().reshape(-1).tolist()]


@pytest.mark.parametrize("passes", [1, 2])
def test_a_switch_declares_the_tensors_anew_at_the_next_step_and_changes_no_sum(ranks: Any, tmp_path: Path, passes: int) -> None:
    stay = ranks.run(2, lambda rank: train(rank, None, None, None, passes=passes))
    path, plan = written(tmp_path / "p.json", WHOLE), read_plan(planned((tuple(MODEL), 0)), "p")
    assert ranks.run(2, lambda rank: train(rank, path, "none", plan, passes=passes)) == stay
    layouts = [step.layout for step in ranks.steps]
    assert list(dict.fromkeys(layouts)) == ["optimizer0", "optimizer0.2", "optimizer0.3"]
    tensors = [{step.tensors for step in ranks.steps if step.layout == name} for name in dict.fromkeys(layouts)]
    assert tensors[0] == {("0.bias",), ("1.bias", "0.weight"), ("1.weight",)}
    assert tensors[2] == {tuple(MODEL)}


def test_a_step_that_was_dropped_just_before_a_switch_is_not_told_again_after_it(ranks: Any) -> None:
    """It is in what was collected, which the new layout takes up."""

    def work(rank: int) -> None:
        model = build()
        optimizer: Any = psgc.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression="topk"
        )
        for step, after in enumerate((optimizer.step, optimizer.zero_grad, optimizer.step, optimizer.step)):
            model(torch.ones(4, 3)).square().mean().backward()
            after()
            optimizer.zero_grad()
            if step == 1:
                optimizer.switch_plan("int8")

    ranks.run(2, work)
    assert [step.previous_skipped for step in ranks.steps] == [False] * 4


def test_a_switch_in_the_middle_of_a_step_or_to_what_is_no_plan_is_refused(ranks: Any) -> None:
    def work(rank: int) -> None:
        model = build()
        optimizer: Any = psgc.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), backward_passes_per_step=2
        )
        for wrong, said in ((None, "expected a plan"), (3, "expected codec text")):
            with pytest.raises(UsageError, match=said):
                optimizer.switch_plan(wrong)
        model(torch.ones(4, 3)).sum().backward()
        with pytest.raises(UsageError, match=r"in the middle of a step; call it after step\(\)"):
            optimizer.switch_plan("int8")
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        optimizer.switch_plan("int8")

    ranks.run(2, work)
    with pytest.raises(UsageError, match="OneBitAdam sends momenta by a codec of its own"):
        ranks.run(1, lambda rank: psgc.OneBitAdam(build().parameters(), warmup_steps=1).switch_plan("int8"))


def test_ranks_that_switch_to_different_plans_end_the_job_naming_the_first_difference(ranks: Any) -> None:
    with pytest.raises(LayoutMismatch, match=r"codec on rank . is (int8|bf16), on rank . it is (int8|bf16)"):
        ranks.run(2, lambda rank: train(rank, None, ("bf16", "int8")[rank]))


@pytest.mark.timeout(500)
def test_what_was_applied_and_what_is_kept_are_all_that_was_computed_after_each_switch(
    make_job: Callable[..., Any], tmp_path: Path
) -> None:
    """Over servers and among workers, in other buckets, by other codecs, and after a step that was thrown away. By TCP, where servers' residuals travel."""
    topk = "topk:k=0.25/topk:k=0.5"
    among = written(tmp_path / "among.json", plan_of(NUMEL, ("b d", "topk:k=0.1", TWICE), ("c", "none", REDUCED), ("a", topk, ENCODED)))
    fused = written(tmp_path / "fused.json", plan_of(NUMEL, ("d c b a", "topk:k=0.01", TWICE)))
    job = make_job(servers=2, env={"PSGC_MIN_COMPRESS_BYTES": "0", "PSGC_TRANSPORT": "tcp"})
    switches = ["dropped", topk, among, "dropped", fused, topk, "none", among, "topk:k=0.5/none"]
    said = job.said("conserve", *switches, job=JOB)
    held = [re.findall(r"^conserved step=\d+ held=(\w+)$", text, re.MULTILINE) for text in said]
    assert [len(of_rank) for of_rank in held] == [7, 7]
    assert "True" in held[0][0], "the comparison is not of zeros"


@pytest.mark.timeout(500)
def test_a_training_that_switches_to_options_among_nodes_and_back_is_the_one_that_does_not(
    make_job: Callable[..., Any], tmp_path: Path
) -> None:
    """With Adam under a loss scaler, which skips the step before each switch. Two ranks' sums are the same in any order."""
    nodes = written(tmp_path / "nodes.json", plan_of(SIZES, (" ".join(SIZES), "none", NODES)))
    servers = written(tmp_path / "servers.json", plan_of(SIZES, *((name, "none", PLAIN) for name in SIZES)))
    stay = make_job().said("train", "-", "-", "-", "-", job=JOB)
    switched = make_job().said("train", "-", nodes, "none", servers, job=JOB)
    for text, wanted in zip(switched, stay, strict=True):
        losses = re.findall(r"^loss .*|^weights .*", text, re.MULTILINE)
        assert len(losses) == 4 * STEPS + 1
        assert losses == re.findall(r"^loss .*|^weights .*", wanted, re.MULTILINE)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_layouts_that_were_given_up_give_their_memory_back_on_servers_and_workers(make_job: Callable[..., Any], transport: str) -> None:
    job = make_job(env={"PSGC_TRANSPORT": transport, "PSGC_MIN_COMPRESS_BYTES": "0"})
    job.scheduler()
    pid = str(job.server().popen.pid)
    for rank in range(2):
        job.worker(rank, "memory", pid, *["none", "int8"] * 8, job=JOB)
    store, pushed = memory_of(job, 16)
    gradient = 4 * sum(SIZES.values())
    assert gradient < max(store) < 6 * gradient, "the server keeps two results, and where results lose something two residuals"
    least = gradient / 2 if transport == "shm" else gradient / 8  # over TCP what is uncompressed leaves from where it lies
    assert least < max(pushed) < 3 * gradient, "a worker keeps what it pushes"


def test_slots_behind_sums_within_nodes_are_given_back_too(make_job: Callable[..., Any], tmp_path: Path) -> None:
    """Two ranks of one node, of which each pushes half of the node's sum."""
    sharded = ("intra.reduce_scatter", "inter.push", "inter.pull", "intra.all_gather")
    plan = written(tmp_path / "sharded.json", plan_of(SIZES, (" ".join(SIZES), "none", sharded)))
    job = make_job(nodes=1)
    job.scheduler()
    pid = str(job.server().popen.pid)
    for rank in range(2):
        job.worker(0, "memory", pid, *[plan, "none"] * 6, job=JOB, BYTEPS_LOCAL_RANK=str(rank), BYTEPS_LOCAL_SIZE="2")
    store, pushed = memory_of(job, 12)
    gradient = 4 * sum(SIZES.values())
    assert gradient < max(store) < 6 * gradient
    assert gradient / 2 < max(pushed) < 3 * gradient


def memory_of(job: Any, switches: int) -> tuple[list[int], list[int]]:
    """The server's memory and rank 0's, after each step of a job that is then over."""
    assert set(job.end().values()) == {0}, job.text()
    found = [(int(store), int(push)) for store, push in re.findall(r"^memory store=(\d+) push=(\d+)$", job.text(), re.MULTILINE)]
    assert len(found) == STEPS * switches, job.text()
    store, pushed = zip(*found, strict=True)
    return list(store), list(pushed)


def test_rank_0s_plan_is_enough_and_a_plan_that_differs_ends_every_rank_with_one_line(make_job: Callable[..., Any], tmp_path: Path) -> None:
    """Each rank has a folder of its own, with its own file."""
    plans = [planned_sizes(), planned_sizes("int8")]
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        folder.mkdir()
    written(folders[0] / "plan.json", plans[0])

    def run(there: dict[str, Any] | None) -> list[str]:
        if there is not None:
            written(folders[1] / "plan.json", there)
        job = make_job(nodes=2)
        job.scheduler()
        job.server()
        workers = [job.worker(node, "train", "-", job=JOB, PSGC_PLAN=str(folders[node] / "plan.json")) for node in (0, 1)]
        status = job.end()
        lines = [worker.text for worker in workers]
        assert ({status[worker.name] for worker in workers} == {0}) == (there is None), job.text()
        return lines

    first, second = run(None)
    assert re.findall("^weights .*", first, re.MULTILINE) == re.findall("^weights .*", second, re.MULTILINE) != []
    for text in run(plans[1]):
        assert re.search(r"codec of the plan's bucket 0 \(of '0.weight'\) on rank 0 is none, on rank 1 it is int8", text)
    broken = planned_sizes("codec_of_rank_1")
    for text in run(broken):
        assert re.search(r"^psgc: rank 1: .*unknown codec 'codec_of_rank_1'", text, re.MULTILINE), text
    on_gpus = plan_of(SIZES, (" ".join(SIZES), "int8", ("comp@gpu", "flat.push.c", "flat.pull.c", "decomp@gpu")))
    written(folders[0] / "plan.json", on_gpus)
    for text in run(on_gpus):
        assert re.search(
            r"^psgc: rank .: gradient of '0.weight': the plan has this bucket encoded on a GPU, but it does not lie", text, re.MULTILINE
        ), text


def planned_sizes(codec: str = "none") -> dict[str, Any]:
    return plan_of(SIZES, (" ".join(SIZES), codec, PLAIN if codec == "none" else ENCODED))
