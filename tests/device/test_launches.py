"""Small parts that are ready together share a launch; every payload is what it would have been alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from psgc.codecs import parse_codec
from psgc.codecs.codec import Encoded, Stream
from psgc.errors import DeviceError
from psgc.torch.device import engines
from psgc.torch.device.engine import Engine
from psgc.torch.device.launches import SMALL_ELEMENTS, Ready
from psgc.torch.device.sent import STATUS_BYTES, Sent
from tests.device.recording import CpuCodec, RecordingRuntime
from tests.device.steps import use_recorded

STREAM = Stream(3, 1, 0, 0)


@pytest.fixture(autouse=True)
def _host_again() -> Iterator[None]:
    yield
    engines.use()


class Found:
    """A part's payload, once it is there."""

    def __init__(self, engine: Engine, side: CpuCodec, grad: torch.Tensor) -> None:
        codec, numel = side.codec, grad.numel()
        self.out, self.there, self.encoded = np.zeros(codec.payload_bound(numel), np.uint8), threading.Event(), list[Any]()
        sent = Sent(engine.empty(STATUS_BYTES + codec.payload_bound(numel), torch.uint8))
        self.ready = Ready(side, grad, None, 1.0, STREAM, sent, self.out, self._then)
        alone = np.zeros_like(self.out)
        count = codec.encode(grad.numpy(), None, 1.0, STREAM, alone).payload_bytes
        self.wanted = alone[:count].tobytes()

    def _then(self, encoded: Any) -> None:
        self.encoded.append(encoded)
        self.there.set()

    @property
    def payload(self) -> bytes:
        assert self.there.wait(100.0) and len(self.encoded) == 1
        assert isinstance(self.encoded[0], Encoded), self.encoded
        return self.out[: self.encoded[0].payload_bytes].tobytes()


def ready_together(runtime: RecordingRuntime, engine: Engine, sizes: list[tuple[CpuCodec, int]]) -> list[Found]:
    """The first part is being launched while the others become ready."""
    made = torch.Generator().manual_seed(1)
    grads = [torch.randn(numel, generator=made) for _, numel in sizes]
    runtime.trainer_writes(grads)
    engine.compute.wait(runtime.current().record())
    found = [Found(engine, side, grad) for (side, _), grad in zip(sizes, grads, strict=True)]
    first, begun, go_on = sizes[0][0], threading.Event(), threading.Event()
    encode = first.encode

    def slow(*arguments: Any) -> None:
        begun.set()
        assert go_on.wait(100.0)
        encode(*arguments)

    first.encode = slow  # type: ignore[method-assign]
    launching = threading.Thread(target=engine.launches.put, args=(found[0].ready,))
    launching.start()
    assert begun.wait(100.0)
    for each in found[1:]:
        engine.launches.put(each.ready)
    first.encode = encode  # type: ignore[method-assign]
    go_on.set()
    launching.join()
    return found


def test_parts_that_become_ready_while_another_is_launched_share_the_next_launch() -> None:
    runtime = RecordingRuntime()
    engine = use_recorded(runtime, slot_bytes=1 << 20)
    for text in ("int8", "topk:k=0.05"):
        side = CpuCodec(parse_codec(text))
        found = ready_together(runtime, engine, [(side, 100), (side, 4097), (side, 1), (side, 70)])
        assert [each.payload for each in found] == [each.wanted for each in found]
        assert side.launched == [3] and runtime.races.found == []


def test_large_parts_other_codecs_and_what_a_slot_cannot_hold_are_launched_apart_and_in_order() -> None:
    runtime = RecordingRuntime()
    engine = use_recorded(runtime, slot_bytes=9000)
    side, other = CpuCodec(parse_codec("onebit")), CpuCodec(parse_codec("int8"))
    sizes = [
        (side, 9),
        (side, 100),
        (side, 101),
        (other, 50),
        (side, 7),
        (side, SMALL_ELEMENTS + 1),
        (side, 20),
        (side, 60000),
        (side, 20000),
    ]
    found = ready_together(runtime, engine, sizes)
    assert [each.payload for each in found] == [each.wanted for each in found]
    assert side.launched == [2, 2] and other.launched == []  # two small ones; 20 and 60000 elements, beside which the last does not fit
    assert runtime.races.found == []


def test_an_error_in_a_launch_is_told_of_each_of_its_parts_once() -> None:
    for stream in ("compute", "down"):
        runtime = RecordingRuntime()
        engine = use_recorded(runtime, slot_bytes=1 << 20)
        side = CpuCodec(parse_codec("int8"))
        runtime.fault = lambda name, stream=stream: RuntimeError("CUDA error: device unavailable") if name == stream else None  # type: ignore[misc]
        runtime.fault, fault = lambda name: None, runtime.fault  # type: ignore[method-assign]
        found = [Found(engine, side, torch.randn(50)) for _ in range(3)]
        runtime.fault = fault  # type: ignore[method-assign]
        for each in found:
            engine.launches.put(each.ready)
        for each in found:
            assert each.there.wait(100.0) and len(each.encoded) == 1
            assert isinstance(each.encoded[0], DeviceError) and "cpu has been lost" in str(each.encoded[0])


def test_payloads_of_unknown_length_are_not_far_below_the_bound_that_they_travel_at() -> None:
    for text, least in (("topk", 0.8), ("topk:select=mstopk", 0.8), ("topk:select=sampled", 0.4), ("blocktopk", 0.9), ("randomk", 0.8)):
        codec, numel = parse_codec(text), 1 << 16
        out = np.zeros(codec.payload_bound(numel), np.uint8)
        grad, residual = torch.randn(numel, generator=torch.Generator().manual_seed(2)).numpy(), np.zeros(numel, np.float32)
        assert codec.encode(grad, residual, 1.0, STREAM, out).payload_bytes >= least * out.size, text
