"""Groups whose members exchange floats from device to device: over gloo, in NCCL's place, on recorded devices. Sums are those of groups over the hosts' memory,
and nothing races."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed as dist

from psgc.config import Config
from psgc.errors import ConfigError, JobFailed
from psgc.plan.model.options import all_options
from psgc.program.sums import sum_in_order
from psgc.torch.collectives.groups import JobGroups, job_groups
from psgc.torch.device import engines
from psgc.torch.device.elements import DeviceElements
from psgc.torch.device.engine import Engine
from psgc.torch.tensors.buffers import TensorsBuffer
from psgc.worker.submission import Submission
from tests.device.recording import RecordingRuntime
from tests.device.steps import use_recorded
from tests.torch.conftest import FakeJob
from tests.torch.rank_threads import Rank, all_well, on_ranks
from tests.worker.over_groups import Job

RAW = sorted({option for option in all_options() if not any("@" in action for action in option)})
NUMEL = 4099


def config(collectives: str = "auto", step_timeout_s: float = 100.0) -> Config:
    return Config(
        transport="tcp", root_host="127.0.0.1", root_port=1, heartbeat_s=0.02, step_timeout_s=step_timeout_s, collectives=collectives
    )


def on_devices(
    size: int, run: Callable[[JobGroups, Rank, DeviceElements, torch.Tensor], None], numel: int, dtype: torch.dtype
) -> list[str]:
    """Play each rank with the elements of a device of its own; what raced."""
    runtimes = [RecordingRuntime(gpus=lambda rank=rank: f"gpu {rank}") for rank in range(size)]

    def play(groups: JobGroups, rank: Rank) -> None:
        made = torch.Generator().manual_seed(rank.rank)
        values = torch.randn(numel, generator=made).to(dtype)
        run(groups, rank, DeviceElements(Engine(runtimes[rank.rank]), None, None, lambda: values), values)

    all_well(on_ranks(size, play, config()))
    return [race for runtime in runtimes for race in runtime.races.found]


def bits(tensor: torch.Tensor) -> Any:
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy().copy()


@pytest.mark.parametrize(("size", "numel"), [(3, 1001), (2, 1)])
def test_sums_on_devices_are_the_sums_in_member_order_bit_for_bit(size: int, numel: int) -> None:
    everybody = tuple(range(size))
    uneven = [0, *sorted(np.random.default_rng(size).integers(0, numel + 1, size - 1).tolist()), numel]
    given: dict[tuple[str, int], Any] = {}
    found: dict[tuple[str, int, str, int], Any] = {}

    def run(groups: JobGroups, rank: Rank, elements: DeviceElements, values: torch.Tensor) -> None:
        start, own, name = values.clone(), rank.rank, str(values.dtype).removeprefix("torch.")
        given[name, own] = bits(start)
        group = groups.on_device(everybody, elements)
        assert group is not None and groups.on_device(everybody, elements) is group
        for divisor, op in itertools.product((1, 3), ("all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast")):
            values.copy_(start)
            group.raw(elements, 0, numel, op, uneven, size - 1, divisor)
            found[name, divisor, op, own] = bits(values)
        held = bits(start)
        group.raw_array(held, name, "all_reduce")
        found[name, 1, "array", own] = found[name, 3, "array", own] = held

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert on_devices(size, run, numel, dtype) == []
    for name, divisor in itertools.product(("float32", "bfloat16", "float16"), (1, 3)):
        contributions = [given[name, rank] for rank in everybody]
        total, mean = sum_in_order(contributions, name), sum_in_order(contributions, name, divisor)
        gathered = np.concatenate([contributions[rank][lo:hi] for rank, (lo, hi) in enumerate(itertools.pairwise(uneven))])
        for rank in everybody:
            lo, hi = uneven[rank : rank + 2]
            assert found[name, divisor, "all_reduce", rank].tobytes() == found[name, divisor, "array", rank].tobytes() == total.tobytes()
            assert found[name, divisor, "reduce_scatter", rank][lo:hi].tobytes() == mean[lo:hi].tobytes()
            assert found[name, divisor, "all_gather", rank].tobytes() == gathered.tobytes()
            assert found[name, divisor, "broadcast", rank].tobytes() == contributions[size - 1].tobytes()
        assert found[name, divisor, "reduce", size - 1].tobytes() == total.tobytes()


def test_a_part_on_another_device_of_a_rank_is_exchanged_all_the_same() -> None:
    def run(groups: JobGroups, rank: Rank, elements: DeviceElements, values: torch.Tensor) -> None:
        group = groups.on_device((0, 1), elements)
        assert group is not None
        other = torch.full((5,), rank.rank + 1.0)
        group.raw(DeviceElements(Engine(RecordingRuntime()), None, None, lambda: other), 0, 5, "all_reduce")
        assert other.tolist() == [3.0] * 5

    assert on_devices(2, run, 5, torch.float32) == []


def test_ranks_that_share_a_device_have_no_group_on_it_and_are_refused_one_that_was_asked_for() -> None:
    for asked in ("auto", "nccl"):
        said: list[str] = []

        def run(groups: JobGroups, rank: Rank, said: list[str] = said) -> None:
            values = torch.zeros(3)
            elements = DeviceElements(Engine(RecordingRuntime(gpus=lambda: "the only one")), None, None, lambda: values)
            try:
                assert groups.on_device((0, 1), elements) is None
            except ConfigError as error:
                said.append(str(error))

        all_well(on_ranks(2, run, config(asked)))
        wanted = "rank 0 has PSGC_COLLECTIVES=nccl, but the group of ranks 0, 1 cannot have it: ranks 0 and 1 share a GPU; mend that, "
        assert said == ([wanted + "or set PSGC_COLLECTIVES=host on every rank"] * 2 if asked == "nccl" else [])


class Impatient:
    """A process group that waits for its members a fifth of a second, once they have connected with all the time they need."""

    def __init__(self, process_group: Any) -> None:
        self._process_group = process_group

    def alltoall_base(self, *arguments: Any) -> Any:
        options = dist.AllToAllOptions()
        options.timeout = timedelta(seconds=0.2)
        return self._process_group.alltoall_base(*arguments, options)

    def abort(self) -> None:
        self._process_group.abort()


def test_a_member_that_does_not_come_ends_a_collective_on_devices_with_one_line() -> None:
    def run(groups: JobGroups, rank: Rank) -> None:
        values = torch.zeros(3)
        elements = DeviceElements(Engine(RecordingRuntime(gpus=lambda: f"gpu {rank.rank}")), None, None, lambda: values)
        group: Any = groups.on_device((0, 1), elements)
        assert group is not None
        if rank.rank == 0:
            group._process_group = group._collectives._process_group = Impatient(group._process_group)
            group.raw(elements, 0, 3, "all_reduce")

    (error, _) = on_ranks(2, run, config())
    assert isinstance(error, JobFailed)
    assert str(error).startswith("rank 0: all_reduce of 3 float32 in the group of ranks 0, 1 on cpu failed: ") and "\n" not in str(error)


def test_a_wait_for_a_device_ends_with_the_job_or_with_the_time_of_a_step() -> None:
    class Never:
        def query(self) -> bool:
            return False

    def run(groups: JobGroups, rank: Rank) -> None:
        values = torch.zeros(3)
        group: Any = groups.on_device(
            (0, 1), DeviceElements(Engine(RecordingRuntime(gpus=lambda: f"gpu {rank.rank}")), None, None, lambda: values)
        )
        if rank.rank == 0:
            rank.config = config(step_timeout_s=0.3)
            with pytest.raises(RuntimeError, match=r"some member has not come to it within 0\.3 s"):
                group._wait(Never())
            rank.job.fail(JobFailed("worker 7 died"))
        else:
            group._wait(Never())

    first, second = on_ranks(2, run, config())
    assert first is None and isinstance(second, JobFailed) and str(second) == "worker 7 died"


@pytest.fixture
def _host_again() -> Iterator[None]:
    yield
    engines.use()


def played(
    options: list[tuple[str, ...]], codec: str, dtype: torch.dtype, sizes: tuple[int, ...], collectives: str, runtime: RecordingRuntime
) -> list[Any]:
    """Results over steps of every kind, on every rank."""
    fake = FakeJob(sum(sizes), config(collectives))
    sessions = [Rank(fake, rank) for rank in range(sum(sizes))]
    job = Job(sizes, groups_of=lambda name, rank: job_groups(sessions[rank], name), collectives=collectives)
    layout = job.layout(options, NUMEL, codec, str(dtype).removeprefix("torch."), parts=2)
    buffers = [[TensorsBuffer([(NUMEL - 7,), (7,)], torch.float32, late=True) for _ in options] for _ in job.executors]
    seen: list[Any] = []
    for number, (skips, dropped) in enumerate([((), False), ((1,), False), ((), True), ((), False)]):
        tickets: list[list[Any]] = [[] for _ in buffers]
        tensors: list[list[torch.Tensor]] = [[] for _ in buffers]
        for rank, executor in enumerate(job.executors):
            for index, buffer in enumerate(buffers[rank]):
                made = torch.Generator().manual_seed(100 * number + 10 * rank + index)
                own = list(torch.randint(-50, 50, (NUMEL,), generator=made).to(dtype).split([NUMEL - 7, 7]))
                own = [each.clone() for each in own]
                runtime.trainer_writes(own)
                buffer.bind(own)
                ticket = job.boards[rank].issue()
                executor.submit(layout, index, Submission(buffer, ticket, rank in skips, dropped, 1.0))
                tickets[rank].append(ticket)
                tensors[rank] += own
        for board, mine in zip(job.boards, tickets, strict=True):
            board.wait(mine)
        assert not job.errors, job.errors
        for rank, mine in enumerate(tensors):
            for buffer in buffers[rank]:
                buffer.arrive()
            runtime.trainer_reads(mine)
            seen += [each.clone() for each in mine]
    threads = [threading.Thread(target=session.end) for session in sessions]
    job.close()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen


SERVED = ("intra.reduce_scatter", "inter.push", "inter.pull", "intra.all_gather")
FLOATS = {action for option in RAW for action in option}
ENCODED = sorted({o for o in all_options() if any("@gpu" in a for a in o) and not any("@cpu" in a for a in o) and set(o) & FLOATS})


@pytest.mark.usefixtures("_host_again")
@pytest.mark.parametrize(
    ("options", "codec", "dtype", "sizes"),
    [
        ([*RAW, SERVED], "none", torch.float32, (2, 2)),
        ([*RAW, SERVED], "none", torch.bfloat16, (2, 1)),
        (ENCODED[:: len(ENCODED) // 8], "onebit", torch.float32, (2, 2)),
    ],
)
def test_programs_whose_floats_go_from_device_to_device_give_what_they_give_over_the_hosts_memory(
    options: list[tuple[str, ...]], codec: str, dtype: torch.dtype, sizes: tuple[int, ...]
) -> None:
    ids = itertools.count()
    host, apart = (
        RecordingRuntime(),
        RecordingRuntime(gpus=lambda: f"gpu {next(ids)}"),
    )  # one recorder for all ranks, whose devices count as different ones
    use_recorded(host, slot_bytes=16384)
    wanted = played(options, codec, dtype, sizes, "host", host)
    use_recorded(apart, slot_bytes=16384)
    found = played(options, codec, dtype, sizes, "auto", apart)
    assert len(found) == len(wanted) > 100
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert host.races.found == apart.races.found == []
    assert (host.streams, apart.streams > 3) == (3, True)


def test_floats_that_do_not_lie_on_a_device_end_a_job_that_asks_for_nccl_and_no_other() -> None:
    for asked in ("auto", "nccl"):
        job = Job((2,), collectives=asked)
        layout = job.layout([("flat.all_reduce",)], 100, "none")
        tensors = [torch.ones(100) for _ in range(2)]
        for rank, tensor in enumerate(tensors):
            buffer = TensorsBuffer([(100,)], torch.float32)
            buffer.bind([tensor])
            job.executors[rank].submit(layout, 0, Submission(buffer, job.boards[rank].issue()))
        for board in job.boards:
            board.wait(board.outstanding())
        job.close()
        said = "PSGC_COLLECTIVES=nccl, but the gradients in the bucket of 't0' do not lie on one GPU; move them there, or set PSGC_COLLECTIVES=auto or host"
        assert all(said in error for error in job.errors) and bool(job.errors) == (asked == "nccl")
        assert asked == "nccl" or all(tensor.tolist() == [1.0] * 100 for tensor in tensors)
