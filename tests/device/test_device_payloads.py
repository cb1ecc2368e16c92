"""Payloads that go from device to device, over gloo in NCCL's place, on recorded devices: the sums and residuals of the hosts' path bit for bit, and nothing
races. Only what a step has to know of an encode, its status, comes to the host."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from psgc.config import Config
from psgc.errors import DeviceError, JobFailed
from psgc.plan.model.options import all_options, server_options
from psgc.program.compile import compile_option
from psgc.program.ranks import Ranks
from psgc.program.steps import Exchange, Transfer
from psgc.torch.collectives.device_group import DeviceGroup
from psgc.torch.collectives.groups import job_groups
from psgc.torch.device import engines
from psgc.torch.device.elements import DeviceElements, HeldPayload
from psgc.torch.device.engine import Engine
from psgc.torch.device.sent import STATUS_BYTES, Sent
from psgc.torch.device.staging import Down
from psgc.torch.tensors.buffers import TensorsBuffer
from psgc.worker.submission import Submission
from tests.device.recording import Event, RecordingRuntime, RecordingStream
from tests.device.steps import use_recorded
from tests.device.test_device_programs import played
from tests.torch.conftest import FakeJob
from tests.torch.rank_threads import Rank
from tests.worker.over_groups import Job

SHARED = ("comp@gpu", "flat.all_to_all.c", "decomp@gpu", "comp@gpu", "flat.all_gather.c", "decomp@gpu")
NUMEL = 4999
pytestmark = pytest.mark.timeout(300)


def moves_on_gpus(option: tuple[str, ...]) -> bool:
    """Whether payloads that GPUs encode and decode are exchanged among workers."""
    for action, text in enumerate(option):
        encodes = [each for each in option[:action] if each.startswith("comp@")]
        decodes = [each for each in option[action:] if each.startswith("decomp@")]
        if (
            text.endswith(".c")
            and not text.endswith(("push.c", "pull.c"))
            and (encodes[-1:], decodes[:1]) == (["comp@gpu"], ["decomp@gpu"])
        ):
            return True
    return False


MOVING = sorted(option for option in {*all_options(), *server_options()} if "flat.push.c" not in option and moves_on_gpus(option))
PAYLOADS = [option for option in MOVING if not any(action.endswith("@cpu") for action in option)]
# Without floats that gloo adds, through which the first step goes: of three ranks and more in an order of its own.
ORDERED = [option for option in PAYLOADS if not any(action.endswith((".reduce", ".all_reduce")) for action in option)]
MIXED = [option for option in MOVING if option not in PAYLOADS]  # where a CPU encodes or decodes, too


@pytest.fixture(autouse=True)
def _host_again() -> Iterator[None]:
    yield
    engines.use()


class Connected:
    """A job whose ranks have a recorded device each, one recorder for all of them. Ends with its groups."""

    def __init__(
        self, sizes: tuple[int, ...], collectives: str = "auto", gpus: Any = None, made: type[RecordingRuntime] = RecordingRuntime
    ) -> None:
        ids = itertools.count()
        self.runtime = made(gpus=gpus or (lambda: f"gpu {next(ids)}"))
        use_recorded(self.runtime, slot_bytes=16384)
        config = Config(
            transport="tcp", root_host="127.0.0.1", root_port=1, heartbeat_s=0.02, step_timeout_s=100.0, collectives=collectives
        )
        fake = FakeJob(sum(sizes), config)
        self.sessions = [Rank(fake, rank) for rank in range(sum(sizes))]
        self.job = Job(sizes, groups_of=lambda name, rank: job_groups(self.sessions[rank], name), collectives=collectives)

    def __enter__(self) -> Connected:
        return self

    def __exit__(self, *error: object) -> None:
        self.job.close()
        for session in self.sessions:
            session.end()


def compared(options: list[tuple[str, ...]], codec: str, dtype: torch.dtype, sizes: tuple[int, ...], numel: int = NUMEL) -> int:
    """Play through the hosts' memory and from device to device; how many collectives of payloads went so."""
    through_hosts = RecordingRuntime()
    use_recorded(through_hosts, slot_bytes=16384)
    wanted = played(options, codec, dtype, through_hosts, sizes, numel=numel)
    real, count = DeviceGroup.exchange, itertools.count()

    def exchange(*arguments: Any) -> Any:
        next(count)
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch, Connected(sizes) as there:
        patch.setattr(DeviceGroup, "exchange", exchange)
        found = played(options, codec, dtype, there.runtime, sizes, there.job, numel)
        assert there.runtime.races.found == through_hosts.races.found == []
    assert len(found) == len(wanted) > 0
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
    return next(count)


