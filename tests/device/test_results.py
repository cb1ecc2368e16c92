"""Small results that are here together share a copy to the device and its launches; every part becomes what it would have been alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from psgc.codecs import parse_codec
from psgc.codecs.codec import Stream
from psgc.errors import DeviceError
from psgc.torch.device import engines
from psgc.torch.device.engine import Engine
from psgc.torch.device.launches import SMALL_ELEMENTS
from psgc.torch.device.results import Result
from tests.device.recording import CpuCodec, RecordingRuntime
from tests.device.steps import use_recorded

STREAM = Stream(3, 1, 0, 0)


@pytest.fixture(autouse=True)
def _host_again() -> Iterator[None]:
    yield
    engines.use()


class Part:
    """A part whose result has come. wanted, kept: what it and its residual have to become."""

    def __init__(self, engine: Engine, push: CpuCodec, pull: CpuCodec, numel: int) -> None:
        made = torch.Generator().manual_seed(numel)
        self.gradient, self.residual = (torch.randn(numel, generator=made) for _ in range(2))
        sent, answer = (payload_of(side, torch.randn(numel, generator=made)) for side in (push, pull))
        self.wanted, self.kept = torch.empty(numel), self.residual.clone()
        if push.codec.feedback:
            push.commit(torch.from_numpy(sent), numel, self.gradient, self.kept, 0.5)
        pull.decode(torch.from_numpy(answer), numel, self.wanted)
        there = engine.empty(sent.size, torch.uint8).copy_(torch.from_numpy(sent))
        commits = push.codec.feedback
        self.result = Result(
            pull, answer, self.gradient, push if commits else None, there if commits else None, self.residual if commits else None, 0.5
        )

    @property
    def right(self) -> bool:
        return torch.equal(self.gradient, self.wanted) and torch.equal(self.residual, self.kept)


def payload_of(side: CpuCodec, elements: torch.Tensor) -> Any:
    out = np.zeros(side.codec.payload_bound(elements.numel()), np.uint8)
    return out[: side.codec.encode(elements.numpy(), None, 1.0, STREAM, out).payload_bytes]


def come_together(runtime: RecordingRuntime, engine: Engine, parts: list[Part]) -> list[BaseException]:
    """The first result is being decoded while the others come, one after the other, each in a thread of its own. Returns what was raised."""
    runtime.trainer_writes([tensor for part in parts for tensor in (part.gradient, part.residual)])
    engine.compute.wait(runtime.current().record())
    begun, go_on, errors, threads = threading.Event(), threading.Event(), list[BaseException](), list[threading.Thread]()
    incoming = engine.incoming

    def slow(payloads: Any) -> Any:
        begun.set()
        assert go_on.wait(100.0)
        return incoming(payloads)

    def apply(part: Part) -> None:
        try:
            engine.results.apply(part.result)
        except BaseException as error:
            errors.append(error)

    engine.incoming = slow  # type: ignore[method-assign]
    for number, part in enumerate(parts):
        threads.append(threading.Thread(target=apply, args=(part,)))
        threads[-1].start()
        assert begun.wait(100.0)
        while len(engine.results._waiting) < number:
            threading.Event().wait(0.001)
    engine.incoming = incoming  # type: ignore[method-assign]
    go_on.set()
    for thread in threads:
        thread.join(100.0)
        assert not thread.is_alive()
    return errors


def test_results_that_come_while_another_is_decoded_share_a_copy_and_the_next_launches() -> None:
    for texts in (("int8", "int8"), ("onebit", "int8"), ("bf16", "none"), ("topk:k=0.1", "none")):
        runtime = RecordingRuntime()
        engine = use_recorded(runtime, slot_bytes=1 << 20)
        push, pull = (CpuCodec(parse_codec(text)) for text in texts)
        parts = [Part(engine, push, pull, numel) for numel in (100, 4097, 1, 70)]
        assert come_together(runtime, engine, parts) == []
        assert all(part.right for part in parts)
        assert (engine.results.rounds, engine.results.parts) == (2, 4)
        assert pull.used == [3] and push.used == ([3] if push.codec.feedback else [])
        assert runtime.races.found == []


def test_large_results_other_codecs_and_what_a_slot_cannot_hold_are_decoded_apart_and_in_order() -> None:
    runtime = RecordingRuntime()
    engine = use_recorded(runtime, slot_bytes=9000)
    push, pull, other = CpuCodec(parse_codec("onebit")), CpuCodec(parse_codec("int8")), CpuCodec(parse_codec("int8"))
    sizes = ((pull, 9), (pull, 100), (pull, 101), (other, 50), (pull, SMALL_ELEMENTS + 1), (pull, 20), (pull, 5000), (pull, 6000))
    parts = [Part(engine, push, side, numel) for side, numel in sizes]
    assert come_together(runtime, engine, parts) == []
    assert all(part.right for part in parts)
    assert (
        pull.used == [2, 2] and push.used == [2, 2] and other.used == []
    )  # two small ones; 20 and 5000, beside which the last does not fit
    assert runtime.races.found == []


def test_an_error_reaches_each_thread_whose_result_was_decoded_then_and_later_results_are_decoded() -> None:
    for stream in ("compute", "up"):
        runtime = RecordingRuntime()
        engine = use_recorded(runtime, slot_bytes=1 << 20)
        push, pull = CpuCodec(parse_codec("bf16")), CpuCodec(parse_codec("int8"))
        parts = [Part(engine, push, pull, numel) for numel in (50, 60, 70)]
        runtime.fault = lambda name, stream=stream: RuntimeError("CUDA error: device unavailable") if name == stream else None  # type: ignore[misc]
        errors = come_together(runtime, engine, parts)
        assert len(errors) == len(parts)
        assert all(isinstance(error, DeviceError) and "cpu has been lost" in str(error) for error in errors)
        runtime.fault = lambda name: None  # type: ignore[method-assign]
        after = Part(engine, push, pull, 80)
        engine.results.apply(after.result)
        assert after.right


def test_payloads_that_share_a_slot_are_copied_at_once() -> None:
    runtime = RecordingRuntime()
    engine = use_recorded(runtime, slot_bytes=1000)
    copies: list[int] = []
    up = engine.up.run

    def counted(work: Any, reads: Any, writes: Any) -> None:
        copies.append(writes[0].numel())
        up(work, reads, writes)

    engine.up.run = counted  # type: ignore[method-assign]
    for sizes, expected in (((100, 7, 300), [112 + 16 + 304]), ((700, 400), [700, 400]), ((1200,), [1000, 200])):
        payloads = [np.arange(size, dtype=np.uint8) for size in sizes]
        copies.clear()
        with engine.incoming(payloads) as arrived:
            assert [bytes(each.numpy()) for each in arrived] == [payload.tobytes() for payload in payloads]
        assert copies == expected
    assert runtime.races.found == []
