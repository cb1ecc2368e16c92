"""Kernels are compiled before the first job: on a cold cache a job's own processes would spend these tests' low limits on it."""

from __future__ import annotations

import pytest

from psgc.codecs import parse_codec, registered_codecs


@pytest.fixture(scope="session", autouse=True)
def _compiled_kernels() -> None:
    for name in registered_codecs():
        parse_codec(name).warm()
