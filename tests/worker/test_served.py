"""A bucket that every rank pushes, as a program: what its rounds contribute, and whose payload counts as part of a result."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from psgc.errors import DeviceError, PsgcError
from psgc.layout import Declaration, TensorSpec, build_layout
from psgc.transport.link import IN_PLACE_BYTES
from psgc.wire.frames import Flag
from psgc.worker.contributions import Contributions
from tests.jobs.array_buffer import ArrayBuffer
from tests.worker.served_bucket import ServedBucket


def bucket_of(codec: str, numel: int = 6000) -> ServedBucket:
    specs = (TensorSpec("w", (numel - 3000,), "float32"), TensorSpec("b", (3000,), "float32"))
    declaration = Declaration("m", "plan", specs, codec, True, order=(0, 1), used=(0, 1), part_bytes=1 << 14, min_compress_bytes=0)
    layout = build_layout(declaration, layout_id=1, servers=1, workers=2, used_by_all=frozenset((0, 1)))
    return ServedBucket(layout, layout.buckets[0])


def gradient(nan_at: int | None = None) -> ArrayBuffer:
    values = np.random.default_rng(0).standard_normal(6000).astype(np.float32)
    if nan_at is not None:
        values[nan_at] = np.nan
    return ArrayBuffer(values)


def residual(served: ServedBucket) -> Any:
    return np.concatenate([memory.residual for memory in served.kept.remembered().values() if memory.residual is not None])


@pytest.mark.parametrize(("codec", "rounds"), [("int8:ef=1", 1), ("shared", 2)])
@pytest.mark.parametrize(("skip", "nonfinite"), [(False, False), (True, False), (False, True)])
def test_a_payload_counts_as_part_of_a_result_if_it_was_sent(codec: str, rounds: int, skip: bool, nonfinite: bool) -> None:
    """Only then its residual is committed: a rank that skips, or whose gradient is not finite, has left nothing out."""
    served = bucket_of(codec)
    assert sum(len(part.program.steps) for part in served.work.parts) == 2 * len(served.bucket.parts)
    assert max(part.round for part in served.bucket.parts) == rounds - 1
    served.begin(gradient(nan_at=10 if nonfinite else None), dropped=True, rescale=2.0, skip=skip, priority=7)
    said = []
    for part in served.bucket.parts:
        said.append(served.encode(part))
        pair = served.scheme.rounds(served.of(part).program.numel)[part.round].pair
        nbytes = pair.pull.payload_bound(served.scheme.rounds(served.of(part).program.numel)[part.round].numel)
        served.decode(part, Flag.NONFINITE if nonfinite else Flag.NONE, None if nonfinite else np.zeros(nbytes, np.uint8))
    assert [one.key for one in said] == [part.key for part in served.bucket.parts]
    assert {(one.skip, one.previous_skipped, one.rescale, one.priority) for one in said} == {(skip, 1, 2.0, 7)}
    assert all((one.payload_bytes > 0) == (not skip and not one.nonfinite) or one.nonfinite for one in said)
    assert residual(served).any() == (not skip and not nonfinite)


@pytest.mark.parametrize("numel", [IN_PLACE_BYTES // 4, IN_PLACE_BYTES // 4 - 1])
@pytest.mark.parametrize("codec", ["none", "none/int8", "int8/none", "bf16"])
def test_a_large_uncompressed_slice_is_its_own_payload_where_servers_take_it_so_and_any_other_is_in_its_slot(
    codec: str, numel: int
) -> None:
    declaration = Declaration(
        "m", "plan", (TensorSpec("w", (numel,), "float32"),), codec, True, order=(0,), used=(0,), min_compress_bytes=0
    )
    layout = build_layout(declaration, layout_id=1, servers=1, workers=2, used_by_all=frozenset((0,)))
    served = ServedBucket(layout, layout.buckets[0], in_place=True)
    (part,), before = served.bucket.parts, np.arange(numel, dtype=np.float32)
    buffer = ArrayBuffer(before.copy())
    served.begin(buffer)
    said = served.encode(part)
    own = codec == "none" and 4 * numel >= IN_PLACE_BYTES
    assert (said.payload is not None) == (said.result is not None) == own
    if not own:
        assert codec != "none" or served.payload(part, said.payload_bytes).tobytes() == before.tobytes()
        return
    assert not served.payload(part, 4 * numel).any(), "its slot takes no memory"
    assert all(
        np.shares_memory(each, buffer.array) and each.size == said.payload_bytes == 4 * numel for each in (said.payload, said.result)
    )
    said.result.view(np.float32)[:] = 2 * before
    served.decode(part, Flag.NONE, said.result[:])
    served.store()
    assert buffer.array.tobytes() == (2 * before).tobytes()
    served.begin(buffer)
    served.encode(part)
    served.decode(part, Flag.NONE, (3 * before).view(np.uint8))
    assert buffer.array.tobytes() == (3 * before).tobytes(), "a result that came elsewhere is taken from there"


def test_slots_of_an_uncompressed_bucket_lie_in_one_row_and_a_gradient_there_is_pushed_and_decoded_in_place() -> None:
    specs = (TensorSpec("w", (70_001,), "float32"), TensorSpec("b", (3,), "float32"))
    declaration = Declaration("m", "plan", specs, "none", True, order=(0, 1), used=(0, 1), part_bytes=1 << 16, min_compress_bytes=0)
    layout = build_layout(declaration, layout_id=1, servers=2, workers=2, used_by_all=frozenset((0, 1)))
    bucket, contributions = layout.buckets[0], Contributions()
    contributions.add(layout, 0)
    keys = [part.key for part in bucket.parts]
    row = contributions.row(keys)
    assert row is not None
    assert row.bytes.size == 4 * bucket.numel
    assert len(keys) > 2
    for part in bucket.parts:
        place = contributions.slot(part.key)
        assert (place.segment, place.offset) == (row.segment, row.offset + 4 * part.offset)
    assert contributions.row(keys[::-1]) is None
    assert contributions.row([*keys, 12345]) is None
    buffer = ArrayBuffer(row.bytes.view(np.float32))
    served = ServedBucket(layout, bucket, slots={key: contributions.slot(key) for key in keys})
    buffer.array[:] = np.arange(bucket.numel)
    served.begin(buffer)
    for part in bucket.parts:
        assert served.encode(part).payload is None, "it lies in its slot"
        assert served.payload(part, 4 * part.numel).tobytes() == buffer.array[part.offset : part.offset + part.numel].tobytes()
        served.decode(part, Flag.NONE, np.full(part.numel, 7, np.float32).view(np.uint8))
    assert (buffer.array == 7).all()
    contributions.close()


def test_a_slice_that_all_ranks_skip_becomes_zeros_where_another_slice_has_what_came_late_and_else_stays_as_it_is() -> None:
    numel = 40_000
    served, buffer = bucket_of("none", numel), ArrayBuffer(np.arange(numel, dtype=np.float32))
    before = buffer.array.copy()
    first, *others = served.bucket.parts
    assert others
    for has_result in (False, True):
        served.begin(buffer, skip=True)
        for part in served.bucket.parts:
            served.encode(part)
            some = has_result and part is first
            served.decode(part, Flag.NONE if some else Flag.SKIPPED, np.full(part.numel, 7, np.float32).view(np.uint8) if some else None)
        served.store()
        assert buffer.skipped == (not has_result)
        if not has_result:
            np.testing.assert_array_equal(buffer.array, before)
    assert (buffer.array[: first.numel] == 7).all()
    assert not buffer.array[first.numel :].any()


def test_a_nan_is_an_error_only_where_that_is_asked_for_and_names_its_tensor() -> None:
    bucket_of("int8").begin(gradient(nan_at=3001))
    with pytest.raises(PsgcError, match="gradient of 'b' holds NaN or infinity in its step 1, and PSGC_NONFINITE=raise"):
        bucket_of("int8").begin(gradient(nan_at=3001), check=True)
    bucket_of("int8").begin(gradient(nan_at=3001), check=True, skip=True)


def test_an_error_of_a_device_is_told_with_the_tensor_that_the_part_begins_with() -> None:
    assert str(bucket_of("int8").work.with_tensor(DeviceError("lost"), 0)) == "gradient of 'w': lost"
