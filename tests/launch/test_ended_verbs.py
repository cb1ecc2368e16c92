"""A verb that runs a job is ended by SIGTERM, as ``timeout`` and schedulers of batch jobs send it: its job ends with it."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.launch.test_verify import files

PSGC = [sys.executable, "-m", "psgc.launch"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("verb", ["chaos", "profile", "verify"])
def test_its_job_ends_with_it(launched: Any, tmp_path: Path, verb: str, number: signal.Signals) -> None:
    begun, script = tmp_path / "begun", tmp_path / "train.py"
    profile, plan = files(tmp_path)
    script.write_text(f"import time\nopen({str(begun)!r}, 'w').close()\ntime.sleep(1000)\n")
    job = ["--", sys.executable, str(script)]
    arguments = {
        "chaos": ["--", *PSGC, "run", "--workers", "1", "--servers", "1", *job],
        "profile": ["--script", "-o", str(tmp_path / "new.json"), *job],
        "verify": [str(plan), "--profile", str(profile), *job],
    }[verb]
    popen = launched.psgc(verb, *arguments)
    while not begun.exists() and popen.poll() is None:
        time.sleep(0.01)
    os.kill(popen.pid, number)
    status, _, err = launched.end(popen)
    assert status == 128 + number, err
    assert "Traceback" not in err
