"""A bucket that every rank pushes, as a program: what its rounds contribute, and whose payload counts as part of a result."""

from __future__ import annotations

from typing import Any, cast

import pytest

from psgc.codecs import Encoded
from psgc.errors import DeviceError
from psgc.layout import Declaration, TensorSpec, build_layout
from psgc.program.run import Runner
from psgc.program.steps import Encode, Serve
from psgc.worker.bucket import BucketWork
from psgc.worker.executor.served import ServedPart, served_parts
from psgc.worker.submission import Submission


class Work:
    """In place of a BucketWork: encodes at once, and remembers whose results it was given."""

    def __init__(self, codec: str, found: Encoded | DeviceError) -> None:
        specs = (TensorSpec("w", (3000,), "float32"), TensorSpec("b", (3000,), "float32"))
        declaration = Declaration("m", "plan", specs, codec, True, order=(0, 1), used=(0, 1), part_bytes=1 << 14, min_compress_bytes=0)
        self.layout = build_layout(declaration, layout_id=1, servers=1, workers=2, used_by_all=frozenset((0, 1)))
        self.bucket = self.layout.buckets[0]
        self.scheme = self.layout.scheme(self.bucket)
        self.step, self.found = 1, found
        self.decoded: list[tuple[int, bool]] = []
        self.encoded: list[int] = []

    def encode(self, key: int, then: Any) -> None:
        self.encoded.append(key)
        then(self.found)

    def decode(self, key: int, flags: int, payload: Any, own: bool) -> None:
        self.decoded.append((key, own))

    def first_nonfinite(self, key: int) -> str | None:
        return "w" if isinstance(self.found, Encoded) and self.found.nonfinite else None


def parts_of(work: Work, raises: bool = False, skip: bool = False) -> list[ServedPart]:
    parts = served_parts(cast("BucketWork", work), 0)
    for part in parts:
        part.begin(Submission(cast("Any", None), cast("Any", None), skip=skip, previous_skipped=1, rescale=2.0, priority=7), raises)
    return parts


def through(part: ServedPart) -> tuple[list[Any], list[Any]]:
    """Run the part's program. Returns what it contributed, and what its encodes met."""
    runner = Runner([part.program], ())
    (start,), over, said, met = runner.begin(0), False, [], []
    while True:
        if isinstance(start.step, Encode):
            part.compute(start.step, met.append)
        else:
            assert isinstance(start.step, Serve)
            (piece,) = start.step.pieces
            said.append(part.contribution(start.step, piece, lambda *_: None))
            assert part.take(start.step, piece, 0, b"") == said[-1].key
        starts, over = runner.over(0)
        if over:
            return said, met
        (start,) = starts


@pytest.mark.parametrize(("codec", "rounds"), [("int8", 1), ("shared", 2)])
@pytest.mark.parametrize(("skip", "nonfinite"), [(False, False), (True, False), (False, True)])
def test_a_payload_counts_as_part_of_a_result_if_it_was_sent(codec: str, rounds: int, skip: bool, nonfinite: bool) -> None:
    """Only then its residual is committed: a rank that skips, or whose gradient is not finite, has left nothing out."""
    work = Work(codec, Encoded(10, nonfinite))
    parts = parts_of(work, skip=skip)
    assert sum(len(part.program.steps) for part in parts) == 2 * len(work.bucket.parts)
    contributed = [one for part in parts for one in through(part)[0]]
    keys = [part.key for part in work.bucket.parts]
    assert len(keys) >= rounds
    assert [one.key for one in contributed] == keys and work.decoded == [(key, not skip and not nonfinite) for key in keys]
    assert work.encoded == ([] if skip else keys), "a rank that skips reads no gradient"
    assert {(one.skip, one.nonfinite, one.previous_skipped, one.rescale, one.priority) for one in contributed} == {
        (skip, nonfinite, 1, 2.0, 7)
    }


def test_a_nan_is_an_error_only_where_that_is_asked_for_and_names_its_tensor() -> None:
    for raises in (False, True):
        _, met = through(parts_of(Work("int8", Encoded(10, True)), raises)[0])
        texts = [str(error) for error in met if error is not None]
        assert texts == (["gradient of 'w' holds NaN or infinity in its step 1, and PSGC_NONFINITE=raise"] if raises else [])


def test_what_a_device_meets_is_told_as_it_is() -> None:
    fault = DeviceError("gradient of 'w': lost")
    _, met = through(parts_of(Work("int8", fault))[0])
    assert met == [fault]
