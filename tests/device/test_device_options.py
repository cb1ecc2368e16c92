"""Every option whose encodes and decodes are all on GPUs, on recorded devices: without loss each rank has the exact mean, and nothing races."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from psgc.layout import BucketSpec, Declaration, Layout, TensorSpec, build_layout
from psgc.plan.methods.search import QUICK, search
from psgc.plan.model.options import all_options, over_groups
from psgc.plan.model.problem import Problem
from psgc.plan.report.running import as_jobs_run, running
from psgc.torch.device import engines
from psgc.torch.tensors.buffers import TensorsBuffer
from psgc.worker.submission import Submission
from tests.device.recording import RecordingRuntime
from tests.device.steps import use_recorded
from tests.device.test_device_payloads import Connected
from tests.plan.questions import questions
from tests.worker.over_groups import Job

ON_GPUS = all_options(("gpu",))
STEPS = 3  # the first one's payloads go through the hosts


@pytest.fixture(autouse=True)
def _host_again() -> Iterator[None]:
    yield
    engines.use()


def numel_of(bucket: int) -> int:
    """Odd, of one element or more, of less than one for each rank, and of more than one block of a codec."""
    return 1 + 2 * (bucket % 23) if bucket % 5 else 4097 + 2 * bucket


def gradient(rank: int, bucket: int, step: int) -> torch.Tensor:
    """Whole numbers, whose sums are exact in any order."""
    random = np.random.default_rng([rank, bucket, step])
    return torch.from_numpy(random.integers(-99, 99, numel_of(bucket)).astype(np.float32))


def layout_of(job: Job, options: list[tuple[str, ...]], codec: str) -> Layout:
    """A tensor and bucket for each option."""
    tensors = tuple(TensorSpec(f"t{number}", (numel_of(number),), "float32") for number in range(len(options)))
    buckets = tuple(
        BucketSpec((number,), codec, -number, 1 + (numel_of(number) > 4096), option=option) for number, option in enumerate(options)
    )
    declaration = Declaration("options", "plan", tensors, "none", True, buckets=buckets, seed=7)
    layout = build_layout(declaration, layout_id=0, servers=1, workers=job.ranks.size, ranks=job.ranks)
    for executor in job.executors:
        executor.add(layout)
    return layout


def check_means(job: Job, runtime: RecordingRuntime, options: list[tuple[str, ...]], codec: str) -> None:
    """Every rank's results in each step against the exact mean. Raises AssertionError, which names the option."""
    layout, ranks = layout_of(job, options, codec), job.ranks.size
    buffers = [[TensorsBuffer([(numel_of(n),)], torch.float32, late=True) for n in range(len(options))] for _ in range(ranks)]
    for step in range(STEPS):
        tensors = [[gradient(rank, bucket, step) for bucket in range(len(options))] for rank in range(ranks)]
        for rank, executor in enumerate(job.executors):
            runtime.trainer_writes(tensors[rank])
            for bucket, (buffer, tensor) in enumerate(zip(buffers[rank], tensors[rank], strict=True)):
                buffer.bind([tensor])
                executor.submit(layout, bucket, Submission(buffer, job.boards[rank].issue()))
        for board in job.boards:
            board.wait(board.outstanding())
        assert not job.errors, job.errors
        for rank, mine in enumerate(tensors):
            for bucket, (buffer, tensor) in enumerate(zip(buffers[rank], mine, strict=True)):
                buffer.arrive()
                mean = sum(gradient(each, bucket, step) for each in range(ranks)) / torch.full((1,), float(ranks))
                assert torch.equal(tensor, mean), (
                    f"{options[bucket]}, {numel_of(bucket)} elements, rank {rank}, step {step}: {tensor} for {mean}"
                )
            runtime.trainer_reads(mine)
    assert runtime.races.found == []


def from_device_to_device(options: list[tuple[str, ...]], codec: str, sizes: tuple[int, ...]) -> None:
    with Connected(sizes) as there:
        check_means(there.job, there.runtime, options, codec)


def through_hosts(options: list[tuple[str, ...]], codec: str, sizes: tuple[int, ...]) -> None:
    runtime, job = RecordingRuntime(), Job(sizes)
    use_recorded(runtime, slot_bytes=16384)
    check_means(job, runtime, options, codec)
    job.close()
    assert not job.errors, job.errors


@pytest.mark.timeout(300)
def test_a_sample_of_the_options_on_gpus_gives_every_rank_the_exact_mean() -> None:
    from_device_to_device(list(ON_GPUS[::17]), "none", (1, 2))
    through_hosts(list(ON_GPUS[5::17]), "topk:k=0.999999", (2, 1))


@pytest.mark.timeout(300)
@settings(max_examples=4, deadline=None)
@given(questions(("cuda",)).filter(lambda problem: problem.cluster.gpus > 1 and problem.cluster.collectives))
def test_what_planners_call_runnable_for_gpus_a_job_runs_on_them(problem: Problem) -> None:
    planned, to_run = search(problem, QUICK), search(as_jobs_run(problem), QUICK)
    chosen = [*(planned.buckets if running(problem, planned.buckets).runs else ()), *to_run.buckets]
    options = [option for option in dict.fromkeys(bucket.option for bucket in chosen) if over_groups(option)]
    sizes = (problem.cluster.gpus_per_node,) * problem.cluster.nodes
    if options:
        (from_device_to_device if problem.cluster.collectives == "nccl" else through_hosts)(options, "none", sizes)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("codec", ["none", "topk:k=0.999999"])
@pytest.mark.parametrize("sizes", [(2, 2), (1, 2, 3), (4,)])
def test_all_of_the_options_on_gpus_do(codec: str, sizes: tuple[int, ...]) -> None:
    assert len(ON_GPUS) == 174
    from_device_to_device(list(ON_GPUS), codec, sizes)
    through_hosts(list(ON_GPUS), codec, sizes)
