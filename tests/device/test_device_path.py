"""Buckets of tensors on a device: the CPU path's payloads, results and residuals bit for bit, in an order that a device cannot upset."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from psgc.errors import DeviceError, UsageError
from psgc.torch.device import engines
from psgc.torch.device.completions import Completions
from psgc.torch.device.cuda import CudaRuntime
from psgc.torch.device.rings import Ring
from psgc.worker.residuals.residual import TensorMemory
from tests.device.recording import Event, RecordingRuntime, RecordingStream
from tests.device.steps import Bucket, one_bucket, use_recorded

CODECS = ("none", "int8", "onebit", "topk:k=0.05", "randomk", "onebit/int8", "topk:k=0.1/none")
SHAPES = [(70, 100), (4097,), (1,), (200, 200)]


@pytest.fixture(autouse=True)
def _host_again() -> Iterator[None]:
    yield
    engines.use()


def gradients(seed: int, shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[Any]:
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=made).to(dtype) for shape in shapes]


def played(bucket: Bucket, shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[Any]:
    """What a bucket gives over steps of every kind: all gradients, some missing, a skip, a step that was dropped, another loss scale, a NaN."""
    seen: list[Any] = []
    some = [None, *gradients(2, shapes, dtype)[1:]] if len(shapes) > 1 else gradients(2, shapes, dtype)
    poisoned = gradients(6, shapes, dtype)
    poisoned[-1].view(-1)[-1] = torch.nan
    for given, dropped, rescale, skip in (
        (gradients(1, shapes, dtype), False, 1.0, False), (some, False, 1.0, False), ([None] * len(shapes), False, 1.0, True),
        (gradients(3, shapes, dtype), False, 0.5, False), (gradients(4, shapes, dtype), True, 1.0, False), (poisoned, False, 1.0, False),
        (gradients(5, shapes, dtype), False, 2.0, False),
    ):  # fmt: skip
        for result in bucket.step(given, dropped, rescale, skip):  # NaN has many bit patterns, of which torch and psgc's kernels write two
            seen.append([result.isnan(), result.nan_to_num(0).contiguous().view(-1).view(torch.uint8)])
        seen.append(list(bucket.payloads))
        kept = bucket.work.kept.remembered()
        seen.append({name: memory.residual.tobytes() for name, memory in kept.items() if memory.residual is not None})
    return seen


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("codec", CODECS)
def test_a_device_gives_the_cpus_bytes_and_nothing_races(codec: str) -> None:
    for dtype, shapes in (("float32", SHAPES), ("bfloat16", SHAPES), ("float32", [(40_000,)])):
        layout = one_bucket(codec, shapes, dtype)
        wanted = played(Bucket(layout, None, "cpu"), shapes, getattr(torch, dtype))
        runtime = RecordingRuntime()
        use_recorded(runtime)
        there = Bucket(layout, runtime)
        assert same(played(there, shapes, getattr(torch, dtype)), wanted)
        assert runtime.races.found == [] and runtime.races.uses > 100
        assert there.buffer._host._memory is None, "gradients were copied to the host"
        engines.use()


def test_gradients_are_offloaded_where_a_plan_or_a_missing_kernel_says_so_and_nothing_races() -> None:
    layout = one_bucket("onebit", SHAPES, "bfloat16")
    wanted = played(Bucket(layout, None, "cpu"), SHAPES, torch.bfloat16)
    for where, lacks in (("cpu", False), ("", True)):
        runtime = RecordingRuntime(lacks=lambda codec, lacks=lacks: lacks)  # type: ignore[misc]
        use_recorded(runtime)
        there = Bucket(layout, runtime, where)  # type: ignore[arg-type]
        assert same(played(there, SHAPES, torch.bfloat16), wanted)
        assert runtime.races.found == [] and there.buffer._host._memory is not None
        engines.use()


@pytest.mark.parametrize("codec", ["none", "onebit/int8", "topk:k=0.05/none"])
def test_a_plan_may_encode_on_the_device_and_decode_on_the_host_or_the_other_way_round(codec: str) -> None:
    """Bytes, results and residuals are those of the CPU wherever each is done; kernels are needed only of what is done on the device."""
    for where, dtype, shapes in (
        ("gpu", "float32", SHAPES), ("gpu/cpu", "bfloat16", SHAPES), ("cpu/gpu", "bfloat16", SHAPES), ("gpu/cpu", "float32", [(40_000,)]),
        ("cpu/gpu", "float32", [(40_000,)]),
    ):  # fmt: skip
        layout = one_bucket(codec, shapes, dtype)
        wanted = played(Bucket(layout, None, "cpu"), shapes, getattr(torch, dtype))
        push, pull = (codec.split("/") * 2)[:2]
        only_there = {"gpu": (), "gpu/cpu": (pull,), "cpu/gpu": (push,)}[where] if push != pull else ()
        runtime = RecordingRuntime(lacks=lambda one, only_there=only_there: one.canonical in only_there)  # type: ignore[misc]
        use_recorded(runtime)
        there = Bucket(layout, runtime, where)  # type: ignore[arg-type]
        assert same(played(there, shapes, getattr(torch, dtype)), wanted), where
        assert runtime.races.found == [] and runtime.races.uses > 100
        engines.use()


def test_a_plan_that_wants_a_gpu_is_refused_where_there_is_none() -> None:
    layout = one_bucket("onebit", SHAPES)
    with pytest.raises(UsageError, match="gradient of 't0': the plan has this bucket encoded on a GPU, but it does not lie on one GPU"):
        Bucket(layout, None, "gpu").step(gradients(1, SHAPES))
    use_recorded(RecordingRuntime(lacks=lambda codec: True))
    with pytest.raises(UsageError, match="has no kernels for onebit"):
        Bucket(layout, None, "gpu").step(gradients(1, SHAPES))


def test_tensors_on_the_cpu_and_on_a_device_share_a_bucket() -> None:
    layout = one_bucket("int8", SHAPES)
    wanted = Bucket(layout, None, "cpu").step(gradients(1, SHAPES))
    runtime = RecordingRuntime()
    engine = use_recorded(runtime)
    engines.use(lambda tensor: tensor.numel() > 5000, lambda device: engine)
    assert same(Bucket(layout, runtime).step(gradients(1, SHAPES)), wanted)
    assert runtime.races.found == []


def test_residuals_follow_tensors_to_a_device_and_back() -> None:
    layout, shapes = one_bucket("onebit", SHAPES), SHAPES
    always_here, moves = Bucket(layout, None, "cpu"), Bucket(layout, None)
    for seed in range(4):
        if seed % 2:
            use_recorded(RecordingRuntime())
        else:
            engines.use()
        dropped = seed == 2
        assert same(moves.step(gradients(seed, shapes), dropped), always_here.step(gradients(seed, shapes), dropped))
        assert moves.payloads == always_here.payloads


def test_a_residual_is_saved_from_a_device_and_taken_up_on_one() -> None:
    layout = one_bucket("onebit", SHAPES)
    use_recorded(RecordingRuntime())
    first, here = Bucket(layout, None), Bucket(layout, None, "cpu")
    for bucket in (first, here):
        bucket.step(gradients(1, SHAPES))
    saved, exact = first.work.kept.remembered(dropped=True), first.work.kept.exact(dropped=True)
    kept = here.work.kept.remembered(dropped=True)
    assert {n: m.residual.tobytes() for n, m in saved.items() if m.residual is not None} == {
        n: m.residual.tobytes() for n, m in kept.items() if m.residual is not None
    }
    again, wanted = Bucket(layout, None), Bucket(layout, None, "cpu")
    for bucket in (again, wanted):
        bucket.work.kept.remember(saved)
        bucket.work.kept.set_exact(exact)
        bucket.step(gradients(2, SHAPES))
    assert again.payloads == wanted.payloads


def test_inherited_residuals_are_added_on_the_device() -> None:
    for dtype in ("float32", "bfloat16"):
        layout = one_bucket("none", SHAPES, dtype)
        use_recorded(RecordingRuntime())
        found = []
        for where in ("", "cpu"):
            bucket = Bucket(layout, None, where)  # type: ignore[arg-type]
            inherited = {f"t{i}": TensorMemory(torch.linspace(0, 1, torch.Size(shape).numel()).numpy()) for i, shape in enumerate(SHAPES)}
            bucket.work.kept.remember(inherited)
            bucket.step(gradients(1, SHAPES, getattr(torch, dtype)))
            found.append(bucket.payloads)
        assert found[0] == found[1]
        engines.use()


def test_every_wait_of_the_device_path_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each place that makes a stream or a thread wait is left out once: the recorder must find a race."""
    layouts = [(one_bucket("onebit", SHAPES), ""), (one_bucket("onebit", [(40_000,)]), ""), (one_bucket("onebit", SHAPES), "cpu")]
    real_wait, real_synchronize = RecordingStream.wait, Event.synchronize
    sites: set[tuple[str, str]] = set()
    left_out: tuple[str, str] | None = None

    def place(kind: str) -> bool:
        caller = sys._getframe(2)
        site = kind, f"{caller.f_code.co_qualname if hasattr(caller.f_code, 'co_qualname') else caller.f_code.co_name}:{caller.f_lineno}"
        sites.add(site)
        return site != left_out

    def wait(stream: RecordingStream, event: Any) -> None:
        if place(stream.name):
            real_wait(stream, event)

    def synchronize(event: Event) -> None:
        if place("host"):
            real_synchronize(event)

    def races() -> list[str]:
        found = []
        for layout, where in layouts:
            runtime = RecordingRuntime()
            use_recorded(runtime)
            bucket, shapes = Bucket(layout, runtime, where), [spec.shape for spec in layout.tensors]  # type: ignore[arg-type]
            for seed in range(3):
                bucket.step([None, *gradients(seed, shapes)[1:]] if seed == 2 else gradients(seed, shapes))
            bucket.work.kept.remembered()
            found += runtime.races.found
            engines.use()
        return found

    monkeypatch.setattr(RecordingStream, "wait", wait)
    monkeypatch.setattr(Event, "synchronize", synchronize)
    assert races() == []
    known = sorted(sites)
    assert len(known) >= 12, known
    for left_out in known:
        assert races(), f"nothing was found wrong without the wait of {left_out}"


