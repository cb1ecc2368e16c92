"""The comparison of a scraped job with one that is not: benchmarks/watched_in_turns.py, a few turns of it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.benchmark_scripts import FOLDER
from tests.ports import free_base


@pytest.mark.long
@pytest.mark.timeout(600)
def test_both_jobs_take_turns_and_every_endpoint_is_read() -> None:
    """An endpoint that does not answer ends it with an error."""
    command = [
        sys.executable,
        str(FOLDER / "watched_in_turns.py"),
        "--rounds",
        "1",
        "--pairs",
        "2",
        "--port",
        str(free_base(0, 1, 2, 100)),
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["pairs"] == 2 and len(found["step"]["rounds"]) == len(found["cpu"]["rounds"]) == 1
    assert found["step"]["ms"] > 0 and found["cpu"]["ms"] > 0 and found["cpu"]["low"] <= found["cpu"]["ratio"] <= found["cpu"]["high"]
