"""Programs over groups that encode or decode on a device: the CPU's results, payload sums and residuals bit for bit, and nothing races."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from psgc.codecs import BLOCK
from psgc.plan.model.options import all_options
from psgc.torch.device import engines
from psgc.torch.tensors.buffers import TensorsBuffer
from psgc.worker.submission import Submission
from tests.device.recording import RecordingRuntime
from tests.device.steps import use_recorded
from tests.worker.over_groups import Job

CPU = tuple(
    sorted({tuple(action.replace("@gpu", "@cpu") for action in option) for option in all_options() if any("@" in a for a in option)})
)
CHOSEN = CPU[::37]
NUMEL = 9001


@pytest.fixture(autouse=True)
def _host_again() -> Iterator[None]:
    yield
    engines.use()


def on(option: tuple[str, ...], devices: str) -> tuple[str, ...]:
    """The option with its encodes and decodes on these devices in turn, c or g."""
    at = iter(devices * len(option))
    return tuple(action.split("@")[0] + {"c": "@cpu", "g": "@gpu"}[next(at)] if "@" in action else action for action in option)


def played(
    options: list[tuple[str, ...]], codec: str, dtype: torch.dtype, runtime: RecordingRuntime | None, sizes: tuple[int, ...],
    job: Job | None = None, numel: int = NUMEL,
) -> list[Any]:  # fmt: skip
    """Results and residuals over steps of every kind. job: of these nodes, not of groups of threads."""
    job = job or Job(sizes)
    layout = job.layout(options, numel, codec, str(dtype).removeprefix("torch."), parts=min(2, -(-numel // BLOCK)))
    buffers = [[TensorsBuffer([(numel,)], torch.float32, late=True) for _ in options] for _ in job.executors]
    seen: list[Any] = []
    for number, (skips, dropped, rescale, poison) in enumerate(
        [((), False, 1.0, False), ((1,), False, 0.5, False), ((), True, 1.0, False), ((), False, 1.0, True), ((), False, 1.0, False)]
    ):
        tickets: list[list[Any]] = [[] for _ in buffers]
        tensors: list[list[torch.Tensor]] = [[] for _ in buffers]
        for rank, executor in enumerate(job.executors):
            for index, buffer in enumerate(buffers[rank]):
                made = torch.Generator().manual_seed(100 * number + 10 * rank + index)
                tensor = torch.randn(numel, generator=made).to(dtype)
                if poison and rank == 0:
                    tensor[min(7, numel - 1)] = torch.inf
                if runtime is not None:
                    runtime.trainer_writes([tensor])
                buffer.bind([tensor])
                ticket = job.boards[rank].issue()
                executor.submit(layout, index, Submission(buffer, ticket, rank in skips, dropped, rescale))
                tickets[rank].append(ticket)
                tensors[rank].append(tensor)
        for board, own in zip(job.boards, tickets, strict=True):
            board.wait(own)
        assert not job.errors, job.errors
        for rank, mine in enumerate(tensors):
            for buffer, tensor in zip(buffers[rank], mine, strict=True):
                buffer.arrive()
                if runtime is not None:
                    runtime.trainer_reads([tensor])
                seen.append((tensor.isnan(), tensor.nan_to_num(0)))
        for executor in job.executors:
            for work in executor.works():
                seen += [
                    (torch.zeros(1), torch.from_numpy(m.residual))
                    for m in work.kept.remembered(dropped=number == 1).values()
                    if m.residual is not None
                ]
                seen += [(torch.zeros(1), torch.from_numpy(e.bytes.copy())) for e in work.kept.exact().values()]
    job.close()
    assert not job.errors
    return seen


@pytest.mark.parametrize(("codec", "dtype", "sizes"), [("onebit", torch.float32, (2, 2)), ("topk:k=0.05", torch.bfloat16, (2, 1))])
def test_programs_on_a_device_give_what_they_give_on_the_cpu(codec: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    wanted = played([on(option, "c") for option in CHOSEN], codec, dtype, None, sizes)
    runtime = RecordingRuntime()
    use_recorded(runtime, slot_bytes=16384)
    found = played([on(option, ("g", "gc", "cg")[index % 3]) for index, option in enumerate(CHOSEN)], codec, dtype, runtime, sizes)
    assert len(found) == len(wanted) > 100
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
    assert runtime.races.found == [] and runtime.races.uses > 1000


def test_a_program_that_wants_a_device_ends_the_job_where_there_is_none() -> None:
    job = Job((2,))
    layout = job.layout([on(CPU[0], "g")], 100, "onebit")
    buffers = [TensorsBuffer([(100,)], torch.float32) for _ in range(2)]
    for rank, buffer in enumerate(buffers):
        buffer.bind([torch.ones(100)])
        job.executors[rank].submit(layout, 0, Submission(buffer, job.boards[rank].issue()))
    for board in job.boards:
        board.wait(board.outstanding())
    job.close()
    assert "the plan has this bucket encoded on a GPU, but it does not lie on one GPU" in job.errors[0]


def test_a_device_that_fails_in_a_program_ends_the_job_with_its_name() -> None:
    runtime = RecordingRuntime()
    use_recorded(runtime)
    job = Job((2,))
    layout = job.layout([on(CPU[0], "g")], 100, "onebit")
    runtime.fault = lambda name: torch.OutOfMemoryError("CUDA out of memory") if name == "compute" else None
    for rank in range(2):
        buffer = TensorsBuffer([(100,)], torch.float32)
        buffer.bind([torch.ones(100)])
        job.executors[rank].submit(layout, 0, Submission(buffer, job.boards[rank].issue()))
    for board in job.boards:
        board.wait(board.outstanding())
    job.close()
    assert "gradient of 't0': cpu is out of memory" in job.errors[0], job.errors
