"""Residuals across restarts: the same buckets go on bit for bit, other buckets take each tensor's along, eight bits train as well."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psgc.codecs import Stream
from psgc.layout import Declaration, Layout, Part, TensorSpec, build_layout
from psgc.wire.frames import Flag
from psgc.worker.residuals.memory import own_memory, take_up
from psgc.worker.residuals.residual import TensorMemory
from tests.cases import for_each
from tests.jobs.array_buffer import ArrayBuffer
from tests.worker.served_bucket import ServedBucket

TENSORS = tuple(TensorSpec(f"t{i}", (numel,), "float32") for i, numel in enumerate((5000, 1, 9000, 300, 20000)))


def works(
    codec: str, fuse: int, part: int, name: str = "l", rank: int = 0, tensors: tuple[TensorSpec, ...] = TENSORS
) -> list[ServedBucket]:
    everything = tuple(range(len(tensors)))
    declaration = Declaration(
        name, "plan", tensors, codec, True, order=everything, used=everything, part_bytes=part, fuse_bytes=fuse, min_compress_bytes=0
    )
    layout: Layout = build_layout(declaration, layout_id=1, servers=1, workers=1, used_by_all=frozenset(everything))
    return [ServedBucket(layout, bucket, rank) for bucket in layout.buckets]


def encoded(work: ServedBucket, part: Part) -> int:
    """Encode a part; the bytes of its payload."""
    return work.encode(part).payload_bytes


def answer(work: ServedBucket, part: Part, written: int) -> Any:
    """A server's, to one worker whose payload is all there is: the same, but that sums of `shared`'s codes are twice as wide."""
    payload = work.payload(part, written)
    round_ = work.scheme.rounds(part.numel)[part.round]
    widens = work.scheme.canonical == "shared" and part.round == 1
    assert written == round_.numel or not widens
    return payload.view(np.int8).astype(np.int16).view(np.uint8) if widens else payload


def step(work: ServedBucket, seed: int, rescale: float = 1.0) -> None:
    """The result is what this rank has sent; zeros where the pull codec is another."""
    generator = np.random.default_rng(seed)
    work.begin(ArrayBuffer(generator.standard_normal(work.bucket.numel, np.float32)), False, rescale)
    for part in work.bucket.parts:
        written = encoded(work, part)
        same = work.scheme.canonical.partition("/")[2] == ""
        payload = answer(work, part, written) if same else np.zeros(4 * part.numel, np.uint8)
        work.decode(part, 0, payload)
    work.store()


def pushed(codec: str, name: str, rank: int = 0) -> list[bytes]:
    """What a rank pushes for the first bucket of a layout of this name in its first step, of the same gradients always."""
    work = works(codec, 1 << 20, 1 << 20, name, rank)[0]
    work.begin(ArrayBuffer(np.random.default_rng(1).standard_normal(work.bucket.numel, np.float32)), False, 1.0)
    return [work.payload(part, encoded(work, part)).tobytes() for part in work.bucket.parts]


@pytest.mark.parametrize("codec", ["int8:ef=0", "dithering", "randomk:k=0.1", "fp8:ef=0"])
def test_layouts_draw_numbers_of_their_own(codec: str) -> None:
    assert pushed(codec, "first") == pushed(codec, "first")
    assert pushed(codec, "first") != pushed(codec, "second")


def test_all_ranks_draw_the_same_places_in_a_layout() -> None:
    first, second = pushed("randomk:k=0.1", "l", rank=0), pushed("randomk:k=0.1", "l", rank=5)
    assert first == second
    assert pushed("int8:ef=0", "l", rank=0) != pushed("int8:ef=0", "l", rank=5)


def test_what_is_remembered_is_in_the_units_of_the_last_loss_scale() -> None:
    (work,) = works("topk:k=0.1,momentum=dgc", 1 << 20, 1 << 20)
    step(work, 0)
    before = work.kept.remembered()
    work.begin(ArrayBuffer(np.zeros(work.bucket.numel, np.float32)), False, 8.0)
    for part in work.bucket.parts:
        work.decode(part, Flag.SKIPPED, None)
    for name, memory in work.kept.remembered().items():
        np.testing.assert_array_equal(memory.residual, 8 * before[name].residual)
        assert memory.velocity is not None and before[name].velocity is not None
        np.testing.assert_array_equal(memory.velocity, 8 * before[name].velocity)


@pytest.mark.parametrize("codec", ["onebit", "topk:k=0.1,momentum=dgc", "int4:residual=int8", "onebit:momentum=nesterov,residual=int8"])
def test_what_is_remembered_follows_its_tensor_into_other_buckets(codec: str) -> None:
    before, after = works(codec, 1 << 20, 1 << 20), works(codec, 30000, 16384)
    assert len(before) < len(after)
    for number, work in enumerate(before):
        step(work, number)
    saved = {name: memory for work in before for name, memory in work.kept.remembered().items()}
    assert saved.keys() == {tensor.name for tensor in TENSORS}
    assert all(memory.residual.any() for memory in saved.values() if memory.residual.size > 1)
    for work in after:
        work.kept.remember(saved)
    loaded = {name: memory for work in after for name, memory in work.kept.remembered().items()}
    largest = max(np.abs(memory.residual).max() for memory in saved.values())
    for name, memory in saved.items():
        if "residual=int8" in codec:  # its blocks begin elsewhere now
            np.testing.assert_allclose(loaded[name].residual, memory.residual, atol=largest / 250)
        else:
            np.testing.assert_array_equal(loaded[name].residual, memory.residual)
        assert (memory.velocity is not None) == ("momentum" in codec)
        if memory.velocity is not None:
            np.testing.assert_array_equal(loaded[name].velocity, memory.velocity)


def test_a_step_that_the_trainer_dropped_is_given_back_before_saving() -> None:
    (work,) = works("topk:k=0.1/none", 1 << 20, 1 << 20)
    step(work, 0)
    grad = np.random.default_rng(0).standard_normal(work.bucket.numel, np.float32)
    kept = np.concatenate([memory.residual for memory in work.kept.remembered().values()])
    given_back = np.concatenate([memory.residual for memory in work.kept.remembered(dropped=True).values()])
    assert (kept != grad).any()
    np.testing.assert_array_equal(given_back, grad)
    again = np.concatenate([memory.residual for memory in work.kept.remembered().values()])
    np.testing.assert_array_equal(again, kept, err_msg="saving changes nothing: the trainer may apply the step yet")


@pytest.mark.parametrize("codec", ["shared", "powersgd:rank=2"])
def test_a_dropped_step_returns_to_the_residual_of_a_rank_that_skips_the_next_one(codec: str) -> None:
    tensors = (TensorSpec("matrix", (60, 50), "float32"), TensorSpec("bias", (50,), "float32"))
    (work,) = works(codec, 1 << 20, 1 << 20, tensors=tensors)
    step(work, 0)
    grad = np.random.default_rng(0).standard_normal(work.bucket.numel, np.float32)
    (other,) = works(codec, 1 << 20, 1 << 20, rank=1, tensors=tensors)
    other.begin(ArrayBuffer(np.random.default_rng(9).standard_normal(work.bucket.numel, np.float32)), False, 1.0)
    work.begin(ArrayBuffer(np.zeros(work.bucket.numel, np.float32)), True, 1.0, skip=True)
    for part in work.bucket.parts:  # the result is what the other rank has sent
        payload = answer(other, part, encoded(other, part))
        other.decode(part, 0, payload)
        work.decode(part, 0, payload)
    kept = np.concatenate([memory.residual for memory in work.kept.remembered().values()])
    np.testing.assert_allclose(kept, grad, atol=2e-5)


@pytest.mark.parametrize(("pull", "carried"), [("none", [1, 1, 0]), ("topk:k=0.5", [1, 0, 0])])
def test_what_is_owed_is_sent_again_after_a_dropped_step_unless_the_server_adds_that_back(pull: str, carried: list[int]) -> None:
    (work,) = works(f"none/{pull}", 1 << 20, 1 << 20)
    work.kept.remember({tensor.name: TensorMemory(np.ones(tensor.numel, np.float32)) for tensor in TENSORS})
    for dropped, wanted in zip((False, True, False), carried, strict=True):
        work.begin(ArrayBuffer(np.zeros(work.bucket.numel, np.float32)), dropped, 1.0)
        for part in work.bucket.parts:
            encoded(work, part)
            sent = work.payload(part, 4 * part.numel).view(np.float32)
            assert (sent == wanted).all()
            codec = work.scheme.rounds(part.numel)[0].pair.pull
            result = np.zeros(codec.payload_bound(part.numel), np.uint8)
            written = codec.encode(sent, None, 1.0, Stream(0, 0, 0, 0), result).payload_bytes
            work.decode(part, 0, result[:written])
        left = [memory.residual for memory in work.kept.remembered(dropped=True).values()]
        assert sum(float(values.sum()) for values in left) == (work.bucket.numel if pull == "none" and wanted else 0)


RESTARTED = ("onebit/bf16", "topk:k=0.05,momentum=dgc/bf16", "int4:residual=int8/bf16")


def digests(job: Any, folder: Path, hows: str, *codecs: str) -> dict[tuple[str, ...], str]:
    """Run tests/jobs/restart.py; of how and codec the digest of the weights that all workers ended with."""
    workers = job.whole(str(folder), hows, *codecs, job="restart.py")
    assert set(job.end().values()) == {0}, job.text()
    (said,) = {tuple(re.findall(r"^weights (\w+) (\S+) (\w{64})$", worker.text, re.MULTILINE)) for worker in workers}
    assert len(said) == len(hows.split(",")) * len(codecs), job.text()
    return {(how, codec): digest for how, codec, digest in said}


@pytest.fixture(scope="module")
def saved(make_shared_job: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[tuple[str, ...], str]]:
    """The folder in which a job of two workers saved its state half-way, and the digests of its weights at the end."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, digests(make_shared_job(), folder, "save", *RESTARTED)


