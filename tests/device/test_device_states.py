"""Schemes with a state on a device: rounds, residual and state are there, and all that comes out of them is the CPU's bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from psgc.codecs import parse_scheme
from psgc.errors import DeviceError, UsageError
from psgc.torch.device import engines
from psgc.torch.tensors.buffers import TensorsBuffer
from tests.device.recording import RecordingRuntime
from tests.device.steps import Bucket, one_bucket, use_recorded
from tests.device.test_device_path import gradients, played, same

SCHEMES = ("powersgd:rank=2", "powersgd:rank=3,ef=0", "shared", "onebit:momentum=nesterov", "topk:k=0.05,momentum=dgc", "int4:clip=2")
SHAPES = [(60, 70), (517,), (1,), (40, 80)]


@pytest.fixture(autouse=True)
def _host_again() -> Iterator[None]:
    yield
    engines.use()


@pytest.mark.parametrize("codec", SCHEMES)
def test_rounds_run_on_the_device_and_nothing_races(codec: str) -> None:
    for dtype in ("float32", "bfloat16"):
        layout = one_bucket(codec, SHAPES, dtype)
        wanted = played(Bucket(layout, None, "cpu"), SHAPES, getattr(torch, dtype))
        runtime = RecordingRuntime()
        use_recorded(runtime)
        there = Bucket(layout, runtime)
        assert same(played(there, SHAPES, getattr(torch, dtype)), wanted)
        assert runtime.races.found == [] and runtime.races.uses > 100
        assert there.buffer._host._memory is None, "gradients were copied to the host"
        engines.use()


@pytest.mark.parametrize("codec", SCHEMES)
def test_states_follow_tensors_to_a_device_and_back(codec: str) -> None:
    layout = one_bucket(codec, SHAPES)
    always_here, moves = Bucket(layout, None, "cpu"), Bucket(layout, None)
    for seed in range(6):
        if seed in (1, 2, 4):
            use_recorded(RecordingRuntime())
        else:
            engines.use()
        dropped = seed in (2, 3)
        assert same(moves.step(gradients(seed, SHAPES), dropped), always_here.step(gradients(seed, SHAPES), dropped)), seed
        assert moves.payloads == always_here.payloads


@pytest.mark.parametrize("codec", SCHEMES)
def test_states_are_saved_from_a_device_and_taken_up_on_one(codec: str) -> None:
    """Also where the last result was not applied, and the state is read before the next step tells of it."""
    layout = one_bucket(codec, SHAPES)
    use_recorded(RecordingRuntime())
    first, here = Bucket(layout, None), Bucket(layout, None, "cpu")
    for bucket in (first, here):
        bucket.step(gradients(1, SHAPES))
        bucket.step(gradients(2, SHAPES), rescale=0.5)
    for dropped in (True, False):
        saved, kept = (bucket.work.kept.remembered(dropped) for bucket in (first, here))
        assert _bytes(saved) == _bytes(kept)
    exact = first.work.kept.exact()
    again, begun, wanted = Bucket(layout, None), Bucket(layout, None), Bucket(layout, None, "cpu")
    begun.step(gradients(5, SHAPES))  # a state may also be loaded where steps have been taken
    for bucket in (again, begun, wanted):
        bucket.work.kept.remember(saved)
        bucket.work.kept.set_exact(exact)
        bucket.work.step = 2
        bucket.step(gradients(3, SHAPES))
    assert again.payloads == wanted.payloads
    assert begun.payloads == wanted.payloads


def _bytes(memories: Any) -> Any:
    return {name: [None if values is None else values.tobytes() for values in memory] for name, memory in memories.items()}


def test_a_scheme_without_kernels_runs_on_the_cpu_unless_a_plan_wants_the_device() -> None:
    use_recorded(RecordingRuntime(lacks=lambda one: True))
    slices = [(0, 4096)]
    for text in ("powersgd:rank=2", "onebit:momentum=nesterov"):
        for where in ("", "gpu"):
            buffer = TensorsBuffer([(64, 64)], torch.float32, where)  # type: ignore[arg-type]
            buffer.bind([torch.zeros(64, 64)])
            if where:
                with pytest.raises(UsageError, match="cpu has no kernels for"):
                    buffer.on_device(parse_scheme(text), slices=slices)
            else:
                assert buffer.on_device(parse_scheme(text), slices=slices) is None


def test_residuals_in_eight_bits_are_kept_on_the_host() -> None:
    use_recorded(RecordingRuntime())
    buffer = TensorsBuffer([(64, 64)], torch.float32)
    buffer.bind([torch.zeros(64, 64)])
    assert buffer.on_device(parse_scheme("int4:residual=int8"), slices=[(0, 4096)]) is None


def test_a_device_without_room_for_a_state_is_named_with_the_tensor() -> None:
    runtime = RecordingRuntime()
    use_recorded(runtime)
    runtime.fault = lambda name: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB") if name == "compute" else None
    with pytest.raises(DeviceError, match="gradient of 't0': cpu is out of memory"):
        Bucket(one_bucket("powersgd:rank=2", SHAPES), runtime).step(gradients(1, SHAPES))
