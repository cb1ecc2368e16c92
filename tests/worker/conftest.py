"""A job of ranks in this process, for several files' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.worker.over_groups import Job


@pytest.fixture
def two_by_two() -> Iterator[Job]:
    job = Job((2, 2))
    yield job
    job.close()
    assert not job.errors