@pytest.mark.parametrize(
    ("options", "codec", "dtype", "sizes"),
    [
        (PAYLOADS[::12], "onebit", torch.float32, (2, 2)),
        ([*PAYLOADS[3::30], *MIXED[:: len(MIXED) // 6]], "topk:k=0.05", torch.bfloat16, (2, 1)),
        (PAYLOADS[5::40], "blocktopk:k=0.1,block=16/int8", torch.float32, (1, 2)),
        (ORDERED[7::30], "int8/topk:k=0.1,select=sampled", torch.float32, (3,)),
        ([SHARED], "dithering", torch.float16, (3,)),
    ],
)
def test_payloads_from_device_to_device_give_the_hosts_sums_and_residuals(
    options: list[tuple[str, ...]], codec: str, dtype: torch.dtype, sizes: tuple[int, ...]
) -> None:
    assert compared(options, codec, dtype, sizes) > 4 * len(options)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_option_gives_the_hosts_sums_and_residuals_from_device_to_device() -> None:
    for options, sizes in ((ORDERED, (2, 3)), (PAYLOADS, (1, 1))):
        for first in range(0, len(options), 20):
            assert compared(options[first : first + 20], "onebit/topk:k=0.1", torch.float32, sizes) > 0


def test_a_part_with_fewer_elements_than_ranks_is_exchanged_all_the_same() -> None:
    """Some members then have nothing to send or to receive, and take part."""
    assert compared(PAYLOADS[::25], "onebit", torch.float32, (2, 2), numel=1) > 0


def test_each_member_of_a_group_takes_part_in_each_exchange() -> None:
    for ranks, numel in itertools.product((Ranks((2, 3)), Ranks((3, 1), ((0, 2), (0,))), Ranks((4, 2), (), (2, 0))), (1, 5000)):
        for option in PAYLOADS[::4]:
            programs = compile_option(option, numel, ranks, 1)
            for action, _ in enumerate(option):
                calls: dict[tuple[int, ...], set[tuple[str, int]]] = {}
                for rank, program in enumerate(programs):
                    for step in (s for s in program.steps if isinstance(s, Transfer) and s.action == action):
                        for one in (c for c in step.collectives if isinstance(c, Exchange)):
                            calls.setdefault(one.members, set()).add((one.op, rank))
                for members, who in calls.items():
                    assert {rank for _, rank in who} == set(members) and len(who) == len(members)


@pytest.fixture
def copied_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the bytes of each copy from a device to the host."""
    sizes: list[int] = []
    real = Down._copied_down

    def copied_down(engine: Any, pieces: Any) -> Any:
        sizes.extend(piece.source.numel() for piece in pieces)
        return real(engine, pieces)

    monkeypatch.setattr(Down, "_copied_down", copied_down)
    return sizes


def test_after_the_first_step_payloads_do_not_come_to_the_host(copied_sizes: list[int]) -> None:
    with Connected((2,)) as there:
        layout = there.job.layout([SHARED], NUMEL, "int8")
        for step in range(3):
            copied_sizes.clear()
            stepped(there, layout, [torch.full((NUMEL,), float(rank)) for rank in range(2)])
            assert (set(copied_sizes) == {STATUS_BYTES}) == (step > 0), copied_sizes


def stepped(there: Connected, layout: Any, gradients: list[torch.Tensor], dropped: bool = False) -> None:
    job = there.job
    buffers = [TensorsBuffer([tuple(gradient.shape)], torch.float32, late=True) for gradient in gradients]
    there.runtime.trainer_writes(gradients)
    for rank, (buffer, gradient) in enumerate(zip(buffers, gradients, strict=True)):
        buffer.bind([gradient])
        job.executors[rank].submit(layout, 0, Submission(buffer, job.boards[rank].issue(), False, dropped, 1.0))
    for board in job.boards:
        board.wait(board.outstanding())
    for buffer in buffers:
        buffer.arrive()
    there.runtime.trainer_reads(gradients)


def test_ranks_that_share_a_device_send_payloads_through_the_hosts_memory(copied_sizes: list[int]) -> None:
    """Once they know that the groups are not connected, payloads come to the host as they are encoded."""
    with Connected((2,), gpus=lambda: "the only one") as there:
        layout = there.job.layout([SHARED], 100, "none")
        for step in range(3):
            copied_sizes.clear()
            gradients = [torch.full((100,), rank + 1.0) for rank in range(2)]
            stepped(there, layout, gradients)
            assert len(copied_sizes) >= 4 and (STATUS_BYTES in copied_sizes) == (step == 1), copied_sizes
            assert all(gradient.tolist() == [1.5] * 100 for gradient in gradients) and not there.job.errors
        assert there.runtime.streams == 3 and there.runtime.races.found == []


def test_payloads_of_a_rank_whose_gradient_has_moved_to_another_device_are_exchanged_all_the_same() -> None:
    payloads: list[list[int]] = [[], []]

    def play(rank: Rank) -> None:
        groups, runtime = job_groups(rank), RecordingRuntime(gpus=lambda: f"gpu {rank.rank}")
        values = torch.zeros(5)
        group = groups.on_device((0, 1), DeviceElements(Engine(runtime), None, None, lambda: values))
        moved = DeviceElements(Engine(RecordingRuntime()), None, None, lambda: values)
        assert group is not None
        own = torch.tensor([rank.rank, 7, 9], dtype=torch.uint8).numpy()
        came = group.exchange(moved, (0,), "all_gather", [[(own, 5)]] * 2, [[5] if member != rank.rank else [] for member in range(2)])
        (other,) = came[1 - rank.rank]
        payloads[rank.rank] = other.tolist()

    job = FakeJob(2, Config(transport="tcp", root_host="127.0.0.1", root_port=1, heartbeat_s=0.02, collectives="auto"))
    ranks = [Rank(job, rank) for rank in range(2)]
    threads = [threading.Thread(target=play, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in ranks:
        rank.end()
    assert payloads == [[1, 7, 9], [0, 7, 9]]


def test_every_wait_of_a_payload_that_stays_on_the_device_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each place of the device groups and of held payloads that makes a stream wait is left out once: the recorder must find a race."""
    real, sites, left_out = RecordingStream.wait, set[tuple[str, str]](), None
    watched = ("DeviceGroup._run", "DeviceElements._enqueue", "DeviceElements._laid_out", "_FlatOnDevice._laid_out")

    def wait(stream: RecordingStream, event: Any) -> None:
        code = sys._getframe(1).f_code
        name = getattr(code, "co_qualname", code.co_name)
        site = stream.name.split()[0], name
        if name in watched:
            sites.add(site)
        if site != left_out:
            real(stream, event)

    def races() -> list[str]:
        with Connected((2,)) as there:
            layout = there.job.layout([SHARED], NUMEL, "onebit")
            for step in range(4):
                stepped(there, layout, [torch.randn(NUMEL, generator=torch.Generator().manual_seed(10 * step + rank)) for rank in range(2)])
            return there.runtime.races.found

    monkeypatch.setattr(RecordingStream, "wait", wait)
    assert races() == []
    known = sorted(sites)
    assert len(known) >= 3, known
    for left_out in known:
        assert races(), f"nothing was found wrong without the wait of {left_out}"


@pytest.mark.parametrize("late", [False, True])
def test_a_device_that_cannot_tell_what_it_has_met_ends_the_job_with_its_name(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """late: when the copy is over, and not when it begins."""
    real = Event.synchronize

    def lost(event: Event) -> None:
        if threading.current_thread().name.startswith("psgc-cpu"):
            raise RuntimeError("CUDA error: device unavailable")
        real(event)

    with Connected((2,)) as there:
        layout = there.job.layout([SHARED], 100, "onebit")
        stepped(there, layout, [torch.ones(100) for _ in range(2)])
        if late:
            monkeypatch.setattr(Event, "synchronize", lost)
        else:
            there.runtime.fault = lambda name: RuntimeError("CUDA error: device unavailable") if name == "down" else None
        with contextlib.suppress(JobFailed):
            stepped(there, layout, [torch.ones(100) for _ in range(2)])
        said = there.job.errors[0]
    wanted = "the control word of 't0' in its step 2: cpu has been lost" if late else "gradient of 't0': cpu has been lost"
    assert wanted in said and "\n" not in said, said


def test_a_payload_from_a_device_that_says_it_is_longer_than_it_can_be_is_refused() -> None:
    engine = Engine(RecordingRuntime())
    elements = DeviceElements(engine, None, None, lambda: torch.zeros(1))
    memory = elements.held(torch.zeros(4, dtype=torch.uint8).numpy(), 4, (0,))
    memory[:STATUS_BYTES].view(torch.int64)[1] = 99
    with pytest.raises(DeviceError, match="cpu: a payload of 99 bytes has come from a GPU, where 4 are possible"):
        HeldPayload(engine, Sent(memory)).to_host()