def test_a_slot_that_is_given_back_before_it_is_read_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = one_bucket("int8", SHAPES)
    runtime = RecordingRuntime()
    use_recorded(runtime, slots=1)
    real = Ring.give_back
    monkeypatch.setattr(Ring, "take", lambda ring, take=Ring.take: _early(ring, take(ring), real))
    monkeypatch.setattr(Ring, "give_back", lambda ring, slot: None)
    with contextlib.suppress(DeviceError):  # or the payload makes no sense
        Bucket(layout, runtime).step(gradients(1, SHAPES))
    assert any("thread" in line for line in runtime.races.found)


def _early(ring: Any, slot: Any, give_back: Any) -> Any:
    give_back(ring, slot)
    return slot


def test_a_devices_errors_name_the_tensor_and_the_device() -> None:
    layout = one_bucket("onebit", SHAPES)
    cases = (
        ("memory", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB"), "gradient of 't0': cpu is out of memory"),
        (
            "compute",
            RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCUDA kernel errors might be"),
            "gradient of 't0': cpu has been lost",
        ),
        (
            "down",
            RuntimeError("CUDA error: an illegal memory access was encountered"),
            "gradient of 't0': cpu: CUDA error: an illegal memory",
        ),
        ("up", RuntimeError("CUDA error: device unavailable"), "gradient of 't0': cpu has been lost"),
    )
    for stream, error, wanted in cases:
        runtime = RecordingRuntime()
        use_recorded(runtime)
        bucket = Bucket(layout, runtime)
        runtime.fault = lambda name, stream=stream, error=error: error if name == stream else None  # type: ignore[misc]
        with pytest.raises(DeviceError) as raised:
            bucket.step(gradients(1, SHAPES))
        assert wanted in str(raised.value) and "\n" not in str(raised.value)


def test_an_error_that_shows_at_an_event_reaches_whoever_waits_for_the_payload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels fail after they were enqueued: the next event tells."""

    def lost(event: Event) -> None:
        raise RuntimeError("CUDA error: device unavailable")

    layout = one_bucket("int8", SHAPES)
    runtime = RecordingRuntime()
    use_recorded(runtime)
    monkeypatch.setattr(Event, "synchronize", lost)
    with pytest.raises(DeviceError, match=r"gradient of 't0': cpu has been lost"):
        Bucket(layout, runtime).step(gradients(1, SHAPES))


def test_completions_run_in_the_order_of_their_events() -> None:
    completions, seen, done = Completions("cpu"), [], threading.Event()
    runtime = RecordingRuntime()
    for number in range(50):
        completions.when(
            runtime.training.record(), lambda fault, number=number: seen.append(number) or (done.set() if number == 49 else None)
        )  # type: ignore[misc,func-returns-value]
    assert done.wait(100) and seen == list(range(50))


def test_gradients_that_become_ready_while_a_graph_is_captured_are_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = CudaRuntime.__new__(CudaRuntime)
    runtime.device = torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UsageError, match=r"gradients on cuda:3 became ready while a CUDA graph was being captured; .*no_sync"):
        runtime.current()


def test_a_bucket_that_is_refused_during_capture_is_as_before_and_takes_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = one_bucket("onebit", SHAPES)
    runtime = RecordingRuntime()
    use_recorded(runtime)
    there, wanted = Bucket(layout, runtime), Bucket(layout, None, "cpu")
    assert same(there.step(gradients(1, SHAPES)), wanted.step(gradients(1, SHAPES)))

    def refuses() -> RecordingStream:
        raise UsageError("a CUDA graph is being captured")

    with monkeypatch.context() as patched:
        patched.setattr(runtime, "current", refuses)
        with pytest.raises(UsageError, match="captured"):
            there.buffer.bind([torch.zeros(shape) for shape in SHAPES])
        assert there.buffer._bound.tensors == (), "what was refused is bound"
    assert same(there.step(gradients(2, SHAPES)), wanted.step(gradients(2, SHAPES)))
    assert there.payloads == wanted.payloads