def test_a_restarted_job_goes_on_bit_for_bit(make_job: Callable[..., Any], saved: tuple[Path, dict[tuple[str, ...], str]]) -> None:
    folder, whole = saved
    again = digests(make_job(), folder, "load,forget", *RESTARTED)
    for codec in RESTARTED:
        assert again["load", codec] == whole["save", codec], codec
        assert again["forget", codec] != whole["save", codec], f"{codec}: the residuals are part of the state"


@for_each(workers=[1, 3])
def test_residuals_of_two_ranks_go_to_another_number_of_workers(
    make_job: Callable[..., Any], workers: int, saved: tuple[Path, dict[tuple[str, ...], str]]
) -> None:
    """What they go on to is the same on every one of them."""
    assert digests(make_job(nodes=workers), saved[0], "load", "onebit/bf16")


@pytest.mark.parametrize("codec", ["topk:k=0.1/none", "topk:k=0.1,momentum=dgc/none", "int4:residual=int8/none"])
def test_a_unit_that_changed_in_a_step_without_a_result_is_taken_along_to_the_last_bit(codec: str) -> None:
    """0.3 and 0.7 are no powers of two: a residual that was multiplied by one of them before it was saved would be rounded once more."""
    (stayed,), (resumed,) = works(codec, 1 << 20, 1 << 20), works(codec, 1 << 20, 1 << 20)
    step(stayed, 0)
    stayed.begin(ArrayBuffer(np.full(stayed.bucket.numel, np.nan, np.float32)), False, 0.3)
    for part in stayed.bucket.parts:
        encoded(stayed, part)
        stayed.decode(part, Flag.NONFINITE, None)
    memory = own_memory(stayed.layout, [stayed.work], dropped=False)
    assert memory.steps == 2
    take_up(memory, resumed.layout, [resumed.work])
    for number in (1, 2):
        for work in (stayed, resumed):
            step(work, number, rescale=0.7)
        (mine, its) = (own_memory(work.layout, [work.work], dropped=False).tensors for work in (stayed, resumed))
        for name, kept in mine.items():
            for field, values in kept._asdict().items():
                assert (values is None) == (its[name]._asdict()[field] is None)
                if values is not None:
                    assert values.tobytes() == its[name]._asdict()[field].tobytes(), (number, name, field)
