"""Codec times of a GPU, measured beside a training: by marks, in streams of psgc's own, without waiting."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from psgc.torch.device import engines
from psgc.torch.plans.device_times import COPIED_BYTES, PASSES, SIZES, DeviceTimes
from tests.device import recording
from tests.device.recording import US_OF_WORK, RecordingRuntime
from tests.device.steps import use_recorded


@pytest.fixture(autouse=True)
def _host_again() -> Iterator[None]:
    yield
    engines.use()


def test_times_are_those_between_marks_and_nothing_that_is_timed_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = RecordingRuntime(lacks=lambda codec: codec.name == "int4")
    engine = use_recorded(runtime)
    times = DeviceTimes(engine, ["bf16", "int4", "onebit", "topk"])
    times.enqueue()  # compiles kernels, and copies payloads up
    assert times.curves() == {} and times.host_link() is None

    def waits(event: object) -> None:
        raise AssertionError("the device was waited for")

    monkeypatch.setattr(recording.Event, "synchronize", waits)
    runtime.behind = True
    for _ in range(PASSES):  # one more than there are
        times.enqueue()
    work = runtime.races.uses
    times.enqueue()
    assert runtime.races.uses == work, "it is over"
    assert times.curves() == {} and times.host_link() is None, "the device has not come to any mark"
    runtime.behind = False
    curves = times.curves()
    assert curves.keys() == {"bf16", "onebit", "topk"}, "int4 has no kernels there"
    for curve in curves.values():
        assert curve.numel == SIZES and {*curve.encode_us, *curve.decode_us} == {US_OF_WORK}
    link = times.host_link()
    assert link is not None and link.gbps == pytest.approx(8e-3 * COPIED_BYTES / US_OF_WORK)
    assert runtime.races.found == []


def test_measuring_draws_nothing_from_the_trainings_generator() -> None:
    engine = use_recorded(RecordingRuntime())
    before = torch.get_rng_state()
    times = DeviceTimes(engine, ["int8"])
    for _ in range(PASSES):
        times.enqueue()
    assert times.curves().keys() == {"int8"}
    assert torch.equal(torch.get_rng_state(), before)
